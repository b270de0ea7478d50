"""What the costs of a step follow from, measured: the link between the ranks, and a method's work on each of them.

All ranks measure at the same time, as they will have to work at the same time, and get the slowest rank's figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from lightning_gradcomp.app.plan.cost import Link, Work
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.step import CompressedStep, Flags
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.averaging.workers import Ranks, all_gather_single, dense_traffic
from lightning_gradcomp.compressors import Compressor, Lossy
from lightning_gradcomp.compressors.adam_step import takes_optimizer

SMALLEST, LARGEST = 1 << 16, 1 << 24
"""Bytes of the first and of the largest message that the bandwidth is measured with."""

LONG_ENOUGH = 0.02
"""Seconds that a message takes which tells the bandwidth."""

OTHERS = 2
"""Payloads besides its own that a rank decodes while its work is measured."""

REPEATS = 3


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """The link between the ranks of `group`, the same on all of them. A collective call of a few tenths of a second.

    Args:
        group: two ranks or more.
        device: of the tensors that its backend takes.
    """
    world = group.size()
    tiny = torch.zeros(world, dtype=torch.float32, device=device)
    everyones = torch.empty_like(tiny)

    def hop() -> None:
        dist.all_to_all_single(everyones, tiny, group=group)

    hop()  # connects
    [latency] = slowest([median(timed(hop, device)[0] for _ in range(9))], group, device)

    def ring(size: int) -> tuple[float, float]:
        flat = torch.zeros(size // 4, dtype=torch.float32, device=device)
        return timed(partial(dist.all_reduce, flat, group=group), device)

    def gather(size: int) -> tuple[float, float]:
        own = torch.zeros(2 * size // world, dtype=torch.uint8, device=device)  # as many bytes travel as in the ring
        everyones = own.repeat(world)
        return timed(partial(all_gather_single, everyones, own, group), device)

    def beyond(collective: Callable[[int], tuple[float, float]], size: int, repeats: int) -> tuple[float, float]:
        """Seconds that a message of this size takes beyond a short one, and the share in which the processor works."""
        short = median(collective(SMALLEST)[0] for _ in range(repeats))
        clock, working = zip(*(collective(size) for _ in range(repeats)), strict=True)
        short, long, working = slowest([short, median(clock), median(working)], group, device)
        return max(long - short, long / 10), min(working / long, 1.0)  # a short one may have waited for the system

    size = 4 * SMALLEST
    while size < LARGEST and beyond(ring, size, 1)[0] < LONG_ENOUGH:
        size *= 4
    (reduced, busy), (gathered, _) = beyond(ring, size, REPEATS), beyond(gather, size, REPEATS)
    bandwidth = dense_traffic(size - SMALLEST, world) / reduced
    return Link(latency, bandwidth, min(reduced / gathered, 1.0), busy if device.type == "cpu" else 0.0)


def measure_work(
    compressor: Compressor,
    gradients: Gradients,
    group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Work:
    """What compressing and decompressing these gradients takes on the ranks of `group` (None: on this one alone).

    Steps are made as in training, but on random numbers, and nothing is sent: the other workers' payloads are copies of
    this one's. In fp32, without weight decay. Gradients and weights stay as they were. Collective where there is a
    group.

    Args:
        gradients: of the model, laid out for this compressor.
        optimizer: with Adam and AdamW, their steps are compressed.
    """
    device = gradients.device
    if isinstance(compressor, Lossy) and gradients.compressed:
        adam = takes_optimizer(optimizer)
        both = [_step_seconds(compressor, gradients, others, adam) for others in (0, OTHERS)]
        # each step waits for the rank that is the slowest in it
        alone, among = (median(slowest(times, group, device)) for times in both)
        return Work(alone, max(among - alone, 0.0) / OTHERS)
    if isinstance(compressor, Lossy) or compressor.wire_dtype == torch.float32:
        return Work(0.0, 0.0)
    flat = torch.randn(gradients.n, dtype=torch.float32, device=device)
    times = [timed(lambda: flat.to(compressor.wire_dtype).float(), device)[0] for _ in range(1 + REPEATS)]
    return Work(median(slowest(times[1:], group, device)), 0.0)


class EchoRanks(Ranks):
    """Workers that send what this one sends, at once."""

    def __init__(self, others: int) -> None:
        super().__init__(None, 1 + others)

    def start_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: message.repeat(self.world, 1)

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.mul_(self.world)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def _step_seconds(compressor: Lossy, gradients: Gradients, others: int, adam: bool) -> list[float]:
    """Of a few compressed steps among `others` that send the same; the first is not counted."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(gradients.compressed, lr=0.0, momentum=0.9)
    weights: list[torch.Tensor] = []
    if adam:
        optimizer = torch.optim.AdamW(gradients.compressed, lr=1e-3, weight_decay=0.0)
        weights = [parameter.detach().clone() for parameter in gradients.compressed]
    step = CompressedStep(compressor, gradients, EchoRanks(others), Topology(), optimizer)
    generator = torch.Generator(gradients.device).manual_seed(0)
    local = [
        torch.randn(p.shape, generator=generator, dtype=torch.float32, device=gradients.device).to(p)
        for p in gradients.parameters
    ]
    kept = [parameter.grad for parameter in gradients.parameters]
    final = compressor.at(compressor.final_sparsity)

    def prepare() -> None:
        for parameter, gradient in zip(gradients.parameters, local, strict=True):
            parameter.grad = gradient.clone()

    times = []
    for number in range(1 + REPEATS):
        prepare()
        call = partial(step.compressed, final, "all_gather", number, 1.0, Stats(), Flags())
        times.append(timed(call, gradients.device)[0])
    for parameter, grad in zip(gradients.parameters, kept, strict=True):
        parameter.grad = grad
    with torch.no_grad():
        for parameter, weight in zip(gradients.compressed, weights, strict=False):
            parameter.copy_(weight)
    return times[1:]


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds that `call` takes, a GPU's work included: on the clock, and of this process's threads."""
    _wait(device)
    clock, processor = time.perf_counter(), time.process_time()
    call()
    _wait(device)
    return time.perf_counter() - clock, time.process_time() - processor


def slowest(seconds: list[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """The most that any rank of `group` took for each; the same numbers on all of them, to the bit."""
    most = torch.tensor(seconds, dtype=torch.float32, device=device)
    if group:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.tolist()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What the costs of a step follow from, measured: the link between the ranks, and a method's work on each of them.

All ranks measure at the same time, as they will have to work at the same time, and get the slowest rank's figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.cost import Link, Work
from lightning_gradcomp.averaging.exchange import Exchange
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.ranks import Ranks, dense_traffic
from lightning_gradcomp.compressors import Compressor, Lossy
from lightning_gradcomp.compressors.incoming import Incoming
from lightning_gradcomp.compressors.memory import Momentum

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
    tiny, everyones = torch.zeros(world, device=device), torch.empty(world, device=device)

    def hop() -> None:
        dist.all_to_all_single(everyones, tiny, group=group)

    hop()  # connects
    [latency] = slowest([median(timed(hop, device)[0] for _ in range(9))], group, device)
    size, seconds = SMALLEST // 4, 0.0
    while seconds < LONG_ENOUGH and size < LARGEST:
        size *= 4
        buffer = torch.zeros(size // 4, device=device)

        def ring(sums: torch.Tensor = buffer) -> None:
            dist.all_reduce(sums, group=group)

        [seconds] = slowest([timed(ring, device)[0]], group, device)
    times = [timed(ring, device) for _ in range(REPEATS)]
    seconds, working = slowest([median(column) for column in zip(*times, strict=True)], group, device)
    sending = max(seconds - 2 * (world - 1) * latency, seconds / 2)  # a slow hop once must not make the link fast
    busy = min(working / seconds, 1.0) if device.type == "cpu" else 0.0
    return Link(latency, dense_traffic(size, world) / sending, busy)


def measure_work(compressor: Compressor, gradients: Gradients, group: dist.ProcessGroup | None = None) -> Work:
    """What compressing and decompressing these gradients takes on the ranks of `group` (None: on this one alone).

    Steps are made as in training, on the `p.grad` that are there (they are put back), but nothing is sent: the other
    ranks' payloads are copies of this one's. In fp32, without weight decay. Collective where there is a group.

    Args:
        gradients: of the model, laid out for this compressor, after a backward.
    """
    device = gradients.flat.device
    gradients.collect(1.0)
    if isinstance(compressor, Lossy) and gradients.compressed:
        alone, among = _step_seconds(compressor, gradients, 0), _step_seconds(compressor, gradients, OTHERS)
        encode, decode = alone, max(among - alone, 0.0) / OTHERS
    else:
        flat = gradients.flat
        casts = compressor.wire != flat.dtype
        times = [timed(lambda: flat.to(compressor.wire).to(flat.dtype), device)[0] for _ in range(1 + REPEATS)]
        encode, decode = median(times[1:]) if casts else 0.0, 0.0
    if group:
        encode, decode = slowest([encode, decode], group, device)
    return Work(encode, decode)


class Echo(Exchange):
    """An exchange with ranks that send what this one sends, at once."""

    def __init__(self, buffer: torch.Tensor, others: int) -> None:
        self.buffer, self.stats, self.ranks, self._others = buffer, Stats(), Ranks(None), others

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        return [payload] * (1 + self._others)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def _step_seconds(compressor: Lossy, gradients: Gradients, others: int) -> float:
    """The median of a few compressed steps among `others` that send the same; the first is not counted."""
    layout, device = gradients.layout, gradients.flat.device
    memory = compressor.memory(layout, device, 0)
    echo = Echo(torch.empty(layout.n, device=device), others)
    local, moving = gradients.compressed_flat.clone(), set(layout.names)
    rules, weights = [Momentum(momentum=0.9)] * len(layout.names), []
    few = [parameter.grad is not None for parameter in gradients.compressed]
    kept = [None if parameter.grad is None else parameter.grad.clone() for parameter in gradients.compressed]

    def step() -> None:
        incoming = Incoming.of(local, layout)
        outgoing = memory.compensate(incoming, rules, moving, weights)
        mean, sent = compressor.average(outgoing, layout, 1 - compressor.final_sparsity, echo, memory)
        memory.forget(sent)
        memory.commit(moving)
        gradients.assign(mean, gradients.dense_flat, few + [False] * len(gradients.dense), 1.0)

    times = [timed(step, device)[0] for _ in range(1 + REPEATS)]
    for parameter, grad in zip(gradients.compressed, kept, strict=True):
        parameter.grad = grad
    return median(times[1:])


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

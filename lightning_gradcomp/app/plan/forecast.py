"""The time of a training step with each method, number of ranks and link, modelled from measurements.

The cost model is that of `cost`; docs/will_it_pay.md has its formulas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from lightning_gradcomp.app.plan import cost
from lightning_gradcomp.app.plan.cost import Link, Work
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.topology import SHARDED
from lightning_gradcomp.averaging.traffic import messages, traffic
from lightning_gradcomp.averaging.workers import Ranks, dense_traffic
from lightning_gradcomp.compressors import Compressor, Lossy
from lightning_gradcomp.compressors.schedules import Ramp, Schedule

RING = "ring"
"""The topology of dense gradients."""

WORTH = 1.1
"""Speed-up below which not to compress: the error of the model is about as large (docs/will_it_pay.md)."""


@dataclass(frozen=True)
class Computation:
    """A step without any exchange.

    Args:
        seconds: forward, backward and optimizer.
        backward: of them, backward.
    """

    seconds: float
    backward: float


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank in a step: of its payload, of all that it sends, and of each message (collective, bytes)."""

    payload: int
    sent: int
    messages: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Step:
    """A modelled step: its seconds, and those of a dense step over them."""

    method: str
    topology: str
    workers: int
    bytes: Bytes
    seconds: float
    speed_up: float


@dataclass(frozen=True)
class Run:
    """A modelled run, warm-up included: its seconds, the bytes that a rank sends; and a dense run's over each."""

    method: str
    seconds: float
    sent: int
    speed_up: float
    ratio: float


@cache
def steps_at(schedule: Schedule | None, epochs: int, steps: int) -> Counter[float | None]:
    """How many steps of a run have which sparsity; None without a schedule.

    Args:
        steps: of an epoch.
    """
    if schedule is None:
        return Counter({None: epochs * steps})
    if not isinstance(schedule, Ramp):
        return Counter(schedule(step // steps, step) for step in range(epochs * steps))
    periods, each = (epochs, steps) if schedule.by == "epoch" else (epochs * steps, 1)
    first = min(schedule.periods, periods)
    counts: Counter[float | None] = Counter({schedule.final: (periods - first) * each})
    for period in range(first):
        counts[schedule(period, period)] += each
    return +counts


class MetaModel(nn.Module):
    """A model's parameters on the meta device, to count bytes of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters_on_meta = [
            (name, nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
            for name, p in model.named_parameters()
        ]

    def named_parameters(self, *_, **__):
        return iter(self._parameters_on_meta)


def topologies(compressor: Compressor) -> tuple[str, ...]:
    """The topologies that its messages can be sent by."""
    if not isinstance(compressor, Lossy):
        return (RING,)
    return ("all_gather",) if compressor.not_sharded_because else ("all_gather", *SHARDED)


def bytes_of_step(
    compressor: Compressor, model: nn.Module, topology: str, workers: int, sparsity: float | None = None
) -> Bytes:
    """What the rank that sends the most sends of the model's gradients in a compressed step.

    Args:
        sparsity: of that step; default: after the warm-up.
    """
    gradients = Gradients(model, compressor)
    if not isinstance(compressor, Lossy):
        payload = gradients.n * compressor.wire_dtype.itemsize
        return Bytes(payload, dense_traffic(payload, workers), ())
    then = compressor.at(compressor.final_sparsity if sparsity is None else sparsity)
    payload = sum(size for _, size in then.messages(gradients.layout))
    return Bytes(payload, traffic(then, gradients, Ranks(None, workers), topology), tuple(messages(then, gradients)))


class Forecast:
    """The model of one network's steps.

    Args:
        model: the network.
        computation: seconds of its step without an exchange.
        methods: name -> (compressor, seconds of its encoding and decoding of this network's gradients).
    """

    def __init__(self, model: nn.Module, computation: Computation, methods: dict[str, tuple[Compressor, Work]]) -> None:
        self.computation, self.methods = computation, methods
        self.elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        on_meta = MetaModel(model)
        self.bytes = cache(
            lambda method, topology, workers, sparsity=None: bytes_of_step(
                methods[method][0], on_meta, topology, workers, sparsity
            )
        )
        """(method, topology, workers, sparsity) -> `Bytes`."""

    def dense(self, workers: int, link: Link) -> float:
        """Seconds of a step with DDP."""
        exchange = cost.dense_seconds(4 * self.elements, workers, link)
        return self.computation.seconds + cost.exposed(exchange, self.computation.backward, link.busy)

    def step(self, method: str, topology: str, workers: int, link: Link, sparsity: float | None = None) -> Step:
        """A step with `method`, at the sparsity of a warm-up, or the final one."""
        compressor, work = self.methods[method]
        size = self.bytes(method, topology, workers, sparsity)
        if isinstance(compressor, Lossy):
            beyond = cost.compressed_seconds(topology, size.sent, size.messages, workers, link, work)
        else:
            exchange = cost.dense_seconds(size.payload, workers, link)
            beyond = work.encode + cost.exposed(exchange, self.computation.backward, link.busy)
        seconds = self.computation.seconds + beyond
        return Step(method, topology, workers, size, seconds, self.dense(workers, link) / seconds)

    def every(self, method: str, workers: int, link: Link, sparsity: float | None = None) -> list[Step]:
        """A step with `method` at each topology."""
        names = topologies(self.methods[method][0])
        return [self.step(method, topology, workers, link, sparsity) for topology in names]

    def best(self, method: str, workers: int, link: Link, sparsity: float | None = None) -> Step:
        """A step with `method` at the topology that is the quickest."""
        return min(self.every(method, workers, link, sparsity), key=lambda step: step.seconds)

    def run(self, method: str, workers: int, link: Link, epochs: int, steps: int) -> Run:
        """A run with the method's warm-up. Compressing a lower sparsity is taken to cost what the final one does.

        Args:
            steps: of an epoch.
        """
        schedule = self.methods[method][0].schedule()
        dense = self.step("none", RING, workers, link)
        seconds, sent = 0.0, 0
        for sparsity, count in steps_at(schedule, epochs, steps).items():
            step = dense if sparsity == 0 else self.best(method, workers, link, sparsity)
            if step.bytes.sent >= dense.bytes.sent and schedule:  # as the averager: it travels dense
                step = dense
            seconds += count * step.seconds
            sent += count * step.bytes.sent
        whole = epochs * steps
        return Run(method, seconds, sent, whole * dense.seconds / seconds, whole * dense.bytes.sent / sent)

    def table(self, workers: int, link: Link) -> list[Step]:
        """Every method at its best topology, the quickest first."""
        return sorted((self.best(method, workers, link) for method in self.methods), key=lambda step: step.seconds)

    def bandwidth_to_hide(self, workers: int, latency: float) -> float:
        """Bytes a second from which on the dense exchange costs nothing beyond the computation."""
        return cost.bandwidth_to_hide(4 * self.elements, workers, latency, self.computation.backward)

    def advice(self, workers: int, link: Link, corrected: bool) -> str:
        """Which method to pick, or that compression gains nothing.

        Args:
            corrected: whether the optimizer is SGD, Adam or AdamW, one of which some methods need.
        """
        steps = [step for step in self.table(workers, link) if step.method != "none"]
        for_any = [step for step in steps if not self.needs_optimizer(step.method)]
        best = (steps if corrected else for_any)[0]
        if best.speed_up < WORTH:
            beyond = 1e3 * (self.dense(workers, link) - self.computation.seconds)
            return (
                f"don't compress: the dense exchange is modelled at {beyond:.1f} ms a step beyond the computation; "
                f"the best method is {named(best)}, and speed-ups below {WORTH:g}x are within the error of the model"
            )
        if not self.needs_optimizer(best.method) or for_any[0].speed_up < WORTH:
            return f"pick {named(best)}"
        return f"pick {named(best)}; with an optimizer other than SGD and Adam, {named(for_any[0])}"

    def needs_optimizer(self, method: str) -> bool:
        """Whether the method is for SGD, Adam and AdamW alone."""
        return self.methods[method][0].needs_optimizer


def named(step: Step) -> str:
    """The method with its speed-up, N and topology."""
    return f"{step.method}, modelled at {step.speed_up:.2f}x over dense (N={step.workers}, {step.topology})"

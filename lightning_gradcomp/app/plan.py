"""`gradcomp plan MODEL`: does compression pay for this model and this link?

It measures the computation of a step and the work of every method on this machine. Bytes follow from the shapes of the
gradients. docs/will_it_pay.md explains the model of a step.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple, NoReturn

import hydra
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torch.utils.data import DataLoader

from lightning_gradcomp.app import compose
from lightning_gradcomp.averaging.autotune import CANDIDATES
from lightning_gradcomp.averaging.exchange import Flags, to_wire
from lightning_gradcomp.averaging.few_bits import mean_in_few_bits
from lightning_gradcomp.averaging.gradients import Gradients, Layouts
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import SHORT, SHORT_SUM, Ranks, dense_traffic
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology, dense_step_traffic, dense_topology, messages, traffic
from lightning_gradcomp.compressors import Compressor, LossyCompressor
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.errors import Refused, refusal
from lightning_gradcomp.registry import entries

BATCH = 32
"""Images per rank for a named network."""
HEADERS = 0.95
"""Fraction of a link's rate that TCP and IP headers leave, in packets of 1500 bytes."""
HIDES = 0.6
"""Fraction of backward that can hide DDP's exchange, which starts when the first bucket of 25 MiB is full."""
BACKWARD = 2 / 3
"""Fraction of backward in a step whose time is given: it computes two matrix products for each one of forward."""
WORTH = 1.1
"""The smallest speed-up to recommend; smaller ones are within the error of the model."""
MANY = (2, 4, 8, 16, 64)
"""Numbers of ranks in the columns of speed-ups."""
REPEATS = 3
UNUSED = ("compressor", "strategy", "trainer", "callbacks", "logger", "ckpt", "evaluate", "dry_run", "folder")
"""Options of a run that have no effect on a plan."""


class Link(NamedTuple):
    """What connects the ranks: seconds per tiny message, and bytes per second that each rank sends."""

    latency: float
    bandwidth: float


class Method(NamedTuple):
    """A compressor on a model: seconds to encode the gradients, and to decode one other rank's payload.

    `spread` is the difference between the slowest and the fastest repeat, divided by their median.
    """

    compressor: Compressor
    layouts: Layouts
    encode: float
    decode: float
    spread: float = 0.0


class Step(NamedTuple):
    """A modelled step: bytes that a rank sends, seconds to encode and decode, and total seconds."""

    topology: str
    sent: int
    work: float
    seconds: float


class Plan(NamedTuple):
    """The model of a step for one network: seconds without an exchange, those of backward, and methods by name."""

    computation: float
    backward: float
    methods: dict[str, Method]

    def step(self, name: str, topology: str, n: int, link: Link) -> Step:
        """A step of `n` ranks with method `name`. Uncompressed methods accept any topology, but use their own."""
        compressor, layouts, encode, decode, _ = self.methods[name]
        if not isinstance(compressor, LossyCompressor):
            ranks = Ranks(None, n)
            sent, how, waits = dense_step_traffic(layouts, ranks, compressor.wire), "ring", 2 * (n - 1)
            if compressor.wire in FORMATS:
                how, waits = dense_topology(compressor.wire, ranks), min(n - 1, 2)
            exposed = max(0.0, waits * link.latency + sent / link.bandwidth - HIDES * self.backward)
            return Step(how, sent, encode, self.computation + encode + exposed)
        final = compressor.with_sparsity(compressor.final_sparsity)
        parts, sent = messages(final, layouts), traffic(final, layouts, Ranks(None, n), topology)
        gathered = sum(size for how, size in parts if how == "gather")
        waits = sum(hops(how, size, n) for how, size in parts if how != "gather" or topology == "all_gather")
        work = encode + (n - 1 if gathered else 0) * decode  # a rank knows its own payload
        if topology == "two_phase":  # every rank's part goes to the owner of a partition, and every owner's mean back
            waits += 1 + hops("gather", sent / (n - 1) - gathered / n, n)
            work = encode + encode / n + 2 * decode
        exchange = waits * link.latency + sent / link.bandwidth
        return Step(topology, sent, work, self.computation + work + exchange)

    def best(self, name: str, n: int, link: Link) -> Step:
        """A step with method `name` and its fastest topology."""
        compressor = self.methods[name].compressor
        partitioned = isinstance(compressor, LossyCompressor) and not compressor.not_partitioned_because
        topologies = CANDIDATES if partitioned else CANDIDATES[:1]
        return min((self.step(name, topology, n, link) for topology in topologies), key=lambda step: step.seconds)

    def speed_up(self, name: str, n: int, link: Link) -> float:
        """Seconds of a dense step divided by those of `best`."""
        return self.best("none", n, link).seconds / self.best(name, n, link).seconds

    @property
    def spread(self) -> float:
        """The median of the methods' spreads, without those that take no work."""
        return median([method.spread for method in self.methods.values() if method.encode] or [0.0])

    def ranked(self, n: int, link: Link) -> list[str]:
        """The methods, fastest first."""
        return sorted(self.methods, key=lambda name: self.best(name, n, link).seconds)

    def verdict(self, n: int, link: Link) -> str:
        """One line that says which method to pick, or that none pays."""
        best = next(name for name in self.ranked(n, link) if name != "none")
        if (speed_up := self.speed_up(best, n, link)) < WORTH:
            return f"don't compress: no method is modelled at {WORTH}x or better"
        return f"pick {best}, modelled at {times(speed_up)} over dense"

    def bandwidth_to_hide(self, n: int, latency: float) -> float:
        """Bytes per second at which backward hides the dense exchange; infinite if latency alone is longer."""
        left = HIDES * self.backward - 2 * (n - 1) * latency
        return dense_traffic(self.methods["none"].layouts.nbytes, n) / left if left > 0 else math.inf

    def table(self, n: int, link: Link) -> str:
        """All methods, fastest first, with their speed-ups for several numbers of ranks."""
        many = [m for m in MANY if m != n][-4:]
        rows = [["method", "topology", "KB sent", "compress ms", "step ms", "speed-up", *(f"N={m}" for m in many)]]
        for name in self.ranked(n, link):
            topology, sent, work, seconds = self.best(name, n, link)
            costs = [f"{sent / 1e3:,.0f}", f"{1e3 * work:.1f}", f"{1e3 * seconds:.1f}"]
            speed_ups = [times(self.speed_up(name, m, link)) for m in (n, *many)]
            rows.append(["none (dense)" if name == "none" else name, topology, *costs, *speed_ups])
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in rows)


def times(ratio: float) -> str:
    """Format a ratio, as in 3.1x and 42x."""
    return f"{ratio:.{1 if ratio < 9.95 else 0}f}x"


def hops(how: str, size: float, n: int) -> int:
    """Number of sequential messages in a gather, sum ("mean") or maximum: a ring's, or fewer for a short message."""
    if how == "gather":
        return 1 if size <= SHORT else n - 1
    return min(n - 1, 2) if how == "mean" and size <= SHORT_SUM else 2 * (n - 1)


class Parser(argparse.ArgumentParser):
    """argparse that raises Refused for wrong options."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message.removeprefix("argument "))


def read(words: list[str]) -> argparse.Namespace:
    """The options in `words`. `model` are the words that choose a network, `run` are those of the run to plan."""
    parser = Parser(
        prog="gradcomp plan",
        description="Model a training step with each compression method, and say whether compression pays.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="*", help="resnet50 or another of conf/model, or recipe=NAME, then overrides")
    add("--rate-mbit", type=float, metavar="R", default=1000.0, help="rate of each rank's link (1000)")
    add("--delay-ms", type=float, metavar="D", default=0.1, help="delay of that link, one way (0.1)")
    add("--ranks", type=int, metavar="N", default=2, help="number of ranks (2)")
    add("--step-ms", type=float, metavar="MS", help="time of a step without an exchange (default: measured here)")
    options = parser.parse_intermixed_args(words)
    if not options.model:
        raise refusal("gradcomp plan", "no MODEL", "gradcomp plan resnet50, or gradcomp plan recipe=NAME")
    for name, least in {"rate_mbit": 0.001, "delay_ms": 0, "ranks": 2, "step_ms": 0.001}.items():
        got = getattr(options, name)
        if got is not None and not least <= got < math.inf:
            raise refusal(f"--{name.replace('_', '-')}", got, f"{least:g} or more")
    network, *overrides = options.run = options.model
    if "=" not in network and not network.startswith("~"):
        if recipe := next((word for word in overrides if word.startswith("recipe=")), None):
            raise refusal("MODEL with a recipe", network, f"{recipe} alone")
        images = f"data.batch_size={BATCH * options.ranks}"
        options.run = ["~recipe", f"model={network}", "data=synthetic", images, *overrides]
    return options


def main(words: list[str]) -> int:
    """Measure a step and print the plan."""
    options = read(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the task logs, and there is no Trainer
        workload = composed(options.run, options.ranks, device)
        warn_of_load()
        plan = measured(workload, device, options.step_ms)
    print(text(options, plan, device))
    return 0


def warn_of_load() -> None:
    """Tell the user if other programs keep this machine busy."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 2:
        told = f"gradcomp plan: this machine is busy (load {load:.1f}, {cores} cores): times will be too long"
        print(f"{told}. Wait until it is idle.", file=sys.stderr)


def text(options: argparse.Namespace, plan: Plan, device: torch.device) -> str:
    """The output of the command: what was measured, the table, and a verdict."""
    mbit, n, link = options.rate_mbit, options.ranks, given_link(options.rate_mbit, options.delay_ms)
    size, hides_from = plan.methods["none"].layouts.nbytes, 8e-9 * plan.bandwidth_to_hide(n, link.latency)
    hides = "Backward is too short to hide a dense exchange."
    if math.isfinite(hides_from):
        hides = f"Backward hides a dense exchange from {hides_from:.3g} Gbit/s on."
    rate = f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
    return f"""\
{" ".join(options.model)}: {size // 4:,} parameters, {size / 1e6:.1f} MB of gradients. \
A step computes for {1e3 * plan.computation:.4g} ms ({"given" if options.step_ms else "measured"}).
Modelled for N={n} ranks over {rate}, {options.delay_ms:g} ms delay.
Compressing was measured on this {device.type.upper()}; repeats differ by {plan.spread:.0%}.
{hides}

{plan.table(n, link)}

{plan.verdict(n, link)}"""


def given_link(mbit: float, delay_ms: float) -> Link:
    """A link from its rate and one-way delay. A gloo message takes two delays: its receiver first says it is ready."""
    return Link(latency=2e-3 * delay_ms, bandwidth=HEADERS * mbit * 1e6 / 8)


class Workload(NamedTuple):
    """What a training step needs."""

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer


def composed(words: list[str], n: int, device: torch.device) -> Workload:
    """Network, optimizer and loss of the run that `gradcomp WORDS` would start, on a rank's share of random data."""
    compose.register()
    compose.check_groups(words)
    if unused := [word for word in words if re.split("[./@=]", word.lstrip("+~"))[0] in UNUSED]:
        allowed = "words about model, data, task and optimizer: every method is planned with its defaults, for --ranks"
        raise refusal("gradcomp plan", " ".join(unused), allowed)
    with hydra.initialize_config_dir(str(compose.shipped("conf")), version_base="1.3"):
        config = hydra.compose("train", words)
    data = compose.instantiated("data", config)
    data.check_batch(n)
    data = data.stand_in(data.batch_size // n)
    task = compose.build_task(config, data).to(device)
    batch = move_data_to_device(next(iter(DataLoader(data.load()[0], data.batch_size))), device)
    return Workload(task, lambda: task.training_step(batch, 0), task.optimizer(task.parameter_groups()))


def measured(workload: Workload, device: torch.device, step_ms: float | None = None) -> Plan:
    """The plan of a workload, with every method that works with its optimizer."""
    if step_ms:
        seconds, backward = 1e-3 * step_ms, BACKWARD * 1e-3 * step_ms
    else:
        tell("a step")
        seconds, backward = measure_step(workload, device)
    methods = {}
    for entry in entries():
        tell(entry.name)
        compressor = entry.cls().for_optimizer(workload.optimizer)
        try:
            compressor.check_optimizer(workload.optimizer)
        except ValueError as error:
            print(f"{entry.name} is left out: {error}", file=sys.stderr)
            continue
        methods[entry.name] = measure_method(compressor, workload)
    return Plan(seconds, backward, methods)


def tell(what: str) -> None:
    """Say what is measured next."""
    print(f"measuring {what}", file=sys.stderr)


def measure_step(workload: Workload, device: torch.device) -> tuple[float, float]:
    """Seconds of a step without an exchange, and of its backward: medians."""
    backwards = []

    def step() -> None:
        workload.optimizer.zero_grad(set_to_none=True)
        loss = workload.loss()
        backwards.append(timed(loss.backward, device))
        workload.optimizer.step()

    return median(repeated(step, device)), median(backwards[1:])


class EchoRanks(Ranks):
    """Ranks that all send what this one sends, instantly."""

    def start_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: message.repeat(self.world, 1)

    def start_swap(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: rows

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.mul_(self.world)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def measure_method(compressor: Compressor, workload: Workload) -> Method:
    """Measure what compressing the model's gradients costs, on random numbers. Sends nothing; overwrites gradients."""
    gradients = Gradients(workload.model, compressor)
    layouts, device, wire = gradients.largest, gradients.device, compressor.wire
    if isinstance(compressor, LossyCompressor) and gradients.compressed:
        alone, of_three = (compressed_steps(compressor, gradients, world, workload.optimizer) for world in (1, 3))
        decode = max(median(of_three) - median(alone), 0.0) / 2
        return Method(compressor, layouts, median(alone), decode, spread(alone))
    if wire == "fp32":
        return Method(compressor, layouts, 0.0, 0.0)
    if form := FORMATS.get(wire):
        large = [(0, torch.randn(shape, device=device)) for shape in layouts.layout.shapes]
        call = partial(mean_in_few_bits, EchoRanks(None, 2), form, large, [gradients.dense_flat])
    else:
        flat = torch.randn(gradients.n, device=device)
        call = lambda: to_wire(flat, 2, wire, saturate=True).float()  # noqa: E731
    seconds = repeated(call, device)
    return Method(compressor, layouts, median(seconds), 0.0, spread(seconds))


def compressed_steps(
    compressor: LossyCompressor, gradients: Gradients, world: int, optimizer: torch.optim.Optimizer
) -> list[float]:
    """Seconds of a few compressed steps of `world` ranks that send the same data."""
    memory = Memory(compressor, gradients, EchoRanks(None, world), Topology(), optimizer)
    final = compressor.with_sparsity(compressor.final_sparsity)
    local, seconds = [torch.randn_like(parameter) for parameter in gradients.parameters], []
    for number in range(1 + REPEATS):
        for parameter, gradient in zip(gradients.parameters, local, strict=True):
            parameter.grad = gradient.clone()
        call = partial(average_compressed, memory, final, "all_gather", number, Flags(), Stats())
        seconds.append(timed(call, gradients.device))
    return seconds[1:]


def spread(seconds: list[float]) -> float:
    """The difference between the longest and the shortest, divided by their median."""
    return (max(seconds) - min(seconds)) / median(seconds)


def repeated(call: Callable[[], object], device: torch.device) -> list[float]:
    """The seconds that `call` takes in a few repeats, after one that also allocates."""
    return [timed(call, device) for _ in range(1 + REPEATS)][1:]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that `call` takes, including work on a GPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start

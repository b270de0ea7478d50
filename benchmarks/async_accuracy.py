"""Accuracy of dist_async on the digits, on a virtual clock: the same figures on every machine and under any load.

    python -m benchmarks.async_accuracy speeds --folds 0,1,2,3,4
    python -m benchmarks.async_accuracy staleness --folds 0
    python -m benchmarks.async_accuracy delay_compensation --folds 0,1,2

One process runs all workers in the order of a virtual clock, by the rules of `parameter_server/` (`partition.py`,
`worker.py`, `clocks.py`). A step's computation takes the seconds that a worker's speed says; encoding and the network
take none. Model, images, optimizer, batch (64 images over 4 workers) and number of gradients (220 steps of 4) are those
of recipe=digits; learning rates follow the number of pushes. The server's weights are validated with the batch-norm
statistics of one pass over the training images.

- speeds: workers as fast as each other, and 4:1:1:1, against DDP and synchronous DGC. A synchronous step takes as long
  as the slowest worker.
- staleness: every gradient is of weights that are so many pushes old.
- delay_compensation: the same, uncompressed, with and without DC-ASGD-a (Zheng et al., ICML 2017).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from benchmarks import report
from benchmarks.methods import RECIPE
from benchmarks.methods import compressor as by_name
from lightning_gradcomp.app.data.digits import CHANNELS, CLASSES, digits
from lightning_gradcomp.app.data.shared import RankSampler
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.app.scheduler import WarmupCosine
from lightning_gradcomp.averaging.averager import GradientAverager
from lightning_gradcomp.parameter_server.clocks import Clocks
from lightning_gradcomp.parameter_server.messages import PUSH, Request
from lightning_gradcomp.parameter_server.partition import ServerPartition
from lightning_gradcomp.parameter_server.server import built
from lightning_gradcomp.parameter_server.worker import Worker
from tests.threads import run_ranks

WORKERS, BATCH, EPOCHS = 4, 64, 10
LR, MOMENTUM = RECIPE.keywords["lr"], RECIPE.keywords["momentum"]
GOAL = 0.98


class SmallResNet(ResNet):
    """ResNet-18 with a quarter of the channels (16, 32, 64, 128): 0.7 million parameters."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=CLASSES)
        self.inplanes = 16
        self.conv1 = nn.Conv2d(CHANNELS, 16, 3, padding=1, bias=False)
        self.bn1, self.maxpool = nn.BatchNorm2d(16), nn.Identity()
        for number, channels in enumerate((16, 32, 64, 128)):
            setattr(
                self, f"layer{number + 1}", self._make_layer(BasicBlock, channels, 2, stride=1 if number == 0 else 2)
            )
        self.fc = nn.Linear(128, CLASSES)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(resnet18, channels=CHANNELS, classes=CLASSES, size=8),
    "small": SmallResNet,
}


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Args:
        name: what it is called.
        push: compressor, with options as in benchmarks.step_time.
        pull: of the pulls; None: whole weights.
        seconds: of a step's computation, for each worker.
        staleness: S, the bound; None: synchronous training.
        age: how many pushes old the weights of every gradient are, workers taking turns; None: as the clock has it.
        compensate: λ0 of DC-ASGD-a; None: without.
        momentum: of SGD; learning rates are such that a gradient moves the weights as far in the end.
    """

    name: str
    push: str = "dgc"
    pull: str | None = None
    seconds: tuple[float, ...] = WORKERS * (1.0,)
    staleness: float | None = math.inf
    age: int | None = None
    compensate: float | None = None
    momentum: float = MOMENTUM


class Compensated(ServerPartition):
    """DC-ASGD-a, for uncompressed pushes: g + λ0 / √(MS + 1e-7) · g² · (w - w_pulled), MS = 0.95 MS + 0.05 g²."""

    factor: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.mean_square, self.pulled = torch.zeros(()), {}  # version -> weights

    def push(self, request: Request, body: torch.Tensor, present: torch.Tensor | None = None) -> bool:
        gradient, now = body.view(torch.float32), flat(self)
        self.mean_square = 0.95 * self.mean_square + 0.05 * gradient.square()
        factor = self.factor / (self.mean_square + 1e-7).sqrt()
        better = gradient + factor * gradient.square() * (now - self.pulled[request.version])
        return super().push(request, better.view(torch.uint8), present)


def flat(shard: ServerPartition) -> torch.Tensor:
    """Its weights in fp32, in the order of a push's body."""
    return shard.pull(-1, True).body.view(torch.float32)


def batches(images: TensorDataset, rank: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """A rank's batches, epoch after epoch."""
    sampler = RankSampler(images, WORKERS, rank, seed=seed, skip=0)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from DataLoader(images, BATCH // WORKERS, sampler=sampler, drop_last=True)


def backward(model: nn.Module, batch: list[torch.Tensor]) -> None:
    """Leaves the gradient of a batch in `p.grad`."""
    model.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


class Training:
    """A run, and what comes of it.

    Args:
        case: what is run.
        network: of `NETWORKS`.
        fold: of the cross-validation.
        seed: of the first weights and the order of the images.
    """

    def __init__(self, case: Case, network: str, fold: int, seed: int = 0) -> None:
        self.case, (self.train, self.val) = case, digits(fold)
        self.epoch = WORKERS * (len(self.train) // BATCH)
        """Pushes of an epoch."""
        torch.manual_seed(seed)
        self.model = NETWORKS[network]()
        """The first weights; later those that are validated."""
        self.images = [batches(self.train, rank, seed) for rank in range(WORKERS)]
        self.accuracy, self.seconds, self.to_goal = 0.0, 0.0, math.inf
        """At the end; virtual seconds of the whole run, and until 98 % (`inf`: never)."""
        self.staleness: list[int] = []
        """Of each push."""

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
        """The recipe's, and what sets its learning rates by the number of pushes so far."""
        momentum = self.case.momentum
        optimizer = RECIPE(model.parameters(), lr=LR * (1 - momentum) / (1 - MOMENTUM), momentum=momentum)
        [factor] = WarmupCosine()(optimizer, self.epoch // WORKERS, EPOCHS).lr_lambdas

        def rates(pushes: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor(pushes // WORKERS)

        return optimizer, rates

    def run(self) -> None:
        """Trains."""
        if self.case.staleness is None:
            run_ranks(WORKERS, self._synchronous, timeout=3600)
            return
        self._start()
        self._by_age(self.case.age) if self.case.age is not None else self._by_the_clock(self.case.staleness)

    def _synchronous(self, rank: int, group: Any) -> None:
        """One of the ranks, which are threads: `GradientAverager`, as the strategies use it."""
        model, case = deepcopy(self.model), self.case
        optimizer, rates = self.optimizer(model)
        averager = GradientAverager(model, by_name(case.push), optimizer=optimizer, process_group=group)
        for step in range(EPOCHS * self.epoch // WORKERS):
            rates(WORKERS * step)
            with averager.local_weights():
                backward(model, next(self.images[rank]))
            averager.step()
            if rank == 0:
                self.staleness.append(0)
                self._after(model, WORKERS * (step + 1), (step + 1) * max(case.seconds))

    def _start(self) -> None:
        self.workers, self.rates, self.models = [], [], [deepcopy(self.model) for _ in range(WORKERS)]
        for model in self.models:
            optimizer, rates = self.optimizer(model)
            pull = None if self.case.pull is None else built(by_name(self.case.pull), optimizer)
            self.workers.append(Worker(model, optimizer, built(by_name(self.case.push), optimizer), pull, 1, WORKERS))
            self.rates.append(rates)
        worker, kind = self.workers[0], ServerPartition if self.case.compensate is None else Compensated
        names = dict(zip(worker.gradients.names, worker.gradients.parameters, strict=True))
        self.shard = kind(names, worker.parts[0], worker.optimizer, worker.compressor, pull=worker.pull_compressor)
        if isinstance(self.shard, Compensated):
            self.shard.factor = self.case.compensate or 0.0

    def _by_the_clock(self, bound: float) -> None:
        """Workers compute side by side; the bound decides when one begins its next step."""
        clocks, waiting, versions, now = Clocks(bound), list(range(WORKERS)), WORKERS * [0], 0.0
        computing: list[tuple[float, int]] = []
        for number, worker in enumerate(self.workers):
            clocks.join(number)
            worker.assign(0, self.shard.pull(number, True).body, True)
        while self.shard.version < EPOCHS * self.epoch:
            for number in [number for number in waiting if clocks.wait(number, 0)]:
                pull = self.shard.pull(number, False)
                self.workers[number].assign(0, pull.body, False)
                versions[number] = pull.version
                heapq.heappush(computing, (now + self.case.seconds[number], number))
                waiting.remove(number)
            now, number = heapq.heappop(computing)
            self._push(number, versions[number], now)
            clocks.tick(number)
            waiting.append(number)

    def _by_age(self, age: int) -> None:
        """Every gradient is of weights that are `age` pushes old; of the first ones for the first pushes."""
        bodies: deque[tuple[int, torch.Tensor]] = deque(maxlen=age + 1)
        while (version := self.shard.version) < EPOCHS * self.epoch:
            bodies.append((version, self.shard.pull(-1, True).body))
            of, body = bodies[0]
            self.workers[version % WORKERS].assign(0, body, True)
            if isinstance(self.shard, Compensated):
                self.shard.pulled = {of: body.view(torch.float32)}
            self._push(version % WORKERS, of, (version + 1) / WORKERS)

    def _push(self, number: int, of: int, now: float) -> None:
        """The end of a worker's step."""
        worker, version = self.workers[number], self.shard.version
        self.rates[number](of)
        backward(self.models[number], next(self.images[number]))
        bodies = worker.encode(number)
        assert bodies is not None, "a gradient is not finite"
        accepted = self.shard.push(Request(PUSH, number, worker.steps, of, worker.rates), bodies[0])
        worker.commit([accepted])
        worker.steps += 1
        self.staleness.append(version - of)
        if self.shard.version % self.epoch == 0:
            self.model.load_state_dict(self.shard.weights, strict=False)
        self._after(self.model, version + 1, now)

    def _after(self, model: nn.Module, pushes: int, now: float) -> None:
        """Validates after each epoch of the pushes."""
        self.seconds = now
        if pushes % self.epoch == 0:
            self.accuracy = self._validate(deepcopy(model))
            if self.accuracy >= GOAL:
                self.to_goal = min(self.to_goal, now)

    @torch.no_grad()
    def _validate(self, model: nn.Module) -> float:
        update_bn(DataLoader(self.train, 256), model)
        model.eval()
        images, labels = self.val.tensors
        return float((model(images).argmax(1) == labels).double().mean())


SPEEDS = {"equal": (1.0, 1.0, 1.0, 1.0), "4:1:1:1": (0.25, 1.0, 1.0, 1.0)}
"""Seconds of a step of 16 images. With either a synchronous step takes one second."""
DENSITIES = {"100 %": "none", "10 %": "dgc:sparsity=0.9", "1 %": "dgc:sparsity=0.99", "0.1 %": "dgc:sparsity=0.999"}


def cases(table: str) -> list[Case]:
    """The lines of a table; the first is what the others are compared with."""
    if table == "speeds":
        found = [Case("DDP", "none", staleness=None), Case("synchronous DGC", staleness=None)]
        for name, seconds in SPEEDS.items():
            found.append(Case(f"dist_async DGC, {name}", seconds=seconds))
            found.append(Case(f"dist_async DGC both ways, {name}", pull="gradient_dropping", seconds=seconds))
        return found
    if table == "staleness":
        pairs = product(DENSITIES.items(), AGES)
        return [Case(f"{density}, {age} pushes old", push, age=age) for (density, push), age in pairs]
    found = []
    for age, momentum in product(AGES[1:], (MOMENTUM, 0.0)):
        name, options = f"{age} pushes old, momentum {momentum}", {"age": age, "momentum": momentum}
        found += [Case(name, "none", **options), Case(f"{name}, compensated", "none", compensate=2.0, **options)]
    return found


AGES = (0, 4, 16)


def interval(values: Sequence[float]) -> str:
    """Mean and half the 95 % interval (Student's t), in per cent."""
    if len(values) < 2:
        return f"{100 * values[0]:.2f}"
    half = STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{100 * mean(values):.2f} ± {100 * half:.2f}"


STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of values -> 97.5 % quantile of Student's t with one degree of freedom less."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("speeds", "staleness", "delay_compensation"))
    parser.add_argument("--network", choices=tuple(NETWORKS), default="small")
    parser.add_argument("--folds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, help="a file of lines of JSON; what it has already is not run again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = {}
    if arguments.out and arguments.out.exists():
        for line in arguments.out.read_text().splitlines():
            entry = json.loads(line)
            known[entry["network"], entry["case"], entry["fold"]] = entry
    results: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases(arguments.table)}
    for fold in map(int, arguments.folds.split(",")):
        for case in cases(arguments.table):
            key = arguments.network, case.name, fold
            results[case.name].append(known.get(key) or one(case, *key, arguments.out))
    print(f"\n{arguments.network}, {WORKERS} workers, folds {arguments.folds}, {report.machine()}")
    head = ["case", "accuracy, %", "less the first, %", "98 % after, s", "whole run, s", "pushes a second", "staleness"]
    print(report.table(head, [row(name, found, next(iter(results.values()))) for name, found in results.items()]))


def one(case: Case, network: str, name: str, fold: int, out: Path | None) -> dict[str, Any]:
    """Runs a case, and writes its line."""
    begin, training = time.process_time(), Training(case, network, fold)
    training.run()
    entry = {
        "network": network,
        "case": name,
        "fold": fold,
        "accuracy": training.accuracy,
        "to_goal": training.to_goal,
        "seconds": training.seconds,
        "pushes": EPOCHS * training.epoch,
        "staleness": mean(training.staleness),
        "largest_staleness": max(training.staleness),
        "core_seconds": round(time.process_time() - begin, 1),
    }
    print(json.dumps(entry), file=sys.stderr, flush=True)
    if out:
        with out.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    return entry


def row(name: str, found: list[dict[str, Any]], first: list[dict[str, Any]]) -> list[str]:
    """Of the table."""
    each = [entry["accuracy"] for entry in found]
    apart = [a - entry["accuracy"] for a, entry in zip(each, first, strict=True)]
    goals = [entry["to_goal"] for entry in found]
    to_goal = f"{mean(goals):.0f}" if max(goals) < math.inf else f"{sum(goal < math.inf for goal in goals)} runs do"
    seconds = mean(entry["seconds"] for entry in found)
    rate = mean(entry["pushes"] / entry["seconds"] for entry in found)
    stale = mean(entry["staleness"] for entry in found)
    return [name, interval(each), interval(apart), to_goal, f"{seconds:.0f}", f"{rate:.2f}", f"{stale:.1f}"]


if __name__ == "__main__":
    main()

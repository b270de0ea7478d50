"""Accuracy on five folds of the digits, of what `gradcomp` can't train: DGC's parts, late averages, unequal workers.

    python -m benchmarks.accuracy ablation    # from plain dropping to DGC; runs that docs/data/ablation.csv lacks
    python -m benchmarks.accuracy late --cases ddp,10,8:onebit,10:K=20 --folds 0,1,2
    python -m benchmarks.accuracy speeds      # dist_async with workers of unequal speed, on a virtual clock
    python -m benchmarks.accuracy staleness   # dist_async with gradients of weights that are so many pushes old

A run takes two to five minutes of two cores. It is recipe=digits in plain PyTorch: ten epochs of 22 steps of 64 images.
The fold is the seed of weights and order, as in the dense runs of docs/data/results.csv. Ranks are processes, which
this script starts. Batch-norm statistics are those of one pass over the training images; in the ablation rank 0's, as
in the recipes.

- ablation: the same compressed phase with one part of DGC more in each case, with and without clipping. Two ranks.
- late: a case is a delay D, with a period K of as many steps (1 for 0, which is synchronous training). After a colon,
  "K=4" for another period, or a compressor as in benchmarks/methods.py. "ddp" is dense. Two ranks; nothing is drained
  before the only validation, at the end.
- speeds, staleness: a server and four workers in one process, which take turns in the order of a virtual clock. So the
  figures are the same on every machine and under any load. A step's computation takes the seconds that a worker's speed
  says; encoding and the network take none.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

import lightning_gradcomp as lgc
from benchmarks import report, results
from benchmarks.link import local, result
from benchmarks.methods import RECIPE, compressor, forward_backward
from lightning_gradcomp.app.data.digits import CHANNELS, CLASSES, digits
from lightning_gradcomp.app.data.shared import RankSampler
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.app.scheduler import WarmupCosine

EPOCHS, BATCH = 10, 64
GOAL = 0.98


class Outcome(NamedTuple):
    """A run.

    Args:
        correct: images classified correctly after each epoch that was validated; the last is the end's.
        images: to validate.
        ratio: dense bytes of the run over those sent.
        staleness: mean number of pushes by which a gradient's weights were old.
        seconds: of the virtual clock; NaN without one.
    """

    correct: list[int]
    images: int
    ratio: float = 1.0
    staleness: float = 0.0
    seconds: float = math.nan

    @property
    def percent(self) -> float:
        """Accuracy at the end."""
        return 100 * self.correct[-1] / self.images


class Fold:
    """What the ranks or workers of a run share: images, first weights, optimizer, learning rates."""

    def __init__(self, fold: int, ranks: int) -> None:
        self.fold, self.ranks = fold, ranks
        self.train, self.val = digits(fold)
        self.steps = len(self.train) // BATCH
        """Of an epoch."""
        torch.manual_seed(fold)  # the same weights everywhere
        self.model = resnet18(channels=CHANNELS, classes=CLASSES, size=8)

    def batches(self, rank: int) -> Iterator[list[torch.Tensor]]:
        """A rank's, epoch after epoch."""
        sampler = RankSampler(self.train, self.ranks, rank, seed=self.fold, skip=0)
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from DataLoader(self.train, BATCH // self.ranks, sampler=sampler, drop_last=True)

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """The recipe's, and its schedule."""
        optimizer = RECIPE(model.parameters())
        return optimizer, WarmupCosine()(optimizer, self.steps, EPOCHS)

    @torch.no_grad()
    def validate(self, model: nn.Module, *, as_trained: bool = False) -> int:
        """Images that are classified correctly, with batch-norm statistics of one pass, or those of the training."""
        if not as_trained:
            update_bn(DataLoader(self.train, 256), model)
        images, labels = self.val.tensors
        right = int((model.eval()(images).argmax(1) == labels).sum())
        model.train()
        return right


# Ranks


PAPER: dict[str, Any] = {"sparsity": 0.999, "values": "fp32"}
ABLATION: dict[str, Callable[..., lgc.Compressor]] = {
    "dropping": partial(lgc.GradientDropping, sparsity=0.999, scope="tensor", warmup_epochs=0),
    "momentum correction": partial(lgc.DGC, **PAPER, start_sparsity=0.999, momentum_masking=False),
    "masking": partial(lgc.DGC, **PAPER, start_sparsity=0.999),
    "warm-up": partial(lgc.DGC, **PAPER, warmup_epochs=4),
    "local weights": partial(lgc.DGC, **PAPER, start_sparsity=0.999),
}
TITLES = {
    "dropping": "dropping, 99.9 %",
    "momentum correction": "+ momentum correction",
    "masking": "+ momentum factor masking",
    "warm-up": "+ warm-up, four epochs",
    "local weights": "masking, local weights, no warm-up",
}
CLIPPED = tuple(ABLATION)[:4]
CLIP_NORM = 5.0
"""About half of the norms of a dense run's average gradients, which fall from 35 to 5 in the first two epochs."""

Averager = lgc.GradientAverager | lgc.DelayedAverager


def averager(case: str, clip_norm: float | None, fold: Fold, optimizer: torch.optim.Optimizer) -> Averager:
    """What averages in a case: one of ABLATION, one of `late`, "ddp", or a compressor."""
    words = case.split(":", 1)
    if words[0].isdigit():
        more = words[1].split(":") if len(words) > 1 else []
        options: dict[str, Any] = {"delay": int(words[0]), "period": max(int(words[0]), 1)}
        if more and more[0].startswith("K="):
            options["period"] = int(more.pop(0)[2:])
        method = compressor(":".join(more)) if more else "none"
        return lgc.DelayedAverager(fold.model, optimizer, method, **options, steps_per_epoch=fold.steps)
    if case in ABLATION:
        made, local_weights = ABLATION[case](clip_norm=clip_norm), case == "local weights"
    else:
        made, local_weights = compressor("none" if case == "ddp" else case), True
    options = {"steps_per_epoch": fold.steps, "local_weights": local_weights}
    return lgc.GradientAverager(fold.model, made, optimizer=optimizer, **options)


def train(case: str, clip_norm: float | None, number: int) -> Outcome:
    """One run, on each of the ranks."""
    fold = Fold(number, dist.get_world_size())
    optimizer, schedule = fold.optimizer(fold.model)
    average, batches, correct = averager(case, clip_norm, fold, optimizer), fold.batches(dist.get_rank()), []
    late = isinstance(average, lgc.DelayedAverager)
    for step in range(1, EPOCHS * fold.steps + 1):
        with nullcontext() if late else average.local_weights():
            forward_backward(fold.model, *next(batches))
        average.step()
        schedule.step()
        if not late and step % fold.steps == 0:
            correct.append(fold.validate(fold.model, as_trained=case in ABLATION))
    if late:
        average.drain()
        correct.append(fold.validate(fold.model))
    costs = average.spent
    return Outcome(correct, len(fold.val), round(costs.dense_bytes / costs.bytes_sent, 2))


def by_ranks(ranks: int, case: str, fold: int, clip_norm: float | None = None) -> Outcome:
    """A run on ranks that are started for it."""
    words = ["--rank", case, "--folds", str(fold), *(["--clip-norm", str(clip_norm)] if clip_norm else [])]
    return Outcome(*result(local(ranks), __spec__.name, *words)[0])


# The ablation's CSV


CSV = report.DATA / "ablation.csv"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A line of the CSV."""

    case: str
    clip_norm: float | None
    fold: int
    correct: int
    images: int
    ratio: float  # of the bytes of a dense run to those sent
    machine: str

    @property
    def percent(self) -> float:
        """Validation accuracy."""
        return 100 * self.correct / self.images


def ablation(folds: list[int]) -> str:
    """The table, after the runs that the CSV lacks."""
    wanted = [(case, None, fold) for fold in folds for case in ABLATION]
    wanted += [(case, CLIP_NORM, fold) for fold in folds for case in CLIPPED]
    known = {(run.case, run.clip_norm, run.fold) for run in report.read(CSV, Run)}
    for case, clip_norm, fold in wanted:
        if (case, clip_norm, fold) not in known:
            found = by_ranks(2, case, fold, clip_norm)
            line = {"correct": found.correct[-1], "images": found.images, "ratio": found.ratio}
            run = Run(case=case, clip_norm=clip_norm, fold=fold, machine=report.machine(), **line)
            print(run, flush=True)
            report.write(CSV, [*report.read(CSV, Run), run])
    dense = results.cross_validated(results.read_csv())[results.Setting("resnet18", None, 2, 220)]["none"]
    beside = {run.fold: run.percent for run in dense}
    rows = [["dense", f"{report.spread([run.percent for run in dense])} ({len(dense)})", "", "1"]]
    found: dict[tuple[str, float | None], list[Run]] = defaultdict(list)
    for run in report.read(CSV, Run):
        found[run.case, run.clip_norm].append(run)
    for case, clip_norm in product(ABLATION, (None, CLIP_NORM)):
        if len(runs := found[case, clip_norm]) > 1:
            interval = report.interval([run.percent - beside[run.fold] for run in runs], 1)
            accuracy = f"{report.spread([run.percent for run in runs])} ({len(runs)})"
            title = f"the same, clipped at {CLIP_NORM:g}" if clip_norm else TITLES[case]
            rows.append([title, accuracy, interval, f"{mean(run.ratio for run in runs):.3g}"])
    return report.table(["", "accuracy, % (folds)", "difference to dense", "ratio, run"], rows)


# Workers on a virtual clock


WORKERS = 4
EQUAL, UNEQUAL = (1.0, 1.0, 1.0, 1.0), (0.25, 1.0, 1.0, 1.0)
"""Seconds of a step of 16 images. With either a synchronous step takes one second."""
DENSITIES = {"100 %": "none", "10 %": "dgc:sparsity=0.9", "1 %": "dgc:sparsity=0.99", "0.1 %": "dgc:sparsity=0.999"}


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Training with a parameter server.

    Args:
        push: compressor, as in benchmarks/methods.py.
        pull: format of the weights in a pull.
        seconds: of a step's computation, for each worker.
        age: how many pushes old the weights of every gradient are, workers taking turns; None: as the clock has it.
    """

    push: str = "dgc"
    pull: str = "fp32"
    seconds: tuple[float, ...] = EQUAL
    age: int | None = None


def turns(seconds: tuple[float, ...]) -> Iterator[tuple[float, int]]:
    """(time, worker) of each end of a step, in their order; workers never wait for each other."""
    computing = [(each, worker) for worker, each in enumerate(seconds)]
    heapq.heapify(computing)
    while True:
        now, worker = heapq.heappop(computing)
        yield now, worker
        heapq.heappush(computing, (now + seconds[worker], worker))


def asynchronous(case: Workers, number: int) -> Outcome:
    """A run. A worker pulls at the end of its step, so its next gradient is of these weights."""
    fold = Fold(number, WORKERS)
    push = compressor(case.push)
    secret: dict[str, Any] = {"secret": "word", "pull": case.pull}
    server = lgc.ParameterServer(fold.model, fold.optimizer(fold.model)[0], push, **secret)
    server.start()

    def joined(model: nn.Module) -> tuple[lgc.AsyncAverager, Callable[[int], None]]:
        optimizer, schedule = fold.optimizer(model)
        [factor], [group] = schedule.lr_lambdas, optimizer.param_groups

        def rate_after(pushes: int) -> None:
            group["lr"] = group["initial_lr"] * factor(pushes // WORKERS)

        return lgc.AsyncAverager(model, optimizer, push, servers=[server.address], world=WORKERS, **secret), rate_after

    models = [deepcopy(fold.model) for _ in range(WORKERS)]
    workers, batches = [joined(model) for model in models], [fold.batches(worker) for worker in range(WORKERS)]
    observer, _ = joined(fold.model)  # it only pulls
    latest = {name: p.detach().clone() for name, p in fold.model.named_parameters()}
    weights = deque([(0, latest)], maxlen=(case.age or 0) + 1)
    clock, correct, staleness, now = turns(case.seconds), [], [], 0.0
    for pushes in range(EPOCHS * fold.steps * WORKERS):
        now, worker = next(clock)
        (averager, rate_after), model = workers[worker], models[worker]
        version = averager.version
        if case.age is not None:
            version, old = weights[0]
            model.load_state_dict(old, strict=False)
        rate_after(version)
        forward_backward(model, *next(batches[worker]))
        averager.step()
        staleness.append(pushes - version)
        if case.age is not None:
            weights.append((pushes + 1, {name: p.detach().clone() for name, p in model.named_parameters()}))
        if (pushes + 1) % (fold.steps * WORKERS) == 0:
            observer.pull()
            correct.append(fold.validate(fold.model))
    ratio = 1 / mean(1 / averager.spent.ratio for averager, _ in workers)
    for averager in [observer, *(averager for averager, _ in workers)]:
        averager.close()
    server.stop()
    return Outcome(correct, len(fold.val), round(ratio, 2), mean(staleness), now)


def synchronous(case: str, number: int) -> Outcome:
    """A run of as many ranks as there are workers; every step waits for the slowest."""
    return by_ranks(WORKERS, case, number)._replace(seconds=EPOCHS * (len(digits(number)[0]) // BATCH) * max(EQUAL))


Case = Callable[[int], Outcome]
"""Runs a fold."""


def cases(table: str, late: str) -> dict[str, Case]:
    """Name of a line -> what runs it. The first is what the others are compared with."""
    if table == "late":
        return {case: partial(by_ranks, 2, case) for case in late.split(",")}
    if table == "staleness":
        return {
            f"{density}, {age} pushes old": partial(asynchronous, Workers(push=push, age=age))
            for (density, push), age in product(DENSITIES.items(), (0, 4, 16))
        }
    found: dict[str, Case] = {"DDP": partial(synchronous, "ddp"), "synchronous DGC": partial(synchronous, "dgc")}
    for name, seconds in {"equal": EQUAL, "4:1:1:1": UNEQUAL}.items():
        found[f"dist_async DGC, {name}"] = partial(asynchronous, Workers(seconds=seconds))
        for values in ("bf16", "int8"):
            case = partial(asynchronous, Workers(pull=values, seconds=seconds))
            found[f"dist_async DGC, pulls in {values}, {name}"] = case
    return found


def row(name: str, found: list[Outcome], first: list[Outcome]) -> list[str]:
    """Of the table of all cases but the ablation's."""
    apart = [each.percent - other.percent for each, other in zip(found, first, strict=True)]
    words = [
        name,
        report.spread([each.percent for each in found], 2),
        ", ".join(f"{each.percent:.2f}" for each in found),
        report.interval(apart) if len(apart) > 1 else f"{apart[0]:+.2f}",
        f"{mean(each.ratio for each in found):.3g}",
    ]
    if math.isnan(found[0].seconds):
        return words
    goals = [seconds_to_goal(each) for each in found]
    to_goal = f"{mean(goals):.0f}" if max(goals) < math.inf else f"{sum(goal < math.inf for goal in goals)} runs do"
    pushes = WORKERS * EPOCHS * (len(digits(0)[0]) // BATCH)
    seconds, stale = mean(each.seconds for each in found), mean(each.staleness for each in found)
    return [*words, to_goal, f"{seconds:.0f}", f"{pushes / seconds:.2f}", f"{stale:.1f}"]


def seconds_to_goal(outcome: Outcome) -> float:
    """Of the virtual clock, at the end of an epoch; infinite where it was never reached."""
    epochs = (epoch for epoch, right in enumerate(outcome.correct, 1) if right >= GOAL * outcome.images)
    return next(epochs, math.inf) / EPOCHS * outcome.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=("ablation", "late", "speeds", "staleness"), default="ablation")
    parser.add_argument("--folds", default="0,1,2,3,4")
    parser.add_argument("--cases", default="ddp,0,5,10,20", help="of late")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--clip-norm", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folds = [int(fold) for fold in arguments.folds.split(",")]
    torch.set_num_threads(1)
    if arguments.rank:
        dist.init_process_group("gloo")
        outcome = train(arguments.rank, arguments.clip_norm, folds[0])
        if dist.get_rank() == 0:
            arguments.place.write_text(json.dumps(outcome))
        dist.barrier()
        dist.destroy_process_group()
        return
    if arguments.table == "ablation":
        print(ablation(folds))
        return
    chosen = cases(arguments.table, arguments.cases)
    found: dict[str, list[Outcome]] = {name: [] for name in chosen}
    for fold, (name, run) in product(folds, chosen.items()):
        found[name].append(run(fold))
        print(f"{name}, fold {fold}: {found[name][-1]}", flush=True)
    print(f"\nResNet-18 on the digits, folds {arguments.folds}, {report.machine()}")
    head = ["case", "accuracy, %", "each fold", "less the first, %", "ratio"]
    if arguments.table != "late":
        head += [f"{GOAL:.0%} after, s", "whole run, s", "pushes a second", "staleness"]
    print(report.table(head, [row(name, each, next(iter(found.values()))) for name, each in found.items()]))


if __name__ == "__main__":
    main()

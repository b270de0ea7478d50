"""docs/data/ablation.csv: from plain dropping at 99.9 % to DGC, one part after the other, in five folds of the digits.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 -m benchmarks.ablation     # the runs that the CSV lacks, and a table

Network, data and optimizer are those of recipe=digits, here in plain PyTorch: ten epochs of 22 steps of 64 images. The
fold is the seed of weights and order, as in the dense runs of docs/data/results.csv with which they are paired. A
run takes some 140 seconds of processor time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import lightning_gradcomp as lgc
from benchmarks import records, report, results
from benchmarks.methods import RECIPE, forward_backward
from benchmarks.results import Setting, cross_validated, spread
from lightning_gradcomp.app.data.digits import CHANNELS, CLASSES, digits
from lightning_gradcomp.app.data.shared import RankSampler
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.app.scheduler import WarmupCosine

CSV = Path(__file__).parents[1] / "docs" / "data" / "ablation.csv"
EPOCHS, BATCH = 10, 64
CLIP_NORM = 5.0
"""About half of the norms of a dense run's average gradients, which fall from 35 to 5 in the first two epochs."""


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


def compressor(case: str, clip_norm: float | None) -> lgc.Compressor:
    """One of CASES."""
    dgc: dict[str, Any] = {"sparsity": 0.999, "values": "fp32", "clip_norm": clip_norm}
    if case == "dropping":
        return lgc.GradientDropping(sparsity=0.999, scope="tensor", warmup_epochs=0, clip_norm=clip_norm)
    dgc |= {"warmup_epochs": 4} if case == "warm-up" else {"start_sparsity": 0.999}
    return lgc.DGC(momentum_masking=case != "momentum correction", **dgc)


CASES = ("dropping", "momentum correction", "masking", "warm-up", "local weights")
TITLES = {
    "dropping": "dropping, 99.9 %",
    "momentum correction": "+ momentum correction",
    "masking": "+ momentum factor masking",
    "warm-up": "+ warm-up, four epochs",
    "local weights": "masking, local weights, no warm-up",
}
HEAD = ["", "accuracy, % (folds)", "difference to dense", "ratio, run"]
CLIPPED = CASES[:4]


def train(case: str, clip_norm: float | None, fold: int) -> Run:
    """One run, on each of the ranks: the accuracy of rank 0's batch-norm statistics, as in the recipes."""
    torch.manual_seed(fold)  # the same weights on every rank
    model = resnet18(channels=CHANNELS, classes=CLASSES, size=8)
    rank, world = dist.get_rank(), dist.get_world_size()
    images, val = digits(fold)
    sampler = RankSampler(images, world, rank, seed=fold, skip=0)
    loader = DataLoader(images, BATCH // world, sampler=sampler, drop_last=True)
    steps = len(loader)
    optimizer = RECIPE(model.parameters())
    schedule = WarmupCosine()(optimizer, steps, EPOCHS)
    averager = lgc.GradientAverager(model, compressor(case, clip_norm), optimizer=optimizer, steps_per_epoch=steps)
    sent = dense = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            with averager.local_weights() if case == "local weights" else nullcontext():
                forward_backward(model, *batch)
            averager.step()
            schedule.step()
            sent, dense = sent + averager.stats.bytes_sent, dense + averager.stats.dense_bytes
    correct = validate(model.eval(), val)
    return Run(
        case=case,
        clip_norm=clip_norm,
        fold=fold,
        correct=correct,
        images=len(val),
        ratio=round(dense / sent, 2),
        machine=report.machine(),
    )


@torch.no_grad()
def validate(model: torch.nn.Module, val: TensorDataset) -> int:
    """Images that are classified correctly."""
    images, labels = val.tensors
    return int((model(images).argmax(1) == labels).sum())


def read_csv() -> list[Run]:
    """The runs so far."""
    return records.read(CSV, Run)


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """ "CASE" or "CASE, clipped" -> the runs of all folds."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[f"{run.case}, clipped" if run.clip_norm else run.case].append(run)
    return found


def table() -> str:
    """Every case with two folds or more."""
    dense = cross_validated(results.read_csv())[Setting("resnet18", None, 2, 220)]["none"]
    beside, found = {run.fold: run.percent for run in dense}, grouped(read_csv())
    rows = [["dense", f"{spread([run.percent for run in dense])} ({len(dense)})", "", "1"]]
    for case in CASES:
        for name, title in ((case, TITLES[case]), (f"{case}, clipped", f"the same, clipped at {CLIP_NORM:g}")):
            if len(runs := found[name]) > 1:
                words = f"{spread([run.percent for run in runs])} ({len(runs)})"
                interval = report.interval([run.percent - beside[run.fold] for run in runs], 1)
                rows.append([title, words, interval, f"{mean(run.ratio for run in runs):.3g}"])
    return report.table(HEAD, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", default="0,1,2,3,4")
    folds = [int(fold) for fold in parser.parse_args().folds.split(",")]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = [(case, None, fold) for fold in folds for case in CASES]
    wanted += [(case, CLIP_NORM, fold) for fold in folds for case in CLIPPED]
    known = {(run.case, run.clip_norm, run.fold) for run in read_csv()}
    dist.barrier()  # before rank 0 adds to it
    for each in wanted:
        if each not in known:
            run = train(*each)
            if dist.get_rank() == 0:
                print(run, flush=True)
                records.write(CSV, [*read_csv(), run])
    dist.barrier()
    if dist.get_rank() == 0:
        print(table())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

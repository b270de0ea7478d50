"""Accuracy on the digits with averages that arrive late: ResNet-18, two ranks, by method and seed.

    torchrun --nproc-per-node=2 -m benchmarks.delayed_accuracy --cases ddp,0,10,10:stale,8:dgc --seeds 0,1,2,3,4

A case is a delay D, with a period K of as many steps (1 for a delay of 0, which is synchronous training); then, after
colons, "stale" for stale-only averages, "K=4" for another period, or a compressor's name with options as in
benchmarks.step_time. "ddp" is plain DDP. The recipe's model, data and optimizer, but its ten epochs are one, since
the end of an epoch is a drain: nothing is drained before the only validation, at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset

from benchmarks import report
from benchmarks.methods import RECIPE, compressor
from lightning_gradcomp import DelayedStrategy
from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.app.data import Digits
from lightning_gradcomp.app.data.shared import Pair
from lightning_gradcomp.app.messages import hide_messages
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.app.scheduler import WarmupCosine
from lightning_gradcomp.plugin import CommunicationMonitor

EPOCHS = 10


class LongEpoch(Digits):
    """The digits, so many times that an epoch is all of the recipe's."""

    def load(self) -> Pair:
        train, val = super().load()
        return ConcatDataset(EPOCHS * [train]), val


def strategy(case: str) -> DelayedStrategy | str:
    """Of a case."""
    if case == "ddp":
        return "ddp"
    delay, *more = case.split(":", 1)
    words = more[0].split(":") if more else []
    options: dict[str, Any] = {"delay": int(delay), "period": max(int(delay), 1)}
    while words and (words[0] == "stale" or words[0].startswith("K=")):
        word = words.pop(0)
        options |= {"stale_only": True} if word == "stale" else {"period": int(word[2:])}
    return DelayedStrategy(compressor(":".join(words)) if words else "none", **options)


def accuracy(case: str, seed: int) -> dict[str, float]:
    """Train and validate; rank-local costs."""
    L.seed_everything(seed, workers=True, verbose=False)
    data = LongEpoch(seed=seed)
    model = resnet18(channels=data.channels, classes=data.classes, size=data.size)
    classifier = Classifier(model, data.classes, RECIPE, WarmupCosine())
    monitor = CommunicationMonitor()
    trainer = L.Trainer(
        strategy=strategy(case),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[] if case == "ddp" else [monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin = time.perf_counter()
    trainer.fit(classifier, data)
    seconds = time.perf_counter() - begin
    trainer.limit_val_batches = 1.0
    trainer.validate(classifier, data, verbose=False)
    rounds = {} if case == "ddp" else monitor.summary()["rounds"]
    return {"accuracy": classifier.correct / classifier.images, "seconds": seconds, **rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="ddp,0,5,10,20,5:stale,10:stale,20:stale")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, help="a file to which a line of JSON is added for each run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hide_messages()
    dist.init_process_group("gloo")
    results: dict[str, list[float]] = {case: [] for case in arguments.cases.split(",")}
    for seed in arguments.seeds.split(","):
        for case, found in results.items():
            result = accuracy(case, int(seed))
            found.append(result["accuracy"])
            if dist.get_rank() == 0:
                line = json.dumps({"case": case, "seed": int(seed), **result})
                print(line, flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(line + "\n")
    if dist.get_rank() == 0:
        print(f"\nResNet-18 on the digits, N={dist.get_world_size()}, {report.machine()}")
        rows = []
        for case, values in results.items():
            spread = 100 * stdev(values) if len(values) > 1 else 0.0
            each = ", ".join(f"{100 * value:.2f}" for value in values)
            rows.append([case, f"{100 * mean(values):.2f} ± {spread:.2f}", each])
        print(report.table(["case", "accuracy, %", "each seed"], rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Losses of a small language model on many ranks: a thread for each, in one process.

    python -m benchmarks.many_ranks 8 recipe=stdlib_gpt compressor=none,eden seed=0,1 trainer.max_epochs=6

Each run adds a line to docs/data/text.csv, as one of `gradcomp` with the same words would
(benchmarks/language_models.py), or to another file with `--csv`. The ranks have the same windows as its processes, and
average with the package's `GradientAverager` over gloo. Processes would spend most of their time on imports and on
waiting for one another. Weights are usually bit-identical to those of such a run; in one of six comparisons EDEN's were
not.

With `--always`, steps are compressed even if dense steps send fewer bytes: the limit of a method as its density goes
to 1. Private: `Choice`, which decides.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from benchmarks import language_models, summaries
from lightning_gradcomp import GradientAverager
from lightning_gradcomp.app import compose
from lightning_gradcomp.app.summary import processor
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.topology import Choice, Decision
from tests.threads import run_ranks


def untrained(config: dict[str, Any]) -> tuple[Any, Any]:
    """The task and the data of a run before its first step, with the weights and the split of its seed."""
    made = OmegaConf.create(config)
    L.seed_everything(made.seed, workers=True, verbose=False)
    data: Any = compose.instantiated("data", made)
    task: Any = compose.build_task(made, data)
    data.train, data.val = data.load()
    return task, data


def train(config: dict[str, Any], ranks: int) -> tuple[float, GradientAverager, torch.nn.Module]:
    """Train as `gradcomp` would. Returns the loss in nats per token, and rank 0's averager and network."""
    made = OmegaConf.create(config)
    first, data = untrained(config)
    steps = min(made.trainer.limit_train_batches or sys.maxsize, len(data.train) // data.batch_size)
    turn = threading.Lock()  # interleaved, threads would take longer: each operation is short
    tasks = [first, *(copy.deepcopy(first) for _ in range(1, ranks))]

    def of_rank(rank: int, group: dist.ProcessGroup) -> GradientAverager:
        task = tasks[rank]
        optimizer = task.optimizer(task.parameter_groups())
        schedule = task.scheduler(optimizer, steps, made.trainer.max_epochs)
        compressor = compose.instantiated("compressor", made)
        averager = GradientAverager(
            task,
            compressor,
            optimizer=optimizer,
            process_group=group,
            steps_per_epoch=steps,
            topology=made.strategy.topology,
        )
        sampler = data.sampler(rank, ranks, 0)
        for epoch in range(made.trainer.max_epochs):
            sampler.set_epoch(epoch)
            loader = DataLoader(data.train, batch_size=data.batch_size // ranks, sampler=sampler, drop_last=True)
            for batch in itertools.islice(loader, steps):
                optimizer.zero_grad()
                with turn, averager.local_weights():
                    task.cross_entropy(batch, "mean").backward()
                averager.step()
                schedule.step()
        return averager

    averager = run_ranks(ranks, of_rank, timeout=24 * 3600)[0]
    with torch.no_grad():
        total = sum(first.count(batch) for batch in DataLoader(data.val, batch_size=64))
    return float(total[0] / total[1]), averager, first


def result(config: dict[str, Any], ranks: int, loss: float, averager: GradientAverager) -> language_models.Result:
    """The line of a run."""
    return language_models.Result(
        method=summaries.method(config),
        optimizer=summaries.optimizer(config),
        ranks=ranks,
        seed=config["seed"],
        steps=averager.steps,
        val_loss=round(loss, 6),
        bytes_sent=averager.spent.bytes_sent,
        dense_bytes=averager.spent.dense_bytes,
        machine=f"{os.cpu_count()} cores of {processor()}, torch {version('torch')}",
    )


def compressed(choice: Choice, sparsity: float | None, gradients: Gradients, dense: Decision) -> Decision:
    """`Choice.decide` with `--always`."""
    compressor = choice._compressor.with_sparsity(sparsity)
    return Decision(compressor.final_sparsity, compressor, choice.topologies[0], is_plain=False)


def main() -> None:
    """Run every combination of the words' values."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("words", nargs="*", help="as for gradcomp; values with commas between them are combined")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--always", action="store_true", help="compress even where dense steps send fewer bytes")
    arguments = parser.parse_args()
    if arguments.always:
        Choice.decide = compressed
    several = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [each.input_line]
        for each in OverridesParser.create().parse_overrides(arguments.words)
    ]
    for each in itertools.product(*several):
        config = summaries.composed(*each)
        found = result(config, arguments.ranks, *train(config, arguments.ranks)[:2])
        language_models.record_results([found], arguments.csv)
        print(found, flush=True)


if __name__ == "__main__":
    main()

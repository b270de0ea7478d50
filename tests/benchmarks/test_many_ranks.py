"""Ranks that are threads of one process train as the processes of `gradcomp` do."""

from pathlib import Path

import torch

from benchmarks import many_ranks, summaries
from tests.processes import Forked

FORKED = str(Path(__file__).parents[1] / "app" / "forked_command.py")

TINY = (
    "recipe=stdlib_gpt", "model.layers=1", "model.width=16", "data.context=16", "data.batch_size=4",
    "data.validation_windows=8", "optimizer.lr=0.01", "trainer.max_epochs=2", "trainer.limit_train_batches=3",
    "callbacks=none",
)  # fmt: skip


def test_they_learn_what_processes_learn(tmp_path):
    words = [*TINY, "compressor.min_elements=64"]
    done = Forked(FORKED, str(tmp_path), *words, "trainer.enable_progress_bar=false", "trainer.devices=2").end()
    assert done.returncode == 0, done.stdout
    [saved] = tmp_path.rglob("last.ckpt")
    expected = torch.load(saved, weights_only=True)["state_dict"]
    start, _, untrained = many_ranks.train(summaries.composed(*words, "optimizer.lr=0"), 2)
    loss, averager, task = many_ranks.train(summaries.composed(*words), 2)
    assert averager.spent.bytes_sent > 0 and loss < start
    first, last = untrained.state_dict(), task.state_dict()
    moved = torch.cat([(expected[name] - first[name]).flatten() for name in first])
    apart = torch.cat([(expected[name] - last[name]).flatten() for name in first])
    assert apart.norm() < 0.1 * moved.norm()

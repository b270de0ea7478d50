"""Ranks that are threads of one process train as the processes of `gradcomp` do."""

import sys

import pytest
import torch

from benchmarks import many_ranks, summaries
from tests.processes import run

TINY = (
    "recipe=stdlib_gpt", "model.layers=1", "model.width=16", "data.context=16", "data.batch_size=4",
    "data.validation_windows=8", "optimizer.lr=0.01", "trainer.max_epochs=2", "trainer.limit_train_batches=3",
    "callbacks=none",
)  # fmt: skip


@pytest.mark.parametrize("compressor", ["eden", "dgc_int8"])
def test_weights_are_those_of_a_run_of_processes(tmp_path, compressor):
    words = [*TINY, f"compressor={compressor}", "compressor.min_elements=64"]
    command = [sys.executable, "-m", "lightning_gradcomp", *words, "trainer.enable_progress_bar=false"]
    done = run(*command, f"hydra.run.dir={tmp_path}", "trainer.devices=2")
    assert done.returncode == 0, done.stdout
    [saved] = tmp_path.rglob("last.ckpt")
    expected = torch.load(saved, weights_only=True)["state_dict"]
    _, averager, task = many_ranks.train(summaries.composed(*words), 2)
    assert averager.spent.bytes_sent > 0
    assert all(torch.equal(value, expected[name]) for name, value in task.state_dict().items())

"""The process of a server: `gradcomp_command.py --process server FOLDER HOST:PORT`.

It holds the weights, and ends when it has the pushes of the whole run. After each epoch of pushes it validates and
writes a checkpoint; batch-norm statistics, which are no weights, are those of a pass over training images.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from lightning_gradcomp.app import run_folder, server_arguments, summary
from lightning_gradcomp.app.async_job import AsyncJob
from lightning_gradcomp.app.config import DistAsync, Run
from lightning_gradcomp.app.processes import hide_known_messages
from lightning_gradcomp.app.train import STOPPED
from lightning_gradcomp.app.trainer import LAST
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.connection import host_and_port
from lightning_gradcomp.parameter_server.server import ParameterServer

POLL_SECONDS = 0.1
BATCH, STATISTICS_BATCHES = 128, 100
"""Images of a batch without gradients; of how many, at most, batch-norm statistics are."""


def main() -> None:
    """Serve the run of a folder; at the end write summary.json, and print the accuracy."""
    folder, address = Path(sys.argv[-2]), sys.argv[-1]
    hide_known_messages()
    run = run_folder.load(folder)
    try:
        server = JobServer(run, folder, address)
    except (ValueError, OSError) as error:
        sys.exit(f"gradcomp: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(server.welcome(), flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        server.pull()
        path = server.save(LAST.name)
        print(f"\nstopped after push {server.version}; to resume: the same words, and ckpt={path}", flush=True)
        os._exit(STOPPED)  # threads still serve workers, and the interpreter's own end would abort them


class JobServer:
    """A server, and what becomes of its weights.

    Args:
        run: its options.
        folder: of the run.
        address: HOST:PORT to listen at.

    Raises:
        ValueError, OSError: an option that can't be honoured, a checkpoint that has all pushes, an address that
            can't be listened at.
    """

    def __init__(self, run: Run, folder: Path, address: str) -> None:
        assert isinstance(run.strategy, DistAsync)
        self.run, self.folder, self.job = run, folder, AsyncJob(run)
        self.classifier, done = self.job.classifier, 0
        if run.ckpt is not None:
            saved = torch.load(run.ckpt, map_location="cpu", weights_only=True)
            self.classifier.load_state_dict(saved["state_dict"])
            done = saved["global_step"] * self.job.workers
            if done >= self.job.pushes:
                allowed = f"more than the {saved['epoch']} that ckpt has completed"
                raise refusal("trainer.max_epochs", run.trainer.max_epochs, allowed)
        host, port = host_and_port(address)
        options = run.strategy
        self.server = ParameterServer(
            self.classifier,
            self.job.optimizer,
            run.compressor,
            secret=server_arguments.secret_of(folder),
            host=host,
            port=port,
            staleness=options.bound,
            max_staleness=options.max_staleness,
            rate_by_staleness=options.rate_by_staleness,
            pull=options.pulls,
            job=self.job.identity,
            timeout=timedelta(seconds=options.timeout),
        )
        self.server.shard.version = self.version = done
        """Pushes in the weights that `classifier` has."""
        self.best, self.begin = 0, time.perf_counter()

    def welcome(self) -> str:
        """What to do with the server."""
        job, overrides = self.job, self.folder / ".hydra" / "overrides.yaml"
        words = [word for word in yaml.safe_load(overrides.read_text()) if not word.startswith("ckpt=")]
        if not any(word.startswith("trainer.devices=") for word in words):
            words.append(f"trainer.devices={job.workers}")
        secret = (
            ""
            if server_arguments.SECRET in os.environ
            else f'{server_arguments.SECRET}="$(cat {self.folder / "secret"})" '
        )
        plan = f"{job.pushes} pushes, planned for {job.workers} workers"
        how = f"{secret}gradcomp join {self.server.address} {shlex.join(words)}"
        return f"parameter server at {self.server.address}: {plan}\nTo join, any number of times: {how}"

    def serve(self) -> None:
        """Until the run is complete and its workers have left."""
        shard, job = self.server.shard, self.job
        epoch_pushes = job.epoch_steps * job.workers
        epoch, correct, images = shard.version // epoch_pushes, 0, 1
        self.server.start()
        while epoch < self.run.trainer.max_epochs:
            if shard.version < (epoch + 1) * epoch_pushes:
                time.sleep(POLL_SECONDS)
                continue
            epoch = min(shard.version // epoch_pushes, self.run.trainer.max_epochs)
            correct, images = self.validate()
            workers = len(self.server.clocks.live)
            print(f"epoch {epoch}: {summary.accuracy(correct, images)}, {workers} workers", flush=True)
            self.save(LAST.name)
            if correct > self.best:
                self.best = correct
                self.save("best.ckpt")
        result = self.result(epoch, correct, images)
        (self.folder / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nvalidation accuracy {summary.accuracy(correct, images)}; {self.folder}{os.sep}", flush=True)
        self.server.stop()
        self.server.join()  # workers see with their next pull that the run is complete

    def result(self, epochs: int, correct: int, images: int) -> dict[str, Any]:
        """The content of summary.json."""
        counts = {"val_correct": correct, "val_images": images, "best_val_acc": self.best / images}
        seconds, pushes = time.perf_counter() - self.begin, self.server.shard.version
        config = run_folder.values_of(self.run)
        return {
            "val_acc": correct / images,
            **counts,
            "epochs": epochs,
            "pushes": pushes,
            "wall_seconds": seconds,
            "config": config,
        }

    def pull(self) -> None:
        """Let `classifier` have the server's weights of now."""
        self.version = self.server.shard.version
        self.classifier.load_state_dict(self.server.shard.snapshot(), strict=False)

    @torch.no_grad()
    def validate(self) -> tuple[int, int]:
        """(correct, images), with the weights of now, which `save` then writes whatever is pushed meanwhile."""
        self.pull()
        data, model = self.job.data, self.classifier
        workers, limit = data.source.workers, self.run.trainer.limit_val_batches
        update_bn(islice(DataLoader(data.train, BATCH, shuffle=True, num_workers=workers), STATISTICS_BATCHES), model)
        model.eval()
        correct = images = 0
        for batch, labels in islice(DataLoader(data.val, BATCH, num_workers=workers), limit):
            correct += int((model(batch).argmax(1) == labels).sum())
            images += len(labels)
        return correct, images

    def save(self, name: str) -> Path:
        """Write the weights of `classifier`, for `evaluate=true` and for a server to resume from; the file's path."""
        path = self.folder / "checkpoints" / name
        path.parent.mkdir(exist_ok=True)
        step = self.version // self.job.workers
        content = {
            "state_dict": self.classifier.state_dict(),
            "epoch": step // self.job.epoch_steps,
            "global_step": step,
            "pytorch-lightning_version": L.__version__,
        }
        part = path.with_suffix(".part")
        torch.save(content, part)
        part.replace(path)
        return path

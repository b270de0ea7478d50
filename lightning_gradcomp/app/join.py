"""The process of a worker: `gradcomp_command.py --process join FOLDER HOST:PORT`. It takes part until the run ends."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_gradcomp.app import run_folder, server_arguments
from lightning_gradcomp.app.async_job import AsyncJob, device_of
from lightning_gradcomp.app.config import DistAsync, Run
from lightning_gradcomp.app.data.shared import RankSampler
from lightning_gradcomp.app.processes import hide_known_messages
from lightning_gradcomp.app.sizes import human
from lightning_gradcomp.compressors.kernels.rng import seed_of
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.connection import ConnectionLost


def main() -> None:
    """Train with the server at the address in `sys.argv`."""
    folder, address = Path(sys.argv[-2]), sys.argv[-1]
    hide_known_messages()
    run = run_folder.load(folder)
    try:
        work(run, address)
    except (ValueError, ConnectionLost) as error:
        sys.exit(f"gradcomp: {error}")


def work(run: Run, address: str) -> None:
    """Push gradients until the server has those of the whole run."""
    assert isinstance(run.strategy, DistAsync)
    job = AsyncJob(run)
    classifier, data = job.classifier.to(device_of(run)), job.data
    averager = AsyncAverager(
        classifier,
        job.optimizer,
        run.compressor,
        servers=[address],
        secret=os.environ[server_arguments.SECRET],
        pull=run.strategy.pulls,
        world=job.workers,
        job=job.identity,
        timeout=timedelta(seconds=run.strategy.timeout),
    )
    # Each worker draws from all images, in an order of its own: workers that come and go leave none out.
    seed = seed_of(run.seed, averager.worker)
    sampler = RankSampler(data.train, 1, 0, seed=seed, skip=0, repeats=run.augment.repeats)
    loader = DataLoader(
        data.train,
        data.rank_batch,
        sampler=sampler,
        drop_last=True,
        num_workers=data.source.workers,
        persistent_workers=data.source.workers > 0,
        prefetch_factor=data.source.prefetch if data.source.workers else None,
        generator=torch.Generator().manual_seed(seed),
    )
    print(f"joined {address} as worker {averager.worker}, after push {averager.version} of {job.pushes}", flush=True)
    sent = 0
    for epoch in count():
        sampler.set_epoch(epoch)
        for batch in loader:
            if averager.version >= job.pushes:
                averager.close()
                print(f"the run is complete: {averager.steps} of its pushes are this worker's, {human(sent)} both ways")
                return
            job.set_rates(averager.version)
            torch.manual_seed(seed_of(seed, averager.steps))  # of what a step draws
            classifier.zero_grad(set_to_none=True)
            loss = classifier.loss([tensor.to(classifier.device) for tensor in batch])
            loss.backward()
            if run.trainer.gradient_clip_val is not None:
                torch.nn.utils.clip_grad_norm_(classifier.parameters(), run.trainer.gradient_clip_val)
            averager.step()
            sent += int(averager.stats.bytes_sent)
            if averager.steps % run.trainer.log_every_n_steps == 0:
                where = f"step {averager.steps}, push {averager.version} of {job.pushes}"
                print(f"{where}: loss {loss.item():.4f}, staleness {averager.stats.staleness}", flush=True)

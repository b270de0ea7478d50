"""What becomes of a run of two ranks when one is killed, stopped, raises or is cut off: when the other ends, and why.

    python benchmarks/fault_matrix.py                                  # all 112 cases, about 45 minutes on two cores
    python benchmarks/fault_matrix.py --kinds SIGSTOP --places round   # some of them

In the cases of "drop" the ranks are two emulated nodes (benchmarks/link.py, which needs root), and the node of one of
them stops sending any packet, acknowledgements included.

Prints a Markdown table. The strategy's timeout is 8 s, from the moment at which both ranks have started. A case is
killed after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

KINDS = ("SIGKILL", "SIGSTOP", "raise", "drop")
PLACES = ("train start", "dense step", "trial", "compressed step", "round", "checkpoint", "sidecar", "validation")
LAUNCHERS = ("Lightning", "torchrun", "two nodes")
TIMEOUT = 8.0


def worker(kind: str, rank: str, place: str, folder: str) -> None:
    """One rank of a case."""
    import lightning as L
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from torch import nn

    import lightning_gradcomp as lgc

    def fault(here: str) -> None:
        if here != place or dist.get_rank() != int(rank):
            return
        Path(folder, "fault").write_text(str(time.time()))
        if kind == "raise":
            raise ArithmeticError("a mistake")
        if kind == "drop":  # no packet fits into a burst of 10 bytes
            subprocess.run(
                [
                    "tc",
                    "qdisc",
                    "replace",
                    "dev",
                    "eth0",
                    "root",
                    "tbf",
                    *["rate", "1kbit", "burst", "10", "latency", "1ms"],
                ],
                check=True,
            )
            return
        os.kill(os.getpid(), signal.Signals[kind])

    class Files(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if "token" in checkpoint:
                fault("sidecar")
            super().save_checkpoint(checkpoint, path, storage_options)

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def setup(self, stage: str) -> None:
            Path(folder, f"rank{dist.get_rank()}").write_text(str(os.getpid()))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
            self.trainer.strategy._timeout = timedelta(seconds=TIMEOUT)

        def on_train_start(self) -> None:
            fault("train start")

        def training_step(self, batch, index):
            if self.trainer.global_step == (15 if place == "trial" else 9):  # 15: the first compressed ones are timed
                fault(place if "step" in place or place in ("round", "trial") else "")
            images, labels = batch
            return nn.functional.cross_entropy(self.layers(images), labels)

        def on_save_checkpoint(self, checkpoint) -> None:
            fault("checkpoint")

        def validation_step(self, batch, index) -> None:
            fault("validation")
            self.log("loss", self.layers(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    patience = timedelta(seconds=60)  # for both ranks to start
    if place == "round":  # at step 9 a round is being exchanged
        strategy = lgc.DelayedStrategy(period=4, delay=3, timeout=patience)
    else:
        compressor = lgc.NoCompression() if place == "dense step" else lgc.DGC()
        state = "sidecar" if place == "sidecar" else "gather"
        topology = "auto" if place == "trial" else "all_gather"
        strategy = lgc.CompressedDDPStrategy(compressor, topology, checkpoint_state=state, timeout=patience)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1 if kind == "drop" else 2, num_nodes=2 if kind == "drop" else 1,
        max_epochs=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[Files()], num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, "last", every_n_train_steps=12, enable_version_counter=False)],
    )  # fmt: skip
    images = torch.randn(320, 64)
    examples = torch.utils.data.TensorDataset(images, images.argmax(1) % 10)
    trainer.fit(Net(), *(torch.utils.data.DataLoader(examples, 16) for _ in range(2)))


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def run(launcher: str, kind: str, rank: int, place: str, limit: float) -> tuple[str, str]:
    """One case: the seconds until the other rank has ended, and what it said."""
    python = [sys.executable]
    if launcher == "torchrun":
        python += [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
        ]
    if launcher == "two nodes":
        python += ["-m", "benchmarks.link", "--nodes", "2", "--", sys.executable]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+") as file:
        command = [*python, __file__, "--worker", kind, str(rank), place, folder]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        begin, seconds, pids = time.monotonic(), f"more than {limit:g}", {}
        while time.monotonic() - begin < limit:
            time.sleep(0.1)
            texts = {int(path.name[4:]): path.read_text() for path in Path(folder).glob("rank?")}
            pids = {number: int(text) for number, text in texts.items() if text}
            moment = Path(folder, "fault")
            if moment.exists() and ended(pids[1 - rank]):
                seconds = f"{time.time() - float(moment.read_text()):.1f}"
                break
        for pid in (*pids.values(), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output = Path(file.name).read_text()
    said = re.findall(rf"rank {1 - rank} of 2, step \d+, [^\n]*", output) or re.findall(r"\w+Error: [^\n]*", output)
    explained = [line for line in said if "the exchange failed" in line] or said
    return seconds, explained[-1].split(" [")[0] if explained else "nothing"


def main() -> None:
    """Run the cases that the options choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(0, 1), default=(0, 1))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--limit", type=float, default=90.0)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    print("| launcher | what happens | on rank | at | seconds until the other has ended | the other's message |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in itertools.product(options.launchers, options.kinds, options.ranks, options.places):
        if (case[0] == "two nodes") != (case[1] == "drop"):
            continue
        seconds, message = run(*case, options.limit)
        print(f"| {' | '.join(map(str, case))} | {seconds} | {message} |", flush=True)


if __name__ == "__main__":
    main()

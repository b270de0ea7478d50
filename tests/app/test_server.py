"""`gradcomp server` and `gradcomp join`: servers and workers as threads; the words of their command lines."""

import json
import stat
import threading
from dataclasses import replace

import pytest
import torch

from lightning_gradcomp import DGC, GradientDropping
from lightning_gradcomp.app import run_folder, server_arguments
from lightning_gradcomp.app.join import work
from lightning_gradcomp.app.options import logger
from lightning_gradcomp.app.server import JobServer
from lightning_gradcomp.parameter_server.connection import ConnectionLost

SMALL = ["model=swin_mini", "trainer.max_epochs=2", "trainer.limit_train_batches=3", "trainer.devices=2"]


@pytest.fixture
def serve(command, monkeypatch):
    """Starts a server of `gradcomp server WORDS` in a thread; (it, the thread)."""
    threads = []
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # undone, with what seeds the runs
    monkeypatch.delenv(server_arguments.SECRET, raising=False)

    def start(*words):
        _, [(folder, run)] = command("server", *SMALL, *words)
        job = JobServer(run, folder, "127.0.0.1:0")
        monkeypatch.setenv(server_arguments.SECRET, (folder / "secret").read_text())
        threads.append(threading.Thread(target=job.serve, daemon=True))
        threads[-1].start()
        return job, threads[-1]

    return start


def join(job, run=None):
    work(run or job.run, job.server.address)


def finish(job, serving):
    """Two workers, until the run is complete."""
    threads = [serving, *(threading.Thread(target=join, args=(job,)) for _ in range(2))]
    for worker in threads[1:]:
        worker.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_run_ends_with_its_pushes_and_a_checkpoint(serve, capsys):
    job, serving = serve()
    secret, file = (job.folder / "secret").read_text(), job.folder / "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(secret) >= 32
    assert secret not in (job.folder / run_folder.CONFIG).read_text() + job.welcome()
    assert f"gradcomp join {job.server.address} model=swin_mini" in job.welcome()
    finish(job, serving)
    printed = capsys.readouterr().out
    assert printed.count("the run is complete") == 2 and "epoch 2: " in printed
    result = json.loads((job.folder / "summary.json").read_text())
    assert 12 <= result["pushes"] <= 13  # 2 epochs of 3 steps by 2 workers, and one that was on its way
    last = job.folder / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    assert saved["global_step"] == 6 and saved["epoch"] == 2
    again = replace(job.run, ckpt=str(last))
    with pytest.raises(ValueError, match=r"^trainer\.max_epochs: got 2, allowed: more than the 2 that"):
        JobServer(again, job.folder, "127.0.0.1:0")
    longer = replace(again, trainer=replace(again.trainer, max_epochs=3))
    server = JobServer(longer, job.folder, "127.0.0.1:0").server
    server.stop()
    resumed = server.shard
    weights = resumed.snapshot()
    assert resumed.version == 12 and all(torch.equal(weights[name], saved["state_dict"][name]) for name in weights)


def test_what_is_saved_is_what_was_validated(serve):
    job, _ = serve()
    job.validate()
    validated = {name: weight.clone() for name, weight in job.classifier.state_dict().items()}
    for weight in job.server.shard.weights.values():
        weight.data.add_(1)  # as a push that comes in between
    saved = torch.load(job.save("best.ckpt"), weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], validated[name]) for name in validated)


def test_who_does_not_fit_is_refused_and_nobody_else_notices(serve, monkeypatch):
    job, serving = serve()
    others = [
        replace(job.run, compressor=GradientDropping(warmup_epochs=0)),
        replace(job.run, compressor=DGC(sparsity=0.5)),
        replace(job.run, optimizer=replace(job.run.optimizer, lr=0.5)),
        replace(job.run, trainer=replace(job.run.trainer, max_epochs=3)),
        replace(job.run, trainer=replace(job.run.trainer, gradient_clip_val=0.1)),
        replace(job.run, augment=replace(job.run.augment, label_smoothing=0.5)),
        replace(job.run, data=replace(job.run.data, fold=2)),
    ]
    for other in others:
        with pytest.raises(ValueError, match="another than the server's"):
            join(job, other)
    with monkeypatch.context() as wrong:
        wrong.setenv(server_arguments.SECRET, "wrong")
        with pytest.raises(ValueError, match=r"secret: got .*, allowed: the server's"):
            join(job)
    with pytest.raises(ConnectionLost, match=r"lost the server at 127\.0\.0\.1:1"):
        work(job.run, "127.0.0.1:1")
    finish(job, serving)


WORDS = {
    "no address": (["join", "recipe=digits"], {}, "gradcomp join: got 'recipe=digits', allowed: HOST:PORT first"),
    "no secret": (["join", "127.0.0.1:1"], {}, "needs the server's secret in the environment variable GRADCOMP_SECRET"),
    "another strategy": (["server", "strategy=ddp"], {}, "strategy of a server: got 'ddp', allowed: dist_async"),
    "a sweep": (["server", "-m", "seed=0,1"], {}, "--multirun with gradcomp server"),
    "torchrun": (["server"], {"LOCAL_RANK": "0"}, "gradcomp server: got 'ranks of torchrun or SLURM'"),
    "no port": (["server", "127.0.0.1:99999"], {}, "gradcomp server: got '127.0.0.1:99999', allowed: HOST:PORT"),
    "no logger": (["server", "logger=tensorboard"], {}, "logger with gradcomp server and join: got 'tensorboard'"),
    "another period": (["server", "trainer.checkpoint_every_n_steps=5"], {}, "trainer.checkpoint_every_n_steps with"),
    "what has no effect": (
        ["server", "trainer.patience=2"],
        {},
        "trainer.patience with gradcomp server and join: got 2",
    ),
}


@pytest.mark.parametrize(("words", "environment", "told"), WORDS.values(), ids=WORDS)
def test_words_that_are_refused(command, monkeypatch, words, environment, told):
    monkeypatch.delenv(server_arguments.SECRET, raising=False)
    monkeypatch.setattr(logger, "find_spec", lambda name: name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, trained = command(*words)
    assert told in code and not trained


def test_an_address_may_be_ipv6(monkeypatch):
    monkeypatch.setenv(server_arguments.SECRET, "word")
    for process in ("server", "join"):
        assert server_arguments.split([process, "[::1]:29600", "recipe=digits"])[:2] == (process, "[::1]:29600")


def test_a_worker_leaves_no_folder(command, monkeypatch, tmp_path):
    monkeypatch.setenv(server_arguments.SECRET, "word")
    code, [(_, run)] = command("join", "127.0.0.1:1", *SMALL)
    assert code == 0 and run.trainer.devices == 2 and not (tmp_path / "runs").exists()

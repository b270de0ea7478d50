"""How a run may end, with one rank in the process of the tests: what is saved, and of which weights the result is."""

import csv
import json
import signal

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy

from lightning_gradcomp.app.data import Text
from lightning_gradcomp.app.fit import fit
from lightning_gradcomp.app.models import gpt_mini
from tests.app.conftest import composed
from tests.processes import free_port

pytestmark = pytest.mark.filterwarnings("default")  # Lightning's, of unusual options; a run shows them
EPOCH = 3  # steps
TINY = (
    "recipe=stdlib_gpt", "model.layers=1", "model.width=16", "data.context=16", "data.batch_size=4",
    "data.validation_windows=9", "optimizer.lr=0.01", "scheduler.warmup_steps=0", "trainer.max_epochs=3",
    f"trainer.limit_train_batches={EPOCH}", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1",
)  # fmt: skip


EMA = ("callbacks=[default,ema]", "callbacks.ema.update_every_n_steps=1")


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """Runs `gradcomp WORDS` on one rank, in the folder `name`. Returns the result."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the quick brown fox jumps over the lazy dog " * 100)

    def gradcomp(name, *words):
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        config = composed(*TINY, f"data.dir={tmp_path / 'texts'}", *words)
        config.folder = str(tmp_path / name)
        (tmp_path / name).mkdir()
        return fit(OmegaConf.to_yaml(config))

    before = signal.getsignal(signal.SIGINT)
    yield gradcomp
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(fitted, tmp_path):
    """Runs `gradcomp WORDS` on one rank. Returns the result, the folder, and the loss of the weights in last.ckpt."""

    def gradcomp(*words):
        result, last = fitted("run", *words), tmp_path / "run" / "checkpoints" / "last.ckpt"
        strategy = [word for word in words if word.startswith("strategy=hsdp")]
        saved = fitted("saved", f"ckpt={last}", "evaluate=true", *strategy)
        return result, tmp_path / "run", saved["val_loss"]

    return gradcomp


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["+trainer.max_steps=2"], 2),
        (["+trainer.max_steps=5", "strategy=dga"], 5),
        (["+trainer.check_val_every_n_epoch=2", "strategy=dga"], 9),
        (["+trainer.check_val_every_n_epoch=2", "strategy=hsdp"], 9),
        (["+trainer.check_val_every_n_epoch=2", "strategy=dist_async", "optimizer=sgd", "~optimizer.betas"], 9),
        (["+trainer.check_val_every_n_epoch=2", *EMA], 9),
        (["+trainer.val_check_interval=2"], 9),
        (["callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=0", "optimizer.lr=0"], 6),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_result_is_that_of_the_last_weights(run, words, steps):
    result, folder, loss = run(*words)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == result["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert summary["communication"]["steps"] == steps


@pytest.mark.parametrize("words", [(), EMA], ids=["", "ema"])
def test_a_run_that_max_steps_has_ended_goes_on(fitted, words, tmp_path):
    """With the next epoch, and with the weights of which a moving average is taken."""
    straight = fitted("straight", *words)
    fitted("first", *words, f"+trainer.max_steps={EPOCH}")
    again = fitted("again", *words, f"ckpt={tmp_path / 'first' / 'checkpoints' / 'last.ckpt'}", "+trainer.max_steps=9")
    assert again["communication"]["steps"] + EPOCH == straight["communication"]["steps"] == 9
    assert again["val_loss"] == straight["val_loss"]


def test_a_language_models_loss_is_that_of_every_validation_byte(run, tmp_path, capsys):
    result, folder, _ = run()
    state = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    model = gpt_mini(vocabulary=256, context=16, layers=1, width=16)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    _, val = Text(dir=str(tmp_path / "texts"), context=16, validation_windows=9).load()
    windows = torch.stack([val[index] for index in range(9)])
    with torch.no_grad():
        loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    assert result["val_loss"] == pytest.approx(loss.item(), rel=1e-5) and result["val_tokens"] == 9 * 16
    assert f"{result['val_loss']:.4f} nats per byte" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [2, 5])
def test_a_validation_after_max_steps_is_one_of_the_run_s(run, steps):
    result, folder, loss = run(f"+trainer.max_steps={steps}")
    with (folder / "metrics.csv").open() as file:
        logged = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert len(logged) == 1 + (steps > EPOCH) and logged[-1] == pytest.approx(loss, rel=1e-4)
    assert result["best_val_loss"] == pytest.approx(min(logged), rel=1e-4)
    assert (folder / "checkpoints" / "best.ckpt").exists() and result["epochs"] == round(steps / EPOCH, 2)


def test_a_run_without_a_validation_is_saved(run, capsys):
    result, folder, _ = run("trainer.limit_val_batches=0")
    assert "val_loss" not in result and result["communication"]["steps"] == 9
    assert torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] == 9
    assert "none, with trainer.limit_val_batches=0" in capsys.readouterr().out


def test_a_run_without_a_step_is_refused(run):
    with pytest.raises(ValueError, match=r"^steps to train: got 0, allowed: 1 or more: a larger trainer\.max_epochs"):
        run("+trainer.max_time=00:00:00:00")

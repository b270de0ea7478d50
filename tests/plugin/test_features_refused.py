"""Features of the Trainer that a compressor can't honour: refused before any process starts."""

import lightning as L
import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import launchers

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ClipsItself(Net):
    def configure_gradient_clipping(self, *args, **kwargs):
        raise AssertionError("the fit went on")


class SecondOrder(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


KINDS = {"compressed": lgc.CompressedDDPStrategy, "delayed": lgc.DelayedStrategy, "async": lgc.AsyncStrategy}


def check_refused(monkeypatch, message, make, compressor, kind="compressed", **options):
    """`message` is raised, and no process was started."""

    def start(*args):
        raise AssertionError("a process was started")

    monkeypatch.setattr(launchers.SubprocessLauncher, "_call_children_scripts", start)
    strategy = KINDS[kind](compressor=compressor)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **QUIET, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make(), torch.zeros(4, 4))


def test_clipping_by_value(monkeypatch):
    message = r"Trainer\(gradient_clip_algorithm\) with DGC: got 'value', allowed: norm"
    check_refused(monkeypatch, message, Net, "dgc", gradient_clip_val=1.0, gradient_clip_algorithm="value")


class SparseTable(Net):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4, sparse=True)


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.frequencies = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (SparseTable, r"gradients of 'table': got 'Embedding\(sparse=True\)', allowed: sparse=False"),
        (Complex, "parameter 'frequencies': got torch.complex64, allowed: a real floating-point type"),
    ],
    ids=["sparse", "complex"],
)
def test_parameters_that_can_not_be_trained(monkeypatch, strategy, make, message):
    check_refused(monkeypatch, message, make, "none", kind=strategy)


@pytest.mark.parametrize("strategy", ["compressed", "delayed", "async"])
def test_a_pattern_that_fits_no_name(monkeypatch, strategy):
    message = r"OneBit.exclude: got 'head.\*', allowed: patterns of names of parameters, such as 'layer.bias'"
    check_refused(monkeypatch, message, Net, lgc.OneBit(exclude=["layer.*", "head.*"], warmup_epochs=0), kind=strategy)


def test_two_thresholds(monkeypatch):
    message = r"DGC.clip_norm and Trainer\(gradient_clip_val\): got 'both', allowed: one of"
    check_refused(monkeypatch, message, Net, lgc.DGC(clip_norm=1.0), gradient_clip_val=1.0)


def test_clipping_in_a_hook(monkeypatch):
    message = r"configure_gradient_clipping with DGC: got 'a hook of the module', allowed: DGC\(clip_norm"
    check_refused(monkeypatch, message, ClipsItself, "dgc")


def test_an_optimizer_that_evaluates_several_times(monkeypatch):
    check_refused(monkeypatch, r"gradients in one step of LBFGS with OneBit: got .*ddp_dense", SecondOrder, "onebit")


def test_compiled_averaging(monkeypatch):
    """torch.compile can be told to average by itself, past DDP's hook."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        check_refused(monkeypatch, r"optimize_ddp: got 'python_reducer', allowed: True or False", Net, "onebit")

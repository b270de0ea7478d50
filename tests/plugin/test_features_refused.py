"""Features of the Trainer that a compressor can't honour: an error before any process starts, or before any step."""

import lightning as L
import pytest
import torch
from features_kit import QUIET
from features_kit import OneLayer as Net
from lightning.pytorch.callbacks import ModelPruning

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import launchers


class ClipsItself(Net):
    def configure_gradient_clipping(self, *args, **kwargs):
        raise AssertionError("the fit went on")


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


class Unfit(Net):
    def training_step(self, batch, index):
        raise AssertionError("the fit went on")


class SecondOrder(Unfit):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Tried(Unfit):
    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters())


class MySGD(torch.optim.SGD):
    """Who knows what its step does."""


class Subclass(Unfit):
    def configure_optimizers(self):
        return MySGD(self.parameters(), lr=0.1)


class Amsgrad(Unfit):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), amsgrad=True)


class Two(Unfit):
    def configure_optimizers(self):
        return torch.optim.SGD([self.layer.weight]), torch.optim.SGD([self.layer.bias])

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "compressor", "message"),
    [
        (SecondOrder, "onebit", r"gradients in one step of LBFGS with OneBit: got .*ddp_dense"),
        (Tried, "dgc", r"the optimizer of DGC: got .*RMSprop', allowed: torch.optim.SGD, Adam or AdamW"),
        (Two, "dgc", "optimizers with DGC: got 2, allowed: 1"),
        (Subclass, "dgc", r"optimizer of DGC: got '.*MySGD'"),
        (Amsgrad, "dgc", r"optimizer of DGC: got 'torch.optim.adamw.AdamW\(amsgrad\)'"),
    ],
)
def test_optimizers_that_can_not_be_honoured(make, compressor, message):
    """They are known once the processes run: `configure_optimizers` is called once a fit."""
    strategy = lgc.CompressedDDPStrategy(compressor)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make(), torch.zeros(4, 4))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("feature", ["pruning", "weight_norm"])
def test_what_keeps_tensors_of_a_forward_pass_needs_shared_weights(feature):
    """With local weights masks, and weights that are computed before each forward pass, would be a rank's own."""

    def fit(**options):
        module, callbacks = Net(), []
        if feature == "pruning":
            pruned = [(module.layer, "weight")]
            callbacks = [ModelPruning("l1_unstructured", parameters_to_prune=pruned, amount=0.5)]
        else:
            module.layer = torch.nn.utils.weight_norm(module.layer)
        strategy = lgc.CompressedDDPStrategy("dgc", **options)
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **QUIET)
        try:
            trainer.fit(module, torch.zeros(4, 4))
        finally:
            torch.distributed.destroy_process_group()

    with pytest.raises(ValueError, match="local_weights=False for the strategy"):
        fit()
    fit(local_weights=False)


def test_compiled_averaging(monkeypatch):
    """torch.compile can be told to average by itself, past DDP's hook."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        check_refused(monkeypatch, r"optimize_ddp: got 'python_reducer', allowed: True or False", Net, "onebit")

"""Which gradients are averaged: of layers that are unfrozen, of several optimizers, of discarded backward calls."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from features_kit import (
    SGD,
    UNUSED,
    Adam,
    Manual,
    Net,
    TwoOptimizers,
    apart,
    check_supported,
    dense,
    dgc,
    fit,
    forced,
    on_every_rank,
    onebit,
    spread,
)
from torch import nn

import lightning_gradcomp as lgc
from tests.processes import on_ranks


class Swapped(Net):
    """The body trains from step 4 on, and the head, which is all that DDP knows, until then."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_batch_start(self, *args):
        self.body.requires_grad_(self.trainer.global_step >= 4)
        self.head.requires_grad_(self.trainer.global_step < 4)


class SwappedByZeroing(Net):
    """As `Swapped`, by taking gradients away."""

    def on_after_backward(self):
        (self.head if self.trainer.global_step >= 4 else self.body).zero_grad()


class Untoggled(TwoOptimizers):
    """Without toggling, each loss leaves gradients on both layers."""

    def training_step(self, batch, index):
        for sign, optimizer in zip((1, -0.1), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(sign * super().training_step(batch, index))
            optimizer.step()


class OneBackward(TwoOptimizers):
    """One loss for both optimizers."""

    def training_step(self, batch, index):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        for place, optimizer in enumerate(optimizers):
            if not self.skips(index, place):
                optimizer.step()

    def skips(self, index, place):
        return False


class Toggled(Untoggled):
    """Both losses before both steps, each with the other optimizer's parameters frozen; averages what it leaves."""

    def training_step(self, batch, index):
        optimizers = self.optimizers()
        for sign, optimizer in zip((1, -0.1), optimizers, strict=True):
            optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * Net.training_step(self, batch, index))
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()


class ClippedManual(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class ClippedManualAdam(ClippedManual):
    configure_optimizers = Adam.configure_optimizers


class TwoLosses(Manual):
    """Calls backward twice between two steps of the optimizer."""

    def first(self, loss):
        self.manual_backward(loss)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.first(Net.training_step(self, batch, index))
        self.manual_backward(Net.training_step(self, batch, index))
        optimizer.step()


class BlockSync(TwoLosses):
    def first(self, loss):
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(loss)


SUPPORTED = {
    "unfrozen layers unknown to DDP": (Swapped, {"reference": SwappedByZeroing, "batches": 10}),
    "untoggled optimizers": (Untoggled, {}),
    "one backward for two optimizers": (OneBackward, {}),
    "toggled optimizers": (Toggled, {"ddp": UNUSED}),
    "two backward calls": (TwoLosses, {}),
    "block_backward_sync": (BlockSync, {}),
}


@pytest.mark.parametrize("how", SUPPORTED)
@on_ranks(2)
def test_supported(how):
    make, options = SUPPORTED[how]
    check_supported(make, **options)


# Layers


@pytest.mark.parametrize("compressor", [lgc.OneBit(min_elements=32, warmup_epochs=0), "none"], ids=["onebit", "none"])
@on_ranks(2)
def test_unfrozen_layers_with_topology_auto(compressor):
    assert spread(fit(lgc.CompressedDDPStrategy(compressor), Swapped)[1]) == 0


class Growing(Net):
    """Gets a layer in its second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.more = nn.Linear(4, 4)
            self.trainer.optimizers[0].add_param_group({"params": self.more.parameters()})

    def forward(self, x):
        return self.more(super().forward(x)) if self.current_epoch else super().forward(x)


class FrozenLate(Net):
    def on_train_batch_start(self, *args):
        self.body.requires_grad_(self.trainer.global_step < 4)


class SparseEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)


class Unused(Net):
    """A layer that nothing runs through."""

    def __init__(self) -> None:
        super().__init__()
        self.nowhere = nn.Linear(16, 4)


REFUSED = {
    "sparse gradients": (SparseEmbedding, r"gradients of 'table': got 'Embedding\(sparse=True\)', allowed: sparse=F"),
    "an added layer": (Growing, r"parameters that train: got .*'more.weight', which was added later"),
    "frozen while training": (
        FrozenLate, r"frozen while training: got 'body.weight', allowed: find_unused_parameters=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_layers_that_cannot_be_averaged_are_refused_on_every_rank(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        fit(onebit(), make)


@on_ranks(2)
def test_ddps_own_words_about_unused_parameters_are_kept():
    with pytest.raises(RuntimeError, match="find_unused_parameters"):
        fit(dense(), Unused)


# Steps that are skipped, gradients that are discarded


class Discarding(Untoggled):
    """The head's own loss is 0; the gradients that the body's leaves on it are discarded."""

    def training_step(self, batch, index):
        head, body = self.optimizers()
        body.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        body.step()
        head.zero_grad()
        self.manual_backward(0 * Net.training_step(self, batch, index))
        head.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(self.body.parameters(), lr=0.1)

    def on_fit_start(self):
        self.before = [self.head.weight.clone(), self.body.weight.clone()]


@pytest.mark.parametrize("make", [lgc.OneBit, lgc.PowerSGD])
@on_ranks(2)
def test_discarded_gradients_stay_discarded(make):
    net = fit(forced(make(min_elements=32, warmup_epochs=0)), Discarding)[0].lightning_module
    head, body = net.before
    assert torch.equal(net.head.weight, head) and not torch.equal(net.body.weight, body)


class Skipping(Net):
    """Skips every other step of its optimizer, in automatic optimization."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        closure() if index % 2 else optimizer.step(closure=closure)


class NotZeroing(Skipping):
    def optimizer_zero_grad(self, *args):
        pass


@on_ranks(2)
def test_averages_that_no_step_uses():
    assert spread(fit(onebit(), Skipping)[1]) == 0
    with pytest.raises(ValueError, match=r"backward calls with OneBit between two .* got .*no_sync"):
        fit(onebit(), NotZeroing)


class SkipsOnOneRank(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        if self.global_rank == 0 or index != 5:
            optimizer.step()


class SkipsOneOfSeveral(OneBackward):
    def skips(self, index, place):
        return self.global_rank != 0 and (index, place) == (5, 0)


SKIPPED = {
    "one optimizer": (SkipsOnOneRank, "rank 0: step 6; rank 1: step 5"),
    "one of several": (
        SkipsOneOfSeveral,
        "rank 0: step 10, optimizer 0, backward pass 6; rank 1: step 10, optimizer 1, backward pass 6",
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
@on_ranks(2)
def test_a_step_skipped_on_one_rank_is_named(case):
    make, got = SKIPPED[case]
    with pytest.raises(ValueError, match=rf"{got}', allowed: .* skipped an optimizer step"):
        fit(onebit(verify_replicas_every_n_steps=None), make)


class Guarded(Manual):
    """Clips, and skips steps whose norm is not finite. Rank 1 has a bad example."""

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = Net.training_step(self, batch, index)
        self.manual_backward(loss * float("nan") if index == 5 and self.global_rank == 1 else loss)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.norms = [*getattr(self, "norms", ()), norm.item()]
        if norm.isfinite():
            optimizer.step()


@pytest.mark.parametrize("make", [dgc, onebit])
@on_ranks(2)
def test_norms_after_manual_backward_are_those_of_the_average(make):
    trainer, moved = fit(make(), Guarded, epochs=1)
    norms = trainer.lightning_module.norms
    one, other = on_every_rank(str(norms))
    assert one == other and one.count("nan") == 1
    assert trainer.global_step == 9 and spread(moved) == 0


class Accumulating(Manual):
    """Steps after every second batch; the first one's gradients stay local if `no_sync`."""

    no_sync = False

    def training_step(self, batch, index):
        optimizer, first = self.optimizers(), index % 2 == 0
        with self.trainer.strategy.block_backward_sync() if self.no_sync and first else nullcontext():
            self.manual_backward(Net.training_step(self, batch, index))
        if not first:
            optimizer.step()
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        pass  # may find update directions


class NotSynced(Accumulating):
    no_sync = True


@pytest.mark.parametrize("make", [dgc, onebit])
@on_ranks(2)
def test_manual_accumulation_is_the_same_with_and_without_no_sync(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert apart(fit(make(), Accumulating)[1], fit(make(), NotSynced)[1]) == 0
    assert not [each for each in caught if "discarded" in str(each.message)]


# Optimizers


class TorchsOptimizer(Manual):
    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)


class TorchsOptimizers(OneBackward):
    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)


@on_ranks(2)
def test_torchs_own_optimizer():
    """It steps averages that are there after backward. Several optimizers' steps would have to average."""
    assert apart(fit(onebit(), TorchsOptimizer)[1], fit(onebit(), Manual)[1]) == 0
    with pytest.raises(ValueError, match=r"optimizer in manual optimization: got .*AdamW.*, allowed: one from self.op"):
        fit(onebit(), TorchsOptimizers)


class UnknownOptimizer(Manual):
    """Steps an optimizer that Lightning does not know."""

    def configure_optimizers(self):
        return None

    def training_step(self, batch, index):
        if index == 0 and self.current_epoch == 0:
            self.__dict__["own"] = torch.optim.SGD(self.parameters(), **SGD)
        self.own.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        self.own.step()


@on_ranks(2)
def test_an_optimizer_that_lightning_does_not_know_gets_averages():
    _, stock = fit("ddp", UnknownOptimizer)
    for strategy, ratio, least, most in ((onebit(), 1, 0, 0), (forced(lgc.Int8(min_elements=32)), 1.5, 1e-9, 0.01)):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer, after = fit(strategy, UnknownOptimizer)
        averager = trainer.strategy.averager
        [said, _] = on_every_rank(" ".join(str(each.message) for each in warned))
        assert averager.steps == 20 and averager.spent.ratio >= ratio and least <= apart(stock, after) <= most
        assert ("configure_optimizers must return the optimizer" in said) == (ratio == 1)


@on_ranks(2)
def test_clipping_in_manual_optimization():
    clipped = check_supported(ClippedManualAdam)
    assert apart(clipped, fit("ddp", Adam, batches=7)[1]) > 0.01
    with pytest.raises(ValueError, match=r"clipping with DGC in manual .*DGC\(clip_norm="):
        fit(dgc(), ClippedManual)


class TwoGradients(torch.optim.SGD):
    """Takes a second gradient in each step, where the first has led, as SAM does."""

    def step(self, closure):
        closure()
        super().step()
        loss = closure()
        super().step()
        return loss


class SharpnessAware(Net):
    def configure_optimizers(self):
        return TwoGradients(self.parameters(), lr=0.02)


@on_ranks(2)
def test_two_gradients_a_step_train_dense_only():
    assert apart(fit("ddp", SharpnessAware)[1], fit(dense(), SharpnessAware)[1]) == 0
    with pytest.raises(ValueError, match=r"gradients in one step of TwoGradients with OneBit: got .*ddp_dense"):
        fit(onebit(), SharpnessAware)

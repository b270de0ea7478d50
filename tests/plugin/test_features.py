"""Features of the Trainer under compression, on two ranks."""

import csv

import lightning as L
import pytest
import torch
from features_kit import (
    RANK,
    UNUSED,
    Adam,
    Kept,
    Manual,
    Net,
    TwoOptimizers,
    apart,
    check_compressed,
    check_supported,
    dgc,
    fit,
    forced,
    loader,
    nothing_dropped,
    onebit,
    spread,
    trainer_for,
    weights,
)
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn

import lightning_gradcomp as lgc
from tests.processes import on_ranks


class Adversaries(TwoOptimizers):
    """They take turns within a batch."""

    def training_step(self, batch, index):
        for sign, optimizer in zip((1, -0.1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, index)
            self.manual_backward(sign * loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class PartlyUsed(Net):
    """One layer is used on rank 0 only, another nowhere. Weight decay would move what is not left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.on_rank_0, self.nowhere = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return super().forward(x) + (self.on_rank_0(x) if RANK == 0 else 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def on_fit_start(self):
        self.before = {name: layer.weight.clone() for name, layer in self.named_children()}

    def on_fit_end(self):
        self.moved = {name: not torch.equal(layer.weight, self.before[name]) for name, layer in self.named_children()}


class Freezing(Net):
    """The body trains in steps 4 to 9 of 14 only."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_batch_start(self, *args):
        self.body.requires_grad_(4 <= self.trainer.global_step < 10)


class Ignoring(Net):
    """As `Freezing`, by taking gradients away: stock DDP never averages a layer that was frozen when it started."""

    def on_after_backward(self):
        if not 4 <= self.trainer.global_step < 10:
            self.body.zero_grad()


class Finetuning(BaseFinetuning):
    """Lightning's own way: the layer enters the optimizer, as a group with a learning rate, when it is unfrozen."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.02, initial_denom_lr=1)


class Head(Net):
    """The optimizer begins with the head alone."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    def configure_callbacks(self):
        return [Finetuning()]


class BothFromTheStart(Net):
    """What `Finetuning` comes to, with a group that is there all along and has no gradients in the first epoch."""

    def configure_optimizers(self):
        groups = [{"params": self.head.parameters()}, {"params": self.body.parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def on_after_backward(self):
        if self.current_epoch < 1:
            self.body.zero_grad()


class Tied(Net):
    """Input and output share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(32, 16)
        self.back.weight = nn.Parameter(self.body.weight.detach().T.clone())
        self.again = nn.Linear(16, 32)
        self.again.weight = self.body.weight

    def forward(self, x):
        return self.head(torch.tanh(self.again(self.back(torch.tanh(self.body(x))))))


SUPPORTED = {
    "accumulation": (Net, {"accumulate_grad_batches": 3, "batches": 10}),  # the last group of an epoch has one batch
    "manual optimization": (Manual, {}),
    "several optimizers": (Adversaries, {"ddp": UNUSED}),
    "static graph": (Net, {"ddp": {"static_graph": True}}),
    "gradient as bucket view": (Net, {"ddp": {"gradient_as_bucket_view": False}}),  # all the others have True
    "freezing": (Freezing, {"reference": Ignoring}),
    "new parameter group": (Head, {"reference": BothFromTheStart}),
    "unused parameters": (PartlyUsed, {"ddp": UNUSED}),
    "tied weights": (Tied, {}),
}


@pytest.mark.parametrize("feature", SUPPORTED)
@on_ranks(2)
def test_supported(feature):
    make, options = SUPPORTED[feature]
    check_supported(make, **options)


@on_ranks(2)
def test_a_static_graph_in_manual_optimization():
    """Where Lightning's own DDP averages there, unlike in 2.5."""
    ddp = {"static_graph": True}
    if not spread(fit(DDPStrategy(**ddp), Manual)[1]):
        check_supported(Manual, ddp=ddp)


# Clipping


@on_ranks(2)
def test_clipping_the_average():
    clipped = check_supported(Adam, gradient_clip_val=0.1)
    assert apart(clipped, fit("ddp", Adam, batches=7)[1]) > 0.01


@on_ranks(2)
def test_the_trainers_clipping_is_dgcs_own():
    trainer, by_trainer = fit(dgc(), gradient_clip_val=0.1)
    assert apart(by_trainer, fit(dgc(clip_norm=0.1))[1]) == 0
    assert apart(by_trainer, fit(dgc())[1]) > 0.01
    assert trainer.gradient_clip_val == 0.1


@on_ranks(2)
def test_clipping_in_dgcs_dense_phases_is_the_trainers():
    assert apart(fit("ddp", gradient_clip_val=0.1)[1], fit(nothing_dropped(), gradient_clip_val=0.1)[1]) <= 1e-6


@on_ranks(2)
def test_clipping_at_zero_is_none():
    """As Lightning takes it."""
    assert apart(fit(dgc())[1], fit(dgc(), gradient_clip_val=0)[1]) == 0


# Parameters


@on_ranks(2)
def test_a_parameter_that_no_rank_uses_stays():
    moved = fit(dgc(**UNUSED), PartlyUsed)[0].lightning_module.moved
    assert moved == {"body": True, "head": True, "on_rank_0": True, "nowhere": False}


@on_ranks(2)
def test_tied_weights_are_remembered_once():
    memory = fit(dgc(), Tied)[0].strategy.averager.state_dict()["memory"]
    assert sorted(memory["velocity"]) == ["back.weight", "body.weight", "head.weight"]


# Callbacks, the Tuner, fitting again


class Normed(Net):
    """With batch norm, whose statistics weight averaging has to gather anew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


class SWA(Normed):
    def configure_callbacks(self):
        return [callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]


class EMA(Normed):
    def configure_callbacks(self):
        return [callbacks.EMAWeightAveraging(decay=0.9)]


@pytest.mark.parametrize("make", ["SWA", "EMA"][: 1 + hasattr(callbacks, "EMAWeightAveraging")])
@on_ranks(2)
def test_weight_averaging_averages(make):
    averaged = check_supported({"SWA": SWA, "EMA": EMA}[make], epochs=3)
    assert apart(averaged, fit("ddp", Normed, batches=7, epochs=3)[1]) > 0.01


@on_ranks(2)
def test_nothing_is_left_of_the_tuners_search(tmp_path):
    L.seed_everything(0, verbose=False)
    net, trainer = Net(), trainer_for(dgc(), default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(net, loader(), min_lr=1e-3, max_lr=0.2, num_training=15)
    assert not trainer.strategy.averager.has_unsent and trainer.strategy.averager.steps == 0
    trainer.fit(net, loader())
    assert Net.lr != net.lr == found.suggestion()
    assert apart(weights(net), fit(dgc(), type("Found", (Net,), {"lr": net.lr}))[1]) == 0


@on_ranks(2)
def test_nothing_is_left_of_a_search_in_the_fit(tmp_path):
    """Where the search leaves no marks on a fit under Lightning's own DDP, unlike in 2.5."""

    def search(strategy):
        finder = callbacks.LearningRateFinder(num_training_steps=15, update_attr=False)
        return *fit(strategy, callbacks=[finder], default_root_dir=tmp_path), len(finder.optimal_lr.results["lr"])

    if apart(search("ddp")[1], fit("ddp")[1]):
        return
    trainer, after, tried = search(dgc())
    assert (trainer.strategy.averager.steps, tried, apart(after, fit(dgc())[1])) == (20, 15, 0)


@on_ranks(2)
def test_fit_validate_test_and_again():
    def twice(strategy):
        L.seed_everything(0, verbose=False)
        net, trainer, losses = Net(), trainer_for(strategy, epochs=1), []
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(net, loader())
            losses += [run(net, loader(), verbose=False)[0]["validated"] for run in (trainer.validate, trainer.test)]
        return trainer, weights(net), losses

    _, stock, stock_losses = twice("ddp")
    _, same, same_losses = twice(nothing_dropped())
    assert apart(stock, same) <= 1e-6 and same_losses == pytest.approx(stock_losses)
    trainer, sparse, (validated, tested, *again) = twice(dgc())
    assert validated == tested > again[0] == again[1]
    assert trainer.global_step == 20 and spread(sparse) == 0


class CompiledPart(Net):
    def configure_model(self):
        if not hasattr(self.body, "_orig_mod"):
            self.body = torch.compile(self.body, backend="eager")


COMPILED = {"torch.compile": lambda: torch.compile(Net(), backend="eager"), "configure_model": CompiledPart}


@pytest.mark.parametrize("how", COMPILED)
@on_ranks(2)
def test_compiled_is_as_not_compiled(how):
    trainer, after = fit(dgc(), COMPILED[how])
    assert apart(after, fit(dgc())[1]) == 0
    assert sorted(trainer.strategy.averager.state_dict()["memory"]["velocity"]) == ["body.weight", "head.weight"]


@on_ranks(2)
def test_a_compiled_run_resumes_without_compilation(tmp_path):
    fit(dgc(), COMPILED["torch.compile"], epochs=1)[0].save_checkpoint(tmp_path / "compiled.ckpt")
    assert apart(fit(dgc(), ckpt_path=tmp_path / "compiled.ckpt")[1], fit(dgc())[1]) == 0


@pytest.mark.parametrize(
    ("precision", "make", "dtype"),
    [
        ("bf16-mixed", dgc, torch.float32),
        ("bf16-true", onebit, torch.bfloat16),
        ("16-true", dgc, torch.float16),
    ],
)
@on_ranks(2)
def test_low_precision(precision, make, dtype):
    _, after = check_compressed(make(), precision=precision)
    assert after.dtype == dtype


# Monitors


@on_ranks(2)
def test_a_monitor_sees_the_users_momentum():
    logger, monitor = Kept(), callbacks.LearningRateMonitor("step", log_momentum=True)
    trainer, _ = fit(dgc(), callbacks=[monitor], logger=logger, log_every_n_steps=1)
    logged = [metrics["lr-SGD-momentum"] for metrics in logger.metrics if "lr-SGD-momentum" in metrics]
    assert RANK or logged == [0.9] * 20
    assert trainer.strategy.averager.stats.sparsity == 0.9


class Counted(Adversaries):
    """With the bytes of every step added up."""

    sent = 0

    def untoggle_optimizer(self, optimizer):
        self.sent += self.trainer.strategy.averager.stats.bytes_sent
        super().untoggle_optimizer(optimizer)


@on_ranks(2)
def test_the_monitor_counts_every_step_of_a_batch():
    monitor = lgc.CommunicationMonitor()
    trainer, _ = fit(onebit(**UNUSED), Counted, callbacks=[monitor])
    if RANK == 0:
        assert monitor.summary()["steps"] == 40
        assert monitor.summary()["bytes_sent"] == trainer.lightning_module.sent > 0


class Validated(Net):
    """With a validation after each epoch, and a sanity check before the first."""

    def val_dataloader(self):
        return loader(2)


def rows(folder):
    """Of metrics.csv: what each has of every name that has a value there."""
    with open(f"{folder}/metrics.csv") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@on_ranks(2)
def test_what_the_monitor_writes_over_two_fits_and_a_validation(tmp_path):
    """One dense epoch; then, from its checkpoint, a compressed one. Every other step is logged."""
    summaries, loggers, path = [], [], tmp_path / "monitored.ckpt"
    for epochs in (1, 2):
        monitor, logger = lgc.CommunicationMonitor(), CSVLogger(tmp_path, "monitored", version=epochs)
        dense_first = lgc.DGC(sparsity=0.9, min_elements=32, dense_epochs=1, warmup_epochs=0)
        trainer, _ = fit(
            forced(compressor=dense_first), Validated, epochs=epochs, ckpt_path=path if epochs > 1 else None,
            callbacks=[monitor], logger=logger, log_every_n_steps=2, num_sanity_val_steps=1,
        )  # fmt: skip
        trainer.save_checkpoint(path)
        summaries.append(monitor.summary())
        loggers.append(logger)
    trainer.validate(trainer.lightning_module, verbose=False)
    finished = lgc.CommunicationMonitor()
    fit(forced(compressor=dense_first), Validated, ckpt_path=path, callbacks=[finished])
    if RANK:
        return
    first, second = summaries
    for key in ("bytes_sent", "dense_bytes"):
        assert second["totals"][key] == first[key] + second[key]
    assert second["totals"]["seconds"] > first["totals"]["seconds"] > 0
    saved = torch.load(path, weights_only=True)["callbacks"]["CommunicationMonitor"]
    assert saved.keys() == {"bytes_sent", "dense_bytes", "seconds"}
    nothing_to_do = finished.summary()
    assert nothing_to_do["steps"] == nothing_to_do["bytes_sent"] == 0
    assert nothing_to_do["totals"]["bytes_sent"] == second["totals"]["bytes_sent"]

    written = [rows(logger.log_dir) for logger in loggers]
    validations = [[row for row in run if "validated" in row] for run in written]
    totals = [row["comm/total_bytes_sent"] for run in validations for row in run if "time/total_s" in row]
    assert totals == [run["totals"]["bytes_sent"] for run in summaries]
    assert len(validations[1]) == 2 and "comm/total_bytes_sent" not in validations[1][1]  # trainer.validate
    seconds = [row["time/total_s"] for run in written for row in run if "time/total_s" in row]
    assert seconds == sorted(seconds) and len(seconds) == 12
    steps = [row for run in written for row in run if "comm/sparsity" in row]
    assert [row["comm/sparsity"] for row in steps] == pytest.approx([0] * 5 + [0.9] * 5)
    assert [row.get("memory/residual_to_gradient", 0) > 0 for row in steps] == [False] * 5 + [True] * 5


@on_ranks(2)
def test_residuals_of_several_optimizers_are_sent_when_the_schedule_turns_dense():
    """The averager is laid out for one of them when the first dense step begins; the other sends its residual too."""
    sparse = forced(compressor=lgc.GradientDropping(sparsity=0.9, min_elements=32, warmup_epochs=0), **UNUSED)
    schedule = lgc.SparsityWarmup(lambda epoch, step: 0.9 if step < 6 else 0.0)
    trainer, after = fit(sparse, Adversaries, callbacks=[schedule])
    memory = trainer.strategy.averager.state_dict()["memory"]
    assert not any(memory.values()), memory
    assert spread(after) == 0

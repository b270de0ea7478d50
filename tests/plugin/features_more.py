"""Features of the Trainer, continued: callbacks, the Tuner, fitting again, torch.compile, tied weights.

Part of `features.py`.
"""

import lightning as L
import torch
from features_kit import (
    FOLDER,
    Net,
    apart,
    dgc,
    fit,
    loader,
    nothing_dropped,
    spread,
    supported,
    trainer_for,
    weights,
)
from lightning.pytorch import callbacks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from torch import nn


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


def averaged(make):
    """As `supported`; also how far averaging has moved the weights."""
    return supported(make, without=Normed, epochs=3)


def stochastic_weight_averaging():
    return averaged(SWA)


def ema_weight_averaging():
    return averaged(EMA) if hasattr(callbacks, "EMAWeightAveraging") else None


def tuner_lr_find():
    L.seed_everything(0, verbose=False)
    net, trainer = Net(), trainer_for(dgc(), default_root_dir=FOLDER)
    found = Tuner(trainer).lr_find(net, loader(), min_lr=1e-3, max_lr=0.2, num_training=15)
    remembered = not trainer.strategy.averager.has_unsent, trainer.strategy.averager.steps
    trainer.fit(net, loader())
    Found = type("Found", (Net,), {"lr": net.lr})
    return {
        "remembered": remembered,
        "new_lr": net.lr != Net.lr and net.lr == found.suggestion(),
        "apart": apart(weights(net), fit(dgc(), Found)[1]),
    }


def lr_finder_callback():
    """None where the search leaves its marks on a fit under Lightning's own DDP, as in 2.5."""

    def search(strategy):
        finder = callbacks.LearningRateFinder(num_training_steps=15, update_attr=False)
        return *fit(strategy, callbacks=[finder], default_root_dir=FOLDER), len(finder.optimal_lr.results["lr"])

    if apart(search("ddp")[1], fit("ddp")[1]):
        return None
    trainer, after, tried = search(dgc())
    return {"steps": trainer.strategy.averager.steps, "tried": tried, "apart": apart(after, fit(dgc())[1])}


def fit_twice():
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
    trainer, sparse, losses = twice(dgc())
    return {
        "apart": apart(stock, same),
        "losses": [stock_losses, same_losses, losses],
        "global_step": trainer.global_step,
        "replicas_apart": spread(sparse),
    }


class CompiledPart(Net):
    def configure_model(self):
        if not hasattr(self.body, "_orig_mod"):
            self.body = torch.compile(self.body, backend="eager")


def compiled():
    """The whole module compiled, or a part; and whether the checkpoint of an epoch goes on without it."""
    plain, result, path = fit(dgc())[1], {}, FOLDER / "compiled.ckpt"
    makes = {"torch.compile": lambda: torch.compile(Net(), backend="eager"), "configure_model": CompiledPart}
    for name, make in makes.items():
        trainer, after = fit(dgc(), make)
        result[name] = {
            "apart": apart(after, plain),
            "names": sorted(trainer.strategy.averager.state_dict()["memory"]["velocity"]),
        }
    fit(dgc(), makes["torch.compile"], epochs=1)[0].save_checkpoint(path)
    result["torch.compile"]["resumed_apart"] = apart(fit(dgc(), ckpt_path=path)[1], plain)
    return result


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


def tied_weights():
    names = sorted(fit(dgc(), Tied)[0].strategy.averager.state_dict()["memory"]["velocity"])
    return {**supported(Tied), "names": names}


class Kept(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(metrics)


def momentum_in_the_monitor():
    logger, monitor = Kept(), callbacks.LearningRateMonitor("step", log_momentum=True)
    trainer, _ = fit(dgc(), callbacks=[monitor], logger=logger, log_every_n_steps=1)
    return {
        "logged": [metrics["lr-SGD-momentum"] for metrics in logger.metrics if "lr-SGD-momentum" in metrics],
        "sparsity": trainer.strategy.averager.stats.sparsity,
    }


FEATURES = (
    stochastic_weight_averaging, ema_weight_averaging, tuner_lr_find, lr_finder_callback, fit_twice,
    compiled, tied_weights, momentum_in_the_monitor,
)  # fmt: skip

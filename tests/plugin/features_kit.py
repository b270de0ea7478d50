"""What the trainings of `features.py` have in common: a small model, its data, and how outcomes are compared."""

import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from strategies import forced
from torch import nn

import lightning_gradcomp as lgc

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
FOLDER = Path(sys.argv[1])
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
SGD = {"lr": 0.05, "momentum": 0.9}


class Net(L.LightningModule):
    """Two linear layers under SGD with momentum. Both weights are compressed, both biases travel dense."""

    lr = SGD["lr"]

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch, index):
        self.log("validated", self.training_step(batch, index), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **{**SGD, "lr": self.lr})


class Manual(Net):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def examples(batches=10):
    """Examples for so many batches a rank: a linear map with noise, so there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * WORLD * batches, 16, generator=generator)
    y = x @ torch.randn(16, 4, generator=generator) / 4 + 0.1 * torch.randn(len(x), 4, generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def loader(batches=10):
    return torch.utils.data.DataLoader(examples(batches), 8)


def trainer_for(strategy, *, epochs=2, **options):
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=WORLD, max_epochs=epochs, **{**QUIET, **options})


def fit(strategy, make=Net, *, batches=10, ckpt_path=None, **options):
    """Train what `make` returns, from seed 0; returns (trainer, all weights as one vector)."""
    L.seed_everything(0, verbose=False)
    net = make()
    trainer = trainer_for(strategy, **options)
    trainer.fit(net, loader(batches), ckpt_path=ckpt_path)
    return trainer, weights(net)


def weights(net):
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def apart(a, b):
    """Largest difference between two weight vectors, over all ranks."""
    difference = (a - b).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def spread(vector):
    """Largest difference between a rank's weights and rank 0's."""
    first = vector.clone()
    dist.broadcast(first, 0)
    return apart(vector, first)


def on_every_rank(value):
    """What each rank has, by rank."""
    values = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def dense(**options):
    return forced(compressor="none", **options)


def nothing_dropped(**options):
    return forced(compressor=lgc.DGC(sparsity=0), **options)


def onebit(**options):
    compressor = lgc.OneBit(min_elements=32, warmup_epochs=0)
    return forced(compressor=compressor, **{"verify_replicas_every_n_steps": 1, **options})


def dgc(clip_norm=None, **options):
    compressor = lgc.DGC(sparsity=0.9, min_elements=32, dense_epochs=0, warmup_epochs=0, clip_norm=clip_norm)
    return forced(compressor=compressor, **{"verify_replicas_every_n_steps": 1, **options})


def compressed(strategy, make=Net, *, batches=7, **options):
    """What compressed training came to: in what precision, how well, and whether the replicas are the same."""
    trainer, after = fit(strategy, make, batches=batches, **options)
    kinds, (x, y) = trainer.strategy.averager.state_dict()["memory"], examples(batches).tensors
    return {
        "trained_in": str(after.dtype),
        "remembered_in": sorted({str(part.dtype) for parts in kinds.values() for part in parts.values()}),
        "loss": nn.functional.mse_loss(trainer.lightning_module.float()(x), y).item(),
        "replicas_apart": spread(after.float()),
        "ratio": trainer.strategy.averager.stats.ratio,
    }


def supported(make=Net, *, ddp=None, reference=None, without=None, **options):
    """How far the dense limit is from stock DDP, and what compressed training comes to.

    Args:
        ddp: options of DDPStrategy.
        reference: what to train under stock DDP, if it is not the same module.
        without: the module without the feature; how far that moves the weights under stock DDP is told, too.
        options: of the Trainer; `batches` an epoch, of two.
    """
    options = {"batches": 7, **options}
    ddp, momentum = ddp or {}, type(make().configure_optimizers()) is torch.optim.SGD
    _, stock = fit(DDPStrategy(**ddp), reference or make, **options)
    exact, lossy = (nothing_dropped, dgc) if momentum else (dense, onebit)
    moved = {"moved": apart(fit("ddp", without, **options)[1], stock)} if without else {}
    return moved | {
        "apart": apart(stock, fit(exact(**ddp), make, **options)[1]),
        "compressed": compressed(lossy(**ddp), make, **options),
    }


def raised(action, *arguments, **options):
    """Type and message of what every rank raises, in order of ranks."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return on_every_rank([type(error).__name__, str(error)])
    return on_every_rank(["nothing", ""])


def run(features):
    """Run every feature and print the outcomes; one that fails must not hide the others'."""
    outcome = {}
    for feature in features:
        try:
            outcome[feature.__name__] = {"result": feature()}
        except Exception:
            outcome[feature.__name__] = {"failed": traceback.format_exc()}
    if RANK == 0:
        print(json.dumps(outcome))

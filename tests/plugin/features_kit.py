"""Small trainings on every rank: a model, its data, and how weights are compared. For tests that run `on_ranks`."""

import os

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from strategies import forced
from torch import nn

import lightning_gradcomp as lgc

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
"""Of the process. The one that collects tests is no rank."""
UNUSED = {"find_unused_parameters": True}
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


class TwoOptimizers(Net):
    """Optimizes by hand, each layer with an optimizer of its own, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=0.01), torch.optim.SGD(self.body.parameters(), lr=0.01)


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OneLayer(L.LightningModule):
    """The least that trains, on tensors of 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Kept(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(metrics)


def examples(batches=10):
    """Examples for so many batches a rank: a linear map with noise, so there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * WORLD * batches, 16, generator=generator)
    y = x @ torch.randn(16, 4, generator=generator) / 4 + 0.1 * torch.randn(len(x), 4, generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def loader(batches=10):
    return torch.utils.data.DataLoader(examples(batches), 8)


def trainer_for(strategy, *, epochs=2, nodes=1, **options):
    ranks = {"accelerator": "cpu", "devices": WORLD // nodes, "num_nodes": nodes}
    return L.Trainer(strategy=strategy, max_epochs=epochs, **ranks, **{**QUIET, **options})


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


def check_compressed(strategy, make=Net, *, batches=7, **options):
    """Compressed training keeps the replicas equal, learns, and has residuals in fp32. Returns the trainer."""
    trainer, after = fit(strategy, make, batches=batches, **options)
    averager, (x, y) = trainer.strategy.averager, examples(batches).tensors
    assert spread(after.float()) == 0
    assert {part.dtype for parts in averager.state_dict()["memory"].values() for part in parts.values()} == {
        torch.float32
    }
    assert averager.stats.ratio > 1.5
    assert nn.functional.mse_loss(trainer.lightning_module.float()(x), y).item() < 0.8  # of a variance of 1
    return trainer, after


def check_supported(make=Net, *, ddp=None, reference=None, **options):
    """The dense limit is bit-identical to stock DDP, and `check_compressed` holds. Returns the weights.

    Args:
        ddp: options of DDPStrategy.
        reference: what to train under stock DDP, if it is not the same module.
        options: of the Trainer; `batches` an epoch, of two.
    """
    options = {"batches": 7, **options}
    ddp, momentum = ddp or {}, type(make().configure_optimizers()) is torch.optim.SGD
    _, stock = fit(DDPStrategy(**ddp), reference or make, **options)
    exact, lossy = (nothing_dropped, dgc) if momentum else (dense, onebit)
    assert apart(stock, fit(exact(**ddp), make, **options)[1]) == 0
    check_compressed(lossy(**ddp), make, **options)
    return stock

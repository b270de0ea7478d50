"""Runs on 4 ranks: Lightning trainings under CompressedHSDPStrategy. Prints their outcomes as one JSON line.

usage: hsdp_script.py FOLDER
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from strategies import forced
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import lightning_gradcomp as lgc
from lightning_gradcomp.app.muon import MuonAdamW
from lightning_gradcomp.averaging.fsdp.checkpoint import whole_memory
from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.plugin import hsdp as hsdp_module
from lightning_gradcomp.plugin.rank_states import mean_over_ranks

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class FSDPsOwn(ModelParallelStrategy):
    """HSDP as FSDP2 has it: both dimensions of the mesh are its own."""

    distributed_sampler_kwargs = lgc.CompressedHSDPStrategy.distributed_sampler_kwargs


class Net(L.LightningModule):
    """A small classifier, whose layers are sharded under strategies that have a mesh."""

    def __init__(self, adamw=False, wrapped=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 4))
        self.adamw, self.wrapped = adamw, wrapped

    def configure_model(self):
        if self.device_mesh is None or isinstance(self.net, FSDPModule):
            return
        if self.wrapped == "checkpointed":
            apply_activation_checkpointing(self.net, check_fn=lambda module: isinstance(module, nn.Linear))
        if self.wrapped == "compiled":
            self.net[0] = torch.compile(self.net[0], backend="aot_eager")
        own = isinstance(self.trainer.strategy, FSDPsOwn)
        fully_shard(self.net, mesh=self.device_mesh if own else self.device_mesh["shard"])

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images).float(), labels)

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
        if self.adamw:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Several(Net):
    """Two optimizers by hand, each with its own backward pass and clipping, as in a GAN."""

    def __init__(self, adamw=False, wrapped=None):
        super().__init__(adamw, wrapped)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[:3].parameters(), lr=0.01)
        return first, torch.optim.SGD(self.net[3].parameters(), lr=0.05, momentum=0.9)


class WithMuon(Net):
    def configure_optimizers(self):
        matrix, *rest = self.parameters()
        return MuonAdamW([{"params": [matrix], "rule": "muon"}, {"params": rest, "rule": "adamw"}], lr=0.01)


def data(batch=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(192, 16, generator=generator)
    labels = (images.mean(1) * 8 + 2).long().clamp(0, 3)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch)


def fit(strategy, *, kind=Net, adamw=False, wrapped=None, epochs=1, ckpt_path=None, seed=0, **options):
    L.seed_everything(seed, verbose=False)
    net = kind(adamw, wrapped)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_epochs=epochs, **QUIET, **options)
    trainer.fit(net, data(), ckpt_path=ckpt_path)
    return trainer, weights(net)


def weights(net):
    with torch.no_grad():
        parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return torch.cat([part.detach().float().reshape(-1) for part in parts])


def everywhere(number):
    """The largest on any rank."""
    largest = torch.tensor([float(number)], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def apart(a, b):
    return everywhere((a - b).abs().max())


def hsdp(compressor=None, replicate=2, shard=2, **options):
    return lgc.CompressedHSDPStrategy(compressor or dgc(), replicate, shard, **options)


def whole(replicate, shard):
    """Checkpoints are files of whole tensors."""
    return hsdp(None, replicate, shard, save_distributed_checkpoint=False)


def dgc():
    return lgc.DGC(sparsity=0.9, warmup_epochs=0, dense_epochs=0, min_elements=40)


def onebit():
    return lgc.OneBit(warmup_epochs=0, min_elements=40)


def replicas_apart(trainer):
    group = trainer.strategy.averager.ranks.group
    largest = 0.0
    for parameter in trainer.lightning_module.parameters():
        own = local(parameter).detach()
        if own.numel():
            first = own.clone()
            dist.broadcast(first, group=group, group_src=0)
            largest = max(largest, float((own - first).abs().max()))
    return everywhere(largest)


def remembered(trainer):
    """Kind -> name -> mean over replicas, in the parameters' shapes."""
    averager = trainer.strategy.averager
    memory = mean_over_ranks(averager.state_dict(), averager)["memory"]
    return whole_memory(averager, memory) if averager.shards else memory


def memory_apart(a, b):
    """The largest difference on rank 0; infinite for other names."""
    if a.keys() != b.keys() or any(a[kind].keys() != b[kind].keys() for kind in a):
        return everywhere(float("inf"))
    parts = [(a[kind][name], b[kind][name]) for kind in a for name in a[kind]]
    return everywhere(max(float((x.double() - y.double()).abs().max()) for x, y in parts))


def like_fsdp():
    """Without compression, against FSDP2's own HSDP; in bf16 gradients are rounded in another order."""
    found = {}
    for name, options in {
        "sgd, clipped": {"gradient_clip_val": 0.1},
        "adamw, accumulated": {"adamw": True, "accumulate_grad_batches": 3},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "bf16-true": {"precision": "bf16-true"},
        "several optimizers": {"kind": Several},
    }.items():
        _, ours = fit(hsdp("none"), **options)
        _, theirs = fit(FSDPsOwn(2, 2), **options)
        found[name] = apart(ours, theirs)
    return found


def trained():
    """Compressed steps, with other initial weights on each rank."""
    found = {}
    for name, options in {
        "dgc": {"gradient_clip_val": 1.0},
        "adamw": {"adamw": True, "accumulate_grad_batches": 2},
        "bf16-true": {"precision": "bf16-true"},
        "bf16-true adamw": {"precision": "bf16-true", "adamw": True},
    }.items():
        strategy, monitor = hsdp(verify_replicas_every_n_steps=4), lgc.CommunicationMonitor()
        logging_norms = LambdaCallback(on_before_optimizer_step=lambda *args: None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer, after = fit(strategy, seed=RANK, callbacks=[monitor, logging_norms], **options)
        told = [str(each.message) for each in caught]
        memory = trainer.strategy.averager.state_dict()["memory"]
        found[name] = {
            "replicas_apart": replicas_apart(trainer),
            "finite": bool(after.isfinite().all()),
            "told": [message for message in told if "update direction" in message],
            "summary": {key: monitor.summary()[key] for key in ("steps", "bytes_sent", "dense_bytes")},
            "parameters": str(next(trainer.lightning_module.parameters()).dtype),
            "memory": sorted({str(part.dtype) for parts in memory.values() for part in parts.values()}),
        }
    return found


def several():
    """Two optimizers, compressed; and a run that goes on."""
    path = FOLDER / "several"
    first, _ = fit(hsdp(onebit()), kind=Several)
    first.save_checkpoint(path)
    _, straight = fit(hsdp(onebit()), kind=Several, epochs=2)
    trainer, resumed = fit(hsdp(onebit()), kind=Several, epochs=2, ckpt_path=path)
    spent = trainer.strategy.averager.spent
    return {
        "replicas_apart": replicas_apart(trainer),
        "resumed": apart(straight, resumed),
        "ratio": spent.dense_bytes / spent.bytes_sent,
    }


def wrapped():
    """Compiled modules and activation checkpointing, against the same run without."""
    (plain, expected), found = fit(hsdp()), {}
    names = sorted(plain.strategy.averager.state_dict()["memory"]["velocity"])
    for how in ("compiled", "checkpointed"):
        trainer, after = fit(hsdp(), wrapped=how)
        same = sorted(trainer.strategy.averager.state_dict()["memory"]["velocity"]) == names
        found[how] = [apart(after, expected), same]
    return found


def checkpoints(adamw, strategies):
    """Runs that go on, and a state's way from a mesh of 2x2 over these strategies. Values: weights, memory apart."""
    folder, found = FOLDER / f"adamw={adamw}", {}
    first, here = fit(hsdp(), adamw=adamw)
    steps, memory = first.global_step, remembered(first)
    first.save_checkpoint(folder / "2x2")
    found["saving fails"] = saving_fails(first, folder / "2x2")

    _, straight = fit(hsdp(), adamw=adamw, epochs=2)
    _, resumed = fit(hsdp(), adamw=adamw, epochs=2, ckpt_path=folder / "2x2")
    found["resumed"] = apart(straight, resumed)
    path = folder / "2x2"
    for way, strategy in strategies.items():
        trainer, now = fit(strategy, adamw=adamw, ckpt_path=path, seed=1, max_steps=steps)
        found[way] = [apart(now, here), memory_apart(remembered(trainer), memory)]
        path = folder / f"{way}.ckpt"
        trainer.save_checkpoint(path)
    found["remembers"] = any(bool(part.any()) for part in memory["unsent_step" if adamw else "velocity"].values())
    return found


def saving_fails(trainer, path):
    """What is beside a checkpoint after a second one in its place has failed half way, and after a third."""
    seen, real = [], hsdp_module.save_sharded_state
    hsdp_module.save_sharded_state = lambda averager, folder: folder / 1  # a TypeError on all ranks
    try:
        trainer.save_checkpoint(path)
    except TypeError:
        seen.append((path / hsdp_module.KEY / "state.json").exists())
    hsdp_module.save_sharded_state = real
    trainer.save_checkpoint(path)
    return [*seen, sorted(each.name for each in path.parent.iterdir())]


def muon():
    """Muon needs whole matrices: against a model that is not sharded; compressed, and resumed."""
    if not hasattr(torch.optim, "Muon"):  # torch 2.8
        return None
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # it orthogonalizes in fp32
        _, sharded = fit(hsdp("none"), kind=WithMuon)
        _, entire = fit(lgc.CompressedDDPStrategy("none"), kind=WithMuon)
    dropping = lgc.GradientDropping(sparsity=0.9, min_elements=40)
    trainer, _ = fit(hsdp(dropping), kind=WithMuon)
    trainer.save_checkpoint(FOLDER / "muon")
    _, straight = fit(hsdp(dropping), kind=WithMuon, epochs=2)
    _, resumed = fit(hsdp(dropping), kind=WithMuon, epochs=2, ckpt_path=FOLDER / "muon")
    return {
        "like_whole": apart(sharded, entire),
        "replicas_apart": replicas_apart(trainer),
        "resumed": apart(straight, resumed),
    }


def evaluated():
    """A fit, a validation of a checkpoint of its weights alone, and another fit."""
    trainer, here = fit(hsdp())
    net, path = trainer.lightning_module, FOLDER / "weights"
    trainer.save_checkpoint(path, weights_only=True)
    losses = [trainer.validate(net, data(), ckpt_path=which, verbose=False)[0]["loss"] for which in (None, path)]
    kept = apart(weights(net), here)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, data())
    return {"losses": losses, "kept": kept, "steps": trainer.global_step, "replicas_apart": replicas_apart(trainer)}


class Refused(Net):
    """Whatever `shard` does instead of what it should."""

    def __init__(self, shard):
        super().__init__()
        self.shard = shard

    def configure_model(self):
        self.net = self.shard(self.net, self.device_mesh)


def refused():
    cases = {
        "not sharded": lambda net, mesh: net,
        "both dimensions": lambda net, mesh: fully_shard(net, mesh=mesh),
        "fsdp1": lambda net, mesh: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
    }
    said = {}
    for name, case in cases.items():
        try:
            L.Trainer(strategy=hsdp(), accelerator="cpu", devices=4, max_epochs=1, **QUIET).fit(Refused(case), data())
            said[name] = "taken"
        except ValueError as error:
            said[name] = str(error)
    return said


found = {
    "like_fsdp": like_fsdp(),
    "trained": trained(),
    "several": several(),
    "wrapped": wrapped(),
    "sgd": checkpoints(False, {"2x2 to 1x4": whole(1, 4), "1x4 to ddp": forced(dgc())}),
    "adamw": checkpoints(
        True,
        {
            "2x2 to 1x4": hsdp(None, 1, 4),
            "1x4 to 4x1": whole(4, 1),
            "4x1 to ddp": forced(dgc()),
            "ddp to 2x2": whole(2, 2),
        },
    ),
    "muon": muon(),
    "evaluated": evaluated(),
    "refused": refused(),
}
print(json.dumps(found))

"""Runs on every rank of a world: trainings that stop and go on from checkpoints. Prints the outcomes as one JSON line.

usage: checkpoints.py FOLDER (which the worlds share). Alone, without a world, it tries start_method="fork".
"""

import json
import logging
import os
import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from strategies import forced

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import mean_state
from lightning_gradcomp.plugin import rank_states

FOLDER, WORLD = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", 2))
KEY, BATCHES = rank_states.KEY, 8
MOMENTS = {(0, "end"): "epoch end", (1, 2): "mid-epoch", (1, 4): "mid-accumulation"}
"""After which batch of which epoch a checkpoint is saved. Three batches are a step; the last is the second of three."""
QUICK = {"min_elements": 32, "warmup_epochs": 0, "dense_epochs": 0, "sparsity": 0.9}


GROWS = ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), (0.0, 1.0, 2.0, 4.0, 3.0, 5.0))
"""A metric of each rank's own. The two best before the last step are the same, and the second of them is not."""


class Net(L.LightningModule):
    """Its data depend on rank, epoch and batch alone, so a run that goes on sees those that it has not seen yet."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Linear(40, 12))

    def training_step(self, _, index):
        generator = torch.Generator().manual_seed(1000 * self.current_epoch + 10 * index + self.global_rank)
        images = torch.randn(4, 12, generator=generator)
        loss = (self.layers(images) - images.flip(1)).square().mean()
        self.log("grows", GROWS[dist.get_rank() % 2][min(self.global_step, 5)])
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Watch(L.Callback):
    """Calls `save(trainer, moment)` at every moment, and notes what is there when training starts."""

    def __init__(self, save):
        self.save = save

    def on_train_start(self, trainer, *_):
        self.memory = trainer.strategy.averager.state_dict()["memory"]
        state, named = trainer.optimizers[0].state, trainer.lightning_module.named_parameters()
        self.momentum = {name: state[p]["momentum_buffer"].clone() for name, p in named if p in state}

    def on_train_batch_end(self, trainer, *args):
        self._at(trainer, args[-1])

    def on_train_epoch_end(self, trainer, *_):
        self._at(trainer, "end")

    def _at(self, trainer, batch):
        moment = MOMENTS.get((trainer.current_epoch, batch))
        if self.save and moment:
            self.save(trainer, moment)


class Slow(TorchCheckpointIO):
    """Checkpoints that stand only when training has gone on for a while."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        time.sleep(0.2)
        super().save_checkpoint(checkpoint, path, storage_options)


def quick(cls, **options):
    known = {field.name for field in fields(cls)}
    return cls(**{key: value for key, value in QUICK.items() if key in known}, **options)


def fit(compressor, state="gather", ckpt=None, save=None, callbacks=(), plugins=None, nodes=1, **options):
    """Train two epochs from seed 0; returns (trainer, all weights in one vector, the Watch)."""
    L.seed_everything(0, verbose=False)
    net, watch = Net(), Watch(save)
    trainer = L.Trainer(
        strategy=forced(compressor=compressor, checkpoint_state=state, **options), accelerator="cpu",
        devices=WORLD // nodes, num_nodes=nodes, max_epochs=2,
        accumulate_grad_batches=3, use_distributed_sampler=False, logger=False,
        callbacks=[watch, *callbacks], plugins=plugins, enable_checkpointing=bool(callbacks),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(range(BATCHES)), ckpt_path=ckpt)
    return trainer, torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]), watch


def apart(a, b):
    """Largest difference between two vectors, over all ranks."""
    difference = (a - b).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def stops(name, compressor, state="gather", where=FOLDER, moments=("mid-accumulation",), plugins=None, **options):
    """Moment -> how far the run that goes on from there is from the straight run; by default where most is held.

    Rank 0 alone is told where to save.
    """
    folder = f"{where}/{WORLD}-{name}-{state}"
    told = folder if os.environ["RANK"] == "0" else FOLDER / "nowhere"
    save = lambda trainer, moment: trainer.save_checkpoint(f"{told}/{moment}.ckpt")  # noqa: E731
    straight = fit(compressor, state, save=save, plugins=plugins, **options)[1]
    resumed = {when: fit(compressor, state, f"{folder}/{when}.ckpt", **options)[1] for when in moments}
    return {when: apart(straight, weights) for when, weights in resumed.items()}


def exact():
    """From every moment where DGC has its sidecar, and its one file."""
    result = {f"dgc {state}": stops("dgc", DGC, state, moments=MOMENTS.values()) for state in ("gather", "sidecar")}
    for name, compressor in {"none": "none", "onebit": ONEBIT, "powersgd": quick(lgc.PowerSGD)}.items():
        result[f"{name} gather"] = stops(name, compressor)
    return {**result, **shards_and_draws()}


def exact_on_three():
    return {"dgc gather": stops("dgc", DGC), **shards_and_draws()}


def shards_and_draws():
    """What depends on the number of ranks."""
    return {
        "dgc two_phase": stops("two_phase", DGC, topology="two_phase"),
        "terngrad sidecar": stops("terngrad", FED_BACK, "sidecar"),
    }


def other_ways():
    """In the background, to a URL, too much for one file, on two nodes; and those that don't keep everything."""
    result = {"async": stops("async", DGC, plugins=[AsyncCheckpointIO(Slow())])}
    result["url"] = stops("url", DGC, "sidecar", f"file://{FOLDER}")
    with mock.patch.object(rank_states, "GATHER_LIMIT", 1):
        result["limit"] = stops("limit", DGC, "auto")
        stops("limit", DGC, "gather", moments=())
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        result["nodes"] = stops("nodes", DGC, "auto", nodes=2)
        stops("nothing", "none", "auto", moments=(), nodes=2)
    result["auto"] = stops("dgc", DGC, "auto")
    return {**result, **{state: stops("dgc", DGC, state) for state in ("mean", "drop")}}


def best():
    """Six checkpoints, of which the last is the best and two are kept; "last.ckpt" is a link to it."""
    folder = FOLDER / f"{WORLD}-best"
    options = {"monitor": "grows", "mode": "max", "save_top_k": 2, "save_last": "link", "every_n_train_steps": 1}
    straight = fit(DGC, "sidecar", callbacks=[ModelCheckpoint(folder, "{step}", **options)])[1]
    left = sorted(os.listdir(folder))
    return {"left": left, "apart": apart(straight, fit(DGC, "sidecar", folder / "last.ckpt")[1])}


class Edit(L.Callback):
    """Removes one parameter's momentum from the checkpoint, and halves the bits of another's."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        state = checkpoint["optimizer_states"][0]["state"]
        state[0]["momentum_buffer"] = state[0]["momentum_buffer"].half()
        del state[2]


def edited():
    """Number of the parameter -> type of its momentum, in a checkpoint that a hook edits."""
    path = FOLDER / f"{WORLD}-edited.ckpt"
    nothing = ModelCheckpoint(FOLDER / "nothing", save_top_k=0)
    fit(DGC, callbacks=[Edit(), nothing])[0].save_checkpoint(path)
    [saved] = torch.load(path, weights_only=True)["optimizer_states"]
    return {index: str(each["momentum_buffer"].dtype) for index, each in saved["state"].items()}


def own_disks():
    """Two saves of one name, on a disk of each rank's own; what is left on each."""
    disk = FOLDER / f"{WORLD}-disk-{dist.get_rank()}"
    trainer = fit(DGC, "sidecar")[0]
    disk.mkdir()
    os.chdir(disk)
    trainer.save_checkpoint("old.ckpt")
    trainer.strategy.remove_checkpoint("old.ckpt")
    for _ in range(2):
        trainer.save_checkpoint("last.ckpt")
    left = [None] * WORLD
    dist.all_gather_object(left, sorted(os.listdir(disk)))
    return left


def off(memory, expected):
    """How far any rank, and the mean over ranks, is from what was `expected`; None where nothing is there."""
    pairs = [(memory[kind].get(name), part) for kind in memory for name, part in expected.get(kind, {}).items()]
    if any(part is None for part, _ in pairs) or not pairs:
        return None
    each = max(apart(part, wanted) for part, wanted in pairs)
    for part, _ in pairs:
        dist.all_reduce(part)
    return {"each": each, "mean": max(apart(part / WORLD, wanted) for part, wanted in pairs)}


def from_two_ranks():
    """What a run begins with that goes on from a checkpoint of two ranks, in several ways."""
    path = f"{FOLDER}/2-dgc-{{}}/mid-epoch.ckpt".format
    expected, result = mean_state(torch.load(path("gather"), weights_only=True)[KEY]["ranks"])["memory"], {}
    ways = [(DGC, state, state) for state in ("gather", "sidecar", "mean")]
    ways += [(DGC, "drop", "gather"), (ONEBIT, "gather", "gather")]
    for compressor, state, source in ways:
        said.clear()
        _, weights, watch = fit(compressor, state, path(source))
        first = weights.clone()
        dist.broadcast(first, 0)
        result[f"{type(compressor).__name__} {state}"] = {
            "memory": off(watch.memory, expected), "momentum": off({"momentum": watch.momentum}, expected),
            "said": said[:], "replicas": apart(weights, first),
        }  # fmt: skip
    return result


def spawned():
    """How far what the main process saves afterwards is from the weights that it got back.

    Lightning has one launcher for "spawn" and "fork"; forked ranks need not import everything again.
    """
    trainer, weights, _ = fit(DGC, start_method="fork", callbacks=[ModelCheckpoint(FOLDER / "spawned")])
    trainer.save_checkpoint(FOLDER / "spawned.ckpt")
    saved = torch.load(FOLDER / "spawned.ckpt", weights_only=True)
    off = (torch.cat([part.reshape(-1) for part in saved["state_dict"].values()]) - weights).abs().max().item()
    return {"off": off}


DGC, ONEBIT, FED_BACK = quick(lgc.DGC), quick(lgc.OneBit), quick(lgc.TernGrad, error_feedback=True)
PARTS = {2: (exact, other_ways, best, edited, own_disks, from_two_ranks), 3: (exact_on_three, from_two_ranks)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    said = []
    logger, handler = logging.getLogger("lightning.pytorch"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.handlers, logger.propagate = [handler], False
    parts = PARTS[WORLD] if "RANK" in os.environ else (spawned,)
    outcome = {part.__name__: part() for part in parts}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(outcome))

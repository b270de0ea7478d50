"""CompressedHSDPStrategy: FSDP2 inside a replica, compressed averages between replicas.

The ranks form a mesh (replicate, shard). FSDP2 uses only the shard dimension: it gathers weights, and averages and
shards gradients, among the ranks of one replica, which share a fast link. The `GradientAverager` averages each rank's
shards with the ranks that hold the same shards of other replicas, after backward, once per optimizer step.

Private Lightning names used here: ModelParallelStrategy's `_setup_distributed`, `_device_mesh` (which
`LightningModule.device_mesh` reads) and `_save_distributed_checkpoint`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import init_device_mesh

from lightning_gradcomp.averaging import save_sharded_state
from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.fsdp.checkpoint import whole_memory
from lightning_gradcomp.averaging.fsdp.shards import MESH, is_sharded, local, mesh_shape, reshard
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import broadcast_unless_identical, replicated_buffers
from lightning_gradcomp.averaging.trainable import parameters_of
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.base import build
from lightning_gradcomp.errors import check_flag, is_whole, refusal
from lightning_gradcomp.plugin.base_strategy import has_optimizer_states, warn_of_stale_addresses
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, no_code
from lightning_gradcomp.plugin.gradient_strategy import GradientStrategy
from lightning_gradcomp.plugin.manual_steps import Turn
from lightning_gradcomp.plugin.rank_states import (
    FORMAT,
    KEY,
    RankStates,
    all_ranks_present,
    mean_over_ranks,
    name_of,
)
from lightning_gradcomp.plugin.validation import check_verification


class CompressedHSDPStrategy(GradientStrategy, ModelParallelStrategy):
    """FSDP2 inside a replica, compressed averages between replicas: for models that don't fit one GPU.

        class Model(L.LightningModule):
            def configure_model(self):
                for block in self.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["shard"])
                fully_shard(self.net, mesh=self.device_mesh["shard"])

        Trainer(strategy=CompressedHSDPStrategy(compressor="dgc", shard=8), devices=8, num_nodes=4)

    Args:
        compressor: a compressor, or its name. Each rank compresses its own shards, so options such as sparsity or rank
            apply per shard.
        replicate: number of replicas. "auto": one for every `shard` ranks.
        shard: number of ranks that share a replica. "auto": the ranks of a node, or all ranks divided by `replicate`.
            On one node, with both "auto", nothing is exchanged.
        timeout: how long a rank waits for the others before it raises an error.
        verify_replicas_every_n_steps: compares a checksum of every shard across the replicas at this interval; also
            detects every write into local weights.
        local_weights: computes gradients at the shared weights minus this rank's own unsent steps, if the compressor
            owns the momentum. False: at the shared weights, which costs accuracy.
        save_distributed_checkpoint: True: a checkpoint is a folder with each rank's shards and residuals, which a mesh
            of any shape can load. False: one file with whole tensors and the replicas' mean residual, which
            `CompressedDDPStrategy` can load too. Lightning loads files only if the optimizer keeps a state, unlike SGD
            without momentum, and only into models without activation checkpointing.
        process_group_backend: "nccl" or "gloo", as for `ModelParallelStrategy`. Default: Lightning's choice.

    Raises:
        ValueError: before training starts, if an option, a mesh, a model, a Trainer feature or an optimizer is not
            supported.
    """

    no_sync_batchnorm = "FSDP2 does not convert the layers; convert them in configure_model()"

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        replicate: int | str = "auto",
        shard: int | str = "auto",
        timeout: timedelta = TIMEOUT,
        verify_replicas_every_n_steps: int | None = None,
        local_weights: bool = True,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        for name, size in (("replicate", replicate), ("shard", shard)):
            if size != "auto" and (not is_whole(size) or size < 1):
                raise refusal(f"CompressedHSDPStrategy.{name}", size, "'auto', or a whole number from 1")
        check_verification(verify_replicas_every_n_steps)
        check_flag("CompressedHSDPStrategy.local_weights", local_weights)
        check_flag("CompressedHSDPStrategy.save_distributed_checkpoint", save_distributed_checkpoint)
        self.compressor = build(compressor)
        self.replicate, self.shard = replicate, shard
        self.verify_replicas_every_n_steps, self.local_weights = verify_replicas_every_n_steps, local_weights
        self._accumulating = False

    # Around a fit

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        mesh_shape(self.replicate, self.shard, self.num_nodes, self.num_processes)
        if not is_overridden("configure_model", module):
            allowed = "a configure_model() that calls fully_shard(..., mesh=self.device_mesh['shard'])"
            raise refusal(f"{type(module).__name__} with CompressedHSDPStrategy", "no configure_model()", allowed)
        super().check(trainer, module)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank has its own data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Join the other processes, and make the mesh that `configure_model` finds in `self.device_mesh`."""
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        warn_of_stale_addresses()
        shape = mesh_shape(self.replicate, self.shard, self.num_nodes, self.num_processes)
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=MESH)
        self.pl_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        if not is_sharded(self.pl_module):
            allowed = "fully_shard(..., mesh=self.device_mesh['shard']) of the modules that have parameters"
            raise refusal("configure_model() with CompressedHSDPStrategy", "a model that is not sharded", allowed)
        reshard(self.pl_module)  # an earlier validation leaves whole parameters
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Like `ModelParallelStrategy`'s. Also copies the first replica's weights and rank 0's buffers to all."""
        super().model_to_device()
        assert self.model is not None
        with self.explained("sharing the initial weights"):
            shards = [shard for parameter in self.model.parameters() if (shard := local(parameter)).numel()]
            broadcast_unless_identical(shards, Ranks(self.device_mesh.get_group("replicate")))
            buffers = [*replicated_buffers(self.model).values()]
            broadcast_unless_identical(buffers, Ranks(torch.distributed.group.WORLD))

    def averager_options(self) -> dict[str, Any]:
        return {
            "process_group": self.device_mesh.get_group("replicate"),
            "local_weights": self.local_weights,
        }

    # Steps

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate: replicas do not average after backward."""
        self._accumulating = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._accumulating = False

    def after_backward(self) -> Turn | None:
        if self.pl_module.automatic_optimization:
            return None if self._accumulating else Turn()
        trainable = [p for p in self.pl_module.parameters() if p.requires_grad]
        return self._manual_steps.after_backward(self.averager, trainable, accumulates=self._accumulating)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that all replicas share, after `agree`. Collective, unless the fit was interrupted."""
        if self.averager is not None and self.averager.in_local_weights:
            allowed = "before the forward pass or after backward, or local_weights=False for the strategy"
            raise refusal("saving the weights of a sharded model", "between forward and backward", allowed)
        if all_ranks_present(self.lightning_module):
            self.agree()  # torch saves any rank's buffers
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state as without compression, including the momentum that the averager keeps."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.averager is None or not all_ranks_present(self.lightning_module):
            return super().optimizer_state(optimizer)
        with self.explained("saving a checkpoint"):
            own = {*parameters_of(optimizer)}
            kept = {each: state for each, state in self.averager.optimizer_state().items() if each in own}
            before = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in kept}
            for parameter, state in kept.items():
                optimizer.state[parameter].update(state)
            try:
                return super().optimizer_state(optimizer)
            finally:
                for parameter, state in before.items():
                    optimizer.state[parameter] = state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Like `ModelParallelStrategy`'s, plus the states of the replicas if there is an optimizer's."""
        averager, folder = self.averager, None
        with_states = self.broadcast(has_optimizer_states(checkpoint))  # a hook may have removed them on one rank
        if with_states and averager is not None and all_ranks_present(self.lightning_module):
            saved: dict[str, Any] = {"format": FORMAT, "compressor": name_of(averager), "world_size": averager.world}
            checkpoint[KEY] = saved
            if self._save_distributed_checkpoint:
                saved["sharded"] = folder = KEY
            else:
                with self.explained("saving a checkpoint"):
                    mean = mean_over_ranks(averager.state_dict(), averager)
                    saved["mean"] = {**mean, "memory": whole_memory(averager, mean["memory"])}
        with self.explained("saving a checkpoint"):
            if not self._save_distributed_checkpoint:
                super().save_checkpoint(checkpoint, filepath, storage_options)
                return
            path = Path(self.broadcast(filepath))
            with _replaced(path, self.barrier) as part:
                super().save_checkpoint(checkpoint, part, storage_options)
                if folder is not None and averager is not None:
                    save_sharded_state(averager, part / folder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Like `ModelParallelStrategy`'s, for a folder or a file. Runs no code from it unless weights_only=False is
        given, but torch reads a folder's list of contents (`.metadata`) as a pickle."""
        path = self.broadcast(checkpoint_path)
        averager, fitting = self.averager, self.pl_module.trainer.state.fn == TrainerFn.FITTING
        with self.explained("loading a checkpoint"), no_code(weights_only), ExitStack() as afterwards:
            if not fitting:  # only weights, which an earlier fit's optimizers don't match
                afterwards.callback(setattr, self, "optimizers", self.optimizers)
                self.optimizers = []
            checkpoint = super().load_checkpoint(path, weights_only)
            if averager is not None and fitting:
                averager.steps = checkpoint.get("global_step", 0)
                RankStates("mean", Sidecars(self.checkpoint_io), self.num_nodes).restore(checkpoint, path, averager)
        return checkpoint


@contextmanager
def _replaced(path: Path, barrier: Callable[[], None]) -> Iterator[Path]:
    """A new folder for all ranks to write into. At the end it replaces `path`, which is kept until then. Collective."""
    part, old = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.old")
    first = torch.distributed.get_rank() == 0
    if first:
        _remove(part)  # left by a run that stopped while writing
    barrier()
    yield part
    barrier()
    if first:
        _remove(old)
        if path.exists():
            path.rename(old)
        part.rename(path)
        _remove(old)
    barrier()


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, but not a link's target (`ModelCheckpoint(save_last="link")` makes links)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

"""CompressedDDPStrategy: DDP with compressed gradient averages.

DDP wraps the model, and its communication hook (plugin/ddp_hook.py) averages only dense steps. The `GradientAverager`
averages compressed steps: after backward, before Lightning's `on_after_backward`. If several optimizers train in manual
optimization, it averages when an optimizer steps, before Lightning's `on_before_optimizer_step`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.base import build
from lightning_gradcomp.errors import check_flag, refusal
from lightning_gradcomp.plugin.base_strategy import DDPBase
from lightning_gradcomp.plugin.ddp_hook import DDPHook, sent_if_they_differ, spare_buffers
from lightning_gradcomp.plugin.gradient_strategy import GradientStrategy
from lightning_gradcomp.plugin.manual_steps import Turn
from lightning_gradcomp.plugin.rank_states import (
    OptimizerState,
    export_optimizer_state,
    mean_optimizer_state,
    own_optimizer_state,
)
from lightning_gradcomp.plugin.validation import (
    check_checkpoint_state,
    check_clipping,
    check_ddp_options,
    check_verification,
)


class CompressedDDPStrategy(GradientStrategy, DDPBase):
    """Data-parallel training with compressed gradients.

        Trainer(strategy=CompressedDDPStrategy(compressor=DGC(sparsity=0.999)), devices=2)

    Args:
        compressor: a compressor, or its name.
        topology: how payloads travel, as for `GradientAverager`. "auto" depends on the clock, so name another if runs
            must be bit-identical.
        inside: what a node's ranks average first, as for `GradientAverager`.
        fallback: the format of steps that topology="auto" does not compress, as for `GradientAverager`.
        checkpoint_state: how a checkpoint saves the residuals. "gather": all of them, in the checkpoint. "sidecar": a
            file per rank in a folder next to the checkpoint. "auto": "gather" on one node up to 1 GiB, otherwise
            "sidecar". "mean": one copy of their mean; a resumed run is then not exact. "drop": none.
        timeout: how long a rank waits for the others before it raises an error. Increase it if one rank works alone,
            for example to prepare data.
        verify_replicas_every_n_steps: compares a checksum of every parameter across the ranks at this interval; also
            detects every write into local weights.
        local_weights: computes gradients at the shared weights minus this rank's own unsent steps, if the compressor
            owns the momentum. False: at the shared weights, which costs accuracy; the module may then write into its
            weights in `training_step`.
        gradient_as_bucket_view: as for `DDPStrategy`. The default, True, saves DDP a pass over its buckets.
        ddp_options: everything else that `DDPStrategy` takes, except options that change how gradients are averaged.

    Raises:
        ValueError: before training starts, if an option, a Trainer feature or an optimizer is not supported.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        inside: str | None = None,
        fallback: str = "none",
        checkpoint_state: str = "auto",
        timeout: timedelta = TIMEOUT,
        verify_replicas_every_n_steps: int | None = None,
        local_weights: bool = True,
        gradient_as_bucket_view: bool = True,
        **ddp_options: Any,
    ) -> None:
        check_ddp_options("CompressedDDPStrategy", ddp_options)
        check_checkpoint_state(checkpoint_state)
        check_verification(verify_replicas_every_n_steps)
        check_flag("CompressedDDPStrategy.local_weights", local_weights)
        super().__init__(timeout=timeout, **ddp_options)
        self._ddp_kwargs = {**self._chosen_ddp_options, "gradient_as_bucket_view": gradient_as_bucket_view}
        self.checkpoint_state = checkpoint_state
        self.verify_replicas_every_n_steps = verify_replicas_every_n_steps
        self.compressor = build(compressor)
        resolve(topology, inside, self.compressor, fallback)  # checks them
        self._averager_options: dict[str, Any] = {
            "topology": topology,
            "inside": inside,
            "fallback": fallback,
            "local_weights": local_weights,
        }
        self._exported: OptimizerState = {}
        """The momentum in the checkpoint that is being made."""

    # Around a fit

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        super().check(trainer, module)
        if "torch._dynamo" in sys.modules and torch._dynamo.config.optimize_ddp == "python_reducer":
            allowed = "True or False: this value calls DDP's hook with other arguments"
            raise refusal("torch._dynamo.config.optimize_ddp", "python_reducer", allowed)
        if self.compressor.needs_optimizer:
            check_clipping(self.compressor, None, trainer, module)

    def configure_ddp(self) -> None:
        module = self.pl_module
        with self.explained("sharing the initial weights"), sent_if_they_differ(module, self._ddp_kwargs):
            super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        as_ddp_does = {"broadcast_buffers", "forward_sync_buffers"}.isdisjoint(self._ddp_kwargs)
        self._shares_buffers = self.model.broadcast_buffers
        if as_ddp_does:
            spare_buffers(self.model, self.compressor)
        self._hook = DDPHook(self.model, None if module.automatic_optimization else self._manual_steps)

    def averager_options(self) -> dict[str, Any]:
        return {**self._averager_options, "ranks_per_node": self.num_processes}

    def on_train_start(self) -> None:
        self.rank_states.put_back_accumulated(self.averager)
        super().on_train_start()

    def teardown(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self._hook.release()
        super().teardown()

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._hook.forward(self._decision):
            return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        automatic = self.pl_module.automatic_optimization  # else a batch may have several steps
        decision = self._decision if automatic else self.averager.begin_step()
        self._hook.before_backward(self.averager, decision, self._grad_scale)
        super().pre_backward(closure_loss)

    def after_backward(self) -> Turn | None:
        return self._hook.after_backward(self.averager)

    # Checkpoints

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state, with this rank's momentum as plain tensors, which callbacks may change or remove.

        Those that are still in the checkpoint when it is saved then become the mean over ranks.
        """
        state = super().optimizer_state(optimizer)
        if self.averager is not None:
            self._exported = own_optimizer_state(self.averager)
            export_optimizer_state(self._exported, getattr(optimizer, "_optimizer", optimizer), state)
        return state

    def put_states(self, checkpoint: dict[str, Any], path: Any, with_states: bool) -> dict[str, Any]:
        """Add all ranks' states. The momentum in the optimizers' states becomes its mean over ranks."""
        if with_states:
            states = self.rank_states.put_into(checkpoint, path, self.averager, self._hook.accumulating)
            for parameter, means in mean_optimizer_state(states, self.averager).items():
                for name, exported in self._exported.get(parameter, {}).items():
                    exported.copy_(means[name])
        self._exported = {}
        return checkpoint

    def restore_states(self, checkpoint: Mapping[str, Any]) -> None:
        self.rank_states.restore(checkpoint, self._loaded_from, self.averager)

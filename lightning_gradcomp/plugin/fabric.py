"""The same averaging for Lightning Fabric: `Fabric(strategy="dgc")`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.types import Optimizable
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.ddp_switch import DDPSwitch
from lightning_gradcomp.registry import build


class CompressedFabricStrategy(DDPStrategy):
    """Data-parallel training in Fabric whose gradients travel compressed. One module, set up with its optimizer.

        fabric = Fabric(strategy="dgc", devices=2)
        model, optimizer = fabric.setup(model, optimizer)
        for epoch in range(epochs):
            fabric.strategy.set_epoch(epoch)      # or steps_per_epoch=... for the strategy

    Args:
        compressor: a compressor, or its name.
        topology: as in `CompressedDDPStrategy`.
        inside: likewise.
        residual_device: likewise.
        steps_per_epoch: lets a warm-up that counts epochs count them; else call `set_epoch`.
        timeout: how long a rank waits for the others, anywhere; then it ends with an error.
        ddp_options: everything that Fabric's `DDPStrategy` takes.

    Raises:
        ValueError: an option, a second module or an optimizer that can't be honoured.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        inside: str | None = None,
        residual_device: str | None = None,
        steps_per_epoch: int | None = None,
        timeout: timedelta = TIMEOUT,
        **ddp_options: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp_options)
        self.compressor: Compressor = build(compressor)
        resolve(topology, inside, residual_device, self.compressor)  # raises
        self._travel = {"topology": topology, "inside": inside, "residual_device": residual_device}
        self.steps_per_epoch = steps_per_epoch
        self.averager: GradientAverager | None = None
        """Made at the first backward, when module and optimizer are known."""
        self._epoch: int | None = None
        self._ddp: DistributedDataParallel | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def set_epoch(self, epoch: int) -> None:
        """Tell the warm-up which epoch begins."""
        self._epoch = epoch

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        if self._ddp is not None:
            raise refusal("modules set up with CompressedFabricStrategy", "a second one", "one")
        self._ddp = super().setup_module(module)
        self._switch = DDPSwitch(self._ddp)
        return self._ddp

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.compressor.owns_momentum and self._optimizer is not None:
            raise refusal(f"optimizers with {type(self.compressor).__name__}", "a second one", "one")
        self._optimizer = optimizer
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        averager = self._averager()
        averager.epoch = self._epoch
        self._switch.before_backward(averager, self.precision)
        super().backward(tensor, module, *args, **kwargs)
        self._switch.after_backward(averager)

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        assert isinstance(optimizer, torch.optim.Optimizer)
        with self._averager().taken_over(optimizer):
            result = super().optimizer_step(optimizer, **kwargs)
        self._switch.spent()
        return result

    def _averager(self) -> GradientAverager:
        if self.averager is None:
            assert self._ddp is not None
            self.averager = GradientAverager(
                self._ddp.module,
                self.compressor,
                optimizer=self._optimizer,
                ranks_per_node=self.num_processes,
                **self._travel,
                steps_per_epoch=self.steps_per_epoch,
                epoch=self._epoch,
            )
        return self.averager

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: names come from the registry of compressors. (Inherited, it would claim "ddp" again.)"""

"""How gradients travel, and when they arrive: torch.distributed, no Lightning."""

from lightning_gradcomp.averaging.averager import GradientAverager
from lightning_gradcomp.averaging.delayed import DelayedAverager
from lightning_gradcomp.averaging.elastic import mean_state
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.rounds import Nesterov

__all__ = ["DelayedAverager", "GradientAverager", "Nesterov", "Stats", "mean_state"]

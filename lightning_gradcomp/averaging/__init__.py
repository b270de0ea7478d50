"""How gradients travel, and when they arrive: torch.distributed, no Lightning."""

from lightning_gradcomp.averaging.averager import GradientAverager
from lightning_gradcomp.averaging.elastic import mean_state
from lightning_gradcomp.averaging.meter import Stats

__all__ = ["GradientAverager", "Stats", "mean_state"]

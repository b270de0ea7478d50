"""Gradient exchange on torch.distributed, without Lightning."""

from lightning_gradcomp.averaging.averager import GradientAverager
from lightning_gradcomp.averaging.checkpoint_state import mean_state
from lightning_gradcomp.averaging.fsdp.checkpoint import load_sharded_state, save_sharded_state
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.topology import Decision

__all__ = ["Decision", "GradientAverager", "Stats", "load_sharded_state", "mean_state", "save_sharded_state"]

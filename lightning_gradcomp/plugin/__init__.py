"""The Lightning layer. Importing it registers every compressor as a strategy name of the Trainer and of Fabric.

"dga", "sparseloco" and "dist_async" are for the Trainer only. In Fabric, users write the loop and can call
`DelayedAverager` and `AsyncAverager` themselves.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gradcomp.compressors import SPARSELOCO
from lightning_gradcomp.plugin.async_strategy import AsyncStrategy
from lightning_gradcomp.plugin.communication_monitor import CommunicationMonitor
from lightning_gradcomp.plugin.delayed import DelayedStrategy
from lightning_gradcomp.plugin.fabric import CompressedFabricStrategy
from lightning_gradcomp.plugin.hsdp import CompressedHSDPStrategy
from lightning_gradcomp.plugin.sparsity_warmup import SparsityWarmup
from lightning_gradcomp.plugin.strategy import CompressedDDPStrategy
from lightning_gradcomp.registry import Entry, notify

__all__ = [
    "AsyncStrategy",
    "CommunicationMonitor",
    "CompressedDDPStrategy",
    "CompressedFabricStrategy",
    "CompressedHSDPStrategy",
    "DelayedStrategy",
    "SparsityWarmup",
]


def _name_strategy(entry: Entry) -> None:
    for registry, cls in ((StrategyRegistry, CompressedDDPStrategy), (STRATEGY_REGISTRY, CompressedFabricStrategy)):
        registry.register(entry.strategy, cls, description=entry.description, override=True, compressor=entry.name)


notify(_name_strategy)
for name, strategy in (("dga", DelayedStrategy), ("dist_async", AsyncStrategy)):
    StrategyRegistry.register(name, strategy, description=(strategy.__doc__ or "").splitlines()[0], override=True)
StrategyRegistry.register(
    "sparseloco",
    DelayedStrategy,
    description="Local steps, and 1.6 % of their sum in 2 bits.",
    override=True,
    **SPARSELOCO,
)

"""strategy=hsdp: which modules of a network are sharded by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.averaging.fsdp import Sharding
from lightning_gradcomp.averaging.gradients import check_shards
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal

SMALLEST = 10_000
"""Parameters of a block that is sharded by itself. The weights of a smaller one are gathered with the rest."""


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a network: what is in an `nn.Sequential` or an `nn.ModuleList`, and is none itself.

    They are Swin's and ViT's transformer blocks, and the residual blocks of ResNets. What a block is made of is not
    looked at. A network without such lists has no blocks.
    """
    for child in network.children():
        if isinstance(network, (nn.Sequential, nn.ModuleList)) and not isinstance(child, (nn.Sequential, nn.ModuleList)):
            if sum(parameter.numel() for parameter in child.parameters()) >= SMALLEST:
                yield child
        else:
            yield from blocks(child)


class ShardedClassifier(Classifier):
    """A `Classifier` whose blocks, and all the rest of its network, are sharded among the ranks of a replica.

    Args:
        compiled: torch.compile of each block; of the whole network where there are no blocks.
    """

    def __init__(self, *args: Any, compiled: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compiled = compiled

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return  # Lightning calls this again for another fit
        assert self.device_mesh is not None
        mesh, own = self.device_mesh["shard"], list(blocks(self.model))
        for module in own or [self.model]:
            if self.compiled:
                module.compile()
        for module in [*own, self.model]:
            fully_shard(module, mesh=mesh)


def check(network: nn.Module, compressor: Compressor, shards: int) -> None:
    """ValueError for a network that can't be divided among so many ranks, or whose shards the compressor can't take."""
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    for name, shape in shapes.items():
        if not shape:
            raise refusal(f"the shape of parameter {name!r} with strategy=hsdp", shape, "one dimension or more")
    last = {name: Sharding(0, shards).shape(shape, shards - 1) for name, shape in shapes.items()}
    check_shards(compressor, compressor.choose(shapes), last)

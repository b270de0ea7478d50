"""strategy=hsdp: which modules of a network are sharded by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.app.options.training import SGD
from lightning_gradcomp.averaging.fsdp import Sharding
from lightning_gradcomp.averaging.gradients import check_shards
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal

LISTS = (nn.Sequential, nn.ModuleList)


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a network: modules in an `nn.Sequential` or `nn.ModuleList` that have layers, and are no such list.

    They are the transformer blocks of Swin and ViT, the residual blocks of ResNet. There may be none.
    """
    for child in network.children():
        if not isinstance(network, LISTS) or isinstance(child, LISTS):
            yield from blocks(child)
        elif list(child.children()) and list(child.parameters()):
            yield child


class ShardedClassifier(Classifier):
    """A `Classifier` whose blocks, and all the rest of its network, are sharded among the ranks of a replica.

    Args:
        compiled: torch.compile of each block; of the whole network where there are no blocks.
    """

    def __init__(self, *args: Any, compiled: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compiled = compiled
        if isinstance(self.options, SGD):  # torch can't run its fused kernel on shards
            self.options = replace(self.options, fused=False)

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return  # Lightning calls this again for another fit
        assert self.device_mesh is not None
        mesh, own = self.device_mesh["shard"], list(blocks(self.model))
        if self.compiled:
            # Blocks of one class are one function to dynamo, with a graph for each of them to train and to validate.
            config = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, 2 * len(own))
            for module in own or [self.model]:
                module.compile()
        for module in [*own, self.model]:
            fully_shard(module, mesh=mesh)


def check(module: Classifier, compressor: Compressor, shards: int) -> None:
    """ValueError for a model that can't be divided into so many shards, or whose shards the compressor can't take."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, shape in shapes.items():
        if not shape:
            raise refusal(f"the shape of parameter {name!r} with strategy=hsdp", shape, "one dimension or more")
    last = {name: Sharding(0, shards).shape(shape, shards - 1) for name, shape in shapes.items()}
    check_shards(compressor, compressor.choose(shapes), last)

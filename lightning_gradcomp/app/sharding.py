"""strategy=hsdp: which modules of a network are sharded by themselves, and whether a compressor takes the shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from lightning_gradcomp.averaging.fsdp.shards import Sharding
from lightning_gradcomp.averaging.gradients import check_shards
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal

if TYPE_CHECKING:
    from lightning_gradcomp.app.classifier import Classifier

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


def check(module: Classifier, compressor: Compressor, shards: int) -> None:
    """ValueError for a model that can't be divided into so many shards, or whose shards the compressor can't take."""
    if module.channels_last:
        raise refusal("task.channels_last with strategy=hsdp", True, "false: FSDP2 does not take such weights")
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, shape in shapes.items():
        if not shape:
            raise refusal(f"the shape of parameter {name!r} with strategy=hsdp", shape, "one dimension or more")
    last = {name: Sharding(0, shards).shape(shape, shards - 1) for name, shape in shapes.items()}
    check_shards(compressor, compressor.choose(shapes), last)

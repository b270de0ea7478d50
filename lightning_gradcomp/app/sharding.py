"""strategy=hsdp: which modules of a network are sharded separately, and whether a compressor accepts the shards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_gradcomp.averaging.fsdp.shards import Sharding
from lightning_gradcomp.averaging.gradients import check_shards
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal

LISTS = (nn.Sequential, nn.ModuleList)


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a network: modules with layers in an `nn.Sequential` or `nn.ModuleList`, other than such lists.

    These are the transformer blocks of Swin and ViT and the residual blocks of ResNet. There may be none.
    """
    for child in network.children():
        if not isinstance(network, LISTS) or isinstance(child, LISTS):
            yield from blocks(child)
        elif list(child.children()) and list(child.parameters()):
            yield child


def check(module: nn.Module, compressor: Compressor, shards: int) -> None:
    """Raises ValueError if the model can't be divided into `shards`, or the compressor can't handle its shards."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, shape in shapes.items():
        if not shape:
            raise refusal(f"the shape of parameter {name!r} with strategy=hsdp", shape, "one dimension or more")
    last = {name: Sharding(0, shards).shape(shape, shards - 1) for name, shape in shapes.items()}
    check_shards(compressor, compressor.choose(shapes), last)

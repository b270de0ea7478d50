"""Which parameters can be trained: dense ones of real numbers. A frozen one may be of any kind."""

from __future__ import annotations

from torch import nn

from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import refusal


def check_trainable(model: nn.Module) -> None:
    """Refuse a model with gradients that can't be laid out flat in fp32.

    Raises:
        ValueError: a complex parameter that requires a gradient, or the weight of an embedding with sparse=True.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            allowed = "a real floating-point type, or requires_grad=False"
            raise refusal(f"parameter {plain_name(name)!r}", parameter.dtype, allowed)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            allowed = "sparse=False, or a weight with requires_grad=False"
            raise refusal(f"gradients of {plain_name(name)!r}", f"{type(module).__name__}(sparse=True)", allowed)

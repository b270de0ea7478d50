"""Numbers as bytes: all 32 bits, 16, or 8 with a scale for each 256 values.

Lengths follow from the number of values alone. What rounding changes stays in the sender's state: it subtracts what the
receivers read.
"""

from __future__ import annotations

import torch

from lightning_gradcomp.errors import refusal

GROUP = 256
"""Values that share a scale in "int8"."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Bytes a value in each format, without the scales."""


def check_format(what: str, values: str) -> None:
    """ValueError unless `values` is the name of a format."""
    if values not in BYTES:
        raise refusal(what, values, ", ".join(repr(name) for name in BYTES))


def value_bytes(k: int, values: str) -> int:
    """Bytes that `pack_values` makes of k values.

    >>> [value_bytes(1000, values) for values in ("fp32", "bf16", "int8")]
    [4000, 2000, 1016]
    """
    return BYTES[values] * k + (4 * -(-k // GROUP) if values == "int8" else 0)


def pack_values(v: torch.Tensor, values: str) -> torch.Tensor:
    """uint8 [value_bytes(k, values)] from v (fp32 [k], finite). Values too large for 16 bits are clamped."""
    if values == "int8":
        grouped = torch.nn.functional.pad(v, (0, -v.numel() % GROUP)).view(-1, GROUP)
        # Slightly below the largest number: its 127th part may be rounded up, and 127 times that would overflow.
        scales = grouped.abs().amax(1, keepdim=True).clamp(max=0.999 * torch.finfo(torch.float32).max) / 127
        rounded = (grouped / torch.where(scales > 0, scales, 1)).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([scales.view(torch.uint8).view(-1), rounded.view(torch.uint8).view(-1)[: v.numel()]])
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[values]
    largest = torch.finfo(dtype).max
    return v.clamp(-largest, largest).to(dtype).view(torch.uint8)


def unpack_values(packed: torch.Tensor, k: int, values: str) -> torch.Tensor:
    """The k values (fp32) that `pack_values` wrote."""
    if values == "int8":
        groups = -(-k // GROUP)
        scales, rounded = packed[: 4 * groups].view(torch.float32), packed[4 * groups :].view(torch.int8)
        return rounded * scales.repeat_interleave(GROUP)[:k]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[values]
    return packed.view(dtype).float()

"""A dense average in 8 bits, in two phases.

The tensors are divided among the ranks, which own a part each. Every rank sends each owner its share of the sum: large
tensors in 8 bits, small ones in fp32. The owner adds the shares in rank order in fp32, rounds the large tensors' mean
to 8 bits once more, and sends the mean to all. Every rank, the owner too, uses what it decodes from that message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.ranks import SHORT, Ranks, start_swap
from lightning_gradcomp.compressors.kernels.int8 import GROUP, add_int8, int8_bytes, pack_int8, unpack_int8
from lightning_gradcomp.compressors.kernels.rng import Dither

PIECES = 4
"""Maximum number of pieces of a rank's part, each of `SHORT` bytes or more."""


def mean_in_int8(
    group: dist.ProcessGroup, large: Sequence[torch.Tensor], small: Sequence[torch.Tensor], *key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The means over the ranks, bit-identical on all. Collective; all ranks have tensors of the same shapes.

    A NaN or an infinity in `large` makes its group of 256 elements NaN.

    Args:
        group: the ranks.
        large: tensors that travel in 8 bits, with n elements together. Not empty.
        small: tensors that travel in fp32, with m elements together. Not empty.
        key: numbers that differ between the averages of a run, for the draws of stochastic rounding.

    Returns:
        The means of `large` and `small`, concatenated and flat: fp32 [n] and [m].
    """
    world, n, m = group.size(), *(sum(tensor.numel() for tensor in tensors) for tensors in (large, small))
    if not n + m:  # a bucket of parameters without elements
        return large[0].float(), small[0].float()
    part, small_part = part_sizes(n, m, world)
    parts, small_parts = _divided(large, world, part), _divided(small, world, small_part)
    pieces = _pieces(parts, small_parts)
    to_owners, to_all = (Dither(parts.device, *key, group.rank(), phase) for phase in (0, 1))

    # A piece travels while the next one is rounded and the previous one is decoded.
    there = [start_swap(group, _messages(*piece, to_owners)) for piece in pieces]
    back = []
    for shares, (own, small_own) in zip(there, pieces, strict=True):
        mean, small_mean = torch.zeros_like(own[0]), torch.zeros_like(small_own[0])
        for share in shares():
            values, small_values = _cut(share, mean.numel())
            add_int8(values, mean)
            small_mean += small_values
        back.append(start_swap(group, _messages(mean[None], small_mean[None], to_all).expand(world, -1)))
    for means, piece in zip(back, pieces, strict=True):
        for row, out, small_out in zip(means(), *piece, strict=True):
            values, small_values = _cut(row, out.numel())
            unpack_int8(values, out)
            small_out.copy_(small_values)
    return parts.view(-1)[:n], small_parts.view(-1)[:m]


def part_sizes(n: int, m: int, world: int) -> tuple[int, int]:
    """Number of elements in a rank's part of n large elements, in whole groups of 256, and of m small ones."""
    return GROUP * -(-n // (GROUP * world)), -(-m // world)


def int8_traffic(n: int, m: int, ranks: Ranks) -> int:
    """Bytes that a rank sends to other workers in `mean_in_int8` of n large and m small elements."""
    part, small_part = part_sizes(n, m, ranks.world)
    return 2 * (ranks.world - ranks.per_worker) * (int8_bytes(part) + 4 * small_part)


def _divided(tensors: Sequence[torch.Tensor], world: int, part: int) -> torch.Tensor:
    """The elements of `tensors` divided by `world`, then zeros: fp32 [world, part]."""
    rest = world * part - sum(tensor.numel() for tensor in tensors)
    flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(rest)])
    return flat.float().div_(world).view(world, part)


def _messages(large: torch.Tensor, small: torch.Tensor, dither: Dither) -> torch.Tensor:
    """A message for each row of `large`, fp32 [rows, n], and of `small`, fp32 [rows, m]: uint8 [rows, L]."""
    end = int8_bytes(large.size(1))
    messages = torch.empty(len(large), end + 4 * small.size(1), dtype=torch.uint8, device=large.device)
    for message, values in zip(messages, large, strict=True):
        pack_int8(values, message[:end], dither)
    messages[:, end:] = small.contiguous().view(torch.uint8)
    return messages


def _cut(message: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_messages` wrote: the packed values of n large elements, and the small ones in fp32."""
    end = int8_bytes(n)
    return message[:end], message[end:].view(torch.float32)


def _pieces(parts: torch.Tensor, small_parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Divide the columns of `parts` into pieces of about equal length. The first one has all of `small_parts`."""
    groups = parts.size(1) // GROUP
    number = max(1, min(PIECES, groups * GROUP // SHORT))
    columns = parts.split(GROUP * max(1, -(-groups // number)), 1)
    none = small_parts[:, :0]
    return [(piece, none if place else small_parts) for place, piece in enumerate(columns)]

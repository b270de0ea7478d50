"""A dense average in 8 bits, in two phases.

The tensors are divided among the ranks, which own a part each. Every rank sends each owner its share of the sum: large
tensors in 8 bits, small ones in fp32. The owner adds the shares in rank order in fp32, rounds the large tensors' mean
to 8 bits once more, and sends the mean to all. Every rank, the owner too, uses what it decodes from that message.

A group of 256 elements lies within one tensor, and its random draws follow from its place in the model. The mean of a
tensor therefore does not depend on the tensors that are averaged with it, on their order, or on the owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.ranks import SHORT, Ranks, start_swap
from lightning_gradcomp.compressors.kernels.int8 import GROUP, add_int8, int8_bytes, pack_int8, unpack_int8
from lightning_gradcomp.compressors.kernels.rng import row_seeds

PIECES = 4
"""Maximum number of pieces of a rank's part, each of `SHORT` bytes or more."""


def first_groups(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The number of each parameter's first group, if the groups of all these parameters are counted in order."""
    numbers = [0, *accumulate(groups_in(prod(shape)) for shape in shapes.values())]
    return dict(zip(shapes, numbers[:-1], strict=True))


def groups_in(n: int) -> int:
    """Number of groups of a tensor with n elements. The last one is filled with zeros."""
    return -(-n // GROUP)


def mean_in_int8(
    group: dist.ProcessGroup, large: Sequence[tuple[int, torch.Tensor]], small: Sequence[torch.Tensor], *key: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The means over the ranks, bit-identical on all. Collective; all ranks have tensors of the same shapes.

    A NaN or an infinity in `large` makes its group of 256 elements NaN.

    Args:
        group: the ranks.
        large: tensors that travel in 8 bits, each with the number of its first group in the model.
        small: tensors that travel in fp32, with m elements together. Not empty.
        key: numbers that differ between the averages of a run, for the draws of stochastic rounding.

    Returns:
        The mean of each of `large`, fp32 [n], and the means of `small`, concatenated: fp32 [m].
    """
    world, rank, device = group.size(), group.rank(), small[0].device
    sizes, m = [tensor.numel() for _, tensor in large], sum(tensor.numel() for tensor in small)
    if not any(sizes) and not m:  # a bucket of parameters without elements
        return [tensor.float().view(-1) for _, tensor in large], small[0].float()
    counts = [groups_in(size) for size in sizes]
    part, small_part = part_sizes(sum(counts), m, world)
    parts, small_parts = (
        _divided(_padded(large), world, GROUP * part, device),
        _divided(small, world, small_part, device),
    )
    pieces = _pieces(parts, small_parts)
    places = _places([first for first, _ in large], counts, world * part, device).view(world, part)
    to_owners, to_all = row_seeds(places, *key, 0, rank), row_seeds(places[rank], *key, 1)

    # A piece travels while the next one is rounded and the previous one is decoded.
    there = [start_swap(group, _messages(own, small_own, to_owners[:, groups])) for own, small_own, groups in pieces]
    back = []
    for shares, (own, small_own, groups) in zip(there, pieces, strict=True):
        mean, small_mean = torch.zeros_like(own[0]), torch.zeros_like(small_own[0])
        for share in shares():
            values, small_values = _cut(share, mean.numel())
            add_int8(values, mean)
            small_mean += small_values
        message = _messages(mean[None], small_mean[None], to_all[None, groups])
        back.append(start_swap(group, message.expand(world, -1)))
    for means, (own, small_own, _) in zip(back, pieces, strict=True):
        for row, out, small_out in zip(means(), own, small_own, strict=True):
            values, small_values = _cut(row, out.numel())
            unpack_int8(values, out)
            small_out.copy_(small_values)
    rows = parts.view(-1)[: GROUP * sum(counts)].split([GROUP * count for count in counts])
    return [row[:size] for row, size in zip(rows, sizes, strict=True)], small_parts.view(-1)[:m]


def part_sizes(groups: int, m: int, world: int) -> tuple[int, int]:
    """Number of groups in a rank's part of all groups, and of elements in its part of m small ones."""
    return -(-groups // world), -(-m // world)


def int8_traffic(sizes: Sequence[int], m: int, ranks: Ranks) -> int:
    """Bytes that a rank sends to other workers in `mean_in_int8`: large tensors of these sizes, m small elements."""
    part, small_part = part_sizes(sum(groups_in(size) for size in sizes), m, ranks.world)
    return 2 * (ranks.world - ranks.per_worker) * (int8_bytes(GROUP * part) + 4 * small_part)


def _padded(large: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors, flat, each followed by the zeros that fill its last group."""
    parts = []
    for _, tensor in large:
        parts.append(tensor.reshape(-1))
        if missing := -tensor.numel() % GROUP:
            parts.append(tensor.new_zeros(missing))
    return parts


def _divided(tensors: Sequence[torch.Tensor], world: int, part: int, device: torch.device) -> torch.Tensor:
    """The elements of `tensors` divided by `world`, then zeros: fp32 [world, part]."""
    rest = world * part - sum(tensor.numel() for tensor in tensors)
    zeros = torch.zeros(rest, dtype=tensors[0].dtype if tensors else torch.float32, device=device)
    flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), zeros])
    return flat.float().div_(world).view(world, part)


def _places(firsts: Sequence[int], counts: Sequence[int], total: int, device: torch.device) -> torch.Tensor:
    """The numbers of the groups in the model, then zeros: int64 [total]."""
    numbers = [torch.arange(first, first + count, device=device) for first, count in zip(firsts, counts, strict=True)]
    return torch.cat([*numbers, torch.zeros(total - sum(counts), dtype=torch.int64, device=device)])


def _messages(large: torch.Tensor, small: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """A message for each row of `large`, fp32 [rows, n], and of `small`, fp32 [rows, m]: uint8 [rows, L].

    `seeds` are those of the groups in `large`: int32 [rows, n / 256].
    """
    end = int8_bytes(large.size(1))
    messages = torch.empty(len(large), end + 4 * small.size(1), dtype=torch.uint8, device=large.device)
    for message, values, own in zip(messages, large, seeds, strict=True):
        pack_int8(values, message[:end], own)
    messages[:, end:] = small.contiguous().view(torch.uint8)
    return messages


def _cut(message: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_messages` wrote: the packed values of n large elements, and the small ones in fp32."""
    end = int8_bytes(n)
    return message[:end], message[end:].view(torch.float32)


def _pieces(parts: torch.Tensor, small_parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    """Divide the columns of `parts` into pieces of about equal length. The first one has all of `small_parts`.

    Returns:
        For each piece its columns of `parts` and of `small_parts`, and its groups.
    """
    groups = parts.size(1) // GROUP
    number = max(1, min(PIECES, groups * GROUP // SHORT))
    length, none = max(1, -(-groups // number)), small_parts[:, :0]
    return [
        (columns, none if place else small_parts, slice(place * length, (place + 1) * length))
        for place, columns in enumerate(parts.split(GROUP * length, 1))
    ]

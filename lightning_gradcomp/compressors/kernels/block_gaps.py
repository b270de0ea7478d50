"""Sorted indices as bytes: a digit for each index, a place in its block or a gap inside it, and a bit for each block.

All indices below n lie in blocks of one size; a bit says of each block whether it has any of the k. The first of a
block is written as its place there, a digit below the size, each further one as its distance from the one before, a
digit from the size on. So the digits themselves say where a block begins.

A block is a circle, whose gaps add up to its size: at most one of them is above half of it. Where one is, the block
begins after it, and continues from its end to its start. No gap that is written is then above half the size, so that
digits of b bits do for blocks of 2/3 · 2^b. These are b bits for each index and one for each block, wherever the
indices lie: the length depends on n and k alone, every rank's message has the same size, no sizes are exchanged.

For random indices this is 0.06 to 0.2 bits an index above the entropy, log2(n / k) + 1.44 for few of them; 0.28 near a
tenth of all. Elias-Fano (Elias 1974, Fano 1971), whose length is as fixed, is 0.47 to 0.56 bits above it, since it has
room for every order of the low bits that share their high ones. Golomb's code of the gaps (Golomb 1966) is within 0.03
bits, but its length depends on the indices: up to Elias-Fano's, where they are crowded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits


def block_size(bits: int) -> int:
    """The largest size whose places and gaps, size + size // 2, are at most 2^bits digits."""
    return (2 * 2**bits + 1) // 3


def digit_bits(n: int, k: int) -> int:
    """Bits of a digit: those with which k indices below n take the fewest bits in all."""
    return min(range(n.bit_length()), key=lambda bits: k * bits + n / block_size(bits))


def index_bytes(n: int, k: int) -> int:
    """Bytes that `pack_indices` makes of k indices below n: at most log2(n / k) + 1.64 bits an index, and two bytes.

    >>> index_bytes(1_000_000, 1000) * 8 / 1000  # bits an index; the entropy is 11.4
    11.472
    """
    bits = digit_bits(n, k)
    return (k * bits + 7) // 8 + (_blocks(n, bits) + 7) // 8


def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor:
    """uint8 [index_bytes(n, k)] from k ascending, distinct int64 indices below n: digits, then the blocks' bits.

    Of the digits all lowest bits come first, then all second ones, and so on.
    """
    k, bits = indices.numel(), digit_bits(n, indices.numel())
    size = block_size(bits)
    flat = _array(indices)
    block = flat // size
    place = flat - block * size
    has_any = _all_false(_blocks(n, bits), flat)
    _set(has_any, block)
    same = block[1:] == block[:-1]  # for each but the first: as the one before
    wide = same & (place[1:] - place[:-1] > size // 2)
    digits = _turn(block, place, wide, size, len(has_any))
    # A block's first is its place already; of each further one the place before is taken away, and size - 1 added.
    digits[1:] -= same * (digits[:-1] - (size - 1))
    planes = _all_false(bits * k, flat).reshape(bits, k)
    for bit in range(bits):
        planes[bit] = (digits & (1 << bit)) != 0
    return torch.cat([pack_bits(torch.as_tensor(planes)), pack_bits(torch.as_tensor(has_any))])


def unpack_indices(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The k ascending int64 indices that `pack_indices` wrote."""
    bits = digit_bits(n, k)
    size, blocks, length = block_size(bits), _blocks(n, bits), (k * bits + 7) // 8
    digits = _array(packed.new_zeros(k, dtype=torch.int64))
    for plane in reversed(_array(unpack_bits(packed[:length], k * bits).view(bits, k))):
        digits += digits
        digits += plane
    starts = _positions(_array(unpack_bits(packed[length:], blocks).view(torch.bool)), min(k, blocks)) * size
    first = digits < size
    steps = digits - ~first * (size - 1)
    firsts, block = _positions(first, min(k, blocks)), first.cumsum(0) - 1  # not counting empty blocks
    place = steps.cumsum(0)
    place -= (place[firsts] - steps[firsts])[block]
    place -= (place >= size) * size
    place += starts[block]
    return torch.as_tensor(_ascending(place))


def _blocks(n: int, bits: int) -> int:
    return -(-n // block_size(bits))


# On a CPU numpy takes half of torch's time for this, so that below arrays are of either kind.


def _turn(block: Any, place: Any, wide: Any, size: int, blocks: int) -> Any:
    """Places in the order in which they are written; those that follow on their block's end are larger by its size.

    Args:
        block, place: of each index, [k].
        wide: for each index but the first, whether the gap before it is in its block and above half of it: bool [k-1].
    """
    turned = _all_false(blocks + 1, block)
    _set(turned, (block[1:] + 1) * wide)  # number 0 is no block: what has no wide gap is written there
    turned[:1] = False  # a slice: a GPU would wait for one element
    in_turned = turned[block + 1]
    some = _chosen(in_turned)
    before = in_turned[some] & (place[some] <= size // 2)  # a gap above half of the block has its middle between
    start = block[some] * (2 * size)
    place[some] = _ascending(start + place[some] + before * size) - start
    return place


def _array(tensor: torch.Tensor) -> Any:
    return tensor if tensor.is_cuda else tensor.numpy()


def _all_false(length: int, like: Any) -> Any:
    """False `length` times, on the device of `like`: bool [length]."""
    if isinstance(like, torch.Tensor):
        return torch.zeros(length, dtype=torch.bool, device=like.device)
    return np.zeros(length, bool)


def _set(mask: Any, places: Any) -> None:
    """True at `places`. An assignment would copy the one True to a GPU, and the host would wait for that."""
    if isinstance(mask, torch.Tensor):
        mask.index_fill_(0, places, True)
    else:
        mask[places] = True


def _ascending(x: Any) -> Any:
    """Sorted; "stable" is quick where most are so already."""
    return x.sort().values if isinstance(x, torch.Tensor) else np.sort(x, kind="stable")


def _chosen(mask: Any) -> Any:
    """An index of what `mask` marks; on a GPU of everything, since the host would wait for the number."""
    return slice(None) if isinstance(mask, torch.Tensor) else np.flatnonzero(mask)


def _positions(mask: Any, at_most: int) -> Any:
    """Where `mask` is set; on a GPU [at_most], with anything at the end, since the host would wait for the number."""
    if isinstance(mask, torch.Tensor):
        return torch.nonzero_static(mask, size=at_most).squeeze(1)
    return np.flatnonzero(mask)

"""Sorted indices as bytes: one digit per index (its place in a block, or the gap before it) and one bit per block.

The range below n is cut into blocks of one size. One bit per block says if it holds any of the k indices. The first
index of a block is written as its place, a digit below the size. Each further index is written as its distance from
the one before, as a digit from the size on. The digits thus show where a block begins.

A block is a circle whose gaps add up to its size, so at most one gap exceeds half of it. If one does, the block starts
after that gap and wraps around at its end. No written gap then exceeds half the size, so digits of b bits suffice for
blocks of 2/3 · 2^b. The total is b bits per index and one per block, wherever the indices lie. The length
depends on n and k alone: every rank's message has the same size, and ranks need not exchange sizes.

For random indices this is 0.06 to 0.2 bits per index above the entropy, which is log2(n / k) + 1.44 for small k, and
0.28 bits near a tenth of all. Elias-Fano (Elias 1974, Fano 1971), also of fixed length, is 0.47 to 0.56 bits above the
entropy, since it can encode every order of the low bits that share their high ones. Golomb's code of the gaps (Golomb
1966) is within 0.03 bits, but its length depends on the indices: up to Elias-Fano's if they are clustered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits


def block_size(bits: int) -> int:
    """The largest size whose places and gaps, size + size // 2, fit into 2^bits digits."""
    return (2 * 2**bits + 1) // 3


def digit_bits(n: int, k: int) -> int:
    """The digit size in bits that gives k indices below n the shortest encoding."""
    return min(range(n.bit_length()), key=lambda bits: k * bits + n / block_size(bits))


def index_bytes(n: int, k: int) -> int:
    """Bytes of k indices below n after `pack_indices`: at most log2(n / k) + 1.64 bits per index, plus two bytes.

    >>> index_bytes(1_000_000, 1000) * 8 / 1000  # bits per index; the entropy is 11.4
    11.472
    """
    bits = digit_bits(n, k)
    return (k * bits + 7) // 8 + (_blocks(n, bits) + 7) // 8


def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor:
    """uint8 [index_bytes(n, k)] from k ascending, distinct int64 indices below n: digits, then the blocks' bits.

    All lowest bits of the digits come first, then all second-lowest ones, and so on.
    """
    k, bits = indices.numel(), digit_bits(n, indices.numel())
    size = block_size(bits)
    flat = _array(indices)
    block = flat // size
    place = flat - block * size
    has_any = _all_false(_blocks(n, bits), flat)
    _set(has_any, block)
    same = block[1:] == block[:-1]  # for each but the first index: True if in the same block as the one before
    wide = same & (place[1:] - place[:-1] > size // 2)
    digits = _turn(block, place, wide, size, len(has_any))
    # A block's first digit is its place. For each further one, subtract the place before and add size - 1.
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


# On a CPU numpy takes half of torch's time for this, so the arrays below are numpy's or torch's.


def _turn(block: Any, place: Any, wide: Any, size: int, blocks: int) -> Any:
    """Places in the order in which they are written. Those that wrap around their block's end are larger by its size.

    Args:
        block, place: each index's block and place in it, [k].
        wide: True for each index but the first if the gap before it is in its block and above half of it: bool [k-1].
    """
    turned = _all_false(blocks + 1, block)
    _set(turned, (block[1:] + 1) * wide)  # element 0 is a dummy for indices without a wide gap
    turned[:1] = False  # a slice: a GPU would wait for one element
    in_turned = turned[block + 1]
    some = _chosen(in_turned)
    before = in_turned[some] & (place[some] <= size // 2)  # a gap above half of the block contains its middle
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
    """Set `mask` at `places`. An assignment would copy True to the GPU, and the host would wait for it."""
    if isinstance(mask, torch.Tensor):
        mask.index_fill_(0, places, True)
    else:
        mask[places] = True


def _ascending(x: Any) -> Any:
    """Sort x. numpy's "stable" is fast on nearly sorted values."""
    return x.sort().values if isinstance(x, torch.Tensor) else np.sort(x, kind="stable")


def _chosen(mask: Any) -> Any:
    """The index of what `mask` marks. On a GPU it selects everything, since the host would wait for the count."""
    return slice(None) if isinstance(mask, torch.Tensor) else np.flatnonzero(mask)


def _positions(mask: Any, at_most: int) -> Any:
    """Where `mask` is set. On a GPU [at_most], with arbitrary values at the end: the host would wait for the count."""
    if isinstance(mask, torch.Tensor):
        return torch.nonzero_static(mask, size=at_most).squeeze(1)
    return np.flatnonzero(mask)

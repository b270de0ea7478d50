"""A dense average in few bits: large tensors rounded to blocks, small ones in fp32.

Two ranks send each other everything, decode both messages and add them. Of three ranks or more, each owns a part of the
blocks. Every rank sends each owner its share of the sum. The owner adds the shares in rank order in fp32, rounds the
mean of the large tensors once more, and sends it to all. Every rank, the owner too, uses what it decodes from that
message. Either way a rank sends 2 (N-1)/N of a whole message; between two ranks, owners would only add a second
rounding and a second wait.

If a worker is a node of several ranks, these first add their gradients in fp32, a part each. With that part each takes
the place of the node in an average over the nodes, as above. Then the ranks of a node send each other their parts.

The mean of a tensor does not depend on the tensors that are averaged with it, on their order, or on the owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from lightning_gradcomp.averaging.ranks import SHORT, Ranks
from lightning_gradcomp.compressors.blocks import FewBits
from lightning_gradcomp.compressors.kernels.rng import row_seeds

PIECES = 4
"""Maximum number of pieces of a rank's part on a CPU, each of `SHORT` elements or more."""


def first_blocks(form: FewBits, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The number of each parameter's first block, if the blocks of all these parameters are counted in order."""
    numbers = [0, *accumulate(form.length(shape) // form.block for shape in shapes.values())]
    return dict(zip(shapes, numbers[:-1], strict=True))


def mean_in_few_bits(
    ranks: Ranks,
    form: FewBits,
    large: Sequence[tuple[int, torch.Tensor]],
    small: Sequence[torch.Tensor],
    *key: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The means over the ranks, bit-identical on all. Collective; all ranks have tensors of the same shapes.

    A NaN or an infinity in `large` makes its block NaN.

    Args:
        ranks: the ranks. Those of one worker exchange in fp32, workers in few bits.
        form: the format of `large`.
        large: tensors that travel in few bits, each with the number of its first block in the model.
        small: tensors that travel in fp32, with m elements together. Not empty.
        key: numbers that differ between the steps of a run, for random draws.

    Returns:
        The mean of each of `large`, fp32 in its shape, and the means of `small`, concatenated: fp32 [m].
    """
    workers, owners, device = ranks.workers, number_of_owners(ranks.workers), small[0].device
    shapes, m = [tuple(tensor.shape) for _, tensor in large], sum(tensor.numel() for tensor in small)
    lengths = [form.length(shape) for shape in shapes]
    if not any(lengths) and not m:  # a bucket of parameters without elements
        return [tensor.float() for _, tensor in large], small[0].float()
    n, in_all = sum(lengths), ranks.per_worker * owners
    part, small_part = part_sizes(form, n, m, in_all)
    flat = torch.empty(in_all * part, dtype=torch.float32, device=device)
    if large:  # else torch._foreach_copy_ raises an error
        form.put([tensor for _, tensor in large], flat[:n].split(lengths), key)
    flat[:n].div_(ranks.world)
    flat[n:].zero_()
    small_flat = _padded(small, in_all * small_part).div_(ranks.world)
    numbers = _numbers(form, [first for first, _ in large], lengths, len(flat), device)
    numbers = numbers.view(ranks.per_worker, owners, -1)[ranks.place]
    flat, small_flat = ranks.sum_inside([flat, small_flat])
    pieces = _pieces(form, flat.view(owners, -1), small_flat.view(owners, -1))
    seeds = row_seeds(numbers, *key, 0, ranks.worker)

    # A piece travels while the next one is rounded and the previous one is decoded.
    waits = [
        ranks.start_swap(_messages(form, own, small_own, seeds[:, blocks]).expand(workers, -1))
        for own, small_own, blocks in pieces
    ]
    if owners > 1:
        seeds = row_seeds(numbers[ranks.worker], *key, 1)
        for index, (own, small_own, blocks) in enumerate(pieces):
            mean, small_mean = torch.zeros_like(own[0]), torch.zeros_like(small_own[0])
            for values, small_values in zip(*_cut(form, waits[index](), mean.numel()), strict=True):
                form.add(values, mean)
                small_mean += small_values
            message = _messages(form, mean[None], small_mean[None], seeds[None, blocks])
            waits[index] = ranks.start_swap(message.expand(workers, -1))
    for wait, (own, small_own, _) in zip(waits, pieces, strict=True):
        values, small_values = _cut(form, wait(), own.size(1))
        form.unpack(values[:owners], own, key)
        small_own.copy_(small_values[:owners])
        if owners < workers:  # two workers' messages, to add
            form.unpack(values[1:], own, key, add=True)
            small_own += small_values[1]
    flat, small_flat = ranks.join_inside([flat, small_flat])
    return [form.take(row, shape) for row, shape in zip(flat[:n].split(lengths), shapes, strict=True)], small_flat[:m]


def number_of_owners(workers: int) -> int:
    """How many workers average a part each; 1 if the workers send each other everything."""
    return workers if workers > 2 else 1


def part_sizes(form: FewBits, n: int, m: int, number: int) -> tuple[int, int]:
    """Elements in one of `number` equal parts of n elements in whole blocks, and of m small elements."""
    return form.block * -(-n // (form.block * number)), -(-m // number)


def few_bits_traffic(form: FewBits, shapes: Sequence[tuple[int, ...]], m: int, ranks: Ranks) -> int:
    """Bytes that a rank sends to other workers in `mean_in_few_bits` of large tensors and m small elements."""
    owners = number_of_owners(ranks.workers)
    n = sum(form.length(shape) for shape in shapes)
    part, small_part = part_sizes(form, n, m, ranks.per_worker * owners)
    messages = (ranks.workers - 1) * (2 if owners > 1 else 1)
    return messages * (form.nbytes(part) + 4 * small_part)


def _numbers(
    form: FewBits, first: Sequence[int], lengths: Sequence[int], total: int, device: torch.device
) -> torch.Tensor:
    """The number of each block in the model, for tensors of these lengths from these blocks: int64 [total / block]."""
    counts = [length // form.block for length in lengths]
    starts = [0, *accumulate(counts)][:-1]
    ahead = torch.tensor([number - start for number, start in zip(first, starts, strict=True)], dtype=torch.int64)
    numbers = torch.arange(total // form.block)
    blocks = sum(counts)
    numbers[:blocks] += ahead.repeat_interleave(torch.tensor(counts, dtype=torch.int64), output_size=blocks)
    return numbers.to(device, non_blocking=True)


def _padded(tensors: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """The elements of `tensors`, then zeros: fp32 [length]."""
    rest = length - sum(tensor.numel() for tensor in tensors)
    return torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(rest)]).float()


def _messages(form: FewBits, large: torch.Tensor, small: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """A message for each row of `large`, fp32 [rows, n], and of `small`, fp32 [rows, m]: uint8 [rows, L].

    `seeds` are those of the blocks in `large`: int32 [rows, n / block].
    """
    end = form.nbytes(large.size(1))
    messages = torch.empty(len(large), end + 4 * small.size(1), dtype=torch.uint8, device=large.device)
    form.pack(large, messages[:, :end], seeds)
    messages[:, end:] = small.contiguous().view(torch.uint8)
    return messages


def _cut(form: FewBits, messages: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_messages` wrote in each row: the packed values of n large elements, and the small ones in fp32."""
    end = form.nbytes(n)
    return messages[:, :end], messages[:, end:].view(torch.float32)


def _pieces(
    form: FewBits, parts: torch.Tensor, small_parts: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    """Divide the columns of `parts` into pieces of about equal length. The first one has all of `small_parts`.

    On a GPU there is one piece: with four, a bucket took four times as many launches.

    Returns:
        For each piece its columns of `parts` and of `small_parts`, and its blocks.
    """
    blocks = parts.size(1) // form.block
    number = 1 if parts.is_cuda else max(1, min(PIECES, parts.size(1) // SHORT))
    length, none = max(1, -(-blocks // number)), small_parts[:, :0]
    return [
        (columns, none if index else small_parts, slice(index * length, (index + 1) * length))
        for index, columns in enumerate(parts.split(form.block * length, 1))
    ]

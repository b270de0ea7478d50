"""An average in 8 bits, of all ranks in one process, element by element as one would write it by hand."""

import numpy as np

GROUP = 256


def rounded(values, uniform):
    """What a receiver decodes: multiples of a 127th of the group's largest magnitude, rounded up if `uniform` says so.

    fp32, a multiple of GROUP.
    """
    decoded = []
    for group, number in zip(values.reshape(-1, GROUP), uniform.reshape(-1, GROUP), strict=True):
        scale = np.float32(np.abs(group).max() / np.float32(127))
        steps = np.floor(group / scale + number) if scale else np.zeros_like(group)
        decoded.append((steps * scale).astype(np.float32))
    return np.concatenate(decoded) if decoded else values


def mean(tensors, first, uniform):
    """The mean of a tensor that travels in 8 bits; one flat array for each rank.

    `first` is the number of its first group. `uniform(phase, begin, n)` are the numbers in [0, 1) of n elements, from
    the group `begin` on; `phase` is (0, rank) on the way to an owner, and (1,) on the way back. Two ranks
    have no owner.
    """
    ranks, n = len(tensors), len(tensors[0])
    total = np.zeros(-(-n // GROUP) * GROUP, np.float32)
    for rank, tensor in enumerate(tensors):
        padded = np.pad(tensor / np.float32(ranks), (0, len(total) - n))
        total += rounded(padded, uniform((0, rank), first, n))
    return (total if ranks == 2 else rounded(total, uniform((1,), first, n)))[:n]

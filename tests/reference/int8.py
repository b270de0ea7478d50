"""An average in 8 bits by two phases, of all ranks in one process, element by element as one would write it by hand."""

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


def divided(values, ranks, whole):
    """`values` as one row for each owner, filled with zeros to rows of a multiple of `whole` elements."""
    row = whole * -(-len(values) // (ranks * whole))
    return np.pad(values, (0, ranks * row - len(values))).reshape(ranks, row)


def mean(larges, smalls, uniform):
    """The means of what travels in 8 bits and of what travels in fp32; one flat array for each rank.

    `uniform(rank, phase, begin, n)` are the numbers in [0, 1) of a rank's elements, for the way there and back.
    """
    ranks = len(larges)
    n, m = len(larges[0]), len(smalls[0])
    large = [divided(each / np.float32(ranks), ranks, GROUP) for each in larges]
    small = [divided(each / np.float32(ranks), ranks, 1) for each in smalls]
    large_means, small_means = [], []
    for owner in range(ranks):
        total, small_total = np.zeros_like(large[0][0]), np.zeros_like(small[0][0])
        for sender in range(ranks):
            row = large[sender][owner]
            total += rounded(row, uniform(sender, 0, owner * len(row), len(row)))
            small_total += small[sender][owner]
        large_means.append(rounded(total, uniform(owner, 1, 0, len(total))))
        small_means.append(small_total)
    return np.concatenate(large_means)[:n], np.concatenate(small_means)[:m]

"""Random draws that are a function of (seed, worker, step), so there is no generator state to save.

Global generators are never used. On a CPU torch takes 4 ns per uniform number, more than all other arithmetic of a
compressor. 16 bits of numpy's SFC64 take 1 ns.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

import numpy as np
import torch

ALL_WORKERS = -1


def seed_of(*numbers: int) -> int:
    """A 63-bit seed hashed from whole numbers by numpy's SeedSequence."""
    entropy = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


class Draws:
    """One worker's random draws in one step. `tensor` is a tensor's name, for draws that all workers share."""

    def __init__(self, seed: int, worker: int, step: int, tensor: str = "") -> None:
        self._seed, self._worker, self._step, self._tensor = seed, worker, step, tensor
        self._own: dict[torch.device, torch.Generator] = {}
        self._uniform: dict[torch.device, Uniform] = {}

    def of(self, tensor: str) -> Draws:
        """These draws for another tensor: `own` continues, `shared` depends on the tensor."""
        other = Draws(self._seed, self._worker, self._step, tensor)
        other._own, other._uniform = self._own, self._uniform
        return other

    def own(self, device: torch.device) -> torch.Generator:
        """This worker's generator for the step. Each use continues where the previous one ended."""
        if device not in self._own:
            seed = seed_of(self._seed, self._worker, self._step)
            self._own[device] = torch.Generator(device).manual_seed(seed)
        return self._own[device]

    def uniform(self, device: torch.device) -> Uniform:
        """This worker's stream of uniform numbers for the step, faster than `own`. Each use continues it."""
        if device not in self._uniform:
            self._uniform[device] = Uniform(device, self._seed, self._worker, self._step)
        return self._uniform[device]

    def shared(self, device: torch.device) -> torch.Generator:
        """A new generator with the same seed on all workers for this step and tensor, in `encode` and in `decode`."""
        seed = seed_of(self._seed, ALL_WORKERS, self._step, crc32(self._tensor.encode()))
        return torch.Generator(device).manual_seed(seed)


class Uniform:
    """A stream of uniform numbers that follows from its key. On a CPU: the middles of 65,536 equal intervals."""

    def __init__(self, device: torch.device, *key: int) -> None:
        self._device, seed = device, seed_of(*key)
        self._bits = np.random.SFC64(seed)
        self._generator = torch.Generator(device).manual_seed(seed) if device.type == "cuda" else None

    def draw(self, n: int, begin: float) -> torch.Tensor:
        """fp32 [n], uniform in [begin, begin + 1); `begin` is 0 or 1. A rounded sum with up to 1 is below begin + 2."""
        if self._generator:
            draws = torch.rand(n, generator=self._generator, dtype=torch.float32, device=self._device)
            return draws.clamp_(max=1 - 2**-21).add_(begin)
        steps = self._bits.random_raw(-(-n // 4)).view(np.uint16)[:n].astype(np.float32)
        return torch.from_numpy(steps).mul_(2**-16).add_(begin + 2**-17)


# Draws for rows that may be anywhere and in any order: each is computed from the key, its row and its place in the row.
# On a CPU that takes about as long as drawing from SFC64.


def row_seeds(rows: torch.Tensor, *key: int) -> torch.Tensor:
    """A seed for each of the `rows` (their numbers, int64), for `fill_uniform`: int32, in the same shape.

    The hash is SplitMix64's (Steele, Lea and Flood 2014).
    """
    mixed = rows * (0x9E3779B97F4A7C15 - 2**64) + seed_of(*key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (mixed ^ _shifted(mixed, 31)).int()


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """int64 x as an unsigned number, shifted to the right."""
    return (x >> by) & (2 ** (64 - by) - 1)


def fill_uniform(x: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Fill x with numbers uniform in (0, 1), the middles of 256 equal intervals. Returns it.

    x is fp32 [..., w], where w is a multiple of 4; `seeds`, int32 [...], are those of its rows.
    """
    words = seeds.unsqueeze(-1) + _columns(x.size(-1) // 4, x.device)
    work = words >> 15
    words.bitwise_xor_(work).mul_(0x735A2D97)  # torch shifts signed numbers, so the highest bit is 0 before the product
    words.add_(torch.bitwise_right_shift(words, 15, out=work))
    return torch.add(torch.tensor(1 / 512), x.copy_(words.view(torch.uint8)), alpha=1 / 256, out=x)


@cache
def _columns(n: int, device: torch.device) -> torch.Tensor:
    """What distinguishes the words of a row: int32 [n]."""
    return row_seeds(torch.arange(n, device=device))

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
    """One worker's random draws in one step.

    Args:
        seed: the user's seed.
        worker: the worker that draws.
        step: the number of the step.
        tensor: the tensor's name, for draws that all workers share.
    """

    def __init__(self, seed: int, worker: int, step: int, tensor: str = "") -> None:
        self._seed, self._worker, self._step, self._tensor = seed, worker, step, tensor
        self._own: dict[torch.device, torch.Generator] = {}

    def of(self, tensor: str) -> Draws:
        """These draws for another tensor: `own` continues, `shared` depends on the tensor."""
        other = Draws(self._seed, self._worker, self._step, tensor)
        other._own = self._own
        return other

    def own(self, device: torch.device) -> torch.Generator:
        """This worker's generator for the step. Each use continues where the previous one ended."""
        if device not in self._own:
            seed = seed_of(self._seed, self._worker, self._step)
            self._own[device] = torch.Generator(device).manual_seed(seed)
        return self._own[device]

    def shared(self, device: torch.device) -> torch.Generator:
        """A new generator with the same seed on all workers for this step and tensor, in `encode` and in `decode`."""
        seed = seed_of(self._seed, ALL_WORKERS, self._step, crc32(self._tensor.encode()))
        return torch.Generator(device).manual_seed(seed)


class Uniform:
    """A stream of uniform numbers that is a function of its key.

    Args:
        device: the numbers' device. On a CPU they are the middles of 65,536 equal intervals.
        key: seed, worker, step.
    """

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


PERIOD = 2**17
"""Number of different uniform numbers of `Dither` on a CPU."""
LARGEST = 1 - 2**-15
"""The largest number of `Dither`. 127 with the rounding errors of a division, plus this, is below 128."""


@cache
def _table() -> torch.Tensor:
    """The numbers twice in a row."""
    return Uniform(torch.device("cpu"), 0).draw(PERIOD, 0).clamp_(max=LARGEST).repeat(2)


class Dither:
    """Uniform numbers for stochastic rounding, a function of the key.

    On a CPU they are those of one table from a random place on, around and around. New numbers would take six times as
    long.

    Args:
        device: the numbers' device.
        key: e.g. step and worker.
    """

    def __init__(self, device: torch.device, *key: int) -> None:
        self._device, self._place = device, seed_of(*key)
        self._generator = torch.Generator(device).manual_seed(self._place) if device.type == "cuda" else None

    def draw(self, begin: int, n: int) -> torch.Tensor:
        """Numbers from `begin` on, uniform in [0, 1): fp32 [n], read-only. On a CPU n is at most `PERIOD`."""
        if self._generator:
            return torch.rand(n, generator=self._generator, dtype=torch.float32, device=self._device).clamp_(
                max=LARGEST
            )
        place = (self._place + begin) % PERIOD
        return _table()[place : place + n]

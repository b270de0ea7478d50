"""Random draws that are a function of (seed, worker, step), so there is no generator state to save.

Global generators are never used. On a CPU torch takes 4 ns per uniform number, more than all other arithmetic of a
compressor. 16 bits of numpy's SFC64 take 1 ns.
"""

from __future__ import annotations

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


class Dither:
    """A stream of uniform numbers for stochastic rounding, a function of its key.

    Args:
        device: the numbers' device. On a CPU they are the middles of 256 equal intervals, a byte each.
        key: e.g. step and worker.
    """

    def __init__(self, device: torch.device, *key: int) -> None:
        seed = seed_of(*key)
        self._bits = np.random.SFC64(seed)
        self._generator = torch.Generator(device).manual_seed(seed) if device.type == "cuda" else None

    def add_to(self, x: torch.Tensor) -> None:
        """Add numbers uniform in (0, 1) to x (fp32). If x is 127 but for rounding errors, the sum is below 128."""
        if self._generator:
            draws = torch.rand(x.shape, generator=self._generator, dtype=torch.float32, device=x.device)
            x.add_(draws.clamp_(max=1 - 2**-15))
            return
        drawn = self._bits.random_raw(-(-x.numel() // 8)).view(np.uint8)[: x.numel()]
        x.add_(torch.from_numpy(drawn).view(x.shape), alpha=1 / 256).add_(1 / 512)

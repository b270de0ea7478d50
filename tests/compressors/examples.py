"""Three published methods as `TensorCodec`s, written with public names alone. `registered` makes them known."""

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

import lightning_gradcomp as lgc
from lightning_gradcomp import registry


@dataclass(kw_only=True)
class EFSignSGD(lgc.TensorCodec):
    """EF-SignSGD (Karimireddy et al. 2019, arXiv 1901.09847, Algorithm 2): each sign, and the mean magnitude."""

    def encode(self, x):
        return lgc.pack_bits(x >= 0), x.abs().mean()

    def decode(self, parts, n):
        bits, mean = parts
        return (2.0 * lgc.unpack_bits(bits, n) - 1) * mean


@dataclass(kw_only=True)
class RandomK(lgc.TensorCodec):
    """Random-k (Stich et al. 2018, arXiv 1809.07599): values alone, since all workers draw the same indices."""

    random = True
    seed: int = 0
    density: float = 0.1

    def indices(self, n, device):
        k = max(1, round(self.density * n))
        return torch.randperm(n, generator=self.draws.shared(device), device=device)[:k]

    def encode(self, x):
        return x[self.indices(len(x), x.device)]

    def decode(self, parts, n):
        [values] = parts
        return values.new_zeros(n).index_copy_(0, self.indices(n, values.device), values)


@dataclass(kw_only=True)
class QSGD(lgc.TensorCodec):
    """QSGD (Alistarh et al. 2017, arXiv 1610.02132, §3): the 2-norm, and each element's level, rounded at random."""

    random = True
    seed: int = 0
    error_feedback: bool = False
    levels: int = 4

    def encode(self, x):
        norm = torch.linalg.vector_norm(x, dtype=torch.float64).float()
        scaled = x.abs() / norm.clamp(min=torch.finfo(torch.float32).tiny) * self.levels
        drawn = torch.rand(len(x), generator=self.draws.own(x.device), device=x.device)
        level = (scaled + drawn).floor().clamp(max=self.levels)
        return (level * x.sign()).to(torch.int8), norm

    def decode(self, parts, n):
        level, norm = parts
        return level.float() / self.levels * norm


EXAMPLES = {"ef_signsgd": EFSignSGD, "random_k": RandomK, "qsgd": QSGD}


@contextmanager
def separate_registry():
    """Inside, what is registered is known to nobody else (Lightning, Hydra), and forgotten at the end."""
    with mock.patch.dict(registry._TABLE), mock.patch.object(registry, "_LISTENERS", []):
        yield


@contextmanager
def registered():
    """Inside, the three are known by their names."""
    with separate_registry():
        for name, cls in EXAMPLES.items():
            lgc.register(name)(cls)
        yield

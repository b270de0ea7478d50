"""Kernels of sparse payloads give the bytes of the CPU's functions."""

import pytest
import torch

from lightning_gradcomp.compressors.kernels import elias_fano, formats
from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits
from lightning_gradcomp.compressors.kernels.topk import count, topk_each
from lightning_gradcomp.compressors.layout import Layout
from tests.averaging.workers import seeded

SIZES = [[1], [1, 2, 3], [4096], [4097, 5], [10_000, 64, 4096, 40_000]]
DENSITIES = [1.0, 0.5, 0.03, 0.004]


def numbers(kind, n):
    x = torch.randn(n, generator=seeded(n))
    return {
        "normal": x,
        "zeros": torch.zeros(n),
        "ties": torch.randint(-3, 4, (n,), generator=seeded(n)).float(),
        "denormals": x * 1e-42,
        "large": x * 1e38,
        "infinities": torch.where(x > 1, torch.inf, x),
    }[kind]


def on_cpu_and(device, monkeypatch, function):
    """The results on a CPU without kernels, and on `device` with them."""
    ours = function(device)
    monkeypatch.delenv("GRADCOMP_TRITON")
    theirs = function(torch.device("cpu"))
    monkeypatch.setenv("GRADCOMP_TRITON", "1")
    return [(own.cpu(), their) for own, their in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "denormals", "large", "infinities"])
def test_the_largest_of_each_tensor(kind, device, monkeypatch):
    cases = [(sizes, density) for sizes in SIZES for density in DENSITIES]

    def largest(where):
        for sizes, density in cases:
            layout = Layout(tuple(map(str, range(len(sizes)))), tuple((size,) for size in sizes))
            yield topk_each(numbers(kind, layout.n).to(where), layout, density)

    for ours, theirs in on_cpu_and(device, monkeypatch, lambda where: list(largest(where))):
        assert torch.equal(ours, theirs)


def test_the_largest_of_many(device, monkeypatch):
    layout, x = Layout(("0",), ((300_000,),)), numbers("normal", 300_000)
    [(ours, theirs)] = on_cpu_and(device, monkeypatch, lambda where: [topk_each(x.to(where), layout, 0.004)])
    assert torch.equal(ours, theirs)


def test_nan_is_larger_than_any_number(device):
    x = numbers("normal", 10_000)
    x[::7] = torch.nan
    indices = topk_each(x.to(device), Layout(("0",), ((10_000,),)), 0.2).cpu()
    assert len(indices) == count(10_000, 0.2)
    assert bool((indices.diff() > 0).all())
    assert int(x[indices].isnan().sum()) == len(x[::7])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (1000, 1), (1000, 999), (1000, 240), (100_003, 3000)])
def test_indices(n, k, device, monkeypatch):
    random, together = torch.randperm(n, generator=seeded(n))[:k].sort().values, torch.arange(n - k, n)
    for indices in (random, together):
        pack = elias_fano.pack_indices
        [(ours, theirs)] = on_cpu_and(device, monkeypatch, lambda where: [pack(indices.to(where), n)])  # noqa: B023
        assert torch.equal(ours, theirs)
        assert torch.equal(elias_fano.unpack_indices(ours.to(device), n, k).cpu(), indices)


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "denormals", "large"])
def test_values_in_two_bits(kind, device, monkeypatch):
    for k in (1, 2, 3, 255, 256, 257, 5000):
        v = numbers(kind, k)
        pack = formats.pack_values
        [(ours, theirs)] = on_cpu_and(device, monkeypatch, lambda where: [pack(v.to(where), "int2")])  # noqa: B023
        assert torch.equal(ours, theirs)
        decoded = formats.unpack_values(ours.to(device), k, "int2").cpu()
        monkeypatch.delenv("GRADCOMP_TRITON")
        assert torch.equal(decoded, formats.unpack_values(ours, k, "int2"))
        monkeypatch.setenv("GRADCOMP_TRITON", "1")


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 20_000])
def test_bits(n, device, monkeypatch):
    bits = torch.randint(0, 2, (n,), generator=seeded(n), dtype=torch.uint8)
    [(ours, theirs)] = on_cpu_and(device, monkeypatch, lambda where: [pack_bits(bits.to(where))])
    assert torch.equal(ours, theirs)
    assert torch.equal(unpack_bits(ours.to(device), n).cpu(), bits)

"""The quantisers' kernels write the payloads of the CPU's functions, and decode to the values that a CPU decodes."""

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.compressors import terngrad
from lightning_gradcomp.compressors.decoded import mean_of
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import Layout


def layout_of(*shapes):
    return Layout(tuple(map(str, range(len(shapes)))), shapes)


ODD = layout_of((3, 147), (5, 7), (8, 8), (8, 8), (1, 1), (2, 4, 300), (1, 9, 5), (1, 5200))
"""Rows longer than a block, sizes that fill no byte and no word, tensors that are encoded together, one element."""
EVEN = layout_of((2, 128), (2, 2, 32), (1, 2, 64), (1, 8192))
"""Powers of 2, so that means of whole numbers are exact."""


def whole(layout, seed=0):
    """Whole numbers, whose sums are exact, with a row of zeros: fp32 [n]."""
    return with_zeros(torch.randint(-8, 9, (layout.n,), generator=torch.Generator().manual_seed(seed)).float())


def normal(layout, seed=0):
    """Normal numbers with a row of zeros: fp32 [n]."""
    return with_zeros(torch.randn(layout.n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32))


def with_zeros(flat):
    flat[128:300] = 0
    return flat


@pytest.fixture
def on_cpu(monkeypatch):
    """Calls a function without kernels."""

    def without_kernels(call, *arguments):
        with monkeypatch.context() as without:
            without.delenv("GRADCOMP_TRITON")
            return call(*arguments)

    return without_kernels


def values_of(decoded):
    return torch.cat([decoded.values(number) for number in range(len(decoded.chunks))]).cpu()


def same_bits(x, y):
    return torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8))


def both(compressor, flat, layout, device, on_cpu):
    """The payload and its values without kernels, and with them. All decode the latter to the same bits."""
    expected, own = on_cpu(compressor.pack, flat, layout)
    payload, sent = compressor.pack(flat.to(device), layout)
    values = on_cpu(lambda: values_of(compressor.unpack(payload.cpu(), layout)))
    assert same_bits(values_of(sent), values)
    assert same_bits(values_of(compressor.unpack(payload, layout)), values)
    return (expected, on_cpu(values_of, own)), (payload.cpu(), values)


@pytest.mark.parametrize(
    ("compressor", "layout"),
    [
        (lgc.OneBit(threshold="zero"), ODD),
        (lgc.OneBit(threshold="zero", groups="tensor"), ODD),
        (lgc.OneBit(), EVEN),
        (lgc.OneBit(groups="block", group_size=16), layout_of((5, 7), (1, 64))),
        (lgc.OneBit(groups="tensor"), EVEN),
        (lgc.TwoBit(threshold=3), ODD),
    ],
    ids=["onebit", "tensors", "mean", "mean of blocks", "mean of tensors", "twobit"],
)
def test_payloads_are_identical_if_sums_are_exact(compressor, layout, device, on_cpu):
    (expected, _), (payload, _) = both(compressor, whole(layout), layout, device, on_cpu)
    assert same_bits(payload, expected)


@pytest.mark.parametrize(
    "compressor",
    [lgc.OneBit(), lgc.OneBit(groups="block", group_size=700), lgc.TwoBit()],
    ids=["onebit", "blocks", "twobit"],
)
def test_codes_are_identical_and_means_close_if_sums_are_rounded(compressor, device, on_cpu):
    (_, expected), (_, values) = both(compressor, normal(ODD), ODD, device, on_cpu)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)  # another code would be another value


@pytest.mark.parametrize("c", [0, 2.5])
def test_terngrads_scalers(c, device, on_cpu):
    flat = torch.cat([normal(ODD) * scale for scale in (1e-30, 1, 1e30)])
    layout = layout_of(*3 * ODD.shapes)
    expected = on_cpu(terngrad.scalers_of, flat, layout, c)
    torch.testing.assert_close(terngrad.scalers_of(flat.to(device), layout, c).cpu(), expected, rtol=1e-6, atol=0)


class Drawn:
    """The same draws whether they are drawn at once or tensor by tensor."""

    def __init__(self, n, device):
        self.rest, self.device = Uniform(torch.device("cpu"), 1).draw(n, 1.0), device

    def draw(self, n, begin):
        own, self.rest = self.rest[:n], self.rest[n:]
        return own.to(self.device)


def test_terngrads_digits_of_the_same_draws(device, on_cpu):
    flat = normal(ODD)
    limits = on_cpu(terngrad.scalers_of, flat, ODD, 2.5)

    def codec(device=device):
        return terngrad._Step(ODD, limits.to(device), 1.25 * limits.to(device), Drawn(ODD.n, device))

    expected, _ = on_cpu(codec(torch.device("cpu")).pack, flat, ODD)
    payload, sent = codec().pack(flat.to(device), ODD)
    values = on_cpu(lambda: values_of(codec(torch.device("cpu")).unpack(payload.cpu(), ODD)))
    assert same_bits(values_of(sent), values)
    assert same_bits(payload, expected)


@pytest.mark.parametrize("compressor", [lgc.OneBit(), lgc.TwoBit()], ids=["onebit", "twobit"])
def test_the_mean_equals_a_cpus(compressor, device, on_cpu):
    payloads = [compressor.pack(normal(EVEN, seed).to(device), EVEN)[0] for seed in range(3)]

    def mean(payloads):
        buffer = torch.empty(EVEN.n, device=payloads[0].device)
        return mean_of((compressor.unpack(each, EVEN) for each in payloads), 3, EVEN.n, lambda: buffer).values

    ours, expected = mean(payloads), on_cpu(mean, [payload.cpu() for payload in payloads])
    assert torch.equal(ours.cpu(), expected)
    left = ours.clone()
    compressor.unpack(payloads[0], EVEN).subtract_from(left)
    first = on_cpu(lambda: values_of(compressor.unpack(payloads[0].cpu(), EVEN)))
    assert torch.equal(left.cpu(), expected - first)


@pytest.mark.parametrize("base", [lgc.OneBit, lgc.TwoBit])
def test_a_subclass_encodes_as_it_says(base, device):
    class Zeros(base):
        def encode(self, x):
            return super().encode(torch.zeros_like(x))

    payload, _ = Zeros().pack(torch.ones(64 * 32, device=device), Layout(("0",), ((64, 32),)))
    assert torch.equal(Zeros().unpack(payload, Layout(("0",), ((64, 32),))).values(0), torch.zeros(64 * 32).to(device))

"""The GPU's path against the CPU's: the same bytes where the arithmetic is exact, and no waiting."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.launches import Echo
from lightning_gradcomp.averaging import exchange
from lightning_gradcomp.compressors import DGC, GradientDropping, OneBit, TwoBit, terngrad
from lightning_gradcomp.compressors.decoded import all_finite
from lightning_gradcomp.compressors.kernels.bits import bit_table, pack_bits, unpack_bits
from lightning_gradcomp.compressors.kernels.elias_fano import pack_indices, unpack_indices
from lightning_gradcomp.compressors.kernels.formats import BITS, pack_values, unpack_values
from lightning_gradcomp.compressors.kernels.topk import topk
from lightning_gradcomp.compressors.layout import Layout
from tests.averaging.workers import seeded
from tests.gpu.worlds import CASES, NAMES, Model, Steps, draw_on_the_cpu, no_sum, sum_of_pair, train_pair

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
EXACT = [
    DGC(),
    DGC(momentum_masking=False),
    GradientDropping(),
    GradientDropping(scope="tensor"),
    GradientDropping(scope="chunk"),
    TwoBit(threshold=0.5),
]


@pytest.mark.parametrize(("cls", "options"), CASES, ids=NAMES)
def test_averages_are_those_of_the_cpu(cls, options, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", sum_of_pair)
    draw_on_the_cpu(monkeypatch)
    compressor = cls(**{"min_elements": 500, **options})
    on_cpu, on_gpu = (train_pair(compressor, device, steps=5) for device in ("cpu", "cuda"))
    for (expected, _), (averages, _) in zip(on_cpu, on_gpu, strict=True):
        for own, theirs in zip(averages, expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    assert all(torch.equal(first, second) for first, second in zip(on_gpu[0][0], on_gpu[1][0], strict=True))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_steps_of_adam_are_those_of_the_cpu(make, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", no_sum)
    weights = {}
    for device in ("cpu", "cuda"):
        model = Model(device)
        groups = [{"params": [*model.parts[:2]]}, {"params": [*model.parts[2:]], "lr": 0.02}]
        # Steps differ in size by this eps: among equal ones, a GPU takes others than a CPU.
        optimizer = make(groups, lr=0.01, weight_decay=0.1, eps=1.0)
        compressed = Steps(model, DGC(sparsity=0.9, min_elements=500), Echo(), optimizer=optimizer)
        for step in range(5):
            model.prescribe(0, step)
            compressed.average()
            optimizer.step()
        weights[device] = [part.detach().cpu() for part in model.parts]
    for own, theirs in zip(weights["cuda"], weights["cpu"], strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("cls", "options"), CASES, ids=NAMES)
def test_deterministic_algorithms_are_all_that_is_used(cls, options, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(dist, "all_reduce", sum_of_pair)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (train_pair(cls(**{"min_elements": 500, **options}), "cuda", steps=3) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for (expected, _), (averages, _) in zip(first, again, strict=True):
        assert all(torch.equal(own, theirs) for own, theirs in zip(averages, expected, strict=True))


@pytest.mark.parametrize("compressor", EXACT, ids=repr)
def test_messages_are_those_of_the_cpu_to_the_bit(compressor):
    on_cpu, on_gpu = (train_pair(compressor, device, steps=5) for device in ("cpu", "cuda"))
    for (_, expected), (_, messages) in zip(on_cpu, on_gpu, strict=True):
        assert len(messages) == 5
        assert all(torch.equal(own, theirs) for own, theirs in zip(messages, expected, strict=True))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (1000, 1), (1000, 999), (100_003, 101), (3_000_000, 30_000)])
def test_exactly_k_ascending_indices_of_the_largest(n, k):
    x = torch.randn(n, generator=seeded(n))
    indices = topk(x.cuda(), k)
    assert indices.dtype == torch.int64
    assert indices.shape == (k,)
    assert bool((indices.diff() > 0).all())
    assert torch.equal(x[indices.cpu()].abs().sort().values, x.abs().topk(k).values.flip(0))


def test_exactly_k_ascending_indices_of_equal_numbers():
    for x in (torch.zeros(100_000, device="cuda"), torch.ones(100_000, device="cuda")):
        indices = topk(x, 1000)
        assert indices.shape == (1000,)
        assert bool((indices.diff() > 0).all())


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 8), (9, 3), (1000, 1), (1000, 999), (100_003, 101), (300_000, 9000)])
def test_indices_are_packed_as_on_the_cpu_and_read_back(n, k):
    for indices in (torch.randperm(n, generator=seeded(n))[:k].sort().values, torch.arange(n - k, n)):
        packed = pack_indices(indices.cuda(), n)
        assert torch.equal(packed.cpu(), pack_indices(indices, n))
        assert torch.equal(unpack_indices(packed, n, k).cpu(), indices)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_bits_and_codes_are_packed_as_on_the_cpu_and_read_back(n):
    x = torch.randn(n, generator=seeded(n))
    bits, digits = (x > 0).view(torch.uint8), (x.round().clamp(-1, 1) + 1).byte()
    for own, theirs in (
        (pack_bits(bits.cuda()), pack_bits(bits)),
        (unpack_bits(pack_bits(bits.cuda()), n), bits),
        (terngrad.pack(digits.cuda()), terngrad.pack(digits)),
        (bit_table(torch.device("cuda")), bit_table(torch.device("cpu"))),
    ):
        assert own.is_cuda
        assert torch.equal(own.cpu(), theirs)


def test_many_tensors_at_once_have_the_payload_that_each_has_alone():
    """Of sizes that leave every alignment behind them. The sums of small whole numbers are exact."""
    shapes = ((3, 7), (64, 33), (5, 5, 3), (16, 64), (16, 64), (2, 513), (7, 11))
    layout = Layout(tuple("abcdefg"), shapes)
    flat = torch.randint(-4, 5, (layout.n,), generator=seeded(0)).float()
    for codec in (OneBit(), TwoBit(), TwoBit(threshold=0.5)):
        payload, decoded = codec.pack(flat.cuda(), layout)
        expected, there = codec.pack(flat, layout)
        here, there_values = torch.zeros(layout.n, device="cuda"), torch.zeros(layout.n)
        decoded.add_to(here)
        there.add_to(there_values)
        assert len(decoded.chunks) == 1
        assert payload.shape == expected.shape
        torch.testing.assert_close(here.cpu(), there_values)


@pytest.mark.parametrize("values", BITS)
def test_values_are_packed_as_on_the_cpu_and_read_back(values):
    x = torch.randn(1000, generator=seeded(1))
    packed = pack_values(x.cuda(), values)
    assert torch.equal(packed.cpu(), pack_values(x, values))
    assert torch.equal(unpack_values(packed, 1000, values).cpu(), unpack_values(packed.cpu(), 1000, values))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_is_found_and_large_is_not_mistaken_for_it(value):
    x = torch.full((100_000,), 3e38, device="cuda")
    assert bool(all_finite(x))
    x[77_777] = value
    assert not bool(all_finite(x))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_remembered_on_no_rank(value):
    model = Model("cuda")
    compressed = Steps(model, GradientDropping(min_elements=500), Echo())
    for step in range(3):
        model.prescribe(0, step)
        if step == 2:
            before = compressed.state.state_dict()
            model.parts[2].grad[3, 2, 1, 0] = value
        compressed.average()
    assert all(bool(part.grad.isnan().all()) for part in model.parts)
    after = compressed.state.state_dict()["residual"]
    assert all(torch.equal(part, after[name]) for name, part in before["residual"].items())


@pytest.mark.parametrize(("cls", "options"), CASES, ids=NAMES)
def test_the_host_waits_once_a_step(cls, options, monkeypatch):
    """The exchange itself apart, which is not there."""
    reads, read = [], exchange.read_flags

    def waiting(flags):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        reads.append(read(flags))
        torch.cuda.set_sync_debug_mode(mode)
        return reads[-1]

    monkeypatch.setattr(dist, "all_reduce", no_sum)
    monkeypatch.setattr(exchange, "read_flags", waiting)
    model = Model("cuda")
    compressed = Steps(model, cls(**{"min_elements": 500, **options}), Echo())
    for step in range(4):
        model.prescribe(0, step)
        try:
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # libraries are loaded in the first
            compressed.average()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(reads) == 4

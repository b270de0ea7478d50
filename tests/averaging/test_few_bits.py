"""Averages in few bits: bit-identical to a simulation, of the bytes announced; not finite if a gradient is not."""

import math

import numpy as np
import pytest
import torch
import torchvision

from lightning_gradcomp import GradientAverager
from lightning_gradcomp.averaging import few_bits
from lightning_gradcomp.averaging.few_bits import first_blocks, mean_in_few_bits
from lightning_gradcomp.averaging.gradients import Layouts
from lightning_gradcomp.averaging.ranks import Nodes, Ranks
from lightning_gradcomp.averaging.topology import dense_step_traffic
from lightning_gradcomp.compressors import EDEN, Int8
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.compressors.kernels import eden
from lightning_gradcomp.compressors.kernels.int8 import int8_bytes, pack_int8, unpack_int8
from lightning_gradcomp.compressors.kernels.rng import fill_uniform, row_seeds
from lightning_gradcomp.compressors.layout import Layout
from tests.averaging.workers import (
    Table,
    averaged,
    backward,
    flag_bytes,
    prescribed_loss,
    seeded,
)
from tests.reference import eden as eden_reference
from tests.reference import int8 as int8_reference
from tests.threads import checked_collectives, run_ranks, subgroups

QUICK = {"min_elements": 40}
"""Of a `Table`, the kernel (360 elements) and the matrix (300) then travel in few bits."""
INT8 = FORMATS["int8"]


def workers(group, per_node):
    """The ranks of `group` as workers, or in nodes that average first."""
    return Nodes(group, per_node) if per_node > 1 else Ranks(group)


def of_nodes(values, per_node):
    """What each node's ranks have together, given what each rank has."""
    return [sum(values[first : first + per_node]) for first in range(0, len(values), per_node)]


@pytest.mark.parametrize(("n", "m"), [(5000, 77), (256, 1), (300, 0), (0, 5), (0, 0), (12 * 256, 12)])
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (3, 1), (4, 1), (4, 2), (8, 2)])
def test_8_bits_are_bit_identical_to_the_simulation_in_one_process(world, per_node, n, m):
    def numbers(rank, k):
        noise = torch.randn(k, generator=seeded(rank, k))
        return noise * noise.abs()

    sizes = [n // 3, n - n // 3]
    first = first_blocks(INT8, {"a": (sizes[0],), "b": (sizes[1],)}).values()

    def work(rank, group):
        large, small = numbers(rank, n).split(sizes), numbers(rank, m)
        ranks = workers(group, per_node)
        means, small_mean = mean_in_few_bits(ranks, INT8, list(zip(first, large, strict=True)), [small], 7)
        return *means, small_mean

    def uniform(phase, begin, k):
        rows = begin + torch.arange(-(-k // 256))
        return fill_uniform(torch.empty(len(rows), 256), row_seeds(rows, 7, *phase)).view(-1).numpy()

    larges = zip(*(numbers(rank, n).split(sizes) for rank in range(world)), strict=True)
    expected = [
        int8_reference.mean([tensor.numpy() / per_node for tensor in of_nodes(each, per_node)], begin, uniform)
        for each, begin in zip(larges, first, strict=True)
    ]
    small = sum(of_nodes([numbers(rank, m) / world for rank in range(world)], per_node)).numpy()
    with subgroups():
        results = run_ranks(world, work)
    for got in results:
        assert all(np.array_equal(mean, wanted) for mean, wanted in zip(got, [*expected, small], strict=True))


@pytest.mark.parametrize("wire", ["int8", "eden2"])
def test_a_bucket_of_small_tensors_alone_has_exact_means(wire):
    def work(rank, group):
        return mean_in_few_bits(
            Ranks(group), FORMATS[wire], [], [torch.full((3,), 1.0 + rank), torch.full((2,), 4.0 * rank)], 7
        )

    for means, small_mean in run_ranks(2, work):
        assert means == [] and small_mean.tolist() == [1.5, 1.5, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3)])
def test_rotated_bits_are_bit_identical_to_the_simulation_in_one_process(world, per_node, bits):
    """On whole numbers, which are divided and rotated without rounding errors."""
    shapes, form = {"wide": (3, 100), "narrow": (7, 5, 3), "exact": (4, 64)}, FORMATS[f"eden{bits}"]
    first = first_blocks(form, shapes)
    assert list(first.values()) == [0, 6, 13]

    def numbers(rank, name):
        return 6.0 * torch.randint(-9, 9, shapes[name], generator=seeded(rank, len(name)))

    def work(rank, group):
        large = [(first[name], numbers(rank, name)) for name in shapes]
        return mean_in_few_bits(workers(group, per_node), form, large, [torch.zeros(0)], 7)[0]

    def seeds(phase, block):
        return int(row_seeds(torch.tensor([block]), 7, *phase))

    turn = eden.rotation(torch.device("cpu"), 7).numpy().astype(np.int64)
    with subgroups():
        results = run_ranks(world, work)
    for name, got in zip(shapes, zip(*results, strict=True), strict=True):
        tensors = of_nodes([numbers(rank, name) for rank in range(world)], per_node)
        expected = eden_reference.mean(
            [tensor.numpy() / per_node for tensor in tensors], bits, turn, first[name], seeds
        )
        for mean in got:
            np.testing.assert_array_equal(eden_reference.blocks_of(mean.numpy()), trimmed(expected, shapes[name]))


def trimmed(blocks, shape):
    """The blocks with zeros where a row is filled."""
    rows = blocks.reshape(shape[0], -1)
    rows[:, math.prod(shape[1:]) :] = 0
    return rows.reshape(-1, 64)


@pytest.mark.parametrize("wire", ["int8", "eden2"])
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (3, 1), (6, 3)])
def test_a_mean_does_not_depend_on_what_is_averaged_with_it_or_on_owners(world, per_node, wire):
    """DDP changes its buckets after the first step, and a resumed run begins with the first ones again."""
    sizes = {"a": (700,), "b": (300, 4), "c": (5000,)}
    form = FORMATS[wire]
    first = first_blocks(form, sizes)

    def work(rank, group):
        tensors = {name: torch.randn(size, generator=seeded(rank, len(size), size[0])) for name, size in sizes.items()}
        small = torch.randn(7, generator=seeded(rank))
        together, ranks = [(first[name], tensor) for name, tensor in tensors.items()], workers(group, per_node)
        means, _ = mean_in_few_bits(ranks, form, together, [small], 5)
        mixed, _ = mean_in_few_bits(ranks, form, [together[2], together[0]], [small[:1], small], 5)
        [alone], _ = mean_in_few_bits(ranks, form, together[1:2], [small[:0]], 5)
        [later], _ = mean_in_few_bits(ranks, form, together[1:2], [small[:0]], 6)
        assert not torch.equal(alone, later)
        return all(map(torch.equal, means, [mixed[1], alone, mixed[0]]))

    with subgroups():
        assert all(run_ranks(world, work))


def test_rounding_is_unbiased_and_the_largest_stays():
    v = torch.cat([torch.tensor([-1.0, 1.0]), torch.linspace(-0.02, 0.02, 254)]) * 3.7
    total, rounds = torch.zeros(256), 2000
    for step in range(rounds):
        seeds = row_seeds(torch.tensor([3]), step)
        packed = pack_int8(v, torch.empty(int8_bytes(256), dtype=torch.uint8), seeds)
        decoded = unpack_int8(packed, torch.empty(256))
        assert torch.equal(decoded[:2], (v[:2] / 3.7).sign() * 127 * (v[1] / 127))
        total += decoded
    assert float((total / rounds - v).abs().max()) < 5 * 0.5 * 3.7 / 127 / rounds**0.5


@pytest.mark.parametrize("groups", [1, 5, 24])
@pytest.mark.parametrize(("world", "per_node", "steps"), [(2, 1, 1), (3, 1, 2), (4, 2, 1)])
def test_a_long_part_travels_in_pieces(world, per_node, steps, groups, monkeypatch):
    """Each message is rounded by less than a step of 1/127 of the largest; that of an owner comes on top."""
    monkeypatch.setattr(few_bits, "SHORT", 256)
    large, small = (
        [torch.randn(k, generator=seeded(rank, k)) for rank in range(world)] for k in (256 * world * groups - 7, 9)
    )

    def work(rank, group):
        [mean], small_mean = mean_in_few_bits(workers(group, per_node), INT8, [(0, large[rank])], [small[rank]])
        return mean, small_mean

    with subgroups():
        (first, first_small), *others = run_ranks(world, work)
    assert all(torch.equal(first, mean) and torch.equal(first_small, small_mean) for mean, small_mean in others)
    largest = float(max(each.abs().max() for each in large))
    torch.testing.assert_close(first, sum(large) / world, rtol=0, atol=steps / 127 * largest)
    torch.testing.assert_close(first_small, sum(small) / world)


@pytest.mark.parametrize("compressor", [Int8(**QUICK), EDEN(bits=3, **QUICK)], ids=["int8", "eden"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_sends_one_message_to_each_rank_and_of_three_or_more_one_mean_back(world, compressor):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor)
        averager.check_same_parameters()
        backward(model, optimizer, rank, 0, prescribed_loss)
        before = len(log[rank])
        averager.step()
        return averager.stats, log[rank][before:]

    with checked_collectives(world) as log:
        for stats, exchanged in run_ranks(world, work):
            parts, phases = (1, 1) if world == 2 else (world, 2)
            flags = flag_bytes(parts)
            number = phases * (world - 1)
            assert exchanged == [("isend", stats.bytes_sent // number + flags)] * number
            assert stats.bytes_sent == stats.bytes_received


@pytest.mark.parametrize(
    ("wire", "ratio"), [("int8", 3.9), ("eden1", 23.8), ("eden2", 13.8), ("eden3", 9.6), ("eden4", 7.4)]
)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_step_of_resnet50_sends_that_many_times_fewer_bytes_than_a_ring(world, wire, ratio):
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in torchvision.models.resnet50().named_parameters()}
    large = Int8().choose(shapes)
    taken, left = ({name: shape for name, shape in shapes.items() if (name in large) is it} for it in (True, False))
    layouts = Layouts(
        Layout(tuple(taken), tuple(taken.values())), Layout(tuple(left), tuple(left.values())), torch.device("cpu")
    )
    dense, sent = (dense_step_traffic(layouts, Ranks(None, world), wire) for wire in ("fp32", wire))
    assert ratio < dense / sent < 1.03 * ratio


def gradients(compressor, world, change, **options):
    """Each rank's gradient of a Table after an average, where rank 1 changed its own first."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor)
        backward(model, optimizer, rank, 0, prescribed_loss)
        if rank == 1:
            change(model)
        averager.average(**options)
        averager.commit()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    first, *others = run_ranks(world, work)
    assert all(torch.equal(first.nan_to_num(-1), other.nan_to_num(-1)) for other in others)
    return first


@pytest.mark.parametrize("grad_scale", [1.0, 65536.0])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_one_element_that_is_not_finite_is_seen_by_all_ranks(name, value, grad_scale):
    def change(model):
        getattr(model, name).grad.view(-1)[5] = value

    for compressor in (Int8(**QUICK), EDEN(bits=2, **QUICK)):
        got = gradients(compressor, 3, change, grad_scale=grad_scale)
        bad = ~got.isfinite()
        assert 0 < bad.sum() <= (256 if name == "kernel" else 1)


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("world", [2, 3])
def test_rows_without_a_gradient_on_any_rank_do_not_move(world, bits):
    """Adam divides by its own noise, so a rare word's row would move by the learning rate."""

    def work(rank, group):
        generator = seeded(rank)
        model = torch.nn.Embedding(8192, 24, _weight=torch.ones(8192, 24))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        averager = GradientAverager(model, EDEN(bits=bits), optimizer=optimizer, process_group=group)
        seen = torch.zeros(8192, dtype=torch.bool)
        for _ in range(3):
            words = torch.randint(8192, (200,), generator=generator)
            optimizer.zero_grad()
            model(words).square().sum().backward()
            seen[words] = True
            averager.step()
        return seen, (model.weight != 1).any(1)

    seen, moved = zip(*run_ranks(world, work), strict=True)
    assert torch.equal(moved[0], torch.stack(seen).any(0))


@pytest.mark.parametrize("world", [2, 3])
def test_large_numbers_do_not_overflow(world):
    largest = torch.finfo(torch.float32).max

    def fill(model):
        for parameter in model.parameters():
            parameter.grad.fill_(largest)

    assert gradients(Int8(**QUICK), world, fill).isfinite().all()


def test_small_tensors_are_exact_and_the_others_within_two_steps():
    exact, got = (gradients(compressor, 2, lambda model: None) for compressor in ("none", Int8(**QUICK)))
    large, small = exact[:660].split(256), exact[660:]
    assert torch.equal(small, got[660:])
    errors = [(a - b).abs().max() / a.abs().max() for a, b in zip(large, got[:660].split(256), strict=True)]
    assert 0 < max(errors) < 2 / 127  # two messages, rounded by less than a step each


def test_an_option_out_of_range_is_an_error():
    with pytest.raises(ValueError, match=r"Int8.min_elements: got 0, allowed: a whole number from 1"):
        Int8(min_elements=0)
    with pytest.raises(ValueError, match=r"EDEN.bits: got 5, allowed: 1, 2, 3 or 4"):
        EDEN(bits=5)

"""PowerSGD: a gradient of rank r is sent exactly in one step, any other in the end."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.compressors import PowerSGD
from lightning_gradcomp.compressors.powersgd import orthonormal
from tests.averaging.methods import Parts, kept
from tests.averaging.workers import all_equal, averaged, conv_net, seeded, train
from tests.compressors.one_worker import CPU, normal, one
from tests.threads import checked_collectives, run_ranks, short_sum


def powersgd(**options):
    return PowerSGD(**{"min_elements": 40, "warmup_epochs": 0, "min_compression": 1.0, **options})


def averages(shapes, gradients, steps=1, world=2, **options):
    """For each step: the average of each parameter, and what is remembered on each rank."""

    def work(rank, group):
        model, log = Parts(*shapes), []
        _, averager = averaged(model, group, powersgd(**options))
        for step in range(steps):
            for part, gradient in zip(model.parts, gradients(rank, step), strict=True):
                part.grad = gradient.clone()
            averager.average()
            averager.commit()
            log.append(([part.grad.clone() for part in model.parts], kept(averager)))
        return log

    ranks = run_ranks(world, work)
    for step in zip(*ranks, strict=True):
        assert all_equal([torch.cat([part.reshape(-1) for part in arrived]) for arrived, _ in step])
    return [(step[0][0], [remembered for _, remembered in step]) for step in zip(*ranks, strict=True)]


def of_rank(r, n, m, *seeds):
    generator = seeded(*seeds)
    return torch.randn(n, r, generator=generator) @ torch.randn(r, m, generator=generator)


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_of_rank_r_are_sent_exactly(matrices, rank):
    """Several matrices of one shape, each on a scale of its own."""
    scales = [1.0, 1e-6, 1e3, 30.0][:matrices]
    gradients = [scale * of_rank(rank, 16, 20, number) for number, scale in enumerate(scales)]
    for arrived, ranks in averages([(16, 20)] * matrices, lambda *_: gradients, steps=3, rank=rank):
        for number, (got, expected) in enumerate(zip(arrived, gradients, strict=True)):
            assert float((got - expected).norm() / expected.norm()) < 1e-5
            assert all(float(kept[f"parts.{number}"].norm() / expected.norm()) < 1e-5 for kept in ranks)


def test_a_mean_of_rank_1_is_sent_exactly():
    """Where ranks differ, it cancels in the sum over them, up to rounding."""
    mean = of_rank(1, 16, 20, 1)
    apart = normal(320).view(16, 20)
    [(arrived, ranks)] = averages([(16, 20)], lambda rank, step: [mean + apart * (1 - 2 * rank)], rank=1)
    assert float((arrived[0] - mean).norm() / mean.norm()) < 1e-4
    assert float((ranks[0]["parts.0"] + ranks[1]["parts.0"]).norm() / mean.norm()) < 1e-4
    assert float(ranks[0]["parts.0"].norm() / mean.norm()) > 0.1


class Means:
    """The `Collectives` of one of two threads: means alone, which take a hundredth of the time of a process group's."""

    def __init__(self, worker, flats, barrier):
        self.worker, self.flats, self.barrier = worker, flats, barrier

    def now(self, phase):
        pass

    def mean(self, flat):
        self.flats[self.worker] = flat
        self.barrier.wait(timeout=10)
        mean = (self.flats[0] + self.flats[1]) / 2
        self.barrier.wait(timeout=10)
        return mean


def test_the_residual_is_bounded_over_500_steps_of_noise():
    """And it is what was not sent. With the averaged product subtracted instead of the local one it would grow."""
    layout, flats, barrier = one(12, 12), [None, None], Barrier(2)

    def work(worker):
        compressor, means = powersgd(rank=2), Means(worker, flats, barrier)
        state, out, generator = (
            compressor.state_for(None).start(layout, CPU),
            torch.empty(layout.n),
            seeded(worker),
        )
        norms, unsent = [], torch.zeros(layout.n).double()
        for _ in range(500):
            gradient, applied = torch.randn(layout.n, generator=generator), torch.zeros(layout.n)
            state.compensate(out.copy_(gradient))
            mean, sent = compressor.average(out, layout, means, state)
            mean.add_to(applied)
            state.subtract(sent)
            out = state.commit({"a"}, out)
            unsent += gradient.double() - applied.double()
            norms.append(float(state.unsent.norm()))
        return norms, unsent, state.unsent.double()

    with ThreadPoolExecutor(2) as threads:
        workers = list(threads.map(work, range(2)))
    for norms, _, _ in workers:
        assert max(norms[300:]) < 1.5 * max(norms[100:300])
    mean = sum(kept for _, _, kept in workers) / 2
    torch.testing.assert_close(mean, sum(unsent for _, unsent, _ in workers) / 2, rtol=1e-4, atol=1e-3)
    grown = [float(unsent.norm()) for _, unsent, _ in workers]
    assert min(grown) > 2 * max(workers[0][0][300:]), "this noise would not tell the two apart"


def test_a_constant_gradient_is_sent_in_the_end():
    gradient = normal(320).view(16, 20)
    total = sum(arrived[0] for arrived, _ in averages([(16, 20)], lambda rank, step: [gradient], steps=100, rank=2))
    assert float((total / 100 - gradient).norm() / gradient.norm()) < 0.1


def test_a_warm_start_finds_the_largest_directions():
    """Without error feedback's help: a fresh gradient of two large directions and little noise, step after step."""
    base = 10 * of_rank(2, 16, 20, 3)

    def error(warm_start):
        def gradients(_, step):
            return [base + torch.randn(16, 20, generator=seeded(step)) * 3]

        log = averages([(16, 20)], gradients, steps=12, rank=2, warm_start=warm_start)
        return sum(float((arrived[0] - base).norm() / base.norm()) for arrived, _ in log[4:])

    assert error(True) < error(False)


@pytest.mark.parametrize("case", ["zero", "zero column", "zero row", "one entry", "rank 1", "equal columns"])
def test_matrices_short_of_rank_are_sent_exactly(case):
    gradient = torch.zeros(16, 20)
    if case == "zero column":
        gradient[:, 1:3] = normal(32).view(16, 2)
    elif case == "zero row":
        gradient[3:5] = normal(40).view(2, 20)
    elif case == "one entry":
        gradient[7, 9] = 5.0
    elif case == "rank 1":
        gradient = of_rank(1, 16, 20, 4)
    elif case == "equal columns":
        gradient = torch.ones(16, 20)
    for arrived, _ in averages([(16, 20)], lambda rank, step: [gradient], steps=6, rank=2):
        torch.testing.assert_close(arrived[0], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-20, 1e18, 1e30])
def test_gradients_of_any_scale_are_sent_exactly(scale):
    gradient = of_rank(1, 16, 20, 5)
    for arrived, ranks in averages([(16, 20)], lambda rank, step: [gradient * scale], steps=5, rank=1):
        torch.testing.assert_close(arrived[0] / scale, gradient, rtol=1e-4, atol=1e-4)
        assert all(bool(torch.isfinite(kept["parts.0"]).all()) for kept in ranks)


def test_rows_of_zeros_stay_zeros():
    """To the bit, also where the mean is short of rank: of padding, whose row is the first, say."""
    gradient = normal(320).view(16, 20)
    gradient[[0, 1, 5, 15]] = 0
    for short in (gradient, gradient * (torch.arange(16) == 3)[:, None]):
        for (arrived,), _ in averages([(16, 20)], lambda *_, g=short: [g], steps=4, rank=4):
            assert not arrived[[0, 1, 5, 15]].any()
            assert arrived[3].any()


def test_a_step_of_zeros_before_a_first_row_of_zeros_loses_no_direction():
    gradient = of_rank(1, 16, 20, 6)
    gradient[0] = 0
    arrived, _ = averages([(16, 20)], lambda _, step: [gradient * (step > 0)], steps=6, rank=1)[-1]
    assert float((arrived[0] - gradient).norm() / gradient.norm()) < 1e-3


def test_steps_of_zeros_lose_no_direction():
    gradient = of_rank(2, 16, 20, 6)

    def gradients(_, step):
        return [gradient * (step > 2)]

    arrived, _ = averages([(16, 20)], gradients, steps=12, rank=2)[-1]
    assert float((arrived[0] - gradient).norm() / gradient.norm()) < 1e-3


@pytest.mark.parametrize("world", [2, 3])
def test_queries_are_the_same_on_all_ranks(world):
    def work(rank, group):
        model = conv_net()
        optimizer, averager = averaged(model, group, powersgd(), momentum=0.9)
        seen = [averager.state_dict()["memory"]["query"]]
        for step in range(4):
            train(model, optimizer, averager, rank, range(step, step + 1))
            seen.append(averager.state_dict()["memory"]["query"])
        return seen

    ranks = run_ranks(world, work)
    for step in zip(*ranks, strict=True):
        assert all(torch.equal(other[name], step[0][name]) for other in step for name in step[0])
    assert not torch.equal(ranks[0][0]["0.weight"], ranks[0][1]["0.weight"])
    [(_, remembered)] = averages([(16, 20)] * 2, lambda rank, step: [normal(320).view(16, 20)] * 2)
    assert not torch.equal(remembered[0]["parts.0"], remembered[0]["parts.1"])


@pytest.mark.parametrize("warm_start", [False, True])
def test_what_is_left_of_a_constant_gradient_does_not_grow(warm_start):
    """With one query for ever all that is outside of its span would be left: about 60 gradients."""
    gradient, steps = normal(40 * 40).view(40, 40), 60
    log = averages([(40, 40)], lambda rank, step: [gradient], steps, rank=2, warm_start=warm_start)
    applied = sum(arrived[0] for arrived, _ in log)
    assert float((steps * gradient - applied).norm() / gradient.norm()) < 20


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_step_is_two_sums_of_thin_factors(world, rank):
    shapes = [(16, 20), (10, 3, 3, 3), (7,)]

    def work(own, group):
        model = Parts(*shapes)
        _, averager = averaged(model, group, powersgd(rank=rank))
        for part in model.parts:
            part.grad = normal(part.numel()).view(part.shape)
        averager.average()
        averager.commit()

    with checked_collectives(world) as log:
        run_ranks(world, work)
    flags = 1 + CALLER_FLAGS + len(shapes)
    p_bytes = 4 * (rank * (16 + 10) + 7 + flags)  # with the vector
    q_bytes = 4 * rank * (20 + 27)
    assert log[0][-len(short_sum(world, 1)) * 2 :] == short_sum(world, p_bytes) + short_sum(world, q_bytes)


@pytest.mark.parametrize(
    ("shape", "options", "taken"),
    [
        ((64, 64), {"rank": 2}, True),  # 256 · 2 < 4096
        ((64, 64), {"rank": 16}, False),  # 2048 · 2 = 4096
        ((64, 64), {"rank": 15}, True),
        ((64, 64), {"rank": 16, "min_compression": 1.9}, True),
        ((2, 5000), {"rank": 1}, False),  # 5002 · 2 > 10000
        ((5, 5000), {"rank": 1}, True),
        ((3, 5000), {"rank": 4, "min_compression": 1}, False),  # no more columns than rows
        ((64, 3, 3, 3), {"rank": 2}, True),  # 64 x 27
        ((10, 10), {"rank": 1}, False),  # min_elements
        ((5000,), {"rank": 1}, False),
    ],
    ids=str,
)
def test_a_matrix_is_taken_if_its_factors_are_smaller(shape, options, taken):
    assert PowerSGD(**options).compresses("weight", shape) == taken


@pytest.mark.parametrize("case", ["normal", "zero", "equal columns", "tiny", "huge", "one column zero"])
def test_the_basis_is_orthonormal_and_spans_its_input(case):
    p = normal(48).view(16, 3)
    p = {
        "normal": p,
        "zero": 0 * p,
        "equal columns": p[:, :1].expand(16, 3),
        "tiny": p * 1e-37,
        "huge": p * 1e37,
        "one column zero": p * torch.tensor([1.0, 0.0, 1.0]),
    }[case]
    basis = orthonormal(p)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3) * (case != "zero"), rtol=0, atol=1e-5)
    spanned = basis @ (basis.T @ p)
    torch.testing.assert_close(spanned, p.contiguous(), rtol=1e-4, atol=1e-5 * max(float(p.abs().max()), 1e-38))

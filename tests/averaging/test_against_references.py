"""Each method has the weights of a plain numpy implementation of it, under momentum SGD, for forty steps.

Both compute in fp32 but add in different orders, so weights drift apart by some last bits. A decision (a sign, a
threshold, a place among the k largest) that only one of them takes moves a weight by 1e-3 at least. `closest` is the
smallest distance from the edge that any decision had. The steps begin at a number for which that is 2e-5 in all cases,
several times the drift, so that agreement to 2e-5 is no accident of this machine.

PowerSGD decides nothing, but where a matrix and its query are nearly at right angles its last bits grow, cold to 1e-4
in forty steps of full-rank noise. With a warm start they grow by a third a step: there the reference takes each step
from where the averager is.
"""

from itertools import count

import numpy as np
import pytest
import torch

from lightning_gradcomp.compressors import GradientDropping, OneBit, PowerSGD, TernGrad, TwoBit
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.powersgd import query
from tests.averaging.workers import Table, averaged, bowl_gradient, bowl_loss, train
from tests.reference.gradient_dropping import PaperGradientDropping
from tests.reference.onebit import PaperOneBit
from tests.reference.powersgd import PaperPowerSGD
from tests.reference.terngrad import PaperTernGrad
from tests.reference.twobit import KVStoreTwoBit
from tests.threads import run_ranks

STEPS = range(9820, 9840)
SGD = {"lr": 0.02, "momentum": 0.9}
COMPRESSED = ["kernel", "matrix"]


def draws(rank, seed=0):
    """The uniform numbers that TernGrad's rank draws: those of a step are for each tensor in turn."""
    streams = (Uniform(torch.device("cpu"), seed, rank, step) for step in count())
    each = (stream for stream in streams for _ in COMPRESSED)
    return lambda n: next(each).draw(n, 0.0).numpy()


def queries(rank):
    """PowerSGD's first queries, which any averager's state tells."""
    _, averager = averaged(Table(), None, PowerSGD(min_elements=40, rank=rank, warmup_epochs=0))
    return {name: q.numpy() for name, q in averager.state_dict()["memory"]["query"].items()}


def onebit(group, threshold, **options):
    return (
        OneBit(threshold=threshold, **options),
        PaperOneBit,
        {"group": group, "threshold": threshold},
    )


def twobit(threshold):
    return TwoBit(threshold=threshold), KVStoreTwoBit, {"threshold": threshold}


def dropping(scope):
    options = {"sparsity": 0.9, "scope": scope}
    return GradientDropping(**options), PaperGradientDropping, options


def terngrad(**options):
    return TernGrad(**options), PaperTernGrad, {"clip_sigma": 2.5, **options}


def powersgd(rank, **options):
    return PowerSGD(rank=rank, **options), PaperPowerSGD, {"queries": queries(rank)}


def cold_powersgd(rank):
    def cold(name, step):
        return query(name, len(first[name]), rank, torch.device("cpu"), step).numpy().astype(np.float64)

    first = queries(rank)
    return PowerSGD(rank=rank, warm_start=False), PaperPowerSGD, {"queries": first, "cold": cold}


CASES = {
    "onebit, blocks of 64": lambda: onebit(64, "zero", groups="block", group_size=64),
    "onebit, columns": lambda: onebit("column", "zero", groups="column"),
    "onebit, tensors, mean": lambda: onebit("tensor", "mean", groups="tensor"),
    "twobit, auto": lambda: twobit("auto"),
    "twobit, 0.5": lambda: twobit(0.5),
    "terngrad": lambda: terngrad(),
    "terngrad, unclipped": lambda: terngrad(clip_sigma=0.0),
    "terngrad, own scalers": lambda: terngrad(share_scaler=False),
    "terngrad, error feedback": lambda: terngrad(error_feedback=True),
    "gradient dropping, global": lambda: dropping("global"),
    "gradient dropping, tensor": lambda: dropping("tensor"),
    "powersgd, rank 1, cold": lambda: cold_powersgd(1),
    "powersgd, rank 2, cold": lambda: cold_powersgd(2),
}


def reference_weights(world, reference_class, options):
    """The reference's weights at the end, and how close a decision was."""
    start = {name: p.detach().numpy() for name, p in Table().named_parameters()}
    if reference_class is PaperTernGrad:
        options = {**options, "draws": [draws(rank) for rank in range(world)]}
    reference = reference_class(start, COMPRESSED, world, **SGD, **options)
    for step in STEPS:
        reference.step([bowl_gradient(reference.weights, rank, step) for rank in range(world)])
    return reference.weights, reference.closest


def averager_weights(world, compressor):
    """The weights of the averager's first rank at the end."""
    compressor.min_elements, compressor.warmup_epochs = 40, 0

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor, **SGD)
        assert averager.begin_step().compressor
        train(model, optimizer, averager, rank, STEPS, bowl_loss)
        return {name: p.detach().numpy() for name, p in model.named_parameters()}

    return run_ranks(world, work)[0]


ONE_OF_EACH = (
    "onebit, blocks of 64", "twobit, auto", "terngrad", "gradient dropping, global", "powersgd, rank 2, cold",
)  # fmt: skip
RUNS = {f"3-{name}": (3, case) for name, case in CASES.items()} | {
    f"2-{name}": (2, CASES[name]) for name in ONE_OF_EACH
}
"""All on three ranks, whose sums have an order; on two, each method once."""


@pytest.mark.parametrize(("world", "case"), RUNS.values(), ids=RUNS)
def test_the_weights_are_the_references(world, case):
    compressor, reference_class, options = case()
    ours = averager_weights(world, compressor)
    expected, closest = reference_weights(world, reference_class, options)
    drift = max(float(np.abs(ours[name] - weight).max()) for name, weight in expected.items())
    tolerance = 1e-3 if reference_class is PaperPowerSGD else 2e-5
    for name, weight in expected.items():
        np.testing.assert_allclose(ours[name], weight, rtol=tolerance, atol=tolerance, err_msg=name)
    assert closest > drift


def averager_steps(world, compressor):
    """What the averager's ranks hold before each step and what arrives in it, then what they hold at the end."""
    compressor.min_elements, compressor.warmup_epochs = 40, 0

    def work(rank, group):
        model, steps_seen = Table(), []
        optimizer, averager = averaged(model, group, compressor, **SGD)
        for step in STEPS:
            memory = averager.state_dict()["memory"]
            held = {kind: {name: part.numpy() for name, part in parts.items()} for kind, parts in memory.items()}
            before = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
            train(model, optimizer, averager, rank, range(step, step + 1), bowl_loss)
            arrived = {name: p.grad.clone().numpy() for name, p in model.named_parameters()}
            steps_seen.append((before, held, arrived))
        return steps_seen

    return zip(*run_ranks(world, work), strict=True)


def span(q):
    """The projection onto what the columns of q span."""
    basis, _ = np.linalg.qr(q.astype(np.float64))
    return basis @ basis.T


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_each_powersgd_step_is_the_references(world, rank):
    compressor, reference_class, options = powersgd(rank)
    reference = None
    for step, ranks in zip(STEPS, averager_steps(world, compressor), strict=True):
        weights, held, arrived = ranks[0]
        if reference is None:
            reference = reference_class(weights, COMPRESSED, world, **SGD, **options)
        else:
            for name in COMPRESSED:
                for own, (_, state, _) in zip(reference.residual, ranks, strict=True):
                    np.testing.assert_allclose(own[name], state["residual"][name], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(span(reference.queries[name]), span(held["query"][name]), rtol=0, atol=1e-4)
            reference.residual = [{name: state["residual"][name] for name in COMPRESSED} for _, state, _ in ranks]
            reference.queries = {name: q.astype(np.float64) for name, q in held["query"].items()}
        averages = reference.averages([bowl_gradient(weights, own, step) for own in range(world)])
        for name in COMPRESSED:
            np.testing.assert_allclose(averages[name], arrived[name], rtol=1e-4, atol=1e-4, err_msg=f"{name} {step}")


def test_every_case_has_weights_of_its_own():
    """Else agreement on an option would say nothing."""
    ends = [reference_weights(2, *case()[1:])[0] for case in CASES.values()]
    for number, end in enumerate(ends):
        for other in ends[:number]:
            assert max(float(np.abs(end[name] - other[name]).max()) for name in end) > 1e-2

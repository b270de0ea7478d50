"""Laws for every registered compressor, and for the examples, whatever the topology. test_matrix.py has the others."""

from functools import partial

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager, exchange
from lightning_gradcomp.compressors import LossyCompressor, PowerSGD
from tests.averaging.cells import Cell, Ledger
from tests.averaging.methods import (
    EVERY,
    LOSSY,
    PARTITIONED,
    REGISTERED,
    REMEMBERING,
    SCALE_FREE,
    Parts,
    finite,
    parts_loss,
    recorded_bytes,
    with_adamw,
    with_defaults,
    without_momentum,
)
from tests.averaging.workers import (
    Table,
    all_equal,
    averaged,
    backward,
    conv_net,
    prescribed_loss,
    same,
    train,
    weights,
)
from tests.threads import GATHERS, checked_collectives, run_ranks

METHODS = with_defaults(EVERY)
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
"""For laws that say nothing of the payload, and so of no other options."""
NOT_LOSSY = {label: make for label, make in METHODS.items() if label not in LOSSY}
remembering = pytest.mark.parametrize("make", REMEMBERING.values(), ids=REMEMBERING)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ODD_SIZES = [(1, 1), (1, 3), (2, 1), (3, 5), (5, 5, 3), (13, 11), (41, 37), (7,), ()]
ODD = {
    "one element": [(1, 1)],
    "two matrices of one element": [(1, 1), (1, 1), (3,)],
    "a row and a column": [(1, 517), (517, 1)],
    "vectors alone": [(5,), (1030,), ()],
}


# A long payload of tensors that are encoded one by one travels in parts


@pytest.mark.parametrize("name", ["onebit", "twobit", "terngrad", "ef_signsgd", "qsgd"])
def test_parts_change_neither_bits_nor_bytes(name, monkeypatch):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, LOSSY[name]())
        train(model, optimizer, averager, rank, 3, prescribed_loss)
        return weights(model), averager.stats.bytes_sent, averager.state_dict()["memory"]

    def run():
        with checked_collectives(2) as log:
            return run_ranks(2, work), len([call for call, _ in log[0] if call in GATHERS])

    whole, gathers = run()
    monkeypatch.setattr(exchange, "SHORT", 32)
    parts, more_gathers = run()
    assert more_gathers == gathers + 3  # one more in each step: there are two tensors
    for (before, sent, memory), (after, sent_in_parts, memory_then) in zip(whole, parts, strict=True):
        assert torch.equal(before, after) and sent == sent_in_parts and same(memory, memory_then)


# Sizes and zeros


IN_ORDER = {
    **{name: LOSSY[name] for name in ("gradient_dropping", "onebit", "twobit", "ef_signsgd")},
    "gradient_dropping of few": partial(LOSSY["gradient_dropping"], sparsity=0.999),
}
"""Sparse sums of few entries are merged."""


@pytest.mark.parametrize("make", IN_ORDER.values(), ids=IN_ORDER)
@pytest.mark.parametrize("slopes", [(2.0**27, 1.0, -(2.0**27)), (1.0, 2.0**27, -(2.0**27))], ids=str)
def test_payloads_are_added_in_the_order_of_the_ranks(make, slopes):
    """In fp32 (2²⁷ + 1) - 2²⁷ is 0. If the last is not added last, it is 1: with one of these orders or the other."""

    def work(rank, group):
        model = Parts((64, 64), (3,))
        averager = averaged(model, group, make())[1]
        (sum(part.sum() for part in model.parts) * slopes[rank]).backward()
        averager.average()
        return torch.cat([part.grad.view(-1) for part in model.parts])

    assert all(not grad.any() for grad in run_ranks(3, work))


def test_an_average_of_few_entries_has_the_loss_scale():
    """Such an average stays sparse; those of small models do not."""

    def work(rank, group, scale):
        model = Parts((64, 64), (3,))
        averager = averaged(model, group, LOSSY["gradient_dropping"](sparsity=0.999))[1]
        (scale * parts_loss(model, rank, 0)).backward()
        averager.average(grad_scale=scale)
        return torch.cat([part.grad.view(-1) for part in model.parts])

    plain, scaled = (run_ranks(2, partial(work, scale=scale))[0] for scale in (1.0, 1024.0))
    assert 3 < plain.count_nonzero() < 16
    assert torch.equal(scaled, 1024 * plain)


PACKINGS = {label: METHODS[label] for label in ("dgc", "gradient_dropping", "onebit", "powersgd", "eden", "none")}
"""Those whose payload depends on how tensors are divided: by entries, rows, groups, blocks, or not at all."""
SIZES = {label: (make, ODD_SIZES) for label, make in EVERY.items()} | {
    f"{label}, {name}": (make, shapes) for label, make in PACKINGS.items() for name, shapes in ODD.items()
}


@pytest.mark.parametrize(("make", "shapes"), SIZES.values(), ids=SIZES)
def test_tensors_of_any_size_train(make, shapes):
    smallest = {"min_elements": 1} if isinstance(make(), LossyCompressor) else {}

    def work(rank, group):
        model = Parts(*shapes)
        optimizer, averager = averaged(model, group, make(**smallest))
        train(model, optimizer, averager, rank, 4, parts_loss)
        assert finite(averager, model)
        assert averager.describe()
        return weights(model)

    with checked_collectives(2):
        assert all_equal(run_ranks(2, work))


@remembering
def test_nothing_is_lost_of_tensors_of_any_size(make):
    if not make(min_elements=1).compresses("part", (1, 1)):
        return

    def work(rank, group):
        ledger = Ledger(Cell(lambda: make(min_elements=1), optimizer="plain").begin(group, Parts(*ODD_SIZES)))
        ledger.go(rank, range(4), parts_loss)
        return ledger.had, ledger.came, ledger.left()[0]

    had, came, left = zip(*run_ranks(3, work), strict=True)
    assert all_equal(came)
    assert float((sum(had) - 3 * came[0] - sum(left)).norm() / sum(had).norm()) <= 1e-6


@every_method
def test_zero_gradients_move_nothing(make):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, make())
        start = weights(model)
        for step in range(8):
            zero = step < 5
            backward(model, optimizer, rank, step, lambda *given, zero=zero: (1 - zero) * prescribed_loss(*given))
            averager.step()
            assert finite(averager, model)
            assert not zero or torch.equal(weights(model), start)
        assert all(bool((p != q).any()) for p, q in zip(model.parameters(), Table().parameters(), strict=True))

    run_ranks(2, work)


SILENT = [(60, 16), (1, 20, 16), (12, 3, 3, 3), (4, 40), (30,), (2, 5)]
"""Shapes of a table of tokens, of positions, of a kernel, of a matrix, and of two tensors that are not compressed."""


def silent(parts):
    """The rows that padding, tokens that never occur, and positions that are not used leave without a gradient."""
    table, positions, kernel, matrix, vector, small = parts
    return [table[:1], table[4:], positions[:, 12:], kernel[::5], matrix[2:3], vector[20:], small[:1]]


SILENCED = {
    **{label: ("all_gather", make) for label, make in REGISTERED.items()},
    **{
        f"two_phase-{label}": ("two_phase", PARTITIONED[label])
        for label in with_defaults(REGISTERED)
        if label in PARTITIONED
    },
}


SILENCED = {f"sgd-{label}": ("sgd", *case) for label, case in SILENCED.items()} | {
    f"adam-{label}": ("adam", *case) for label, case in SILENCED.items() if label in REMEMBERING and "," not in label
}


@pytest.mark.parametrize(("optimizer", "topology", "make"), SILENCED.values(), ids=SILENCED)
def test_rows_without_a_gradient_stay_where_they_are(optimizer, topology, make):
    def work(rank, group):
        model, options = Parts(*SILENT), {}
        if isinstance(make(), LossyCompressor) and not isinstance(make(), PowerSGD):
            options = {"dense_values": "int2"}
        if optimizer == "sgd":
            steps, averager = averaged(model, group, make(**options), topology=topology)
        else:
            steps, averager = with_adamw(model, group, make(**options), topology=topology, weight_decay=0)
        for step in range(6):
            backward(model, steps, rank, step, parts_loss)
            for rows in silent([part.grad for part in model.parts]):
                rows.zero_()
            averager.step()
        start = Parts(*SILENT)
        assert not torch.equal(weights(model), weights(start))
        for rows, before in zip(silent(model.parts), silent(start.parts), strict=True):
            assert torch.equal(rows, before)

    run_ranks(2, work)


# Ranks that differ, models that change


@every_method
def test_a_missing_gradient_on_one_rank_is_zero_there(make):
    def run(unused):
        def work(rank, group):
            model = Table()
            optimizer, averager = averaged(model, group, make())
            for step in range(6):
                backward(model, optimizer, rank, step, prescribed_loss)
                for name in (("kernel", "bias"), ("matrix",))[rank]:
                    parameter = getattr(model, name)
                    parameter.grad = unused(parameter)
                averager.step()
            assert finite(averager, model)
            return weights(model)

        with checked_collectives(2):
            return run_ranks(2, work)

    absent = run(lambda parameter: None)
    assert all_equal(absent)
    assert torch.equal(absent[0], run(torch.zeros_like)[0])


@pytest.mark.parametrize("make", NOT_LOSSY.values(), ids=NOT_LOSSY)
def test_a_parameter_unused_on_every_rank_gets_no_gradient(make):
    """test_unused.py has the others."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, make())
        for step in range(3):
            backward(model, optimizer, rank, step, prescribed_loss)
            model.matrix.grad = model.small.grad = None
            averager.step()
            assert model.matrix.grad is None
            assert model.small.grad is None

    run_ranks(2, work)


# Precisions and layouts


@every_method
def test_bf16_parameters_have_fp32_state(make):
    def work(rank, group):
        model = Table().bfloat16()
        optimizer, averager = averaged(model, group, make())
        train(model, optimizer, averager, rank, 6, prescribed_loss)
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        kinds = averager.state_dict()["memory"].values()
        assert {part.dtype for parts in kinds for part in parts.values()} <= {torch.float32, torch.uint8}
        assert finite(averager, model)
        return weights(model)

    assert all_equal(run_ranks(2, work))


def in_memory_format(model, strange):
    """Other strides, the same numbers."""
    if strange:
        model.kernel.data = model.kernel.data.to(memory_format=torch.channels_last)
        model.matrix.data = model.matrix.data.t().contiguous().t()
    return model


@every_method
def test_channels_last_and_transposed_train_to_the_same_bits(make):
    def run(strange):
        def work(rank, group):
            model = in_memory_format(Table(), strange)
            optimizer, averager = averaged(model, group, make())
            train(model, optimizer, averager, rank, 4, prescribed_loss)
            assert model.matrix.is_contiguous() != strange
            return weights(model), averager.state_dict()["memory"]

        return run_ranks(2, work)

    for (got, memory), (expected, other) in zip(run(True), run(False), strict=True):
        assert torch.equal(got, expected)
        assert same(memory, other)


# Repeatable


@every_method
def test_the_same_run_puts_the_same_bytes_on_the_wire_and_in_all_replicas(make):
    def run():
        def work(rank, group):
            model = conv_net()
            optimizer, averager = averaged(model, group, make(), nesterov=True, weight_decay=0.01)
            assert averager.begin_step().compressor or not isinstance(make(), LossyCompressor)
            train(model, optimizer, averager, rank, 5)
            assert finite(averager, model)
            return weights(model)

        with recorded_bytes(3) as log:
            return run_ranks(3, work), log

    torch.manual_seed(0)
    results, log = run()
    torch.manual_seed(1)  # nothing is drawn from the global generator
    again, log_again = run()
    assert log == log_again
    assert all(len(calls) >= 5 for calls in log)
    assert all_equal(results + again)


# Not finite


LARGE = {f"{label}, 3e38": (make, 3e38) for label, make in with_defaults(LOSSY).items()} | {
    f"{label}, 1e37": (make, 1e37) for label, make in with_defaults(LOSSY).items()
}


@pytest.mark.parametrize(("make", "size"), LARGE.values(), ids=LARGE)
def test_large_gradients_leave_the_state_finite(make, size):
    """Finite, but so large that sums of them, over a group of elements or over the ranks, are not."""

    def work(rank, group):
        model = Table()
        optimizer, averager = without_momentum(model, group, make())
        for step in range(4):
            backward(model, optimizer, rank, step, prescribed_loss)
            if step == 1:
                for parameter in model.parameters():
                    parameter.grad.sign_().mul_(size)
            before = averager.state_dict()["memory"]
            averager.average()
            averager.commit()
            assert finite(averager, model)
            seen = torch.cat([model.kernel.grad.reshape(-1), model.matrix.grad.reshape(-1)])
            counts = bool(torch.isfinite(seen).all())
            assert counts or same(averager.state_dict()["memory"], before)
            assert counts or step > 0
        assert counts or size > 1e38, "dead after a large gradient"
        return seen.nan_to_num(7)

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("make", SCALE_FREE.values(), ids=SCALE_FREE)
def test_averages_scale_with_gradients_to_the_bit(make):
    """Nothing squares them, compares them with a constant or adds one, by which small ones would be lost."""

    def run(scale):
        def work(rank, group):
            model, seen = Table(), []
            optimizer, averager = without_momentum(model, group, make())
            for step in range(4):
                backward(model, optimizer, rank, step, lambda *given: scale * prescribed_loss(*given))
                averager.average()
                averager.commit()
                seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / scale)
            return torch.stack(seen)

        return run_ranks(2, work)[0]

    plain = run(1.0)
    assert all(torch.equal(run(2.0**power), plain) for power in (-80, 80))


# Honest numbers


@every_method
def test_in_a_world_of_one_training_is_as_without_it_to_the_bit(make):
    def run(step_of):
        model = conv_net()
        optimizer, averager = averaged(model, None, make(), nesterov=True, weight_decay=0.1)
        for step in range(5):
            backward(model, optimizer, 0, step)
            step_of(optimizer, averager)()
        return weights(model)

    with_averager = run(lambda optimizer, averager: averager.step)
    assert torch.equal(with_averager, run(lambda optimizer, averager: optimizer.step))


@every_method
def test_its_own_state_can_always_be_loaded(make):
    """Whatever the parameters are called."""

    def work(rank, group):
        model = torch.nn.Module()
        names = ["state", "residual", "generator", "query", "velocity", "steps"]
        for number, name in enumerate(names):
            model.register_parameter(name, torch.nn.Parameter(torch.ones((3,) if number % 2 else (20, 30))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        averager = GradientAverager(model, make(), optimizer=optimizer, process_group=group)
        sum((p * p).sum() for p in model.parameters()).backward()
        averager.step()
        state = averager.state_dict()
        averager.load_state_dict(state)
        assert same(averager.state_dict()["memory"], state["memory"])

    run_ranks(2, work)

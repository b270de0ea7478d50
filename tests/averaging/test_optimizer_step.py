"""An average is an ordinary gradient until the optimizer steps: what `p.grad` is by then counts, and is committed."""

import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from lightning_gradcomp import DGC, NoCompression, OneBit, PowerSGD
from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.methods import REMEMBERING, with_defaults
from tests.averaging.workers import (
    Table,
    all_equal,
    averaged,
    backward,
    bowl_loss,
    dgc,
    prescribed_loss,
    train,
    train_ddp,
    weights,
)
from tests.threads import run_ranks

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
if hasattr(torch.optim, "Muon"):  # of torch 2.9
    OPTIMIZERS["muon"] = partial(torch.optim.Muon, lr=0.01, weight_decay=0.1)
COMPRESSORS = {
    "dgc": dgc,
    "onebit": partial(OneBit, min_elements=50, warmup_epochs=0),
    "powersgd": partial(PowerSGD, min_elements=50, warmup_epochs=0, rank=1),
    "none": NoCompression,
}


class Matrices(nn.Module):
    """Two matrices, which is all that Muon takes; a third is too small to be compressed."""

    def __init__(self):
        super().__init__()
        table = Table()
        self.matrix, self.other, self.small = table.matrix, nn.Parameter(table.kernel.detach().view(40, 9)), table.small


def matrices_loss(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return sum((p * torch.randn(p.shape, generator=generator).pow(3)).sum() for p in model.parameters())


# How a hook may write into a gradient, and what it may write

WRITES = {
    "attribute": lambda p, new: setattr(p, "grad", new),
    "data": lambda p, new: p.grad.data.copy_(new),
    "numpy": lambda p, new: p.grad.numpy().__setitem__(..., new.numpy()),
}
CHANGES = {
    "filled": lambda grad: torch.full_like(grad, 0.01),
    "zeroed": torch.zeros_like,
    "scaled": lambda grad: 0.5 * grad,
    "without NaN": lambda grad: grad.nan_to_num(0.0),
    "clipped": lambda grad: grad.clamp(-0.01, 0.01),
}
HOOKS = [(change, "attribute") for change in (*CHANGES, "discarded")]
HOOKS += [(change, write) for change in ("filled", "zeroed") for write in ("data", "numpy")]


def change(parameter, how, write):
    if parameter.grad is None:
        return
    if how == "discarded":
        parameter.grad = None
    else:
        WRITES[write](parameter, CHANGES[how](parameter.grad.clone()))


def trained(rank, group, make_optimizer, compressor, topology, how, write, place):
    """Weights of rank and matrix before and after each of three steps, with a hook that changes `matrix`'s gradient."""
    model = Matrices()
    optimizer = make_optimizer(model.parameters())
    hook = lambda *_: change(model.matrix, how, write)  # noqa: E731
    handle = optimizer.register_step_pre_hook(hook) if place == "pre-hook" else None
    averager = GradientAverager(model, compressor, optimizer=optimizer, process_group=group, topology=topology)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        matrices_loss(model, rank, step).backward()
        averager.average()
        if handle is None:
            hook()
        before, old = model.matrix.detach().clone(), model.small.detach().clone()
        optimizer.step()
        direction = averager.direction_exponent(model.matrix) is not None
        grad = None if model.matrix.grad is None else model.matrix.grad.clone()
        seen.append((before, grad, model.matrix.detach().clone(), direction))
        assert not torch.equal(old, model.small)
    return weights(model), seen


CASES = [(name, "dgc", "all_gather") for name in ("sgd", "adam", "adamw")]
CASES += [("sgd", "powersgd", "all_gather"), ("muon", "onebit", "all_gather"), ("sgd", "none", "all_gather")]
CASES += [("sgd", "dgc", "two_phase"), ("adamw", "onebit", "two_phase")]


@pytest.mark.parametrize(("name", "compressor", "topology"), [case for case in CASES if case[0] in OPTIMIZERS])
def test_what_hooks_leave_in_a_gradient_counts_and_replicas_stay_equal(name, compressor, topology):
    make = OPTIMIZERS[name]
    decay = {"adamw": 1 - 0.01 * 0.1}.get(name, 1.0)

    def work(rank, group):
        found = []
        for (how, write), place in itertools.product(HOOKS, ["between", "pre-hook"]):
            after, seen = trained(rank, group, make, COMPRESSORS[compressor](), topology, how, write, place)
            for before, grad, now, direction in seen:
                if grad is None:
                    assert torch.equal(now, before), (how, write, place)
                elif direction:  # θ - lr · p.grad, whatever the momentum
                    lr = make.keywords["lr"]
                    torch.testing.assert_close(now, decay * before - lr * grad, rtol=1e-6, atol=1e-7)
            found.append(after)
        return found

    for one, other in zip(*run_ranks(2, work), strict=True):
        assert torch.equal(one, other)


DENSE = {"none": NoCompression, "dgc, sparsity 0": partial(DGC, sparsity=0)}


@pytest.mark.parametrize(
    ("name", "compressor"),
    [("sgd", DENSE["none"]), *((name, DENSE["dgc, sparsity 0"]) for name in ("sgd", "adam", "adamw"))],
)
def test_without_compression_it_is_ddp_whatever_a_hook_does(name, compressor):
    def ddp(rank, group, how, write):
        model = Table()
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.register_step_pre_hook(lambda *_: change(model.matrix, how, write))
        train_ddp(model, optimizer, group, rank, 4, prescribed_loss, bucket_cap_mb=1)
        return weights(model)

    def ours(rank, group, how, write):
        model = Table()
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.register_step_pre_hook(lambda *_: change(model.matrix, how, write))
        averager = GradientAverager(model, compressor(), optimizer=optimizer, process_group=group)
        for step in range(4):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
        return weights(model)

    def work(rank, group):
        return [(ddp(rank, group, *hook), ours(rank, group, *hook)) for hook in HOOKS]

    for expected, got in run_ranks(2, work)[0]:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


# A step that is left out, a gradient that is discarded


def set_up(group, make, optimizer="sgd", **options):
    model = Table()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, GradientAverager(model, make(), optimizer=made, process_group=group, **options)


remembering = pytest.mark.parametrize("make", with_defaults(REMEMBERING).values(), ids=with_defaults(REMEMBERING))


@remembering
@pytest.mark.parametrize("how", ["None", "zeros"])
def test_a_discarded_gradient_leaves_the_parameters_state_as_it_was(make, how):
    """And the first step afterwards is as long as the first of all."""

    def work(rank, group):
        model, made, averager = set_up(group, make)
        start, lengths = model.matrix.detach().clone(), []
        for step in range(8):
            backward(model, made, rank, 0, prescribed_loss)
            averager.average()
            if step < 6 and how == "None":
                model.matrix.grad = None
            elif step < 6:
                model.matrix.grad.zero_()
            made.step()
            if step < 6:
                memory = averager.state_dict()["memory"]
                assert all("matrix" not in parts for kind, parts in memory.items() if kind != "query")
                lengths.append(float((model.matrix.detach() - start).norm()))
        return lengths, float((model.matrix.detach() - start).norm())

    def first_step(rank, group):
        model, made, averager = set_up(group, make)
        start = model.matrix.detach().clone()
        for _ in range(2):
            backward(model, made, rank, 0, prescribed_loss)
            averager.step()
        return float((model.matrix.detach() - start).norm())

    lengths, afterwards = run_ranks(2, work)[0]
    if how == "None":
        assert lengths == [0.0] * 6
    assert afterwards == pytest.approx(run_ranks(2, first_step)[0], rel=0.5)


def test_a_learning_rate_of_0_sends_nothing_and_moves_nothing():
    """AdamW's step contains the learning rate: the moments go on, and what is not sent stays."""

    def work(rank, group):
        model = Table()
        groups = [{"params": [model.kernel, model.small]}, {"params": [model.matrix, model.bias]}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group)
        for step in range(3):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
        optimizer.param_groups[1]["lr"] = 0.0
        before, kept = model.matrix.detach().clone(), averager.state_dict()["memory"]
        for step in range(3, 6):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
        now = averager.state_dict()["memory"]
        assert torch.equal(model.matrix, before)
        assert torch.equal(now["unsent_step"]["matrix"], kept["unsent_step"]["matrix"])
        assert not torch.equal(now["unsent_step"]["kernel"], kept["unsent_step"]["kernel"])
        assert not torch.equal(now["exp_avg"]["matrix"], kept["exp_avg"]["matrix"])
        assert int(optimizer.state[model.matrix]["step"]) == 6
        return weights(model)

    assert all_equal(run_ranks(2, work))


# Hooks after the step, and what the optimizer is afterwards


def test_post_step_hooks_see_weights_and_moments_after_the_step():
    def work(rank, group):
        model = Table()
        optimizer, seen = OPTIMIZERS["adamw"](model.parameters()), []

        def clamp(stepped, *_):
            seen.append((model.kernel.detach().clone(), int(stepped.state[model.kernel]["step"])))
            for parameter in model.parameters():
                parameter.data.clamp_(-0.05, 0.05)

        optimizer.register_step_post_hook(clamp)  # before the averager has one
        averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group)
        for step in range(3):
            before = model.kernel.detach().clone()
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
            assert not torch.equal(seen[-1][0], before) and seen[-1][1] == step + 1
            assert all(float(parameter.detach().abs().max()) <= 0.0501 for parameter in model.parameters())
        return weights(model)

    assert all_equal(run_ranks(2, work))


def test_an_optimizer_is_as_before_once_its_averager_is_detached_and_keeps_none_alive():
    model = Table()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    before = set(vars(optimizer)), list(optimizer._optimizer_step_post_hooks)
    averager = GradientAverager(model, dgc(), optimizer=optimizer)
    prescribed_loss(model, 0, 0).backward()
    averager.step()
    known = weakref.ref(averager)
    averager.detach()
    assert (set(vars(optimizer)), list(optimizer._optimizer_step_post_hooks)) == before
    second = GradientAverager(model, dgc(), optimizer=optimizer)
    second_known = weakref.ref(second)
    del averager, second
    gc.collect()
    assert known() is None and second_known() is None
    optimizer.step()


# Another optimizer


def test_the_moments_of_another_optimizer_count():
    """With a new one of the same class training goes on as if the moments had been cleared."""

    def work(rank, group, how):
        model, optimizer, averager = set_up(group, dgc, "adamw")
        for step in range(6):
            if step == 3 and how == "new":
                optimizer = OPTIMIZERS["adamw"](model.parameters())
                averager.use_optimizers(optimizer)
            elif step == 3:
                optimizer.state.clear()
            backward(model, optimizer, rank, step, bowl_loss)
            averager.average()
            optimizer.step()
        return weights(model)

    new, cleared = (run_ranks(2, partial(work, how=how)) for how in ("new", "cleared"))
    assert all_equal([*new, *cleared])


def test_another_class_of_optimizer_is_an_error():
    model, _, averager = set_up(None, dgc, "adamw")
    with pytest.raises(ValueError, match=r"another optimizer in mid-run with DGC: got 'SGD', allowed: .*AdamW"):
        averager.use_optimizers(OPTIMIZERS["sgd"](model.parameters()))


# Errors where an average would be used wrongly


def test_averages_that_were_not_used_are_not_averaged_again():
    def work(rank, group):
        model, _, averager = set_up(group, dgc)
        prescribed_loss(model, rank, 0).backward()
        averager.average()
        with pytest.raises(ValueError, match="averages that no optimizer step has used"):
            averager.average()
        return True

    assert all(run_ranks(2, work))


def test_an_average_that_a_later_forward_pass_has_dropped_is_no_step():
    def work(rank, group):
        model, optimizer, averager = set_up(group, dgc)
        prescribed_loss(model, rank, 0).backward()
        averager.average()
        with averager.local_weights():
            prescribed_loss(model, rank, 1)
        with pytest.raises(ValueError, match="averages that a later forward pass has dropped"):
            optimizer.step()
        return True

    assert all(run_ranks(2, work))


# What trains


@pytest.mark.parametrize("begin", [0, 3])
def test_ranks_that_train_other_layers_are_named(begin):
    """At the start, and in mid-run, with and without compression."""

    def work(rank, group):
        for make in (dgc, NoCompression):
            model, optimizer, averager = set_up(group, make)
            for step in range(5):
                model.matrix.requires_grad_(step < begin or rank != 1)
                backward(model, optimizer, rank, step, prescribed_loss)
                if step == begin:
                    with pytest.raises(ValueError, match=r"'matrix'.*trains on rank 0, is frozen on rank 1"):
                        averager.step()
                    break
                averager.step()
        return True

    assert all(run_ranks(2, work))


def test_parameters_outside_the_optimizer_or_ignored_by_ddp_have_no_part():
    """They are not sent, and a NaN in them is none of the average's."""

    def work(rank, group):
        model = Table()
        model._ddp_params_and_buffers_to_ignore = ["kernel"]
        optimizer = torch.optim.SGD([model.kernel, model.matrix], lr=0.02, momentum=0.9)
        averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group)
        for step in range(3):
            model.zero_grad()
            prescribed_loss(model, rank, step).backward()
            model.small.grad.fill_(torch.nan)
            averager.step()
        assert averager.gradients.nbytes == 4 * model.matrix.numel()
        assert set(averager.state_dict()["memory"]["velocity"]) == {"matrix"}
        return model.kernel.detach(), model.matrix.detach()

    (kernel, matrix), (other_kernel, other_matrix) = run_ranks(2, work)
    assert torch.equal(matrix, other_matrix) and matrix.isfinite().all()
    assert not torch.equal(kernel, other_kernel), "each rank steps its own"


def test_the_clipped_norm_of_a_dense_average_leaves_out_what_ddp_ignores():
    def work(rank, group):
        model = Table()
        model._ddp_params_and_buffers_to_ignore = ["kernel"]
        optimizer, averager = averaged(model, group, dgc(clip_norm=0.1, dense_epochs=9), steps_per_epoch=9)
        train(model, optimizer, averager, rank, 2, prescribed_loss)
        return model.matrix.detach()

    matrix, other_matrix = run_ranks(2, work)
    assert torch.equal(matrix, other_matrix)


# Local weights


@pytest.mark.parametrize("write", ["in place", "by .data", "exchanged"])
def test_a_write_into_a_local_weight_is_an_error_and_shared_weights_return(write):
    def work(rank, group):
        model, optimizer, averager = set_up(group, dgc)
        for step in range(2):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
        shared = weights(model)
        with pytest.raises(ValueError, match=r"'matrix'.*allowed: local_weights=False"), averager.local_weights():
            assert not torch.equal(weights(model), shared)
            if write == "in place":
                with torch.no_grad():
                    model.matrix[3, 2] += 1
            elif write == "by .data":
                model.matrix.data.copy_(nn.functional.normalize(model.matrix.data, dim=1))
            else:
                model.matrix.data = model.matrix.data + 1
        assert torch.equal(weights(model), shared)
        return shared

    assert all_equal(run_ranks(2, work))


def test_one_element_written_by_data_is_noticed_where_all_are_compared():
    def work(rank, group):
        model, optimizer, averager = set_up(group, dgc)
        averager.compare_all_local_weights()
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.step()
        with pytest.raises(ValueError, match="'kernel'"), averager.local_weights():
            model.kernel.data[0, 0, 0, 1] += 1
        return True

    assert all(run_ranks(2, work))


def test_an_exception_inside_local_weights_leaves_the_shared_ones_and_a_save_inside_has_them():
    class Stop(Exception):
        pass

    def work(rank, group):
        model, optimizer, averager = set_up(group, dgc)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.step()
        shared = weights(model)
        with pytest.raises(Stop), averager.local_weights():
            local = weights(model)
            with averager.shared_weights():
                assert torch.equal(weights(model), shared)
            assert torch.equal(weights(model), local) and not torch.equal(local, shared)
            raise Stop
        assert torch.equal(weights(model), shared)
        return shared

    assert all_equal(run_ranks(2, work))


def test_without_local_weights_gradients_are_taken_at_the_shared_ones():
    def work(rank, group):
        model, optimizer, averager = set_up(group, dgc, local_weights=False)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.step()
        shared = weights(model)
        with averager.local_weights():
            assert torch.equal(weights(model), shared)
            model.matrix.data.mul_(2.0)
        return weights(model)

    assert all_equal(run_ranks(2, work))

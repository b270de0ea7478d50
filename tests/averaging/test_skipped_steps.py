"""Averages that no optimizer step uses: on some ranks only, and before another backward."""

import pytest
import torch

from lightning_gradcomp import OneBit, PowerSGD, TernGrad
from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.workers import SGD, Table, averaged, backward, bowl_loss, dgc, prescribed_loss, weights
from tests.threads import run_ranks, subgroups

QUICK = {"min_elements": 50, "warmup_epochs": 0}
METHODS = {
    "dgc": dgc(),
    "onebit": OneBit(**QUICK),
    "powersgd": PowerSGD(rank=1, **QUICK),
    "terngrad": TernGrad(error_feedback=True, **QUICK),
}
MODES = {
    "all_gather": (2, dgc(), {}),
    "mean": (2, PowerSGD(rank=1, **QUICK), {}),
    "two_phase": (3, dgc(), {"topology": "two_phase"}),
    "server": (3, dgc(), {"topology": "server"}),
    "nodes": (4, dgc(), {"inside": "dense", "ranks_per_node": 2}),
    "dense": (2, "none", {}),
    "bf16": (2, "bf16", {}),
    "int8": (2, "int8", {}),
    "flush": (2, dgc(), {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_one_rank_skipped_is_named(mode):
    """On all ranks, and the gradients stay the ranks' own."""
    world, compressor, options = MODES[mode]

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor, **options)
        for step in range(3):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.average()
            if step < 2 or rank != 1:
                optimizer.step()
        if mode == "flush":
            averager.schedule = lambda epoch, step: 0.0
        backward(model, optimizer, rank, 3, prescribed_loss)
        own = model.matrix.grad.clone()
        at = "; ".join(f"rank {each}: step {3 - (each == 1)}" for each in range(world))
        with pytest.raises(ValueError, match=rf"{at}', allowed: .* skipped an optimizer step"):
            averager.average()
        return torch.equal(model.matrix.grad, own)

    with subgroups():
        assert all(run_ranks(world, work))


@pytest.mark.parametrize("compressor", METHODS.values(), ids=METHODS)
def test_a_revoked_average_is_as_if_it_had_not_been(compressor):
    """Another backward adds to this rank's gradients: weights and state are those of one average of the sum."""

    def work(rank, group):
        found = []
        for averages_twice in (False, True):
            model = Table()
            optimizer, averager = averaged(model, group, compressor)
            for step in range(4):
                backward(model, optimizer, rank, 2 * step, bowl_loss)
                if averages_twice:
                    averager.average(revocable=True)
                    assert averager.revoke()
                bowl_loss(model, rank, 2 * step + 1).backward()
                averager.step()
                assert not averager.revoke()
            memory = averager.state_dict()["memory"]
            found.append([weights(model), *(part for kind in memory.values() for part in kind.values())])
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    assert all(run_ranks(2, work))


def test_an_average_that_was_discarded_or_changed_before_another_backward():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group)
        for discard in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)):
            backward(model, optimizer, rank, 0, prescribed_loss)
            averager.average(revocable=True)
            discard()
            assert not averager.revoke()
            assert model.matrix.grad is None or not model.matrix.grad.any()
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.average(revocable=True)
        model.matrix.grad.mul_(0.5)
        with pytest.raises(ValueError, match="a backward after averages were changed: got 'matrix'"):
            averager.revoke()
        return True

    assert all(run_ranks(2, work))


def test_optimizers_that_ranks_step_in_another_order_are_named():
    def work(rank, group):
        model = Table()
        optimizers = [torch.optim.SGD([each], **SGD) for each in (model.kernel, model.matrix)]
        averager = GradientAverager(model, OneBit(**QUICK), optimizers=optimizers, process_group=group)
        averager.check_same_turn(optimizers[0], 1)
        got = "rank 0: step 0, optimizer 0, backward pass 2; rank 1: step 0, optimizer 1, backward pass 2"
        with pytest.raises(ValueError, match=got):
            averager.check_same_turn(optimizers[rank], 2)
        return True

    assert all(run_ranks(2, work))

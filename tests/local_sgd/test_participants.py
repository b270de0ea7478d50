"""Federated averaging: in each round some ranks take part, and the others rest."""

import pytest
import torch

from lightning_gradcomp import DelayedAverager, DelayedStrategy
from lightning_gradcomp.local_sgd.schedule import Participants
from tests.averaging.workers import Table, all_equal, backward, bowl_loss, weights
from tests.local_sgd.training import CLOSE, run_ranks, set_up


def test_all_ranks_know_who_takes_part():
    rounds = [Participants(0.5).of_round(number, 6) for number in range(200)]
    assert all(len(set(each)) == 3 for each in rounds)
    often = torch.tensor([rank for each in rounds for rank in each]).bincount(minlength=6)
    assert often.min() > 70
    assert rounds == [Participants(0.5).of_round(number, 6) for number in range(200)]


def test_an_average_is_that_of_the_participants():
    period, participants = 3, Participants(0.5)

    def work(rank, group):
        model, made, averager = set_up(group, "momentum", period=period, delay=0, participation=0.5)
        updates, history, rested = [], [], []
        for number in range(8):
            rested.append(averager.resting)
            before = weights(model)
            for step in range(period):
                backward(model, made, rank, period * number + step, bowl_loss)
                with averager.stepping(4):
                    if not averager.resting:
                        made.step()
                    if step == period - 1:
                        updates.append(weights(model) - before)
            history.append(weights(model))
        return torch.stack(updates), torch.stack(history), rested

    updates, history, rested = zip(*run_ranks(4, work), strict=True)
    assert all_equal(torch.stack(history).flatten(1))
    expected = weights(Table()).double()
    for number in range(8):
        taking = participants.of_round(number, 4)
        assert [rank for rank in range(4) if not rested[rank][number]] == taking
        assert all(float(updates[rank][number].abs().max()) == 0 for rank in range(4) if rank not in taking)
        expected = expected + sum(updates[rank][number].double() for rank in taking) / len(taking)
        torch.testing.assert_close(history[0][number].double(), expected, **CLOSE)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "half"])
def test_a_share_that_is_none_is_refused(share):
    message = f"participation: got {share!r}, allowed: a number above 0, up to 1"
    with pytest.raises(ValueError, match=message):
        DelayedStrategy(participation=share)
    model = Table()
    with pytest.raises(ValueError, match=message):
        DelayedAverager(model, torch.optim.SGD(model.parameters(), lr=0.1), participation=share)

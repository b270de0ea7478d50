"""Ranks that come and go: the others lose a round at most, and one that comes has the agreed weights."""

import json
import time
from pathlib import Path

import pytest
import torch
from torchft.coordination import LighthouseServer

from lightning_gradcomp import ElasticAverager, GradientDropping, Nesterov
from tests.averaging.workers import Table, weights
from tests.processes import Forked

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
ROUNDS = 20


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Rank -> what it has written: 2 is killed amid a round, then 3 comes."""
    folder = tmp_path_factory.mktemp("elastic")
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=5000)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"

    def start(number, dies_at=-1, begin="first"):
        return Forked(SCRIPT, address, str(number), str(ROUNDS), str(dies_at), str(folder / begin), timeout=180)

    ranks = [start(0), start(1), start(2, dies_at=8), start(3, begin="second")]
    try:
        deadline = time.monotonic() + 90
        while not all((folder / f"ready{number}").exists() for number in range(4)) and time.monotonic() < deadline:
            time.sleep(0.05)
        (folder / "first").touch()
        ranks[2].end()
        (folder / "second").touch()
        for number in (0, 1, 3):
            done = ranks[number].end()
            assert done.returncode == 0, done.stdout
    finally:
        for process in ranks:
            process.kill()
        server.shutdown()
    return {n: [json.loads(line) for line in (folder / f"out{n}").read_text().splitlines()] for n in range(4)}


def test_the_others_go_on_and_a_new_rank_joins(lines):
    assert lines[2][-1]["round"] == 8
    assert [lines[number][-1]["round"] for number in (0, 1, 3)] == [ROUNDS] * 3
    assert lines[3][0]["round"] > 1
    assert 3 in {line["world"] for line in lines[3]}


def test_a_lost_rank_costs_a_round_at_most(lines):
    for number in (0, 1):
        failed = [line for line in lines[number] if not line["applied"]]
        assert len(failed) <= 1


def test_agreed_weights_are_the_same_to_the_bit(lines):
    by_round = {}
    for number in (0, 1, 2, 3):
        for line in lines[number]:
            if line["applied"]:
                by_round.setdefault(line["round"], []).append(line["weights"])
    assert sum(len(each) > 1 for each in by_round.values()) > ROUNDS / 2
    assert all(each == one[0] for one in by_round.values() for each in one)


def test_what_survivors_have_trained_is_sent_or_remembered(lines):
    """A round moves the weights by the mean of what its ranks have sent. What rank 2 had not sent is lost with it.

    The steps before a rank's first round began at weights of its own, and do not count.
    """
    applied = {n: {line["round"]: line for line in mine if line["applied"]} for n, mine in lines.items()}
    first = {n: min(rounds) for n, rounds in applied.items()}
    after = {"a death": False, "a newcomer": False}
    for number in applied[0].keys() - {first[0]}:
        present = {n: rounds[number] for n, rounds in applied.items() if number in rounds}
        world, moved = present[0]["world"], present[0]["moved"]
        old = [line for n, line in present.items() if first[n] < number]
        if len(present) == world:
            sent = sum(line["update"] * world / len(old) - line["kept"] for line in old)
            assert sent == pytest.approx(moved, rel=1e-4, abs=1e-5)
            after["a death"] |= number > 8
            after["a newcomer"] |= len(old) < world
    assert all(after.values())


@pytest.fixture
def alone():
    """Makes an ElasticAverager with these options, the only one of its lighthouse."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    made = []

    def make(model, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(ElasticAverager(model, optimizer, lighthouse=address, host="127.0.0.1", **options))
        return made[0]

    yield make
    made[0].shutdown()
    server.shutdown()


def test_a_round_with_too_few_ranks_is_not_averaged(alone, caplog):
    assert not alone(Table(), min_ranks=2).average()
    assert "round 1 was not averaged; its steps carry over to the next: 1 of 2 ranks" in caplog.text


def test_layers_may_be_unfrozen_and_frozen(alone):
    model = Table()
    model.matrix.requires_grad_(False)
    averager = alone(model, period=2, outer=Nesterov(lr=0.5, momentum=0.0))
    start = model.matrix.detach().clone()

    def step():
        model.zero_grad()
        sum(p.sum() for p in model.parameters() if p.requires_grad).backward()
        averager.step()

    step()
    model.matrix.requires_grad_(True)
    step()
    step()
    assert averager.rounds == 2  # the first was ended where its layers changed
    torch.testing.assert_close(model.matrix.detach(), start - 0.5 * 0.2)
    model.matrix.requires_grad_(False)
    step()
    step()
    assert averager.rounds == 3
    torch.testing.assert_close(model.matrix.detach(), start - 0.5 * 0.2)


def test_a_rank_that_is_left_alone_trains_on_and_keeps_what_waits(alone):
    model = Table()
    compressor = GradientDropping(sparsity=0.8, min_elements=64, warmup_epochs=0)
    averager = alone(model, compressor=compressor, period=2, error_decay=0.95)
    state = averager.state_dict()
    sizes = {name: p for name, p in model.named_parameters() if p.numel() >= 64}
    waiting = {name: torch.full_like(p, 0.5) for name, p in sizes.items()}
    memory = {**state["rounds"]["memory"], "residual": waiting}
    averager.load_state_dict({**state, "rounds": {**state["rounds"], "memory": memory}})
    start = weights(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        averager.step()
    assert averager.rounds == 1
    torch.testing.assert_close(weights(model), start - 0.2)
    for left in averager.state_dict()["rounds"]["memory"]["residual"].values():
        torch.testing.assert_close(left, torch.full_like(left, 0.95 * 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 4}, "ElasticAverager.delay: got 4, allowed: 0"),
        ({"min_ranks": 0}, "ElasticAverager.min_ranks: got 0, allowed: 1 or more"),
        ({"period": 0}, "period: got 0"),
        ({"error_decay": 2}, "error_decay: got 2"),
    ],
    ids=str,
)
def test_refusals(options, message):
    model = Table()
    with pytest.raises(ValueError, match=message):
        ElasticAverager(model, torch.optim.SGD(model.parameters(), lr=0.1), lighthouse="http://x:1", **options)

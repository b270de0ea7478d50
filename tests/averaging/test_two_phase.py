"""Topologies with partitions: bit-identical to a simulation in one process, and nothing is lost."""

import re
from functools import partial

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging.checkpoint_state import PARTITION
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.topology import traffic
from tests.averaging.cells import Cell, Ledger
from tests.averaging.methods import CODECS, REMEMBERING, Parts
from tests.averaging.workers import Table, averaged, backward, prescribed_loss, recorded, same
from tests.reference.two_phase import Workers
from tests.threads import run_ranks

LOSSLESS = {label: make for label, make in REMEMBERING.items() if label in CODECS}
every_codec = pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
remembering = pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
CUTS = {2: [9], 3: [6, 13], 4: [5, 9, 15], 8: [2, 5, 7, 9, 12, 15, 19]}
"""Rows (10 of 36 elements, then 12 of 25) at which owners begin: those nearest to equal parts of 660 elements."""


LARGE = ("dgc", "onebit", "terngrad")
"""One that sends a few numbers of many, one that sends all in few bits, and one that draws."""


def on(worlds, makes):
    """Every method on up to three ranks, with options that are not its defaults on three; on more, those in `LARGE`."""

    def wanted(world, label):
        return world == 3 or ("," not in label and (world < 3 or label in LARGE))

    return {f"{w}-{label}": (w, make) for w in worlds for label, make in makes.items() if wanted(w, label)}


def begin(group, make, topology="two_phase", **options):
    model = Table()
    return model, *averaged(model, group, make(), topology=topology, **options)


SIMULATED = {f"two_phase-{label}": ("two_phase", *case) for label, case in on([2, 3, 4, 8], CODECS).items()} | {
    f"server-{world}-{label}": ("server", world, CODECS[label]) for world, label in zip((2, 3, 4), LARGE, strict=True)
}


@pytest.mark.parametrize(("topology", "world", "make"), SIMULATED.values(), ids=SIMULATED)
def test_it_is_the_simulation_in_one_process_to_the_bit(topology, world, make):
    steps = 4 if world < 8 else 3
    ranks = run_ranks(world, lambda rank, group: recorded(*begin(group, make, topology), rank, steps))
    shapes = {"kernel": (10, 4, 3, 3), "matrix": (12, 25)}
    momentum = 0.9 if make().needs_optimizer else 0.0
    workers = Workers(make(), shapes, CUTS[world], momentum, dense_pull=topology == "server")
    for step in range(steps):
        average = workers.step([seen[step][0] for seen, _ in ranks])
        for seen, _ in ranks:
            assert torch.equal(seen[step][1], average)
    for rank, (_, memory) in enumerate(ranks):
        theirs = workers.states[rank].state_dict()
        assert same({kind: memory[kind] for kind in theirs}, theirs)
    owned = sum(workers.layout.join(memory.get(PARTITION, {}), torch.device("cpu")) for _, memory in ranks)
    assert torch.equal(owned, workers.residual)


def go(group, make, rank, steps, topology="two_phase"):
    """A rank's ledger after steps without momentum."""
    ledger = Ledger(Cell(make, topology, optimizer="plain").begin(group, schedule=lambda epoch, step: 0.9))
    ledger.go(rank, steps)
    return ledger


def assert_nothing_lost(ledgers, before=()):
    """What came, plus the residuals, is what ranks had on average; now, and in ledgers of `before`."""
    had, came = (
        sum(getattr(ledger, what) / len(ledgers) for ledger in (*ledgers, *before)) for what in ("had", "came")
    )
    own, owners = zip(*(ledger.left() for ledger in ledgers), strict=True)
    assert float((had - came - sum(own) / len(ledgers) - sum(owners)).norm() / had.norm()) <= 1e-6


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8"])
def test_servers_remember_what_their_format_rounds_off(values):
    make = partial(lgc.OneBit, min_elements=40, warmup_epochs=0, dense_values=values)
    ledgers = run_ranks(3, lambda rank, group: go(group, make, rank, range(6), topology="server"))
    assert_nothing_lost(ledgers)
    assert all(bool(ledger.left()[1].any()) == (values != "fp32") for ledger in ledgers)


@remembering
def test_a_partition_residual_loaded_while_frozen_is_not_lost(make):
    before = run_ranks(3, lambda rank, group: go(group, make, rank, range(4)))

    def go_on(rank, group):
        ledger = Ledger(Cell(make, "two_phase", optimizer="plain").begin(group, schedule=lambda epoch, step: 0.9))
        ledger.model.kernel.requires_grad_(False)
        backward(ledger.model, ledger.optimizer, rank, 0, prescribed_loss)
        ledger.averager.average()
        ledger.averager.commit()
        ledger.averager.load_state_dict(before[rank].averager.state_dict())
        ledger.model.kernel.requires_grad_(True)
        ledger.go(rank, range(4, 8))
        return ledger

    assert_nothing_lost(run_ranks(3, go_on), before)


FEEDS_BACK = partial(lgc.OneBit, min_elements=40, warmup_steps=0)
FORGETS = partial(FEEDS_BACK, error_feedback=False)


def resumed_while_frozen(before, after):
    """The state that each of three ranks saves with one compressor, and has with another after it was loaded."""

    def work(rank, group):
        state = go(group, before, rank, range(4)).averager.state_dict()
        model = Table()
        model.kernel.requires_grad_(False)
        _, averager = averaged(model, group, after(), topology="two_phase")
        averager.load_state_dict(state)
        return state["memory"], averager.state_dict()["memory"]

    return run_ranks(3, work)


def test_without_error_feedback_neither_workers_nor_owners_have_a_residual():
    assert resumed_while_frozen(FORGETS, FORGETS) == [({}, {})] * 3


def test_residuals_loaded_without_error_feedback_are_named_as_lost():
    with pytest.warns(UserWarning, match=r"'residual', 'partition_residual' is lost"):
        states = resumed_while_frozen(FEEDS_BACK, FORGETS)
    assert all(PARTITION in before and not after for before, after in states)


@pytest.mark.parametrize("make", [CODECS[label] for label in LARGE], ids=LARGE)
@pytest.mark.parametrize("topology", ["two_phase", "server"])
def test_the_rank_that_sends_the_most_of_eight_sends_what_was_announced(make, topology):
    def work(rank, group):
        model, optimizer, averager = begin(group, make, topology)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.average()
        averager.commit()
        return averager.stats.bytes_sent, averager.stats.bytes_received, averager.describe()

    sent, received, said = zip(*run_ranks(8, work), strict=True)
    assert f" {max(sent):,} bytes sent a step" in said[0]
    assert sum(sent) == sum(received)


@every_codec
def test_bytes_do_not_grow_with_the_ranks(make):
    """Two messages at most, but for what each of N parts costs by itself: a count and a scale rounded up."""
    compressor = make()
    gradients = Gradients(Parts((512, 1024), (256, 512)), compressor)
    payload = dict(compressor.messages(gradients.layout))["gather"]
    for world in (2, 8, 64):
        sent = traffic(compressor, gradients, Ranks(None, world), "two_phase")
        assert sent <= 2 * (payload * (world - 1) / world) * 1.2 + 40 * world


@pytest.mark.parametrize("topology", ["two_phase", "server"])
@pytest.mark.parametrize(
    "make", [lgc.CompressedDDPStrategy, lgc.CompressedFabricStrategy, partial(lgc.GradientAverager, Table())]
)
def test_powersgd_which_has_no_partitions_is_refused(make, topology):
    allowed = "'auto' or 'all_gather': the owner of a partition can't average"
    with pytest.raises(ValueError, match=re.escape(f"topology with PowerSGD: got '{topology}', allowed: {allowed}")):
        make(lgc.PowerSGD(), topology=topology)

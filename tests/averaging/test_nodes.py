"""inside="dense": the ranks of a node are one worker, whose gradient is their mean; nothing else changes."""

import threading
from collections import defaultdict
from copy import deepcopy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.cells import FEW, NODE
from tests.averaging.methods import CODECS, LOSSY, REMEMBERING
from tests.averaging.workers import (
    Table,
    all_equal,
    averaged,
    backward,
    dgc,
    flag_bytes,
    flat_gradients,
    prescribed_loss,
    same,
    train,
    weights,
)
from tests.threads import run_ranks, subgroups

LOSSLESS = {label: make for label, make in REMEMBERING.items() if label in CODECS and "," not in label}
TRAVEL = {f"all_gather-{label}": ("all_gather", LOSSY[label]) for label in (*FEW, "powersgd")} | {
    f"two_phase-{label}": ("two_phase", LOSSY[label]) for label in FEW
}
SERVER = {f"server-{label}": ("server", LOSSY[label]) for label in FEW}
every = pytest.mark.parametrize(("topology", "make"), (TRAVEL | SERVER).values(), ids=TRAVEL | SERVER)
without_server = pytest.mark.parametrize(("topology", "make"), TRAVEL.values(), ids=TRAVEL)


@pytest.fixture(autouse=True)
def nodes_of_threads():
    with subgroups():
        yield


def begin(group, make, per_node=NODE, **options):
    """Ranks in nodes, or with per_node=1 workers."""
    model, inside = Table(), "dense" if per_node > 1 else "compressed"
    return model, *averaged(model, group, make(), inside=inside, ranks_per_node=per_node, **options)


def node_gradients(model, optimizer, node, step):
    """The mean of what the ranks of a node have."""
    gradients = []
    for rank in range(NODE * node, NODE * (node + 1)):
        backward(model, optimizer, rank, step, prescribed_loss)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = sum(parts) / NODE


@every
def test_nodes_are_workers_with_the_mean_gradient_to_the_bit(topology, make):
    def of_nodes(rank, group):
        model, optimizer, averager = begin(group, make, topology=topology)
        seen = []
        for step in range(5):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
            seen.append(weights(model))
        return seen, averager.state_dict()["memory"]

    def of_workers(node, group):
        model, optimizer, averager = begin(group, make, 1, topology=topology)
        seen = []
        for step in range(5):
            node_gradients(model, optimizer, node, step)
            averager.step()
            seen.append(weights(model))
        return seen, averager.state_dict()["memory"]

    ranks, workers = run_ranks(2 * NODE, of_nodes), run_ranks(2, of_workers)
    for rank, (seen, memory) in enumerate(ranks):
        expected, remembered = workers[rank // NODE]
        assert all(torch.equal(own, other) for own, other in zip(seen, expected, strict=True))
        assert same(memory, remembered)


@pytest.mark.parametrize("compressor", [lgc.Int8(min_elements=40), lgc.EDEN(min_elements=40)], ids=["int8", "eden"])
def test_in_few_bits_each_rank_sends_its_part_to_one_rank_of_each_other_node(compressor):
    """And the same part of the mean back, in the format that it announces."""
    nodes, send, sent = 3, dist.isend, defaultdict(list)

    def counted(message, *, group, **options):
        sent[threading.current_thread().name, group.size()].append(message.nbytes)
        return send(message, group=group, **options)

    def work(rank, group):
        model, optimizer, averager = begin(group, lambda: compressor)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.average()
        averager.commit()
        return averager.stats.bytes_sent

    with mock.patch.object(dist, "isend", counted):
        results = run_ranks(NODE * nodes, work)
    for rank, announced in enumerate(results):
        lengths = sent[f"rank {rank}", nodes]
        assert len(lengths) == 2 * (nodes - 1) and len(set(lengths)) == 1
        assert sum(lengths) == announced + len(lengths) * flag_bytes(NODE * nodes)


@without_server
def test_a_node_sends_its_payload_once(topology, make):
    """Its ranks share it, but for the few bytes that make their parts equal."""

    def sent(per_node, rank, group):
        model, optimizer, averager = begin(group, make, per_node, topology=topology)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.average()
        averager.commit()
        return averager.stats.bytes_sent, averager.stats.dense_bytes, averager.describe()

    nodes, workers = run_ranks(3 * NODE, partial(sent, NODE)), run_ranks(3, partial(sent, 1))
    for node, (bytes_sent, _, said) in enumerate(workers):
        of_node = [sent for sent, _, _ in nodes[NODE * node : NODE * (node + 1)]]
        assert bytes_sent - NODE < sum(of_node) <= bytes_sent + 64  # a ring's part is rounded on each
        assert "between nodes" not in said
    most = max(sent for sent, _, _ in nodes)
    assert f" {most:,} bytes sent between nodes a step" in nodes[0][2] and "N=6 on 3 nodes" in nodes[0][2]
    elements = sum(parameter.numel() for parameter in Table().parameters())
    ring = 2 * 5 / 6 * 4 * elements
    assert abs(NODE * nodes[0][1] - ring) <= NODE  # of a ring through all ranks, one edge leaves a node


def test_with_adamw_too_what_each_rank_measured_becomes_the_nodes():
    def work(rank, group, steps, per_node, saved=None):
        model, inside = Table(), "dense" if per_node > 1 else "compressed"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"optimizer": optimizer, "process_group": group, "inside": inside, "ranks_per_node": per_node}
        averager = GradientAverager(model, dgc(), **options)
        parts = model, optimizer, averager
        for part, state in zip(parts, saved[rank] if saved else (), strict=False):
            part.load_state_dict(state)
        train(*parts, rank, steps, prescribed_loss)
        return deepcopy([part.state_dict() for part in parts])

    states = run_ranks(4, lambda rank, group: work(rank, group, range(6), 1))
    [model, _, one], *others = run_ranks(4, lambda rank, group: work(rank, group, range(6, 11), NODE, states))
    assert all(same({"": model}, {"": other}) for other, _, _ in others)
    assert same({"": one["memory"]["squares"]}, {"": others[0][2]["memory"]["squares"]})


def test_a_state_saved_before_sharing_is_each_ranks_own():
    make = LOSSLESS["dgc"]

    def loaded_and_saved(rank, group):
        averager = begin(group, make)[2]
        averager.load_state_dict(states[rank])
        return averager.state_dict()

    def alone(rank, group):
        parts = begin(group, make, 1)
        train(*parts, rank, 6, prescribed_loss)
        return parts[2].state_dict()

    states = run_ranks(4, alone)
    again = run_ranks(4, loaded_and_saved)
    for state, other in zip(states, again, strict=True):
        assert same(state["memory"], other["memory"]) and other["shared_by"] == 1


def test_a_gradient_that_one_rank_of_a_node_lacks_is_0_there():
    def work(lacking, rank, group):
        model, optimizer, averager = begin(group, LOSSLESS["onebit"])
        backward(model, optimizer, rank, 0, prescribed_loss)
        if rank in (1, 2):
            model.matrix.grad = None if lacking else torch.zeros_like(model.matrix.grad)
        averager.flag = rank == 3
        averager.average()
        averager.commit()
        assert averager.flagged
        return flat_gradients(model).double()

    lacking, zero = (run_ranks(2 * NODE, partial(work, lacking)) for lacking in (True, False))
    assert all_equal(lacking + zero)


def test_one_node_alone_is_dense():
    def work(rank, group):
        averager = begin(group, LOSSLESS["dgc"])[2]
        return averager.begin_step().is_plain, averager.why_uncompressed()

    assert run_ranks(NODE, work) == [(True, "there is one node, and only nodes compress")] * NODE


def test_one_node_alone_averages_in_fp32():
    def work(rank, group, make):
        model, optimizer, averager = begin(group, make)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.average()
        averager.commit()
        assert "a step by all_reduce" in averager.describe()
        return flat_gradients(model)

    makes = lgc.NoCompression, partial(lgc.EDEN, min_elements=40), partial(lgc.Int8, min_elements=40)
    assert all_equal([gradients for make in makes for gradients in run_ranks(NODE, partial(work, make=make))])


def test_nodes_of_unequal_size_and_unknown_size_are_refused(monkeypatch):
    def averager_of(rank, group, **options):
        return lgc.GradientAverager(Table(), "onebit", process_group=group, inside="dense", **options)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="ranks_per_node with inside='dense': got None, allowed: the number of ranks"):
        run_ranks(2, averager_of)
    with pytest.raises(ValueError, match="ranks with inside='dense': got 3, allowed: a multiple of the 2 ranks"):
        run_ranks(3, partial(averager_of, ranks_per_node=2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [averager.ranks.workers for averager in run_ranks(4, averager_of)] == [2] * 4


@pytest.mark.parametrize(
    ("per_node", "options", "expected"),
    [
        (2, {"topology": "auto"}, 2),
        (2, {"topology": "auto", "inside": "compressed"}, 4),
        (2, {"topology": "all_gather"}, 4),
        (4, {"topology": "auto"}, 4),
        (1, {"topology": "auto"}, 4),
        (None, {"topology": "auto"}, 4),
    ],
)
def test_auto_is_dense_inside_several_nodes(per_node, options, expected):
    def work(rank, group):
        model, travel = Table(), {"ranks_per_node": per_node, **options}
        return averaged(model, group, LOSSLESS["twobit"](), **travel)[1].ranks.workers

    assert run_ranks(4, work) == [expected] * 4


KVSTORES = {
    "device": ("server", "compressed"),
    "dist_sync": ("server", "dense"),
    "dist_sync_device": ("server", "dense"),
}


@pytest.mark.parametrize(("name", "route"), KVSTORES.items(), ids=KVSTORES)
def test_kvstores_names_are_what_the_docs_say(name, route):
    topology, inside = route

    def work(rank, group, **options):
        model = Table()
        optimizer, averager = averaged(model, group, LOSSLESS["twobit"](), ranks_per_node=NODE, **options)
        train(model, optimizer, averager, rank, 3, prescribed_loss)
        return weights(model), averager.stats.bytes_sent

    long = {"topology": topology, "inside": inside}
    short, spelled = run_ranks(4, partial(work, topology=name)), run_ranks(4, partial(work, **long))
    for (own, sent), (other, sent_too) in zip(short, spelled, strict=True):
        assert torch.equal(own, other) and sent == sent_too
    for make in (lgc.CompressedDDPStrategy, lgc.CompressedFabricStrategy):
        make("twobit", topology=name)


REFUSED = {
    "dist_async": (
        {"topology": "dist_async"},
        "topology: got 'dist_async', allowed: .*'dist_sync'.*: asynchronous push and pull are strategy='dist_async'",
    ),
    "inside": ({"inside": "sparse"}, "inside: got 'sparse', allowed: 'compressed', 'dense'"),
    "twice": ({"topology": "dist_sync", "inside": "dense"}, "inside with topology='dist_sync': got 'dense'"),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize(
    "make", [lgc.CompressedDDPStrategy, lgc.CompressedFabricStrategy, partial(lgc.GradientAverager, Table())]
)
def test_combinations_that_do_not_work_are_refused(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(lgc.OneBit(warmup_epochs=0), **options)

"""Links and work are measured with the same collectives and the same result on all ranks, and leave nothing behind."""

import threading

import pytest
import torch

from lightning_gradcomp.app.plan import link as module
from lightning_gradcomp.app.plan.cost import Work
from lightning_gradcomp.app.plan.link import measure_link, measure_work
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.compressors import DGC, Lossy, NoCompression
from lightning_gradcomp.registry import entries
from tests.threads import checked_collectives, run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def rates(monkeypatch):
    """A clock by which each rank's thread has `latency` a call and `rate` bytes a second, whatever really happens."""
    ranks = threading.local()

    def timed(call, device):
        call()
        size = call.args[0].numel() * call.args[0].element_size() if hasattr(call, "args") else 0
        return ranks.latency + size / ranks.rate, size / ranks.rate / 4

    monkeypatch.setattr(module, "timed", timed)
    return ranks


def test_a_real_link_is_the_same_on_all_ranks():
    links = run_ranks(3, lambda rank, group: measure_link(group, CPU))
    assert links[0] == links[1] == links[2]
    assert 0 < links[0].latency < 1 and links[0].bandwidth > 0
    assert 0 < links[0].gathers <= 1 and 0 < links[0].busy <= 1


@pytest.mark.parametrize(("world", "enough"), [(2, 1 << 22), (3, 1 << 20)])
def test_the_slowest_rank_counts_and_all_send_alike(world, enough, rates):
    def rank_main(rank, group):
        rates.latency, rates.rate = 0.001 * (1 + rank), 1e8 / (1 + rank)
        return measure_link(group, CPU)

    with checked_collectives(world) as log:
        links = run_ranks(world, rank_main)
    assert all(link == links[0] for link in links)
    slowest = 1e8 / world
    assert links[0].latency == pytest.approx(0.001 * world)
    # what the clock takes for the bytes of a ring is its buffer, of which 2 (N-1)/N are sent
    assert links[0].bandwidth == pytest.approx(slowest * 2 * (world - 1) / world, rel=1e-3)
    assert max(size for _, size in log[0]) == enough  # the first that takes 20 ms longer than a short one
    seconds = enough / slowest
    assert links[0].busy == pytest.approx(seconds / 4 / (0.001 * world + seconds))


def test_a_fast_link_is_not_measured_for_ever(rates):
    def rank_main(rank, group):
        rates.latency, rates.rate = 1e-5, 1e12
        return measure_link(group, CPU)

    with checked_collectives(2) as log:
        run_ranks(2, rank_main)
    assert max(size for _, size in log[0]) == module.LARGEST


def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 100))
    model(torch.randn(8, 64)).square().mean().backward()
    return model


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_work_is_measured_and_gradients_stay(entry):
    model, compressor = network(), entry.cls()
    before = [(parameter.grad, parameter.grad.clone(), parameter.clone()) for parameter in model.parameters()]
    work = measure_work(compressor, Gradients(model, compressor))
    assert (work.encode > 0) == (entry.name != "none")
    assert work.decode >= 0 and (isinstance(compressor, Lossy) or work.decode == 0)
    for parameter, (grad, values, weights) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad and torch.equal(grad, values) and torch.equal(parameter, weights)


def test_decode_is_what_one_more_payload_costs(monkeypatch):
    read = []
    decode = DGC.decode
    monkeypatch.setattr(DGC, "decode", lambda *arguments: read.append(1) or decode(*arguments))

    def timed(call, device):
        read.clear()
        call()
        return 10.0 + 3.0 * len(read), 0.0

    monkeypatch.setattr(module, "timed", timed)
    model = network()
    assert measure_work(DGC(), Gradients(model, DGC())) == Work(10.0, 3.0)


def test_the_slowest_ranks_work_counts(monkeypatch):
    ranks = threading.local()
    monkeypatch.setattr(module, "timed", lambda call, device: (call(), (ranks.seconds, 0.0))[1])
    models = [network(), network()]

    def rank_main(rank, group):
        ranks.seconds = 1.0 + rank
        return measure_work(DGC(), Gradients(models[rank], DGC()), group)

    assert run_ranks(2, rank_main) == [Work(2.0, 0.0)] * 2


def test_a_model_without_matrices_has_nothing_to_compress():
    model = torch.nn.BatchNorm1d(8)
    model(torch.randn(4, 8)).square().sum().backward()
    assert measure_work(DGC(), Gradients(model, DGC())) == Work(0.0, 0.0)
    assert measure_work(NoCompression(), Gradients(model, NoCompression())) == Work(0.0, 0.0)

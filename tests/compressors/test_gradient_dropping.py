"""Gradient dropping: exactly the k largest of all tensors together, or of each; for any optimizer."""

import pytest
import torch

from lightning_gradcomp.compressors import GradientDropping
from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes
from lightning_gradcomp.compressors.kernels.topk import count
from lightning_gradcomp.compressors.layout import Layout
from tests.averaging.methods import with_adamw
from tests.averaging.workers import Table, all_equal, averaged, bowl_loss, conv_net, images, train, weights
from tests.compressors.one_worker import Worker, normal
from tests.threads import run_ranks

LAYOUT = Layout(("small", "large", "tiny"), ((20, 30), (40, 50), (1, 3)))
SCALES = torch.cat([torch.full((600,), 0.01), torch.full((2000,), 1.0), torch.full((3,), 1e-6)])


def dropping(**options):
    return GradientDropping(**{"sparsity": 0.9, "warmup_epochs": 0, "min_elements": 40, **options})


def sent_of(scope, v, density):
    compressor = dropping(scope=scope, sparsity=1 - density)
    payload, sent = compressor.pack(v, LAYOUT)
    received = compressor.unpack(payload, LAYOUT)
    assert torch.equal(received.indices, sent.indices)
    assert torch.equal(received.values, sent.values)
    assert payload.numel() == compressor.payload_bytes(LAYOUT)
    return sent


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_global_sends_the_k_largest_of_all_tensors(density):
    v = normal(LAYOUT.n) * SCALES
    sent, k = sent_of("global", v, density), count(LAYOUT.n, density)
    assert sent.indices.numel() == k
    assert torch.equal(sent.values, v[sent.indices])
    assert torch.equal(sent.values.abs().sort(descending=True).values, v.abs().topk(k).values)


def test_tensor_sends_some_of_each_and_global_may_not():
    v = normal(LAYOUT.n) * SCALES
    everywhere, each = sent_of("global", v, 0.01), sent_of("tensor", v, 0.01)
    for (start, stop), k in zip(LAYOUT.bounds, (6, 20, 1), strict=True):
        inside = (each.indices >= start) & (each.indices < stop)
        assert int(inside.sum()) == k
        largest = v[start:stop].abs().topk(k).values
        assert torch.equal(each.values[inside].abs().sort(descending=True).values, largest)
    assert bool(((everywhere.indices >= 600) & (everywhere.indices < 2600)).all())


def test_chunk_sends_the_largest_of_every_4096_elements():
    layout = Layout(("long", "short"), ((2, 4500), (30,)))  # chunks of 4096, 4096, 808 and 30
    v = normal(layout.n) * torch.cat([torch.full((4096,), 1e-3), torch.full((layout.n - 4096,), 1.0)])
    compressor = dropping(scope="chunk", sparsity=0.99)
    _, sent = compressor.pack(v, layout)
    begin = 0
    for size, k in ((4096, 41), (4096, 41), (808, 9), (30, 1)):
        expected = v[begin : begin + size].abs().topk(k).indices.sort().values + begin
        inside = (sent.indices >= begin) & (sent.indices < begin + size)
        assert torch.equal(sent.indices[inside], expected)
        begin += size


@pytest.mark.parametrize("scope", ["global", "tensor", "chunk"])
@pytest.mark.parametrize("fill", [0.0, 1.0, -1.0])
def test_ties_send_exactly_k(scope, fill):
    sent = sent_of(scope, torch.full((LAYOUT.n,), fill), 0.01)
    assert sent.indices.numel() == {"global": count(LAYOUT.n, 0.01), "tensor": 6 + 20 + 1, "chunk": 6 + 20 + 1}[scope]
    assert bool((sent.indices.diff() > 0).all())


@pytest.mark.parametrize("scope", ["global", "tensor", "chunk"])
def test_what_was_dropped_is_added_to_the_next_gradient(scope):
    worker, gradients = Worker(dropping(scope=scope), LAYOUT), [normal(LAYOUT.n, seed) * SCALES for seed in range(8)]
    residual = torch.zeros(LAYOUT.n)
    for gradient in gradients:
        sent = worker.push(gradient)
        residual = residual + gradient
        assert torch.equal(sent[sent != 0], residual[sent != 0])
        residual[sent != 0] = 0
        assert torch.equal(worker.residual, residual)


def test_a_payload_is_fp32_values_and_indices():
    k = count(LAYOUT.n, 0.01)
    assert dropping().with_sparsity(0.99).payload_bytes(LAYOUT) == 4 * k + index_bytes(LAYOUT.n, k)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("world", [2, 3])
def test_an_average_has_at_most_k_entries_of_each_rank(scope, world):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, dropping(scope=scope))
        train(model, optimizer, averager, rank, 1, bowl_loss)
        return int((model.kernel.grad != 0).sum()) + int((model.matrix.grad != 0).sum())

    k = count(660, 0.1) if scope == "global" else count(360, 0.1) + count(300, 0.1)
    assert k < run_ranks(world, work)[0] <= world * k


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_it_trains_with_either_optimizer(optimizer, scope):
    """At 95 % sparsity, on four batches repeatedly."""

    def loss(model, rank, step):
        x, y = images(rank, step % 2)
        return torch.nn.functional.cross_entropy(model(x), y)

    def both(model, rank):
        return sum(float(loss(model, rank, step).detach()) for step in range(2))

    def work(rank, group):
        model, compressor = conv_net(), dropping(sparsity=0.95, scope=scope)
        pair = with_adamw(model, group, compressor) if optimizer == "adamw" else averaged(model, group, compressor)
        before = both(model, rank)
        train(model, *pair, rank, 60, loss)
        assert both(model, rank) < 0.5 * before
        return weights(model)

    assert all_equal(run_ranks(2, work))

"""DGC's payload: the k largest velocities of each tensor, in the announced number of bytes."""

import pytest
import torch

from lightning_gradcomp.compressors import DGC
from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes
from lightning_gradcomp.compressors.kernels.formats import value_bytes
from lightning_gradcomp.compressors.kernels.topk import count
from lightning_gradcomp.compressors.layout import Layout
from tests.compressors.one_worker import normal, one

LAYOUTS = {
    "one element": one(1, 1),
    "odd sizes": Layout(("a", "b", "c"), ((3, 7), (1, 1), (5, 5, 3, 3))),
    "large": Layout(("a", "b"), ((300, 301), (64, 7, 3, 3))),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
sparsities = pytest.mark.parametrize("sparsity", [0.999, 0.99, 0.75, 0.25, 0.0])


def test_matrices_and_kernels_are_compressed():
    """Vectors, small tensors and excluded names are not."""
    dgc = DGC(min_elements=100, exclude=["head.*", "*.gate"])
    assert dgc.compresses("body.weight", (10, 10))
    assert dgc.compresses("conv.weight", (4, 3, 3, 3))
    assert not dgc.compresses("body.weight", (9, 11))
    assert not dgc.compresses("norm.weight", (100_000,))
    assert not dgc.compresses("scale", ())
    assert not dgc.compresses("head.weight", (1000, 1000))
    assert not dgc.compresses("body.gate", (1000, 1000))
    assert dgc.compresses("overhead.weight", (1000, 1000))


def test_each_instance_has_its_own_exclusions():
    DGC().exclude.append("*")
    assert DGC().compresses("weight", (100, 100))


def test_a_step_has_its_scheduled_sparsity():
    dgc = DGC(sparsity=0.99, values="bf16", min_elements=7)
    assert dgc.with_sparsity(0.99) is dgc
    assert dgc.with_sparsity(0.75) == DGC(sparsity=0.75, values="bf16", min_elements=7)
    assert dgc.final_sparsity == 0.99


@layouts
@sparsities
@pytest.mark.parametrize("values", ["fp32", "bf16", "int8"])
def test_the_payload_is_read_back_and_as_long_as_announced(layout, sparsity, values):
    dgc = DGC(values=values).with_sparsity(sparsity)
    payload, sent = dgc.pack(normal(layout.n), layout)
    k = sum(count(size, 1 - sparsity) for size in layout.sizes)
    assert payload.dtype == torch.uint8
    assert payload.shape == (value_bytes(k, values) + index_bytes(layout.n, k),) == (dgc.payload_bytes(layout),)
    assert dgc.messages(layout) == [("gather", len(payload))]
    received = dgc.unpack(payload, layout)
    assert torch.equal(received.indices, sent.indices)
    assert torch.equal(received.values, sent.values)


@layouts
@sparsities
def test_each_tensors_largest_velocities_are_sent_unchanged(layout, sparsity):
    velocity = normal(layout.n)
    before = velocity.clone()
    _, sent = DGC(sparsity=sparsity, values="fp32").pack(velocity, layout)
    assert torch.equal(velocity, before)
    assert torch.equal(sent.values, velocity[sent.indices])
    for start, stop in layout.bounds:
        inside = sent.indices[(sent.indices >= start) & (sent.indices < stop)]
        expected = velocity[start:stop].abs().topk(count(stop - start, 1 - sparsity)).values
        assert torch.equal(velocity[inside].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_a_constant_velocity_has_a_payload_of_the_same_size(fill):
    layout, dgc = LAYOUTS["odd sizes"], DGC(sparsity=0.99)
    payload, sent = dgc.pack(torch.full((layout.n,), fill), layout)
    assert payload.numel() == dgc.payload_bytes(layout)
    assert torch.equal(dgc.unpack(payload, layout).indices, sent.indices)


def test_at_999_an_entry_costs_less_than_44_bits():
    layout = one(2048, 2048)
    assert 8 * DGC(sparsity=0.999, values="fp32").payload_bytes(layout) < 44 * count(layout.n, 1 - 0.999)

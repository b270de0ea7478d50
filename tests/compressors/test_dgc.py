"""DGC's options say what they allow, and its payload is as long as it says."""

import pytest
import torch

from lightning_gradcomp.compressors import DGC
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.kernels.topk import count
from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes

LAYOUTS = {
    "one element": Layout(("a",), ((1, 1),)),
    "odd sizes": Layout(("a", "b", "c"), ((3, 7), (1, 1), (5, 5, 3, 3))),
    "large": Layout(("a", "b"), ((300, 301), (64, 7, 3, 3))),
}
DENSITIES = [1 - 0.999, 0.01, 0.25, 0.75, 1.0]


def normal(layout, seed=0):
    return torch.randn(layout.n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "DGC.sparsity: got 1.0, allowed: 0 <= sparsity < 1"),
        ({"sparsity": -0.5}, "DGC.sparsity: got -0.5, allowed: 0 <= sparsity < 1"),
        ({"sparsity": float("nan")}, "DGC.sparsity: got nan, allowed: 0 <= sparsity < 1"),
        ({"warmup_epochs": -1}, "DGC.warmup_epochs: got -1, allowed: 0 or more"),
        ({"dense_epochs": -2}, "DGC.dense_epochs: got -2, allowed: 0 or more"),
        ({"clip_norm": 0.0}, "DGC.clip_norm: got 0.0, allowed: None or a number above 0"),
        ({"clip_norm": -1.0}, "DGC.clip_norm: got -1.0, allowed: None or a number above 0"),
        ({"clip_norm": float("nan")}, "DGC.clip_norm: got nan, allowed: None or a number above 0"),
        ({"min_elements": 0}, "DGC.min_elements: got 0, allowed: 1 or more"),
    ],
)
def test_an_option_out_of_range_is_refused_with_what_it_got_and_what_it_allows(options, message):
    with pytest.raises(ValueError) as caught:
        DGC(**options)
    assert str(caught.value) == message


def test_options_are_named_and_a_misspelt_one_is_refused():
    with pytest.raises(TypeError):
        DGC(0.99)
    with pytest.raises(TypeError):
        DGC(sparsty=0.99)
    with pytest.raises(AttributeError):
        DGC().sparsty = 0.99


def test_matrices_and_kernels_are_taken_vectors_small_and_excluded_tensors_are_not():
    dgc = DGC(min_elements=100, exclude=["head.*", "*.gate"])
    assert dgc.takes("body.weight", (10, 10))
    assert dgc.takes("conv.weight", (4, 3, 3, 3))
    assert not dgc.takes("body.weight", (9, 11))
    assert not dgc.takes("norm.weight", (100_000,))
    assert not dgc.takes("scale", ())
    assert not dgc.takes("head.weight", (1000, 1000))
    assert not dgc.takes("body.gate", (1000, 1000))
    assert dgc.takes("overhead.weight", (1000, 1000))


def test_each_instance_has_its_own_exclusions():
    DGC().exclude.append("*")
    assert DGC().takes("weight", (100, 100))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("density", DENSITIES)
def test_the_payload_is_as_long_as_the_formula_and_decodes_to_what_was_sent(layout, density):
    dgc = DGC()
    payload, sent = dgc.encode(normal(layout), layout, density)
    k = sum(count(size, density) for size in layout.sizes)
    assert payload.dtype == torch.uint8
    assert payload.shape == (4 * k + index_bytes(layout.n, k),) == (dgc.payload_bytes(layout, density),)
    received = dgc.decode(payload, layout, density)
    assert torch.equal(received.indices, sent.indices)
    assert torch.equal(received.values, sent.values)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("density", DENSITIES)
def test_each_tensor_sends_its_own_largest_velocities_as_they_are(layout, density):
    velocity = normal(layout)
    _, sent = DGC().encode(velocity, layout, density)
    assert torch.equal(sent.values, velocity[sent.indices])
    for start, stop in layout.bounds:
        inside = sent.indices[(sent.indices >= start) & (sent.indices < stop)]
        expected = velocity[start:stop].abs().topk(count(stop - start, density)).values
        assert torch.equal(velocity[inside].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_a_constant_velocity_sends_no_more_than_any_other(fill):
    layout = LAYOUTS["odd sizes"]
    payload, sent = DGC().encode(torch.full((layout.n,), fill), layout, 0.01)
    assert payload.numel() == DGC().payload_bytes(layout, 0.01)
    assert torch.equal(DGC().decode(payload, layout, 0.01).indices, sent.indices)


def test_encoding_changes_no_velocity():
    velocity = normal(LAYOUTS["large"])
    before = velocity.clone()
    DGC().encode(velocity, LAYOUTS["large"], 0.01)
    assert torch.equal(velocity, before)


def test_at_999_an_entry_of_a_large_tensor_costs_less_than_44_bits():
    layout = Layout(("a",), ((2048, 2048),))
    k = count(layout.n, 1 - 0.999)
    assert 8 * DGC().payload_bytes(layout, 1 - 0.999) < 44 * k

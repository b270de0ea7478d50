"""1-bit SGD: the quantiser of the paper (threshold 0) and of CNTK (also the mean), and its payload."""

import numpy as np
import pytest
import torch

from lightning_gradcomp.compressors import OneBit
from lightning_gradcomp.compressors.layout import Layout
from tests.compressors.one_worker import Worker, normal, one

V = torch.tensor([1, -1, 2, -3, 0, 0.5, -0.5, 4])
VECTORS = {
    "zero": (
        "zero",
        V,
        [1, 0, 1, 0, 1, 1, 0, 1],
        (-1.5, 1.5),
        [-0.5, 0.5, 0.5, -1.5, -1.5, -1, 1, 2.5],
    ),
    "mean": (
        "mean",
        V,
        [1, 0, 1, 0, 0, 1, 0, 1],
        (-1.125, 1.875),
        [-0.875, 0.125, 0.125, -1.875, 1.125, -1.375, 0.625, 2.125],
    ),
    "all positive": ("zero", torch.tensor([1.0, 2, 3, 4]), [1] * 4, (0, 2.5), [-1.5, -0.5, 0.5, 1.5]),
    "all negative": ("zero", torch.tensor([-1.0, -2, -3, -4]), [0] * 4, (-2.5, 0), [1.5, 0.5, -0.5, -1.5]),
    "all zero": ("zero", torch.zeros(5), [1] * 5, (0, 0), [0] * 5),
    "mean, one above": ("mean", torch.tensor([0.0, 0, 0, 8]), [0, 0, 0, 1], (0, 8), [0] * 4),
    "all zero, mean": ("mean", torch.zeros(5), [1] * 5, (0, 0), [0] * 5),
}
ODD = Layout(("a", "b", "c", "d"), ((3, 7), (1, 1), (5, 5, 3), (2, 513)))
WAYS = {
    "block of 8": {"groups": "block", "group_size": 8},
    "block of 512": {"groups": "block"},
    "column": {"groups": "column"},
    "tensor": {"groups": "tensor"},
}
ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def group_size(options, shape):
    """Elements of a group of a tensor."""
    n = torch.Size(shape).numel()
    return {"column": n // shape[0], "tensor": n}.get(options.get("groups"), options.get("group_size", 512))


def bits_of(payload, length):
    return np.unpackbits(payload.numpy(), bitorder="little")[:length].tolist()


@pytest.mark.parametrize(("threshold", "v", "bits", "values", "residual"), VECTORS.values(), ids=VECTORS)
def test_bits_values_and_residual_of_known_vectors(threshold, v, bits, values, residual):
    worker = Worker(OneBit(groups="tensor", threshold=threshold), one(1, len(v)))
    decoded = worker.push(v)
    assert bits_of(worker.payload[8:], len(v)) == bits
    assert worker.payload[:8].view(torch.float32).tolist() == list(values)
    assert decoded.tolist() == [values[bit] for bit in bits]
    assert worker.residual.tolist() == residual


def test_the_residual_is_added_before_the_next_step():
    worker = Worker(OneBit(groups="tensor", threshold="zero"), one(1, 8))
    worker.push(V)
    decoded = worker.push(torch.zeros(8))  # of [-0.5, 0.5, 0.5, -1.5, -1.5, -1, 1, 2.5]
    assert decoded.tolist() == [-1.125, 1.125, 1.125, -1.125, -1.125, -1.125, 1.125, 1.125]


def test_the_bit_of_negative_zero_is_1():
    worker = Worker(OneBit(groups="tensor", threshold="zero"), one(1, 4))
    worker.push(torch.tensor([-0.0, 4.0, -2.0, 0.0]))
    assert bits_of(worker.payload[8:], 4) == [1, 1, 0, 1]


@ways
def test_groups_never_span_two_parameters(options):
    """The values are those of the parameter alone, whatever its neighbours are."""
    v = normal(ODD.n)
    decoded = Worker(OneBit(**options), ODD).push(v)
    for (start, stop), shape in zip(ODD.bounds, ODD.shapes, strict=True):
        assert torch.equal(decoded[start:stop], Worker(OneBit(**options), one(*shape)).push(v[start:stop]))


@ways
@pytest.mark.parametrize("threshold", ["zero", "mean"])
def test_a_group_of_zeros_decodes_to_zeros(options, threshold):
    v = normal(ODD.n)
    v[21:97] = 0  # the second and the third parameter
    worker = Worker(OneBit(threshold=threshold, **options), ODD)
    assert not worker.push(v)[21:97].any()
    assert not worker.residual[21:97].any()


@ways
@pytest.mark.parametrize("shape", [(5, 3), (5, 5, 3), (3, 513), (1, 5, 16), (1, 1, 40)], ids=str)
def test_a_row_of_zeros_decodes_to_zeros(options, shape):
    """Also in a group of several rows, as in every tensor of shape [1, positions, width]."""
    v = normal(torch.Size(shape).numel()).view(shape)
    rows = v if shape[0] > 1 else v[0]
    rows[len(rows) // 2] = 0
    worker = Worker(OneBit(**options), one(*shape))
    for _ in range(3):
        decoded = worker.push(v).view(rows.shape)
        assert not decoded[len(rows) // 2].any()
        assert len(rows) == 1 or decoded[0].any()


@pytest.mark.parametrize(
    ("shape", "taken"), [((2000, 1), False), ((2000, 2), False), ((2000, 3), True), ((1, 2000, 1, 1), False)], ids=str
)
def test_columns_too_short_to_save_bytes_travel_uncompressed(shape, taken):
    assert OneBit().compresses("weight", shape) == taken
    assert OneBit(groups="block").compresses("weight", shape)


@ways
@pytest.mark.parametrize("threshold", ["zero", "mean"])
def test_every_group_keeps_its_sum(options, threshold):
    worker = Worker(OneBit(threshold=threshold, **options), ODD)
    for seed in range(5):
        worker.push(normal(ODD.n, seed))
        for (start, stop), shape in zip(ODD.bounds, ODD.shapes, strict=True):
            for group in worker.residual[start:stop].double().split(group_size(options, shape)):
                assert abs(float(group.sum())) < 5e-4


def test_a_column_is_a_units_fan_in():
    """A row of PyTorch's weight. Each row has one magnitude here, and is sent without error."""
    magnitudes = torch.tensor([1.0, 10.0, 0.1])
    signs = normal(3 * 10).sign().view(3, 10)
    worker = Worker(OneBit(groups="column"), one(3, 5, 2, 1))
    torch.testing.assert_close(worker.push(signs * magnitudes[:, None]).view(3, 10), signs * magnitudes[:, None])
    assert worker.payload.numel() == 3 * 8 + 4


@ways
@pytest.mark.parametrize("layout", [ODD, one(1, 1), one(1, 8), one(3, 3), one(700, 3), one(3, 90_000)], ids=str)
def test_the_payload_is_two_means_a_group_and_a_bit_an_element(layout, options):
    """Of each tensor the means, then the bits, and where groups cut rows a bit for each; all end at multiples of 4."""
    compressor = OneBit(threshold="zero", **options)
    worker = Worker(compressor, layout)
    v = normal(layout.n)
    decoded, begin = worker.push(v), 0
    for (start, stop), shape in zip(layout.bounds, layout.shapes, strict=True):
        begin += 8 * -(-(stop - start) // group_size(options, shape))
        assert bits_of(worker.payload[begin:], stop - start) == (v[start:stop] >= 0).int().tolist()
        begin += 4 * -(-(stop - start) // 32)
        row = (stop - start) // shape[0]
        if shape[0] > 1 and row % min(group_size(options, shape), stop - start):
            assert all(bits_of(worker.payload[begin:], shape[0]))
            begin += 4 * -(-shape[0] // 32)
    assert worker.payload.numel() == begin == dict(compressor.messages(layout))["gather"]
    assert torch.equal(worker.residual, v - decoded)


def test_a_block_of_512_costs_1_125_bits_an_element():
    assert OneBit(groups="block").messages(one(1024, 1024)) == [("gather", 1.125 * 2**17)]


@pytest.mark.parametrize("threshold", ["zero", "mean"])
def test_one_compression_leaves_less_than_there_was(threshold):
    """A contraction, which error feedback needs. Also where a tensor's scales differ by a thousand."""
    v = normal(4096)
    for scaled in (v, v.pow(3), v * (torch.arange(4096) < 2048) * 1000 + v):
        worker = Worker(OneBit(threshold=threshold), one(64, 64))
        worker.push(scaled)
        assert worker.residual.norm() < 0.95 * scaled.norm()

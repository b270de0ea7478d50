"""`TensorCodec`: encode and decode of one tensor are enough for payloads, error feedback, chunks and random draws."""

from dataclasses import dataclass, replace

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp import registry
from lightning_gradcomp.compressors.base import build
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import CHUNK, Layout
from tests.compressors.examples import EXAMPLES, QSGD, EFSignSGD, RandomK, registered, separate_registry
from tests.compressors.one_worker import Worker, normal, one, payload_codec

ODD = Layout(("a", "b", "c"), ((3, 7), (1, 1), (5, 5, 3)))
BYTES = {
    "ef_signsgd": (3 + 1 + 4) + (1 + 3 + 4) + (10 + 2 + 4),
    "random_k": 4 * (2 + 1 + 8),
    "qsgd": (21 + 3 + 4) + (1 + 3 + 4) + (75 + 1 + 4),
}
"""Of `ODD`: every part is padded to 4 bytes."""
examples = pytest.mark.parametrize("name", EXAMPLES)


class Parts(lgc.TensorCodec):
    """All dtypes, in sizes that leave every alignment behind them; the last part alone is x."""

    def encode(self, x):
        n = len(x)
        odd = [torch.arange(3, dtype=torch.uint8), x > 0, torch.full((n, 3), 7, dtype=torch.int16).T, x.half()]
        return [*odd, torch.tensor(-(2**40)), x.bfloat16(), x[:0], torch.arange(3) << 40, x.double()]

    def decode(self, parts, n):
        for part, expected in zip(parts, self.encode(parts[-1].float()), strict=True):
            assert part.dtype == expected.dtype
            assert torch.equal(part, expected)
        return parts[-1].float()


class Whole(lgc.TensorCodec):
    """Sends x as it is; `decode` returns a view of the payload."""

    def encode(self, x):
        return x

    def decode(self, parts, n):
        return parts[0]


def payload_of(compressor, v, layout, **key):
    """What `v` decodes to, fp32 [n], by the sender and by another worker."""
    codec, here, there = payload_codec(compressor, layout, **key), torch.zeros(len(v)), torch.zeros(len(v))
    payload, decoded = codec.pack(v, layout)
    decoded.add_to(here)
    other = payload_codec(compressor, layout, **{**key, "worker": 5})
    other.unpack(payload, layout).add_to(there)
    assert torch.equal(here, there)
    return here


# Payloads


@examples
def test_a_payload_is_the_parts_padded_to_four_bytes(name):
    compressor = EXAMPLES[name]()
    assert compressor.messages(ODD) == [("gather", BYTES[name])]
    assert compressor.partition_bytes(ODD, False) == (BYTES[name], BYTES[name])
    worker = Worker(compressor, ODD)
    worker.push(normal(ODD.n))
    assert worker.payload.numel() == BYTES[name]


@examples
def test_each_tensor_is_encoded_alone(name):
    """What another tensor contains changes nothing. Own draws continue from tensor to tensor."""
    v = normal(ODD.n)
    decoded = payload_of(EXAMPLES[name](), v, ODD)
    start, stop = ODD.bounds[0]
    alone = payload_of(EXAMPLES[name](), v[start:stop], Layout(ODD.names[:1], ODD.shapes[:1]))
    assert torch.equal(decoded[start:stop], alone)
    v[stop:] *= 1000
    assert torch.equal(payload_of(EXAMPLES[name](), v, ODD)[start:stop], alone)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_parts_of_any_dtype_and_size_are_read_back(n):
    layout = Layout(("a", "b"), ((1, n), (3, 3)))
    v = normal(layout.n)
    assert torch.equal(payload_of(Parts(), v, layout), v)


def test_a_payload_may_begin_at_any_multiple_of_four():
    """As it does in a message, behind other gradients."""
    layout, v = one(3, 3), normal(9)
    codec = payload_codec(Parts(), layout)
    payload, _ = codec.pack(v, layout)
    for begin in (0, 4, 8, 12):
        message = torch.zeros(begin + len(payload), dtype=torch.uint8)
        message[begin:] = payload
        flat = torch.zeros(9)
        codec.unpack(message[begin:], layout).add_to(flat)
        assert torch.equal(flat, v)


@pytest.mark.parametrize(
    ("encode", "got"),
    [
        (lambda x: x[x != 0], r"[(torch.float32, (6,))], allowed: [(torch.float32, (0,))]"),
        (lambda x: x.double() if x.any() else x, "torch.float64"),
        (lambda x: [x, x] if x.any() else x, r"(6,)), (torch.float32, (6,))], allowed: [(torch.float32, (6,))]"),
        (lambda x: x.view(2, 3) if x.any() else x, "(2, 3)"),
    ],
    ids=["length", "dtype", "number of parts", "shape"],
)
def test_sizes_that_depend_on_the_values_are_refused(encode, got):
    class Wrong(Whole):
        def encode(self, x):
            return encode(x)

    with pytest.raises(ValueError) as caught:
        payload_of(Wrong(), torch.ones(6), one(2, 3))
    assert str(caught.value).startswith("Wrong.encode(x [6]): got [(torch.")
    assert got in str(caught.value)
    assert str(caught.value).endswith("as for zeros: sizes are a function of n alone")


def test_an_argument_that_is_changed_in_place_is_refused():
    """What was cut off would be lost: the residual is the argument, minus what is sent."""

    class Clipped(Whole):
        def encode(self, x):
            return x.clamp_(-1, 1)

    @dataclass(kw_only=True)
    class Largest(lgc.SparseCodec):
        values: str = "fp32"
        sparsity: float = 0.5

        def count(self, layout):
            return 2

        def select(self, flat, layout):
            return flat.abs_().topk(2).indices.sort().values

    for codec, method in ((Clipped(), "Clipped.encode"), (Largest(), "Largest.select")):
        with pytest.raises(ValueError, match=f"the argument of {method}: got 'changed in place', allowed: unchanged"):
            payload_of(codec, torch.arange(6.0), one(2, 3))


def test_a_codec_is_made_for_each_tensor():
    class Halves(Whole):
        def encode(self, x):
            return x.to(self.dtype)

        def decode(self, parts, n):
            return parts[0].float()

        def for_tensor(self, name, shape):
            codec = Halves()
            codec.dtype = torch.bfloat16 if name == "a" else torch.float32
            return codec

    v = normal(ODD.n)
    assert Halves().messages(ODD) == [("gather", 44 + 4 + 4 * 75)]
    assert torch.equal(payload_of(Halves(), v, ODD), torch.cat([v[:21].bfloat16().float(), v[21:]]))


# Chunks


class ChunkedSigns(EFSignSGD):
    """A multiple of 8 elements has bytes of its own; the mean belongs to the whole tensor."""

    chunk = 8


@pytest.mark.parametrize("n", [1, 8, 700, 2 * CHUNK + 13])
@pytest.mark.parametrize(
    "compressor",
    [ChunkedSigns(), lgc.OneBit(groups="block"), lgc.OneBit(groups="block", group_size=100), lgc.TwoBit()],
    ids=["signs", "onebit", "onebit, 100", "twobit"],
)
def test_decoding_by_chunks_is_decoding_whole(compressor, n):
    v = normal(n)
    _, decoded = payload_codec(compressor, one(1, n)).pack(v, one(1, n))
    assert len(decoded.chunks) == -(-n // CHUNK)
    codec = compressor.for_tensor("a", (1, n))
    assert torch.equal(payload_of(compressor, v, one(1, n)), codec.decode(codec.encode(v), n))


# Several tensors at once

PIECES = Layout.pieces
MANY = Layout(tuple("abcdefg"), (*[(8, 16)] * 3, (16, 8), (5, 3), *[(4, 1000)] * 2))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "compressor",
    [
        lgc.OneBit(),
        lgc.OneBit(threshold="zero"),
        lgc.TwoBit(),
        lgc.TwoBit(threshold=0.3),
        lgc.TernGrad(share_scaler=False),
    ],
    ids=["onebit", "onebit, zero", "twobit", "twobit, 0.3", "terngrad"],
)
def test_tensors_together_have_the_values_and_bytes_that_they_have_alone(compressor, device, monkeypatch):
    """Small ones of one shape, as on a CPU; or all, as on a GPU."""
    monkeypatch.setattr(Uniform, "draw", lambda self, n, begin: torch.full((n,), begin + 0.5))
    monkeypatch.setattr(Layout, "pieces", lambda self, _: PIECES(self, torch.device(device)))
    v = normal(MANY.n) * torch.arange(1, MANY.n + 1)
    compressor = replace(compressor)  # knows no layout yet
    payload, decoded = payload_codec(compressor, MANY).pack(v, MANY)
    assert len(decoded.chunks) == {"cpu": 4, "cuda": 1}[device]
    together, alone, payloads = payload_of(compressor, v, MANY), [], []
    for shape, (start, stop) in zip(MANY.shapes, MANY.bounds, strict=True):
        alone.append(payload_of(compressor, v[start:stop], one(*shape)))
        payloads.append(payload_codec(compressor, one(*shape)).pack(v[start:stop], one(*shape))[0])
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(payload, torch.cat(payloads))


# Error feedback


@examples
def test_what_was_not_sent_is_added_to_the_next_gradient(name):
    worker, kept = Worker(EXAMPLES[name](error_feedback=True), ODD), torch.zeros(ODD.n)
    for seed in range(5):
        kept = kept + normal(ODD.n, seed)
        kept = kept - worker.push(normal(ODD.n, seed))
        assert torch.equal(worker.residual, kept)
        assert kept.any()


@examples
def test_without_error_feedback_nothing_is_kept(name):
    worker = Worker(EXAMPLES[name](error_feedback=False), ODD)
    worker.push(normal(ODD.n))
    assert worker.state.empty
    assert worker.state.state_dict() == {}


def test_a_view_of_the_payload_may_be_decoded():
    worker = Worker(Whole(), ODD)
    assert torch.equal(worker.push(normal(ODD.n)), normal(ODD.n))
    assert not worker.residual.any()


# The examples' methods


def test_signs_and_the_mean_magnitude():
    v = torch.tensor([1.0, -2.0, 3.0, 0.0])
    assert payload_of(EFSignSGD(), v, one(2, 2)).tolist() == [1.5, -1.5, 1.5, 1.5]


def test_all_workers_draw_the_same_indices():
    """And others for each step, tensor and seed."""
    layout, v = Layout(("a", "b"), ((10, 10), (10, 10))), torch.ones(200)
    sent = [payload_of(RandomK(), v, layout, worker=worker) for worker in (0, 1, 7)]
    assert torch.equal(sent[0], sent[1])
    assert torch.equal(sent[0], sent[2])
    a, b = sent[0].split(100)
    assert a.sum() == b.sum() == 10
    assert not torch.equal(a, b)
    assert not torch.equal(payload_of(RandomK(), v, layout, step=1), sent[0])
    assert not torch.equal(payload_of(RandomK(seed=1), v, layout), sent[0])


def test_qsgd_is_a_level_of_the_norm():
    v = normal(100)
    level = payload_of(QSGD(levels=4), v, one(10, 10)) * 4 / v.norm()
    torch.testing.assert_close(level, level.round())
    assert bool(((level - 4 * v / v.norm()).abs() < 1).all())
    assert not payload_of(QSGD(), torch.zeros(9), one(3, 3)).any()
    alone = torch.tensor([0.0, -3.0])
    assert torch.equal(payload_of(QSGD(levels=127), alone, one(1, 2)), alone)


def test_qsgd_is_unbiased_within_five_standard_errors():
    """The variance of a level that is rounded at random is p (1 - p), p being the fraction (Alistarh et al., §3)."""
    v, draws = normal(50, seed=3), 2000
    codec, scale = QSGD(levels=4), v.norm() / 4
    total = sum(payload_of(codec, v, one(5, 10), step=step).double() for step in range(draws))
    p = (v.abs() / scale).frac().double()
    standard_error = scale * (p * (1 - p) / draws).sqrt()
    assert bool(((total / draws - v).abs() <= 5 * standard_error + 1e-6).all())


@pytest.mark.parametrize("key", [{"worker": 1}, {"step": 1}, {"seed": 1}])
def test_own_draws_are_a_function_of_seed_worker_and_step(key):
    """The global generator takes no part."""

    def sent(seed=0, **key):
        return payload_of(QSGD(seed=seed), normal(200), one(10, 20), **key)

    before = torch.random.get_rng_state()
    assert torch.equal(sent(), sent())
    assert torch.equal(sent(**key), sent(**key))
    assert not torch.equal(sent(**key), sent())
    assert torch.equal(torch.random.get_rng_state(), before)


# Registering


def test_an_example_is_known_inside_and_forgotten_outside():
    before = registry.entries()
    with registered():
        for name, cls in EXAMPLES.items():
            assert build(name) == cls()
            averager = lgc.GradientAverager(torch.nn.Linear(4, 3), cls(min_elements=1, warmup_epochs=0))
            assert averager.gradients.layout.names == ("weight",)
    assert registry.entries() == before
    with separate_registry(), pytest.raises(ValueError, match=r"min_elements: got 0"):
        lgc.register("signs")(EFSignSGD)(min_elements=0)


def test_options_of_a_codec_are_checked_as_all_are():
    with pytest.raises(ValueError, match=r"QSGD.warmup_epochs: got -1, allowed: a whole number from 0"):
        QSGD(warmup_epochs=-1)
    assert QSGD(warmup_epochs=2).schedule()(1, 0) == 0
    assert QSGD(warmup_epochs=2).schedule()(2, 0) is None
    assert QSGD().state_for(None).kind is None

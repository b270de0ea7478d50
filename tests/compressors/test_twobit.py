"""2-bit quantisation is MXNet's: codes, order of bits, residuals.

The numbers are those of MXNet's own tests (tests/nightly/dist_sync_kvstore.py with compressed_cpu_2bit, test_kvstore.py
and the example of pull request 7512), at the level of what its server adds up: there the workers' values are summed,
here their mean arrives.
"""

import hashlib

import numpy as np
import pytest
import torch

from lightning_gradcomp.compressors import TwoBit
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.twobit import best_threshold
from tests.compressors.one_worker import Worker, normal, one

T, RATE, WORKERS = 0.5, 2, 7
SHAPES = [(2, 3), (12, 11), (1, 1), (17, 16)]


class Store:
    """A key of MXNet's kvstore: a value, to which each push adds rate · Σ over the workers."""

    def __init__(self, shape, workers=WORKERS, threshold=T):
        self.workers = [Worker(TwoBit(threshold=threshold), one(*shape)) for _ in range(workers)]
        self.value = torch.zeros(shape)

    def push(self, number):
        grads = torch.full(self.value.shape, number)
        self.value += RATE * sum(worker.push(grads) for worker in self.workers).view(self.value.shape)
        assert bool((self.value == self.value.view(-1)[0]).all())
        return float(self.value.view(-1)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxnets_pushes_add_up_over_the_workers(shape):
    store = Store(shape)
    pushes = [0.0, 0.4, T - 0.4, 0.2, T - 0.2, T]
    assert [store.push(number) for number in pushes] == [0.0, 0.0, 7.0, 7.0, 14.0, 21.0]
    assert not any(worker.residual.any() for worker in store.workers)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxnets_pushes_on_four_devices(shape):
    store = Store(shape, workers=4)
    step = T * RATE * 4
    assert [store.push(number) for number in (0.4, T - 0.3, 0.2, T - 0.3)] == [0.0, step, step, 2 * step]
    assert [store.push(-T) for _ in range(4)] == [step, 0.0, -step, -2 * step]


def codes(worker):
    """The payload without its threshold."""
    return worker.payload[4:].numpy().tobytes()


def test_mxnets_random_pushes_have_its_bytes():
    """Golden bytes from a restatement of MXNet's rule: seed 123, the shapes in this order, seven pushes each."""
    random = np.random.RandomState(123)
    small = ["c3c00000", "fcf00000", "ff300000", "fff00000", "cff00000", "fff00000", "ffc00000"]
    hashes = {
        (1211, 1211): ("817c22cb6c8c39e2", "2c0f2a94d656ca46"),
        (1200, 1200): ("0a0c83ab54b9363f", "a23ad017f10ddcd0"),
    }
    worker = Worker(TwoBit(threshold=T), one(2, 3))
    for expected in small:
        worker.push(torch.from_numpy(random.rand(2, 3).astype(np.float32)))
        assert codes(worker).hex() == expected
    for shape, (first, last) in hashes.items():
        worker, seen = Worker(TwoBit(threshold=T), one(*shape)), []
        for _ in range(7):
            worker.push(torch.from_numpy(random.rand(*shape).astype(np.float32)))
            seen.append(hashlib.sha256(codes(worker)).hexdigest()[:16])
        assert (seen[0], seen[6]) == (first, last)


def test_mxnets_worked_example():
    worker = Worker(TwoBit(threshold=4), one(2, 5))
    worker.state.load_state_dict({"residual": {"a": torch.tensor([[-3.0, 1, -1, 5, -2], [2, 3, -7, -2, -100]])}})
    sent = worker.push(torch.tensor([-6.0, -2, 3, 1, 10, 5, -3, 2, -8, 0]))
    assert sent.tolist() == [-4, 0, 0, 4, 4, 4, 0, -4, -4, -4]
    assert worker.residual.tolist() == [-5, -1, 2, 2, 4, 3, 0, -1, -6, -96]
    assert codes(worker).hex() == "83f2a000"


def test_four_codes_a_byte_the_first_in_the_top_bits():
    worker = Worker(TwoBit(threshold=1.0), one(1, 5))
    worker.push(torch.tensor([2.0, -2.0, 0.0, 3.0, -1.5]))
    assert codes(worker) == bytes([0b11_10_00_11, 0b10_00_00_00, 0, 0])


@pytest.mark.parametrize("t", [0.5, 0.1, 1, 3e-5])
def test_both_comparisons_are_inclusive(t):
    t32 = np.float32(t)
    below, above = np.nextafter(t32, np.float32(0)), np.nextafter(t32, np.float32(9))
    v = torch.tensor(np.array([t32, -t32, below, -below, above, -above]))
    worker = Worker(TwoBit(threshold=t), one(2, 3))
    assert (worker.push(v) / t32).tolist() == [1, -1, 0, 0, 1, -1]


def test_a_step_sends_the_threshold_and_keeps_the_rest():
    worker = Worker(TwoBit(threshold=T), one(1, 3))
    sent = sum(worker.push(torch.full((3,), 10.0)) for _ in range(100))
    assert sent.tolist() == [50.0] * 3
    assert worker.residual.tolist() == [950.0] * 3


def test_auto_is_sent_for_each_tensor_and_step():
    layout = Layout(("a", "b", "zero"), ((3, 7), (5, 11), (2, 2)))
    worker = Worker(TwoBit(), layout)
    for seed in range(3):
        v = normal(layout.n, seed) * torch.where(torch.arange(layout.n) < 21, 1.0, 1000.0)
        v[76:] = 0
        kept = worker.residual + v
        sent = worker.push(v)
        encodings = worker.payload.split([4 + 4 * -(-n // 16) for n in layout.sizes])  # a threshold, then words
        thresholds = [encoding[:4].view(torch.float32)[0] for encoding in encodings]
        for t, (start, stop) in zip(thresholds[:2], layout.bounds, strict=False):
            part = kept[start:stop]
            torch.testing.assert_close(t, part.square().sum() / (2**0.5 * part.abs().sum()), rtol=1e-6, atol=0)
            expected = t * ((part >= t).float() - (part <= -t).float())
            assert torch.equal(sent[start:stop], expected)
            assert 0.2 < float((expected != 0).float().mean()) < 0.6
        assert thresholds[2] > 0
        assert not sent[76:].any()


@pytest.mark.parametrize("zeros", [0, 8])
@pytest.mark.parametrize("distribution", [torch.distributions.Laplace, torch.distributions.Normal])
def test_auto_leaves_the_least_that_a_threshold_can_leave(distribution, zeros):
    torch.manual_seed(0)
    r = torch.cat([distribution(0.0, 1e-3).sample((100_000,)), torch.zeros(zeros * 100_000)])

    def left(t):
        return float((r - t * ((r >= t).float() - (r <= -t).float())).square().sum())

    least = min(left(t * 1e-3) for t in torch.arange(0.1, 4, 0.02).tolist())
    assert left(best_threshold(r)) <= 1.001 * least


@pytest.mark.parametrize("threshold", ["auto", 0.5])
@pytest.mark.parametrize("sizes", [[1], [15], [16], [17], [1, 1, 33], [1211]], ids=str)
def test_the_payload_is_a_threshold_and_words_a_tensor(threshold, sizes):
    layout = Layout(tuple("abc"[: len(sizes)]), tuple((1, n) for n in sizes))
    compressor = TwoBit(threshold=threshold)
    worker = Worker(compressor, layout)
    worker.push(normal(layout.n))
    assert worker.payload.numel() == sum(4 + 4 * -(-n // 16) for n in sizes)
    assert compressor.messages(layout) == [("gather", worker.payload.numel())]

"""Whether all ranks hold the same tensors is known without sending them."""

import pytest
import torch

from lightning_gradcomp.averaging import replicas
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import broadcast, checksum, identical
from tests.threads import run_ranks

TENSOR = torch.arange(12.0).reshape(3, 4)
OTHERS = {
    "a bit": TENSOR + torch.tensor([0.0, 0, 0, 1e-6]),
    "order": TENSOR.flip(0),
    "type": TENSOR.double(),
    "shape": TENSOR.reshape(4, 3),
}
ADDED = torch.tensor([0, 2, -2, 0], dtype=torch.int32)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_one_tensor_of_one_rank_that_differs_is_noticed_by_all(other):
    counter = torch.tensor(0)

    def work(rank, group):
        return identical([other if rank == 1 else TENSOR, counter], group)

    assert run_ranks(3, work) == [False] * 3


@pytest.mark.parametrize("other", [TENSOR.flip(0), TENSOR.view(torch.int32).add(ADDED).view(torch.float32)])
def test_differences_that_cancel_in_a_sum_change_the_checksum(other):
    assert checksum(other) != checksum(TENSOR)


def test_a_compared_buffer_can_still_be_resized():
    """Observers of quantisation-aware training resize theirs in the first forward pass."""

    def work(rank, group):
        observed = torch.zeros(0), torch.arange(6.0)
        identical(observed, group)
        return [each.resize_(9).shape for each in observed]

    assert run_ranks(2, work) == [[(9,), (9,)]] * 2


def test_large_tensors_are_compared_to_the_last_byte(monkeypatch):
    monkeypatch.setattr(replicas, "CHUNK", 20)

    def work(rank, group):
        own = TENSOR.clone()
        before = identical([own], group)
        own[-1, -1] += rank
        return before, identical([own], group)

    assert run_ranks(2, work) == [(True, False)] * 2


def test_the_same_values_in_another_layout_are_identical():
    images = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16)

    def work(rank, group):
        return identical([images.contiguous(memory_format=torch.channels_last) if rank else images], group)

    assert run_ranks(3, work) == [True] * 3


KINDS = {
    "complex64": torch.tensor([1 + 2j, 3]),
    "complex128": torch.tensor([1 + 2j, 3], dtype=torch.complex128),
    "0-d complex128": torch.tensor(1 + 2j, dtype=torch.complex128),
    "uint8": torch.tensor([1, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "0-d": torch.tensor(1.0),
    "float64": torch.tensor([1.0, 2.0], dtype=torch.float64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_are_compared_and_copied(kind):
    tensor, empty = KINDS[kind], torch.zeros(0, 3)
    changed = tensor.clone()
    changed.view(-1)[0] = 0

    def work(rank, group):
        own = [changed.clone() if rank else tensor, empty, torch.tensor(0)]
        before = identical(own, group)
        broadcast(own, Ranks(group))
        return before, identical(own, group), own[0]

    for before, after, own in run_ranks(2, work):
        assert (before, after) == (False, True)
        assert torch.equal(own, tensor)
    assert checksum(tensor) == checksum(tensor.clone()) != checksum(changed)
    assert checksum(empty) == 0

"""Whether all ranks hold the same tensors is known without sending them."""

import pytest
import torch

from lightning_gradcomp.averaging.replicas import identical
from tests.threads import run_ranks

TENSOR = torch.arange(12.0).reshape(3, 4)
OTHERS = {
    "a bit": TENSOR + torch.tensor([0.0, 0, 0, 1e-6]),
    "order": TENSOR.flip(0),
    "type": TENSOR.double(),
    "shape": TENSOR.reshape(4, 3),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_one_tensor_of_one_rank_that_differs_is_noticed_by_all(other):
    counter = torch.tensor(0)

    def work(rank, group):
        return identical([other if rank == 1 else TENSOR, counter], group)

    assert run_ranks(3, work) == [False] * 3


def test_the_same_values_in_another_layout_are_identical():
    images = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16)

    def work(rank, group):
        return identical([images.contiguous(memory_format=torch.channels_last) if rank else images], group)

    assert run_ranks(3, work) == [True] * 3

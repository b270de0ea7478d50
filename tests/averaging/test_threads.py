"""The helper under all the tests here: ranks as threads."""

import pytest
import torch
import torch.distributed as dist

from tests.threads import run_ranks


def test_results_come_in_rank_order_from_ranks_that_can_talk():
    def work(rank, group):
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total, group=group)
        everyone = torch.empty(group.size())
        dist.all_gather_into_tensor(everyone, torch.tensor([float(rank)]), group=group)
        return group.rank(), group.size(), total.item(), everyone.tolist()

    assert run_ranks(3, work) == [(rank, 3, 111.0, [0.0, 1.0, 2.0]) for rank in range(3)]


def test_an_error_of_one_rank_is_raised_at_once():
    def work(rank, group):
        if rank == 1:
            raise KeyError("rank 1")
        dist.all_reduce(torch.zeros(1), group=group)

    with pytest.raises(KeyError, match="rank 1"):
        run_ranks(2, work, timeout=20)


def test_ranks_that_wait_for_each_other_fail_and_do_not_hang():
    def work(rank, group):
        if rank == 0:
            dist.all_reduce(torch.zeros(1), group=group)

    with pytest.raises((TimeoutError, RuntimeError), match=r"(?i)still running|timed out|closed"):
        run_ranks(2, work, timeout=1)

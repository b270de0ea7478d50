"""The helper under all the tests here: ranks as threads."""

import pytest
import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.ranks import add
from tests.threads import ALL_GATHER, run_ranks


def test_results_come_in_rank_order_from_ranks_that_can_talk():
    def work(rank, group):
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total, group=group)
        everyone = torch.empty(group.size())
        getattr(dist, ALL_GATHER)(everyone, torch.tensor([float(rank)]), group=group)
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


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("numbers", [1, 7, 4096, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_short_and_long_are_the_same_on_all_ranks(world, numbers, dtype):
    def work(rank, group):
        own = torch.randn(numbers, generator=torch.Generator().manual_seed(rank)).to(dtype)
        total = own.clone()
        add(group, total)
        return own.double(), total

    owns, totals = zip(*run_ranks(world, work), strict=True)
    assert all(torch.equal(total, totals[0]) for total in totals)
    tolerance = 1e-6 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(totals[0].double(), torch.stack(owns).sum(0), rtol=tolerance, atol=tolerance)

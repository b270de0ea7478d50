"""Where ranks meet outside of steps: to save a checkpoint, before a dense step, and at the end of an epoch.

All of these use one collective, in which each rank says whether it saves. If some ranks call
`trainer.save_checkpoint` and others go on, all raise an error at once. Without it they would wait for each other until
the timeout, as they do where a compressed step comes next: it has no such meeting.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_gradcomp.errors import refusal


def meet(device: torch.device, *, saving: bool = False, flag: bool = False) -> bool:
    """Wait for all ranks. Collective.

    Args:
        device: of collectives.
        saving: whether this rank is in `trainer.save_checkpoint`.
        flag: what any rank may tell all.

    Returns:
        True if any rank set its flag.

    Raises:
        ValueError: some ranks save, and others do not.
    """
    said = torch.tensor([flag, saving, not saving], dtype=torch.uint8, device=device)
    dist.all_reduce(said, dist.ReduceOp.MAX)
    any_flag, some_save, some_go_on = said.tolist()
    if some_save and some_go_on:
        allowed = "a call on every rank, as under ddp; or torch.save(module.state_dict(), path) on one"
        raise refusal("trainer.save_checkpoint", "a call on some ranks alone", allowed)
    return bool(any_flag)

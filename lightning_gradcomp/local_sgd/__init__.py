"""Local SGD with delayed averaging: ranks train locally and average their updates once per round.

Uses torch.distributed through `averaging/`, and no Lightning. This file imports nothing, because the command line reads
`schedule.py`, `participants.py`, `pending_share.py`, `error_decay.py` and `outer_optimizer.py` without torch.
"""

"""Local SGD with delayed averaging: ranks train locally and average their updates once per round.

Uses torch.distributed through `averaging/`, but not Lightning.
"""

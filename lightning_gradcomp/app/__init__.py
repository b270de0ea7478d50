"""The command `gradcomp`: Hydra composes and checks a run in this process; other processes train it."""

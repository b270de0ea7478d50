"""The command `gradcomp`: Hydra composes and checks a run in this process; another process trains it."""

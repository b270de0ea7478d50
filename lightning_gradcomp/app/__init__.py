"""The command `gradcomp`: Hydra composes a run in this process, without torch; a fresh process trains it."""

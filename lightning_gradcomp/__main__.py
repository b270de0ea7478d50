"""`python -m lightning_gradcomp` is the command `gradcomp`."""

from lightning_gradcomp.app.cli import main

main()

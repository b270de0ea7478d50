"""`python -m lightning_gradcomp` is the command `gradcomp`."""

from lightning_gradcomp.app.train import main

if __name__ == "__main__":
    main()

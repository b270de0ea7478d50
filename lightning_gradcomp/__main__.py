"""`python -m lightning_gradcomp` is the command `gradcomp`."""

if __name__ == "__main__":  # the ranks that it starts import this file, too
    from lightning_gradcomp.app.train import main

    main()

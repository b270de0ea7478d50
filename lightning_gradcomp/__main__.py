"""`python -m lightning_gradcomp` is the command `gradcomp`."""

if __name__ == "__main__":  # the ranks that it starts also import this file
    from lightning_gradcomp.app.train import main

    main()

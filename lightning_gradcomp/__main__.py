"""`python -m lightning_gradcomp` is the command `gradcomp`, with the seconds that importing Lightning takes."""

from gradcomp_command import main

main()

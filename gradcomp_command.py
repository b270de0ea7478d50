"""The command `gradcomp`: the console script, and the processes that it starts.

A module of its own beside the package, because importing anything of `lightning_gradcomp` runs the package's
`__init__`, which imports Lightning: seconds that `gradcomp --help` or a refused option should not cost.

    gradcomp ...                                   answers without Lightning
    python gradcomp_command.py --process train ... trains, with Lightning

Started by its path and not by `python -m`, Python does not put the working folder on `sys.path`, on 3.10 too: a
`queue.py` there is not taken for the standard library's. Lightning starts further ranks by the same path and words.
"""

import os
import sys

PROCESSES = {
    "train": "lightning_gradcomp.app.train",
    "server": "lightning_gradcomp.app.server",
    "join": "lightning_gradcomp.app.join",
}
"""`--process` word -> module whose `main()` is run."""


def main() -> None:
    """Run the command line in `sys.argv`."""
    try:
        os.environ["GRADCOMP_WITHOUT_LIGHTNING"] = "1"
        from lightning_gradcomp.app import cli

        del os.environ["GRADCOMP_WITHOUT_LIGHTNING"]  # no process that is started from here inherits it
        cli.main()
    except KeyboardInterrupt:
        print("\ngradcomp: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    folder, library = sys.path.pop(0), os.path.dirname(os.__file__)
    sys.path.insert(sys.path.index(library) + 1, folder)  # this file's folder: after the standard library
    if sys.argv[1:2] == ["--process"]:
        from importlib import import_module

        try:
            import_module(PROCESSES[sys.argv[2]]).main()
        except KeyboardInterrupt:  # the command that started this process says so
            sys.exit(130)
    else:
        main()

"""`gradcomp` whose ranks are forked from it, which spares them their imports. usage: forked_command.py FOLDER WORDS"""

import os
import sys
from concurrent.futures import thread

from lightning_gradcomp.app import ranks, train

if __name__ == "__main__":
    folder, *sys.argv[1:] = sys.argv[1:]
    os.chdir(folder)
    ranks.LaunchConfig = lambda launch=ranks.LaunchConfig, **options: launch(**{**options, "start_method": "fork"})
    os.register_at_fork(
        after_in_child=thread._threads_queues.clear
    )  # or a rank waits at its end for the forking thread
    train.main()

"""What torchrun does, in a process of its own and with ranks forked from it, which spares them their imports.

usage: elastic_script.py SCRIPT ARGUMENTS
"""

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def be_a_rank(*argv):
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="test", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=1, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, be_a_rank)(*sys.argv[1:])

"""What torchrun does, in a process of its own and with ranks forked from it, which spares them their imports.

usage: elastic_script.py [torchrun's options] SCRIPT ARGUMENTS
"""

import runpy
import sys

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def be_a_rank(*argv):
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    options = parse_args(sys.argv[1:])
    config, *_ = config_from_args(options)
    config.start_method = "fork"
    elastic_launch(config, be_a_rank)(options.training_script, *options.training_script_args)

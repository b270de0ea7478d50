"""Settings for tests with several ranks, which share few cores."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import end_worlds

torch.set_num_threads(1)  # ranks would otherwise fight for the cores, and sums stay in one order
os.environ["OMP_NUM_THREADS"] = "1"  # of processes too; and Lightning's launchers, which set both, leave them alone
sys.setswitchinterval(5e-4)  # one that comes back from an exchange then soon gets its turn, where ranks are threads


@pytest.fixture(scope="module", autouse=True)
def end_processes():
    """Ends what a file leaves: ranks, and a Trainer's process group, so that a later file can make its own."""
    yield
    end_worlds()
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_collection_modifyitems(items):
    """Files that start processes come first: they take the longest, and none may begin when the others have ended.

    Of these, and of the rest, first those in tests/ itself, which are long.
    """

    def starts_processes(item):
        return any(getattr(each, "__module__", None) == "tests.processes" for each in vars(item.module).values())

    items.sort(key=lambda item: (not starts_processes(item), item.path.parent != Path(__file__).parent))


def pytest_collection_finish():
    """Garbage collections then skip half a million objects that imports made; one took half a second."""
    gc.freeze()

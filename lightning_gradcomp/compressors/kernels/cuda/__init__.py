"""Triton kernels that process all tensors of a flat buffer at once. Every result equals that of the CPU's functions.

They have run in Triton's interpreter only, so they are off by default. GRADCOMP_TRITON=1 in the environment turns them
on. With TRITON_INTERPRET=1 they also process tensors on a CPU, slowly, for tests.

Triton comes with torch's CUDA wheels, so import a kernel's module only where `takes` is True.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

import torch

_lock = Lock()
"""Triton's interpreter runs one kernel at a time. Ranks may be threads."""


def takes(x: torch.Tensor) -> bool:
    """True if the Triton kernels process x."""
    on = os.environ.get("GRADCOMP_TRITON") == "1"
    return on and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def launch(kernel: Any, programs: int, *arguments: Any, **constants: int) -> None:
    """Run a kernel in this many programs."""
    with _lock:
        kernel[(programs,)](*arguments, **constants)

"""Triton kernels that process all tensors of a flat buffer at once. Every result equals that of the CPU's functions.

So far they have run in Triton's interpreter only, so they are off by default. GRADCOMP_TRITON=1 in the environment turns
them on. With TRITON_INTERPRET=1 they also process tensors on a CPU, slowly, for tests.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def takes(x: torch.Tensor) -> bool:
    """True if the Triton kernels process x."""
    on = os.environ.get("GRADCOMP_TRITON") == "1"
    return on and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def launch(kernel: Any, programs: int, *arguments: Any, **constants: int) -> None:
    """Run a kernel in this many programs."""
    kernel[(programs,)](*arguments, **constants)

"""The device that the Triton kernels are tested on: a GPU, or a CPU with Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setenv("GRADCOMP_TRITON", "1")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

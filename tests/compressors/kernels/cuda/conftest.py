import pytest
import torch


@pytest.fixture
def device(monkeypatch):
    """A GPU, or the CPU with Triton's interpreter; with Triton kernels turned on."""
    pytest.importorskip("triton")
    monkeypatch.setenv("GRADCOMP_TRITON", "1")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""Launches of a compressed step of ResNet-50 on a GPU, counted without one: tensors hold no data, kernels don't run."""

import pkgutil
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import exchange
from lightning_gradcomp.compressors.kernels import cuda
from tests.gpu import test_no_host_sync
from tests.gpu.worlds import Echo, Steps, draw_on_the_cpu, no_sum

pytest.importorskip("triton")
pytestmark = test_no_host_sync.pytestmark
data_on_the_cpu = test_no_host_sync.data_on_the_cpu
ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided}
KERNELS = [import_module(f"{cuda.__name__}.{each.name}") for each in pkgutil.iter_modules(cuda.__path__)]


class Launches(TorchDispatchMode):
    """Counts the kernels and torch's operations on a GPU. An operation counts once, even if it runs several kernels."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def kernel(self, kernel, programs, *arguments, **constants):
        self.count += 1

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        on_gpu = any(leaf.is_cuda for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        self.count += on_gpu and not launches_nothing(op)
        return result


def launches_nothing(op):
    """True for views and allocations."""
    returned = [each.alias_info for each in op._schema.returns]
    is_view = any(alias and not alias.is_write for alias in returned)
    return is_view or op.namespace != "aten" or op.overloadpacket in ALLOCATIONS


@pytest.fixture
def launches(monkeypatch):
    """Counts launches with Triton kernels, which it replaces. Tables without data are forgotten after the test."""
    counted = Launches()
    monkeypatch.setenv("GRADCOMP_TRITON", "1")
    monkeypatch.setattr(dist, "all_reduce", no_sum)
    monkeypatch.setattr(exchange, "read_flags", lambda flags: [False] + [True] * (len(flags) - 3) + [False] * 2)
    draw_on_the_cpu(monkeypatch)
    tables = [each for module in KERNELS for each in vars(module).values() if hasattr(each, "cache_clear")]
    for module in KERNELS:
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", counted.kernel)
    for table in tables:
        table.cache_clear()
    yield counted
    for table in tables:
        table.cache_clear()


@pytest.mark.parametrize(
    ("compressor", "make", "most"),
    [
        (lgc.DGC(), torch.optim.SGD, 60),
        (lgc.DGC(), torch.optim.AdamW, 100),
        (lgc.GradientDropping(values="int2"), torch.optim.SGD, 60),
    ],
)
def test_a_step_of_resnet50(compressor, make, most, launches):
    with FakeTensorMode():
        with torch.device("cuda"):
            model = torchvision.models.resnet50()
        steps = Steps(model, compressor, Echo(), optimizer=make(model.parameters(), lr=0.1, weight_decay=0.01))
        for _ in range(3):  # the first fills tables
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            launches.count = 0
            with launches:
                steps.average()
    assert 20 < launches.count <= most

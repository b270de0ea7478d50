"""A compressed step on a GPU asks for its result once. Seen without a GPU: tensors that hold no data can't be asked."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import lightning_gradcomp as lgc
from benchmarks.launches import Echo
from lightning_gradcomp.averaging import exchange
from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.averaging.topology import PARTITIONED, Topology
from lightning_gradcomp.compressors import terngrad, twobit
from lightning_gradcomp.compressors.kernels import bits, rows, topk
from tests.gpu.worlds import CASES, Model, Steps, draw_on_the_cpu, no_sum

PARAMETERS = 5
"""Of `Model`."""


def agreed(flags):
    """What is read if all gradients and the mean are finite, all gradients present, and no other flag is set."""
    expected = [False] + [True] * PARAMETERS + [False] * CALLER_FLAGS
    if flags.dtype == torch.uint8:
        expected = np.packbits(expected, bitorder="little").tolist()
    assert flags.is_cuda
    assert len(flags) == len(expected) + 1
    return [*expected, True]


def holds_no_data():
    """Whether this torch can do without a GPU's driver here; 2.8 can't."""
    with FakeTensorMode():
        try:
            torch.zeros(1, device="cuda").nonzero()
        except DynamicOutputShapeException:
            return True
        except RuntimeError:
            return False


pytestmark = pytest.mark.skipif(not holds_no_data(), reason="this torch needs a GPU's driver for tensors without data")


ATEN = torch.ops.aten
COPIES = (ATEN.copy_.default, ATEN._to_copy.default, ATEN.index_put_.default)
"""What copies a number or a tensor of the host's to the GPU: for x[0] = 1 and x[indices] = 1 too."""


class NothingLeaves(TorchDispatchMode):
    """Refuses copies that the host waits for, and FakeTensorMode allows: from the GPU, of a number that is assigned."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if op in COPIES and result.is_cuda and not (kwargs.get("non_blocking") or any(arg is True for arg in args)):
            given = (arg for arg in args if isinstance(arg, torch.Tensor))
            assert all(arg.is_cuda for arg in given), f"{op} waits for a copy to the GPU"
        if isinstance(result, torch.Tensor) and not result.is_cuda:
            assert not any(arg.is_cuda for arg in args if isinstance(arg, torch.Tensor)), f"{op} waits for the GPU"
        return result


@pytest.fixture(autouse=True)
def data_on_the_cpu(monkeypatch):
    """Sizes of encodings are found on the CPU, with data. Tables without data are forgotten after the test."""
    encode_zeros = lgc.TensorCodec._encode_zeros

    def with_data(*arguments):
        with unset_fake_temporarily(), _disable_current_modes():
            return encode_zeros(*arguments)

    monkeypatch.setattr(lgc.TensorCodec, "_encode_zeros", with_data)
    tables = [
        each for module in (bits, rows, terngrad, topk, twobit) for each in vars(module).values()
        if hasattr(each, "cache_clear")
    ]  # fmt: skip
    for table in tables:
        table.cache_clear()
    yield
    for table in tables:
        table.cache_clear()


@pytest.fixture
def no_data(monkeypatch):
    """Tensors have shapes and devices alone; there are no other ranks and no GPU's generator."""
    monkeypatch.setattr(dist, "all_reduce", no_sum)
    draw_on_the_cpu(monkeypatch)
    with FakeTensorMode(), NothingLeaves():
        yield


def steps(cls, options, number, topology="all_gather", make=None):
    """`number` steps, each of which is yielded after. `make` makes an optimizer in place of SGD."""
    model = Model("cuda")
    optimizer = make(model.parameters()) if make else None
    compressed = Steps(model, cls(**{"min_elements": 500, **options}), Echo(), Topology(topology), optimizer)
    for step in range(number):
        model.prescribe(1, step)
        compressed.average(2.0**16)
        yield


def ways(cases, topologies):
    """Every (class, options, topology) that go together."""
    made = [(case, case[0](**case[1]).not_partitioned_because) for case in cases]
    return [(*case, how) for case, refused in made for how in topologies if not (refused and how in PARTITIONED)]


DEFAULTS = [case for case in CASES if not case[1]]
"""Owners that send a dense sum ask no codec more than those that send what they have encoded."""


@pytest.mark.parametrize(
    ("cls", "options", "topology"), [*ways(CASES, ["all_gather", "two_phase"]), *ways(DEFAULTS, ["server"])]
)
def test_the_flags_are_all_that_a_step_reads(cls, options, topology, no_data, monkeypatch):
    reads = []

    def read(flags):
        reads.append(flags)
        return agreed(flags)

    monkeypatch.setattr(exchange, "read_flags", read)
    for step, _ in enumerate(steps(cls, options, 2, topology)):
        assert len(reads) == step + 1


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_adam_read_the_flags_alone(fused, no_data, monkeypatch):
    monkeypatch.setattr(exchange, "read_flags", agreed)
    for _ in steps(lgc.DGC, {}, 3, make=lambda parameters: torch.optim.AdamW(parameters, fused=fused)):
        pass


@pytest.mark.parametrize(("cls", "options"), DEFAULTS)
def test_that_read_would_have_been_noticed(cls, options, no_data):
    with pytest.raises(DataDependentOutputException):
        next(steps(cls, options, 1))


def assign_where(number):
    number.view(1)[torch.zeros(1, dtype=torch.long, device="cuda")] = 1


def assign_one(number):
    number.view(1)[0] = 1


@pytest.mark.parametrize(
    "ask",
    [
        torch.Tensor.item, bool, float, exchange.read_flags, torch.nonzero, torch.unique, torch.Tensor.cpu,
        assign_where, assign_one,
    ],
)  # fmt: skip
def test_so_would_any_other(ask, no_data):
    number = torch.zeros(1, device="cuda")
    assert number.is_cuda
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, AssertionError)):
        ask(number)

"""Compiles every kernel that a step launches, for an H100. Prints the kernels' names."""

import os
import pkgutil
from importlib import import_module

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import lightning_gradcomp as lgc
from lightning_gradcomp.compressors import terngrad
from lightning_gradcomp.compressors.decoded import Chunked
from lightning_gradcomp.compressors.kernels import cuda
from lightning_gradcomp.compressors.kernels.cuda import powersgd
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import Layout

H100 = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.bool: "*i1"}


def compile_for_h100(kernel, programs, *arguments, **constants):
    """Compile a kernel instead of running it, and set its tensors to 0."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            each.zero_()
    given = [TYPES[each.dtype] if isinstance(each, torch.Tensor) else "i32" for each in arguments]
    signature = dict(zip(kernel.arg_names, given + ["constexpr"] * len(constants), strict=True))
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, places), target=H100)
    assert compiled.asm["cubin"]
    names.add(kernel.__name__)


names = set()
for found in pkgutil.iter_modules(cuda.__path__):
    module = import_module(f"{cuda.__name__}.{found.name}")
    if hasattr(module, "launch"):
        module.launch = compile_for_h100
os.environ |= {"GRADCOMP_TRITON": "1", "TRITON_INTERPRET": "1"}  # the kernels take tensors on a CPU
layout = Layout(("a", "b"), ((64, 147), (32, 576)))
flat = torch.randn(layout.n)
digits = terngrad._Step(layout, flat[:2], flat[:2], Uniform(flat.device, 1))
terngrad.scalers_of(flat, layout, 2.5)
onebit = (lgc.OneBit(), lgc.OneBit(groups="tensor", threshold="zero"))
for codec in (lgc.DGC().for_optimizer(None), *onebit, lgc.TwoBit(), digits):
    payload, sent = codec.pack(flat, layout)
    sent.add_to(flat)
    if isinstance(sent, Chunked):
        sent.values(0)
    codec.unpack(payload, layout)
tables = powersgd.tables_of(tuple(layout.shapes), 4, flat.device)
p = powersgd.times(flat, torch.zeros(len(tables.q_numbers)), tables)
for sign in (0, -1):
    powersgd.outer(p, powersgd.transposed_times(flat, p, tables), tables, flat, sign)
print(*sorted(names))

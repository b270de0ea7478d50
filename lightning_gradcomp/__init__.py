"""Gradient compression for PyTorch Lightning. Importing this registers the strategies: `Trainer(strategy="dgc")`."""

from lightning_gradcomp.averaging import GradientAverager, Stats, load_sharded_state, save_sharded_state
from lightning_gradcomp.compressors import (
    BF16,
    DGC,
    EDEN,
    FP16,
    SPARSELOCO,
    Codec,
    Collectives,
    Compressor,
    GradientDropping,
    Int8,
    LossyCompressor,
    NoCompression,
    OneBit,
    PowerSGD,
    SparseCodec,
    TensorCodec,
    TernGrad,
    TwoBit,
)
from lightning_gradcomp.compressors.decoded import Dense, Sparse
from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits
from lightning_gradcomp.compressors.kernels.topk import topk
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.local_sgd.rounds import Nesterov
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.server import ParameterServer
from lightning_gradcomp.plugin import (
    AsyncStrategy,
    CommunicationMonitor,
    CompressedDDPStrategy,
    CompressedFabricStrategy,
    CompressedHSDPStrategy,
    DelayedStrategy,
    SparsityWarmup,
)
from lightning_gradcomp.registry import entries, load_entry_points, register

__all__ = [
    "BF16",
    "DGC",
    "EDEN",
    "FP16",
    "SPARSELOCO",
    "AsyncAverager",
    "AsyncStrategy",
    "Codec",
    "Collectives",
    "CommunicationMonitor",
    "CompressedDDPStrategy",
    "CompressedFabricStrategy",
    "CompressedHSDPStrategy",
    "Compressor",
    "DelayedAverager",
    "DelayedStrategy",
    "Dense",
    "GradientAverager",
    "GradientDropping",
    "Int8",
    "Layout",
    "LossyCompressor",
    "Nesterov",
    "NoCompression",
    "OneBit",
    "ParameterServer",
    "PowerSGD",
    "Sparse",
    "SparseCodec",
    "SparsityWarmup",
    "Stats",
    "TensorCodec",
    "TernGrad",
    "TwoBit",
    "entries",
    "load_sharded_state",
    "pack_bits",
    "register",
    "save_sharded_state",
    "topk",
    "unpack_bits",
]

load_entry_points()

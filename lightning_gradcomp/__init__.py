"""Gradient compression for PyTorch Lightning. Importing this registers the strategies: `Trainer(strategy="dgc")`."""

import os

from lightning_gradcomp.compressors import (
    BF16,
    DGC,
    FP16,
    Codec,
    Compressor,
    GradientDropping,
    Lossy,
    NoCompression,
    OneBit,
    PowerSGD,
    TernGrad,
    TwoBit,
)
from lightning_gradcomp.outer import Nesterov
from lightning_gradcomp.registry import entries, register

# gradcomp_command.py sets this variable while it imports the package, in the process that composes and checks a run.
if "GRADCOMP_WITHOUT_LIGHTNING" not in os.environ:
    from lightning_gradcomp.averaging import DelayedAverager, GradientAverager, Stats
    from lightning_gradcomp.plugin import (
        CommunicationMonitor,
        CompressedDDPStrategy,
        CompressedFabricStrategy,
        DelayedStrategy,
        SparsityWarmup,
    )

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "Codec",
    "CommunicationMonitor",
    "CompressedDDPStrategy",
    "CompressedFabricStrategy",
    "Compressor",
    "DelayedAverager",
    "DelayedStrategy",
    "GradientAverager",
    "GradientDropping",
    "Lossy",
    "Nesterov",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "SparsityWarmup",
    "Stats",
    "TernGrad",
    "TwoBit",
    "entries",
    "register",
]

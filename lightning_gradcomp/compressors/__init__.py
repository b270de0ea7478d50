"""Compressors and error feedback. Importing this package registers every compressor."""

from lightning_gradcomp.compressors.base import Codec, Collectives, Compressor, LossyCompressor, SparseCodec
from lightning_gradcomp.compressors.dense import BF16, FP16, Int8, NoCompression
from lightning_gradcomp.compressors.dgc import DGC
from lightning_gradcomp.compressors.eden import EDEN
from lightning_gradcomp.compressors.gradient_dropping import SPARSELOCO, GradientDropping
from lightning_gradcomp.compressors.onebit import OneBit
from lightning_gradcomp.compressors.powersgd import PowerSGD
from lightning_gradcomp.compressors.tensor_codec import TensorCodec
from lightning_gradcomp.compressors.terngrad import TernGrad
from lightning_gradcomp.compressors.twobit import TwoBit

__all__ = [
    "BF16",
    "DGC",
    "EDEN",
    "FP16",
    "SPARSELOCO",
    "Codec",
    "Collectives",
    "Compressor",
    "GradientDropping",
    "Int8",
    "LossyCompressor",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "SparseCodec",
    "TensorCodec",
    "TernGrad",
    "TwoBit",
]

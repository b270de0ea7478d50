"""What is sent, and what is remembered. Importing this package registers every compressor."""

from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.compressors.baselines import NoCompression
from lightning_gradcomp.compressors.dgc import DGC

__all__ = ["DGC", "Compressor", "NoCompression"]

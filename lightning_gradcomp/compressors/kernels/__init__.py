"""Tensor functions that the methods are built from: top-k, bit packing, formats, random numbers."""

"""Pure functions of tensors that the methods are made of: top-k, bytes, formats, random numbers."""

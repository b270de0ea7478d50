"""Compressors without an exchange: what a rank sends and remembers, in plain tensors."""

import torch

from lightning_gradcomp.compressors.local_gradient import Incoming
from lightning_gradcomp.compressors.layout import Layout

CPU = torch.device("cpu")


def one(*shape):
    """The layout of a single parameter."""
    return Layout(("a",), (shape,))


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


class Worker:
    """A rank's memory and a compressor whose payload can be decoded alone; `push` gives what the others decode."""

    def __init__(self, compressor, layout):
        self.compressor, self.layout = compressor, layout
        self.memory = compressor.memory(layout, CPU, 0)
        self.payload = None

    def push(self, gradient):
        outgoing = self.memory.compensate(
            Incoming.of(gradient.reshape(-1).float(), self.layout), [], set(self.layout.names)
        )
        self.payload, sent = self.compressor.encode(outgoing, self.layout, 0.5)
        self.memory.forget(sent)
        self.memory.commit(set(self.layout.names))
        decoded = torch.zeros(self.layout.n)
        self.compressor.decode(self.payload, self.layout, 0.5).add_to(decoded)
        return decoded

    @property
    def residual(self):
        return self.layout.join(self.memory.state_dict()["residual"], CPU)

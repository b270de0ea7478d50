"""A compressor without an exchange: what one worker sends and keeps, in plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_gradcomp.compressors.layout import Layout

CPU = torch.device("cpu")


def one(*shape):
    """The layout of a single parameter."""
    return Layout(("a",), (shape,))


def normal(n, seed=0):
    """fp32 [n]."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@dataclass
class _Codec:
    """`Collectives` that return the codec that they are given, instead of a mean."""

    worker: int
    step: int

    def mean_of_payloads(self, codec, flat, layout, **options):
        return codec, None


def payload_codec(compressor, layout, worker=0, step=0):
    """What encodes and decodes this worker's payloads in this step, for a compressor that sends payloads."""
    return compressor.average(torch.empty(0), layout, _Codec(worker, step), None)[0]


class Worker:
    """A worker's state and its compressor. `push` returns what the others decode, fp32 [n]."""

    def __init__(self, compressor, layout):
        self.compressor, self.layout = compressor, layout
        self.state, self.out = compressor.state_for(None).start(layout, CPU), torch.empty(layout.n)
        self.payload, self.steps = None, 0

    def push(self, gradient):
        self.state.compensate(self.out.copy_(gradient.reshape(-1)))
        codec = payload_codec(self.compressor, self.layout, step=self.steps)
        self.payload, sent = codec.pack(self.out, self.layout)
        self.state.subtract(sent)
        self.out = self.state.commit(set(self.layout.names), self.out)
        self.steps += 1
        assert self.payload.dtype == torch.uint8
        assert self.payload.shape == (codec.payload_bytes(self.layout),)
        decoded = torch.zeros(self.layout.n)
        codec.unpack(self.payload, self.layout).add_to(decoded)
        return decoded

    @property
    def residual(self):
        return self.layout.join(self.state.state_dict()["residual"], CPU)

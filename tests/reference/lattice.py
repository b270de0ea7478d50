"""TernGrad's parameter server in one process (Wen et al. 2017, §3, "scaler sharing"): it adds up whole numbers."""

import torch

from lightning_gradcomp.compressors.local_gradient import Incoming
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.state import Momentum
from lightning_gradcomp.compressors.terngrad import scaler_of, ternarise


class Server:
    """Every worker's memory, of tensors laid end to end; `step` takes all workers' gradients.

    Args:
        compressor: TernGrad with a shared scaler.
        shapes: name -> shape of what is compressed.
        workers: their number.
    """

    def __init__(self, compressor, shapes, workers):
        self.compressor, self.workers = compressor, workers
        self.layout = Layout(tuple(shapes), tuple(shapes.values()))
        self.memories = [compressor.memory(self.layout, torch.device("cpu"), rank) for rank in range(workers)]

    def step(self, gradients):
        """The average of flat gradients, one a worker."""
        rules, moving = [Momentum() for _ in self.layout.names], set(self.layout.names)
        owed = [
            memory.compensate(Incoming.of(g.clone(), self.layout), rules, moving).clone()
            for memory, g in zip(self.memories, gradients, strict=True)
        ]
        limits = [[scaler_of(flat[a:b], self.compressor.clip_sigma) for a, b in self.layout.bounds] for flat in owed]
        scalers = [max(each) for each in zip(*limits, strict=True)]
        levels = [self.levels(*each, scalers) for each in zip(self.memories, owed, limits, strict=True)]
        average = sum(levels).float()
        for (a, b), s in zip(self.layout.bounds, scalers, strict=True):
            assert average[a:b].abs().max() <= self.workers
            average[a:b] *= s / self.workers
        for memory in self.memories:
            memory.commit(moving)
        return average

    def levels(self, memory, flat, limits, scalers):
        """-1, 0 and 1 of one worker, int64 [n]; what it has sent with them is taken from its memory."""
        tensors = list(zip(self.layout.bounds, limits, scalers, strict=True))

        def drawn(generator):
            return [ternarise(flat[a:b].clamp(-limit, limit), s, generator).long() - 1 for (a, b), limit, s in tensors]

        levels = memory.draw(drawn)
        if self.compressor.error_feedback:
            memory._residual.sub_(torch.cat([s * t for (_, _, s), t in zip(tensors, levels, strict=True)]))
        return torch.cat(levels)

"""TernGrad's parameter server in one process (Wen et al. 2017, §3, "scaler sharing"): it adds up whole numbers."""

import torch

from lightning_gradcomp.compressors.decoded import Dense
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.compressors.terngrad import scaler_of, ternarise

CPU = torch.device("cpu")


class Server:
    """Every worker's state, of tensors laid end to end; `step` takes all workers' gradients.

    Args:
        compressor: TernGrad with a shared scaler.
        shapes: name -> shape of what is compressed.
        workers: their number.
    """

    def __init__(self, compressor, shapes, workers):
        self.compressor, self.workers, self.steps = compressor, workers, 0
        self.layout = Layout(tuple(shapes), tuple(shapes.values()))
        self.states = [compressor.state(self.layout, CPU) for _ in range(workers)]

    def step(self, gradients):
        """The average of flat gradients, one a worker."""
        outs = [torch.empty(self.layout.n) for _ in gradients]
        for state, gradient, out in zip(self.states, gradients, outs, strict=True):
            state.compensate(LocalGradient.of(gradient.clone(), self.layout), out)
        limits = [[scaler_of(out[a:b], self.compressor.clip_sigma) for a, b in self.layout.bounds] for out in outs]
        scalers = [max(each) for each in zip(*limits, strict=True)]
        digits = [self.digits(*each, scalers) for each in zip(range(self.workers), outs, limits, strict=True)]
        average = sum(digits).float()
        for (a, b), s in zip(self.layout.bounds, scalers, strict=True):
            assert average[a:b].abs().max() <= self.workers
            average[a:b] *= s / self.workers
        for state, own, out in zip(self.states, digits, outs, strict=True):
            scaled = [s * own[a:b] for (a, b), s in zip(self.layout.bounds, scalers, strict=True)]
            state.subtract(Dense(torch.cat(scaled)))
            state.commit(set(self.layout.names), out)
        self.steps += 1
        return average

    def digits(self, worker, flat, limits, scalers):
        """-1, 0 and 1 of one worker, int64 [n]."""
        uniform = Uniform(CPU, self.compressor.seed, worker, self.steps)
        tensors = zip(self.layout.bounds, limits, scalers, strict=True)
        parts = [ternarise(flat[a:b].clamp(-limit, limit), s, uniform) for (a, b), limit, s in tensors]
        return torch.cat(parts).long() - 1

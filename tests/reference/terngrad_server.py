"""TernGrad's parameter server in one process (Wen et al. 2017, §3, "scaler sharing"): it adds up whole numbers."""

import torch

from lightning_gradcomp.compressors.decoded import Dense
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import Layout
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
        self.states = [ErrorFeedback(self.layout, CPU, compressor.state_for(None)) for _ in range(workers)]

    def step(self, gradients):
        """The average of flat gradients, one a worker."""
        flats = [g.clone() for g in gradients]
        for state, flat in zip(self.states, flats, strict=True):
            state.compensate(flat)
        limits = [[scaler_of(flat[a:b], self.compressor.clip_sigma) for a, b in self.layout.bounds] for flat in flats]
        scalers = [max(each) for each in zip(*limits, strict=True)]
        digits = [self.digits(worker, *each, scalers) for worker, each in enumerate(zip(flats, limits, strict=True))]
        average = sum(digits).float()
        for (a, b), s in zip(self.layout.bounds, scalers, strict=True):
            assert average[a:b].abs().max() <= self.workers
            average[a:b] *= s / self.workers
        for state, flat, own in zip(self.states, flats, digits, strict=True):
            tensors = zip(self.layout.bounds, scalers, strict=True)
            state.subtract(Dense(torch.cat([own[a:b] * s for (a, b), s in tensors])))
            state.commit(set(self.layout.names), flat)
        self.steps += 1
        return average

    def digits(self, worker, flat, limits, scalers):
        """-1, 0 and 1 of one worker, int64 [n]."""
        uniform = Uniform(CPU, self.compressor.seed, worker, self.steps)
        tensors = zip(self.layout.bounds, limits, scalers, strict=True)
        drawn = [ternarise(flat[a:b].clamp(-limit, limit), s, uniform) for (a, b), limit, s in tensors]
        return torch.cat(drawn).long() - 1

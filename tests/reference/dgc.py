"""Deep Gradient Compression as its paper writes it: Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887.

All workers in one place, plain loops, nothing fast, and nothing from the package that is tested with it. PyTorch's
convention: a worker's gradient is the mean over its own batch, and what the workers send is averaged.
"""

import math

import numpy as np


class PaperDGC:
    """Weights, and for each of `workers` workers a momentum u and a velocity v of every tensor in `compressed`.

    A phase of density 1 is ordinary momentum SGD on the mean gradient. When it ends, every worker's u is the momentum
    that SGD has, and v is 0. When a sparse phase ends, everything is sent and SGD goes on with the mean of u.
    """

    def __init__(
        self,
        weights,
        compressed,
        workers,
        *,
        lr,
        momentum,
        nesterov=False,
        weight_decay=0.0,
        masking=True,
        clip_norm=None,
    ):
        self.weights = {name: np.array(weight, dtype=np.float32) for name, weight in weights.items()}
        self.compressed, self.workers = list(compressed), workers
        self.lr, self.m, self.nesterov = np.float32(lr), np.float32(momentum), nesterov
        self.weight_decay, self.masking, self.clip_norm = np.float32(weight_decay), masking, clip_norm
        self.sgd_momentum = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        self.u = self.v = None

    def step(self, gradients, density):
        """One step from the workers' own gradients, a list of name -> array."""
        if density < 1 and self.u is None:
            self.u = [{name: self.sgd_momentum[name].copy() for name in self.compressed} for _ in gradients]
            self.v = [{name: np.zeros_like(self.weights[name]) for name in self.compressed} for _ in gradients]
        if self.u is None:
            self.dense_step(gradients)
        else:
            self.sparse_step(gradients, density)

    def dense_step(self, gradients):
        """Momentum SGD; the averaged gradient is clipped."""
        averaged = self.clipped({name: self.mean(g[name] for g in gradients) for name in self.weights}, self.clip_norm)
        for name in self.weights:
            self.sgd(name, averaged[name])

    def sgd(self, name, gradient):
        """w ← w − η · momentum, as `torch.optim.SGD` has it."""
        gradient = gradient + self.weight_decay * self.weights[name]
        buffer = self.sgd_momentum[name] = self.m * self.sgd_momentum[name] + gradient
        self.weights[name] -= self.lr * (gradient + self.m * buffer if self.nesterov else buffer)

    def sparse_step(self, gradients, density):
        """Algorithm 4 of the paper, with the order: clip, decay, correct the momentum, select, mask, average."""
        limit = None if self.clip_norm is None else math.sqrt(self.workers) * self.clip_norm
        gradients = [self.clipped(g, limit) for g in gradients]
        for name in set(self.weights) - set(self.compressed):
            self.sgd(name, self.mean(g[name] for g in gradients))
        for name in self.compressed:
            sent = []
            for g, u, v in zip(gradients, self.u, self.v, strict=True):
                gradient = g[name] + self.weight_decay * self.weights[name]
                u[name] = self.m * u[name] + gradient
                v[name] = v[name] + (gradient + self.m * u[name] if self.nesterov else u[name])
                mask = largest(v[name], math.ceil(round(v[name].size * density, 6)))
                sent.append(np.where(mask, v[name], np.float32(0)))
                v[name] = np.where(mask, np.float32(0), v[name])
                if self.masking and density < 1:
                    u[name] = np.where(mask, np.float32(0), u[name])
            self.weights[name] -= self.lr * self.mean(sent)
            if density == 1:
                self.sgd_momentum[name] = self.mean(u[name] for u in self.u)
        if density == 1:
            self.u = self.v = None

    def mean(self, arrays):
        """The average over the workers, summed in rank order."""
        return sum(arrays) / np.float32(self.workers)

    @staticmethod
    def clipped(gradient, limit):
        """All tensors of a gradient, scaled down together to the norm `limit`."""
        if limit is None:
            return gradient
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()))
        return {name: g * np.float32(min(1.0, limit / norm)) for name, g in gradient.items()}


def largest(x, k):
    """Where the k entries of `x` of largest magnitude lie, as a mask."""
    mask = np.zeros(x.size, dtype=bool)
    mask[np.argsort(-np.abs(x.reshape(-1)), kind="stable")[: max(1, k)]] = True
    return mask.reshape(x.shape)

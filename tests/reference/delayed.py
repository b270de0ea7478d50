"""Delayed Gradient Averaging as its paper has it (Zhu, Lin, Lu, Lin, Han, NeurIPS 2021), and DiLoCo (arXiv 2311.08105).

All workers in one place, plain loops in fp64, gradients where the package has updates, and nothing from the package.
"""

import numpy as np


class PaperDGA:
    """Weights of every worker, which train by plain SGD on their own gradients.

    At the end of each `period` steps a worker sends the sum G_j of the round's gradients; `delay` steps later it
    receives their mean, and takes its own back: w_j ← w_j − η·(mean G − G_j). With delay 0 that is FedAvg.
    """

    def __init__(self, weights, workers, *, lr, period, delay):
        self.weights = [np.array(weights, dtype=np.float64) for _ in range(workers)]
        self.lr, self.period, self.delay, self.t = lr, period, delay, 0
        self.sums = [np.zeros_like(w) for w in self.weights]
        self.under_way = {}

    def step(self, gradients):
        """One step of every worker, from its own gradient at its own weights."""
        self.t += 1
        for w, total, g in zip(self.weights, self.sums, gradients, strict=True):
            w -= self.lr * g
            total += g
        if self.t % self.period == 0:
            self.under_way[self.t + self.delay] = self.sums
            self.sums = [np.zeros_like(w) for w in self.weights]
        if self.t in self.under_way:
            sent = self.under_way.pop(self.t)
            for w, own in zip(self.weights, sent, strict=True):
                w -= self.lr * (np.mean(sent, axis=0) - own)


class PaperDiLoCo:
    """One set of global weights; each round every worker trains a copy by SGD, and the outer Nesterov SGD steps."""

    def __init__(self, weights, workers, *, lr, period, outer_lr, outer_momentum):
        self.shared = np.array(weights, dtype=np.float64)
        self.lr, self.period, self.outer_lr, self.momentum = lr, period, outer_lr, outer_momentum
        self.weights = [self.shared.copy() for _ in range(workers)]
        self.velocity, self.t = np.zeros_like(self.shared), 0

    def step(self, gradients):
        """One inner step of every worker; at the end of a round an outer one."""
        self.t += 1
        for w, g in zip(self.weights, gradients, strict=True):
            w -= self.lr * g
        if self.t % self.period == 0:
            pseudo_gradient = np.mean([self.shared - w for w in self.weights], axis=0)
            self.velocity = self.momentum * self.velocity + pseudo_gradient
            self.shared = self.shared - self.outer_lr * (pseudo_gradient + self.momentum * self.velocity)
            self.weights = [self.shared.copy() for _ in self.weights]


class PaperSparseLoCo:
    """SparseLoCo (arXiv 2508.15706, algorithm 1) without the quantiser, and plain SGD inside.

    With an outer momentum, it is a round of MuLoCo (arXiv 2505.23725): error feedback, then Nesterov on what was sent.

    Each worker accumulates e <- decay · e + (what its round has added to the weights), sends the largest entries of
    each compressed tensor and takes them out of e. An entry's sum over workers is divided by all, or by its senders.

    Args:
        tensors: (start, stop, number of entries that are sent), None for one that travels whole.
    """

    def __init__(self, weights, tensors, workers, *, lr, period, decay, mean, outer_lr=1.0, outer_momentum=0.0):
        self.outer_lr, self.momentum = outer_lr, outer_momentum
        self.shared = np.array(weights, dtype=np.float64)
        self.tensors, self.lr, self.period, self.decay, self.mean = tensors, lr, period, decay, mean
        self.weights = [self.shared.copy() for _ in range(workers)]
        self.remembered = [np.zeros_like(self.shared) for _ in range(workers)]
        self.velocity, self.t = np.zeros_like(self.shared), 0

    def step(self, gradients):
        """One inner step of every worker; at the end of a round an outer one, on what they send."""
        self.t += 1
        for w, g in zip(self.weights, gradients, strict=True):
            w -= self.lr * g
        if self.t % self.period == 0:
            sent = [self.send(e, w - self.shared) for e, w in zip(self.remembered, self.weights, strict=True)]
            senders = sum((s != 0).astype(int) for s in sent) if self.mean == "senders" else len(sent)
            update = sum(sent) / np.maximum(senders, 1)
            self.velocity = self.momentum * self.velocity + update
            self.shared = self.shared + self.outer_lr * (update + self.momentum * self.velocity)
            self.weights = [self.shared.copy() for _ in self.weights]

    def send(self, e, update):
        """What a worker sends; `e` is changed in place."""
        e *= self.decay
        e += update
        sent = np.zeros_like(e)
        for start, stop, k in self.tensors:
            largest = np.arange(stop - start) if k is None else np.argsort(-np.abs(e[start:stop]))[:k]
            sent[start:stop][largest] = e[start:stop][largest]
        e -= sent
        return sent

"""Error feedback after Adam's preconditioner, as the paper has Adam, one worker at a time, with numpy.

Kingma & Ba 2015, Algorithm 1; decoupled weight decay as in Loshchilov & Hutter 2019, Algorithm 2.
"""

from __future__ import annotations

import numpy as np


class Worker:
    """One rank's moments, and the sum of its steps that it has not sent. fp64."""

    def __init__(self, n):
        self.m, self.v, self.e, self.t = np.zeros(n), np.zeros(n), np.zeros(n), 0
        self.own_squares = self.mean_squares = 0.0

    def observe(self, own, mean, beta2):
        """What this rank's gradient of the uncompressed tensors is, and what the mean of all ranks' is."""
        self.own_squares = beta2 * self.own_squares + (own**2).sum()
        self.mean_squares = beta2 * self.mean_squares + (mean**2).sum()

    def step(self, gradient, lr, beta1, beta2, eps):
        """Adam's step for this gradient, which is then waiting to be sent: with the second moment of the mean."""
        ratio = self.mean_squares / self.own_squares if self.own_squares else 1.0
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        beta = 1 - (1 - beta2) * min(ratio, 1.0)
        self.v = beta * self.v + (1 - beta) * ratio * gradient**2
        m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta**self.t)
        u = lr * m_hat / (np.sqrt(v_hat) + eps)
        self.e += u
        return u

    def send_largest(self, k):
        """The k largest of what waits, as a vector; the rest goes on waiting."""
        sent = np.zeros_like(self.e)
        largest = np.argsort(-np.abs(self.e), kind="stable")[:k]
        sent[largest] = self.e[largest]
        self.e -= sent
        return sent


def train(weights, workers, gradient, uncompressed, steps, *, k, lr, betas=(0.9, 0.999), eps=1e-8, decay=0.0):
    """Weights after `steps` steps; the sums of what was applied, and of mean steps.

    The ranks' gradients are gradient(weights, rank, step), and uncompressed(rank, step) those of other tensors.
    """
    applied, wanted = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(steps):
        steps_made = [w.step(gradient(weights, rank, step), lr, *betas, eps) for rank, w in enumerate(workers)]
        others = [uncompressed(rank, step) for rank in range(len(workers))]
        for worker, own in zip(workers, others, strict=True):
            worker.observe(own, np.mean(others, axis=0), betas[1])
        mean = np.mean([worker.send_largest(k) for worker in workers], axis=0)
        weights = (1 - lr * decay) * weights - mean
        applied += mean
        wanted += np.mean(steps_made, axis=0)
    return weights, applied, wanted

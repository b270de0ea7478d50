"""Gradient dropping as its paper writes it: Aji and Heafield, EMNLP 2017, arXiv 1704.05021, Algorithm 1."""

import math

import numpy as np

from tests.reference.workers import Workers


class PaperGradientDropping(Workers):
    """The k entries of residual + gradient of largest magnitude are sent, of each tensor or of all ("global")."""

    def __init__(self, *args, sparsity, scope, **options):
        super().__init__(*args, **options)
        self.density, self.scope = 1 - sparsity, scope

    def lossy(self, compensated):
        if self.scope == "tensor":
            return {name: self.largest(v.reshape(-1)).reshape(v.shape) for name, v in compensated.items()}
        everything = self.largest(np.concatenate([v.reshape(-1) for v in compensated.values()]))
        sent, start = {}, 0
        for name, v in compensated.items():
            sent[name] = everything[start : start + v.size].reshape(v.shape)
            start += v.size
        return sent

    def largest(self, v):
        """v where it is among the k largest in magnitude, else 0."""
        k = math.ceil(round(v.size * self.density, 6))
        order = np.argsort(-np.abs(v), kind="stable")
        self.decided(np.abs(v[order[k - 1]]) - np.abs(v[order[k]]))
        sent = np.zeros_like(v)
        sent[order[:k]] = v[order[:k]]
        return sent

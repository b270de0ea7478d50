"""PowerSGD as its paper writes it: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2."""

import numpy as np

from tests.reference.workers import Workers


class PaperPowerSGD(Workers):
    """`queries` is name -> the first Q; `cold` is, for no warm start, (name, step) -> Q.

    The basis comes from Gram-Schmidt, as in the paper, and all is done in fp64.
    """

    def __init__(self, *args, queries, cold=None, **options):
        super().__init__(*args, **options)
        self.queries, self.cold = {name: np.array(q, dtype=np.float64) for name, q in queries.items()}, cold
        self.steps = 0

    def averages(self, gradients):
        averages = {}
        self.steps += 1
        for name in self.compressed:
            shape = self.weights[name].shape
            compensated = [
                (e[name] + g[name]).astype(np.float64) for e, g in zip(self.residual, gradients, strict=True)
            ]
            matrices = [v.reshape(shape[0], -1) for v in compensated]
            p = gram_schmidt(sum(m @ self.queries[name] for m in matrices) / self.workers)
            own = [m.T @ p for m in matrices]
            q = sum(own) / self.workers
            for residual, m, q_own in zip(self.residual, matrices, own, strict=True):
                residual[name] = (m - p @ q_own.T).reshape(shape).astype(np.float32)
            self.queries[name] = self.cold(name, self.steps) if self.cold else q
            averages[name] = (p @ q.T).reshape(shape).astype(np.float32)
        return averages


def gram_schmidt(p):
    """Columns orthogonalised one after the other."""
    basis = []
    for column in p.T:
        for known in basis:
            column = column - (known @ column) * known
        basis.append(column / np.linalg.norm(column))
    return np.stack(basis, 1)

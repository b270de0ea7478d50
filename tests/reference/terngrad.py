"""TernGrad as its paper writes it: Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017, arXiv 1705.07878, Algorithm 1."""

import numpy as np

from tests.reference.workers import Workers


class PaperTernGrad(Workers):
    """Clip, share the scalers, ternarise. `draws[worker](n)` gives n uniform numbers, tensor after tensor."""

    def __init__(self, *args, draws, clip_sigma, share_scaler=True, error_feedback=False, **options):
        super().__init__(*args, **options)
        self.draws, self.c, self.share = draws, np.float32(clip_sigma), share_scaler
        self.error_feedback = error_feedback

    def averages(self, gradients):
        compensated = [{name: e[name] + g[name] for name in e} for e, g in zip(self.residual, gradients, strict=True)]
        cut = [{name: self.clip(v) for name, v in each.items()} for each in compensated]
        scalers = [{name: np.abs(v).max() for name, v in each.items()} for each in cut]
        if self.share:
            scalers = [{name: max(s[name] for s in scalers) for name in self.compressed}] * self.workers
        sent = [
            {name: self.ternarise(cut[k][name], scalers[k][name], self.draws[k]) for name in self.compressed}
            for k in range(self.workers)
        ]
        if self.error_feedback:
            self.residual = [{name: v[name] - s[name] for name in v} for v, s in zip(compensated, sent, strict=True)]
        return {name: self.mean([each[name] for each in sent]) for name in self.compressed}

    def clip(self, g):
        """§3: within c standard deviations, of a distribution whose mean is 0."""
        if not self.c:
            return g
        limit = self.c * np.sqrt((g.astype(np.float64) ** 2).mean()).astype(np.float32)
        return np.clip(g, -limit, limit)

    def ternarise(self, g, s, draw):
        """s · sign(g) ∘ b, with P(b = 1) = |g| / s."""
        u = draw(g.size).reshape(g.shape)
        chance = np.where(g > 0, 1 - u, u) * s  # as good as u, and that at which floor(g / s + u) rounds away from 0
        inside = (np.abs(g) > 0) & (np.abs(g) < s)
        self.decided(np.abs(chance - np.abs(g))[inside])
        return (s * np.sign(g) * (chance < np.abs(g))).astype(np.float32)

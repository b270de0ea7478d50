"""MXNet's 2-bit quantisation, element by element as its kvstore does it (src/kvstore/gradient_compression-inl.h)."""

import numpy as np

from tests.reference.workers import Workers


class KVStoreTwoBit(Workers):
    """`threshold` is a number, as in MXNet, or "auto": 1.5 times the mean magnitude of what is owed of a tensor."""

    def __init__(self, *args, threshold, **options):
        super().__init__(*args, **options)
        self.threshold = threshold

    def quantise(self, v):
        t = np.float32(1.5) * np.abs(v).mean() if self.threshold == "auto" else np.float32(self.threshold)
        sent = np.zeros_like(v)
        for i, r in np.ndenumerate(v):
            if r >= t:
                sent[i] = t
            elif r <= -t:
                sent[i] = -t
        self.decided(np.abs(np.abs(v) - t))
        return sent

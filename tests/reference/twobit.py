"""MXNet's 2-bit quantisation, element by element as its kvstore does it (src/kvstore/gradient_compression-inl.h)."""

import numpy as np

from tests.reference.workers import Workers


class KVStoreTwoBit(Workers):
    """`threshold` is a number, as in MXNet, or "auto": of a tensor's residual + gradient, half the
    square root of 2 times the mean square, over the mean magnitude."""

    def __init__(self, *args, threshold, **options):
        super().__init__(*args, **options)
        self.threshold = threshold

    def quantise(self, v):
        auto = self.threshold == "auto"
        t = np.float32(np.sqrt(2) / 2 * np.square(v).mean() / np.abs(v).mean() if auto else self.threshold)
        sent = np.zeros_like(v)
        for i, r in np.ndenumerate(v):
            if r >= t:
                sent[i] = t
            elif r <= -t:
                sent[i] = -t
        self.decided(np.abs(np.abs(v) - t))
        return sent

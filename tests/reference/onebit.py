"""1-bit SGD as its paper and its authors' CNTK write it: Seide, Fu, Droppo, Li, Yu, Interspeech 2014."""

import numpy as np

from tests.reference.workers import Workers


class PaperOneBit(Workers):
    """Every group of elements is sent as one bit each and the two numbers that the bits stand for.

    `group` is how many consecutive elements of a tensor share them, "column" (a unit's fan-in) or "tensor".
    """

    def __init__(self, *args, group, threshold, **options):
        super().__init__(*args, **options)
        self.group, self.threshold = group, threshold

    def quantise(self, v):
        size = {"column": v.size // v.shape[0], "tensor": v.size}.get(self.group, self.group)
        sent = np.empty(v.size, dtype=np.float32)
        for start in range(0, v.size, size):
            sent[start : start + size] = self.one_group(v.reshape(-1)[start : start + size])
        return sent.reshape(v.shape)

    def one_group(self, v):
        middle = v.mean() if self.threshold == "mean" else np.float32(0)
        self.decided(np.abs(v - middle))
        bit = v >= middle
        ones = v[bit].mean() if bit.any() else middle
        zeros = v[~bit].mean() if not bit.all() else middle
        return np.where(bit, ones, zeros)

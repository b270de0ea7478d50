"""EDEN's rotation and quantiser in numpy, one block at a time, in 64-bit numbers except where a rounding matters.

Written from DRIVE (arXiv 2105.08339) and EDEN (arXiv 2108.08842), with the product's block, levels and bf16 scales.
"""

import numpy as np
from scipy.linalg import hadamard

BLOCK, UNIT = 64, 40
CENTERS = {  # Lloyd and Max, for the standard normal distribution
    1: [0.7979],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1519],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}


def rotation(signs: np.ndarray) -> np.ndarray:
    """Three rounds of signs, bool [3, 64], and a Hadamard transform: integers [64, 64]."""
    product = np.eye(BLOCK, dtype=np.int64)
    for negative in signs:
        product = product @ np.diag(np.where(negative, -1, 1)) @ hadamard(BLOCK)
    return product


def quantise(block: np.ndarray, bits: int) -> tuple[np.ndarray, np.float32]:
    """The levels of one rotated block (fp32 [64]) and its scale before it is rounded to bf16."""
    levels = np.rint(UNIT * np.array(CENTERS[bits])).astype(np.int64)
    squares = np.float32((block.astype(np.float64) ** 2).sum())
    if squares == 0:
        return np.full(BLOCK, levels[0]), np.float32(0)
    unit = np.float32(8 * UNIT) / np.sqrt(squares)
    found = []
    for value in block:
        t = int(np.clip(np.floor(value * unit), -128, 127))
        nearest = min(levels, key=lambda level: abs(abs(t + 0.5) - level))
        found.append(nearest if t >= 0 else -nearest)
    products = np.float32((block.astype(np.float64) * found).sum())
    return np.array(found), squares / products


def to_bf16(scale: np.float32, seed: int) -> np.float32:
    """Round up if the discarded 16 bits plus 16 random ones overflow."""
    number = int(np.float32(scale).view(np.uint32))
    return np.uint32((number + seed % 2**16) >> 16 << 16).view(np.float32)


def packed(levels: np.ndarray, scales: list[np.float32], bits: int) -> bytes:
    """The message of some blocks: bf16 scales, then codes, lowest bits first."""
    positive = np.rint(UNIT * np.array(CENTERS[bits])).astype(np.int64)
    every = np.concatenate([-positive[::-1], positive])
    codes = np.searchsorted(every, levels.ravel())
    stream = (codes[:, None] >> np.arange(bits) & 1).astype(np.uint8)
    upper = np.array(scales, np.float32).view(np.uint32) >> 16
    return upper.astype("<u2").tobytes() + np.packbits(stream.ravel(), bitorder="little").tobytes()


def blocks_of(tensor: np.ndarray) -> np.ndarray:
    """Blocks inside rows, the last one of a row filled with zeros."""
    rows = tensor.reshape(len(tensor), -1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK))).reshape(-1, BLOCK)


def mean(tensors: list[np.ndarray], bits: int, turn: np.ndarray, first: int, seeds) -> np.ndarray:
    """The mean over ranks of whole numbers, as blocks, fp32 [blocks, 64].

    `seeds(phase, block)` is the draw of a block for the way to its owner, phase (0, rank), or back, phase (1,). Of two
    ranks, each decodes both messages.
    """

    def decoded(levels, scale, seed):
        return (levels @ turn.T).astype(np.float32) * (to_bf16(scale, seed) / np.float32(BLOCK**3))

    result = []
    for number, shares in enumerate(zip(*map(blocks_of, tensors), strict=True)):
        rotated = [(share.astype(np.int64) @ turn).astype(np.float32) / np.float32(len(tensors)) for share in shares]
        sent = [(*quantise(block, bits), seeds((0, rank), first + number)) for rank, block in enumerate(rotated)]
        if len(tensors) == 2:
            result.append(sum(decoded(*each) for each in sent))
            continue
        total = np.zeros(BLOCK, np.float32)
        for levels, scale, seed in sent:
            total += levels.astype(np.float32) * to_bf16(scale, seed)
        result.append(decoded(*quantise(total, bits), seeds((1,), first + number)))
    return np.array(result)

"""How much a rank holds back: the length of what it has not sent, against that of its gradient.

A residual that error feedback keeps in check stays at some multiple of the gradient; one that grows without end, while
the gradient does not shrink, says that the compressor can't carry what training needs. Both lengths are L2 norms over
the compressed parameters, on this rank alone, so nothing is exchanged; each is a pass over the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.compressors.memory import Memory


@contextmanager
def weighed(gradients: Sequence[torch.Tensor], memory: Memory, stats: Stats, scale: float) -> Iterator[None]:
    """Around a compressed step: note `residual_to_gradient` in `stats`, and what that took in `weighing_seconds`.

    Args:
        gradients: the rank's own, as backward has left them; the step may overwrite them.
        memory: of the same parameters. Where it is empty after the step, nothing is noted.
        scale: the loss scale that is in the gradients.
    """
    begin = time.perf_counter()
    gradient = length(gradients) / scale
    stats.weighing_seconds += time.perf_counter() - begin
    yield
    begin, unsent = time.perf_counter(), memory.unsent
    # A step that overflowed has left the memory as it was, and no gradient to compare it with.
    if unsent is not None and not memory.empty and 0 < gradient < math.inf:
        stats.residual_to_gradient = length([unsent]) / gradient
    stats.weighing_seconds += time.perf_counter() - begin


def length(tensors: Sequence[torch.Tensor]) -> float:
    """L2 norm of all of them as one vector, in fp32; of none, 0. Waits for a GPU."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

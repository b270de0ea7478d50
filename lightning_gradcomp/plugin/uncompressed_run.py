"""Why a run with a compressor has compressed nothing."""

from __future__ import annotations

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.compressors import LossyCompressor
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.plugin.sigterm import Averager


def why_uncompressed(averager: Averager) -> str:
    """Why no step since the averager was made was compressed, those that topology="auto" tries aside.

    Empty where one was, or where nothing was to be compressed: with a baseline, and with dist_async, whose pushes are
    compressed from the first on.
    """
    if isinstance(averager, DelayedAverager):
        if isinstance(averager.compressor, LossyCompressor) and averager.world > 1 and not averager.stats.rounds:
            return f"no round of {averager.period} steps ended before a drain"
        return averager.rounds.why_uncompressed("round")
    return averager.why_uncompressed() if isinstance(averager, GradientAverager) else ""

"""Why a run with a compressor has compressed nothing."""

from __future__ import annotations

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.autotune import DENSE
from lightning_gradcomp.compressors import LossyCompressor
from lightning_gradcomp.compressors.schedules import dense_start
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
        return _why_dense(averager.rounds, "round")
    return _why_dense(averager, "step") if isinstance(averager, GradientAverager) else ""


def _why_dense(averager: GradientAverager, step: str) -> str:
    auto, ranks, schedule = averager.autotune, averager.ranks, averager.schedule
    compressed = averager.spent.bytes_sent < averager.spent.dense_bytes
    if not isinstance(averager.compressor, LossyCompressor) or (
        auto.choice not in (None, DENSE) if auto else compressed
    ):
        return ""
    if ranks.workers == 1:
        alone = "replica" if averager.shards else "rank" if ranks.world == 1 else "node, and only nodes compress"
        return f"there is one {alone}"
    if not averager.gradients.compressed:
        return "no tensor is large enough"
    if schedule is not None and not schedule(averager.epoch or 0, averager.steps - 1):
        start = dense_start(schedule, step)
        return f"its warm-up of {start} lasted to the end" if start else "its sparsity was 0"
    if auto:
        return f'topology="auto" {"had not chosen yet" if auto.choice is None else "found dense steps the quickest"}'
    return f"a compressed {step} costs no fewer bytes than a dense one"

"""The progress bar, with what the exchange costs in units for people."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_gradcomp.app.sizes import human


class WireBar(TQDMProgressBar):
    """Lightning's bar; CommunicationMonitor's two figures become one: `wire=102 kB/step (438x, N=2)`."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = {**super().get_metrics(trainer, pl_module)}
        metrics.pop("v_num", None)  # a run's folder has no version
        ratio = next((name for name in metrics if name.startswith("ratio(N=")), None)
        if ratio is None or "sent_MB" not in metrics:
            return metrics
        sent, times = human(1e6 * float(metrics.pop("sent_MB"))), float(metrics.pop(ratio))
        world = ratio.removeprefix("ratio(").removesuffix(")")
        return {**metrics, "wire": f"{sent}/step ({times:.3g}x, {world})"}

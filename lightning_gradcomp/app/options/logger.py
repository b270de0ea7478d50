"""Where the metrics of every step go. metrics.csv in the run's folder is written beside all of these but `none`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradcomp.app.options.limits import one_of


@dataclass(kw_only=True, slots=True)
class Logger:
    """No metrics by step at all."""


@dataclass(kw_only=True, slots=True)
class CSV(Logger):
    """metrics.csv alone."""


@dataclass(kw_only=True, slots=True)
class TensorBoard(Logger):
    """TensorBoard's files in the run's folder."""


@dataclass(kw_only=True, slots=True)
class WandB(Logger):
    """Weights & Biases. `mode`: offline keeps everything in the run's folder, for `wandb sync`."""

    project: str
    mode: str

    def __post_init__(self) -> None:
        one_of("logger.mode", self.mode, ("online", "offline"))


@dataclass(kw_only=True, slots=True)
class MLflow(Logger):
    """MLflow. `tracking_uri`: a server, or a place on this machine."""

    experiment: str
    tracking_uri: str


LOGGERS: dict[str, type[Logger]] = {
    "csv": CSV,
    "mlflow": MLflow,
    "none": Logger,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
PACKAGES = {"mlflow": ("mlflow",), "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
"""Of whose packages one has to be installed; the first is what to install."""

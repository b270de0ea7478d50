"""Options of the logger. metrics.csv in the run's folder is written beside all of them but `none`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from lightning_gradcomp.app.options.limits import one_of


@dataclass(kw_only=True)
class Logger:
    """No metrics of steps."""


@dataclass(kw_only=True)
class CSV(Logger):
    """metrics.csv alone."""


@dataclass(kw_only=True)
class TensorBoard(Logger):
    """TensorBoard's files in the run's folder."""


@dataclass(kw_only=True)
class WandB(Logger):
    """Weights & Biases. `mode`: offline keeps everything in the run's folder, for `wandb sync`."""

    project: str
    mode: str

    def __post_init__(self) -> None:
        one_of("logger.mode", self.mode, ("online", "offline"))


@dataclass(kw_only=True)
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
"""Logger -> packages of which one has to be installed; the first is the one to install."""


def check_installed(logger: Logger) -> None:
    """ValueError for a logger whose package is not installed."""
    [name] = [name for name, cls in LOGGERS.items() if cls is type(logger)]
    packages = PACKAGES.get(name, ())
    if packages and not any(map(find_spec, packages)):
        raise ValueError(f"needs a package for logger={name}: pip install {packages[0]} (missing: {packages[0]})")

"""Lightning's loggers, writing into the run's folder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_gradcomp.app.config import name_of
from lightning_gradcomp.app.options.logger import PACKAGES, Logger, MLflow, TensorBoard, WandB


def check(options: Logger) -> None:
    """ValueError for a logger whose package is not installed."""
    name = name_of("logger", options)
    packages = PACKAGES.get(name, ())
    if packages and not any(map(find_spec, packages)):
        raise ValueError(f"needs a package for logger={name}: pip install {packages[0]} (missing: {packages[0]})")


def loggers(options: Logger, folder: Path) -> list[Any]:
    """metrics.csv, and whatever `options` name beside it; none for "none"."""
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    if type(options) is Logger:
        return []
    found: list[Any] = [CSVLogger(folder, name="", version="")]
    if isinstance(options, TensorBoard):
        found.append(TensorBoardLogger(folder, name="", version=""))
    if isinstance(options, WandB):
        offline = options.mode == "offline"
        found.append(WandbLogger(name=folder.name, save_dir=folder, project=options.project, offline=offline))
    if isinstance(options, MLflow):
        found.append(
            MLFlowLogger(experiment_name=options.experiment, run_name=folder.name, tracking_uri=options.tracking_uri)
        )
    return found

"""Which checkpoint a run resumes from or validates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from lightning_gradcomp.errors import refusal

GROUPS = ("model", "data", "optimizer")
"""What a run that continues another must have in common with it; the optimizer only to train."""


def resolve(config: DictConfig, folder: Path, is_alone: bool) -> str | None:
    """The path of `config.ckpt`, for a run that writes to `folder`.

    Args:
        is_alone: False in a sweep's job and under torchrun or SLURM, where "last" may differ between processes.
    """
    given = config.ckpt
    if config.evaluate and given is None:
        raise refusal("ckpt with evaluate=true", None, "best, last, a run's folder, or a .ckpt file")
    if config.dry_run and given is not None:
        raise refusal("ckpt with dry_run=true", given, "null: a dry run starts from scratch")
    if given is None:
        return None
    if given in ("last", "best"):
        if not is_alone:
            raise refusal("ckpt", given, "the path of a checkpoint, in a sweep and under torchrun or SLURM")
        path = _newest(given, folder)
    else:
        path = Path(str(given)).expanduser()
        if path.is_dir() and not _is_distributed(path):  # a run's folder
            path = path / "checkpoints" / ("best.ckpt" if config.evaluate else "last.ckpt")
    if not path.exists():
        raise refusal("ckpt", given, "last, best, the folder of a run that has saved a checkpoint, or a .ckpt file")
    if path.name == "best.ckpt" and not config.evaluate:
        raise refusal("ckpt", str(path), "last.ckpt, to resume from: best.ckpt holds only weights, for evaluate=true")
    if _is_distributed(path) and "HSDP" not in config.strategy._target_:
        allowed = "a file, which strategy=hsdp writes with strategy.save_distributed_checkpoint=false"
        raise refusal("ckpt without strategy=hsdp", f"{path}, a distributed checkpoint", allowed)
    path = path.resolve()
    if earlier := _config_of(path):
        _check_same(earlier, config)
    return str(path)


def _newest(name: str, folder: Path) -> Path:
    """The newest checkpoint of the runs next to `folder`."""
    file = f"checkpoints/{name}.ckpt"
    found = [*folder.parent.glob(f"*/{file}"), *folder.parent.glob(f"*/*/{file}")]  # of runs, of sweeps' jobs
    if not found:
        raise refusal("ckpt", name, f"the path of a checkpoint: no run in {folder.parent} has saved one yet")
    return max(found, key=lambda path: path.stat().st_mtime)


def _is_distributed(path: Path) -> bool:
    return (path / ".metadata").is_file()


def _config_of(path: Path) -> Any:
    """The config of the run that saved `path`, or None if another program did."""
    try:
        config: Any = OmegaConf.load(path.parent.parent / "config.yaml")
    except (OSError, UnicodeDecodeError, YAMLError):
        return None
    is_run = OmegaConf.is_dict(config) and all(OmegaConf.is_dict(config.get(group)) for group in GROUPS)
    return config if is_run and all("_target_" in config[group] for group in GROUPS) else None


def _check_same(earlier: Any, config: Any) -> None:
    """Raises ValueError if the checkpoint's run had a different model, data set or optimizer."""
    for group in GROUPS[:2] if config.evaluate else GROUPS:
        if (got := config[group]._target_) != earlier[group]._target_:
            raise refusal(group, got, f"{earlier[group]._target_}, as in ckpt's run")
    fold = earlier.data.get("fold")
    if (got := config.data.get("fold")) != fold:  # or this run would validate on images that the earlier one trained on
        raise refusal("data.fold", got, f"{'null' if fold is None else fold}, as in ckpt's run")

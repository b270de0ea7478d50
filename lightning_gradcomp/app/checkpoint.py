"""Which checkpoint a run resumes from or validates."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_gradcomp.app import ranks
from lightning_gradcomp.errors import refusal


def resolve(config: DictConfig, folder: Path) -> Path | None:
    """The path of `config.ckpt`, for a run that writes to `folder`.

    Raises:
        ValueError: there is no such checkpoint, or its run had other images to validate with.
    """
    if config.evaluate and config.ckpt is None:
        raise refusal("ckpt with evaluate=true", None, "best, last, a run's folder, or a .ckpt file")
    if config.dry_run and config.ckpt is not None:
        raise refusal("ckpt with dry_run=true", config.ckpt, "null: a dry run starts from nothing")
    if config.ckpt is None:
        return None
    name = "best.ckpt" if config.evaluate else "last.ckpt"
    if config.ckpt in ("last", "best"):
        path = _newest(config, folder)
    else:
        path = Path(str(config.ckpt)).expanduser()
        if path.is_dir() and not (path / ".metadata").is_file():  # a run; not a distributed checkpoint
            path /= f"checkpoints/{name}"
    if not path.exists():
        raise refusal("ckpt", config.ckpt, "last, best, the folder of a run that has saved a checkpoint, or a .ckpt file")
    if path.name == "best.ckpt" and not config.evaluate:
        raise refusal("ckpt", str(path), "last.ckpt, to resume from: best.ckpt holds weights alone, for evaluate=true")
    earlier = path.resolve().parents[1] / "config.yaml"
    if earlier.exists():
        fold = OmegaConf.load(earlier).get("data", {}).get("fold")
        if (got := config.data.get("fold")) != fold:  # images to validate with that the earlier run has trained on
            raise refusal("data.fold", got, f"{fold}, as in ckpt's run")
    return path.resolve()


def _newest(config: DictConfig, folder: Path) -> Path:
    """The newest checkpoint of the runs beside `folder`."""
    if ranks.launched():
        raise refusal("ckpt", config.ckpt, "the path of a checkpoint, if torchrun or SLURM starts the ranks")
    name = f"checkpoints/{config.ckpt}.ckpt"
    found = [*folder.parent.glob(f"*/{name}"), *folder.parent.glob(f"*/*/{name}")]  # of runs, of sweeps' jobs
    if not found:
        raise refusal("ckpt", config.ckpt, f"the path of a checkpoint: no run in {folder.parent} has saved one yet")
    return max(found, key=lambda path: path.stat().st_mtime)

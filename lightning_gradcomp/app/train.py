"""The command `gradcomp`: Hydra composes a run, this process checks it, fresh processes train it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_gradcomp.app import checkpoint, compose, recipes
from lightning_gradcomp.app.fit import fit
from lightning_gradcomp.app.ranks import ChildFailedError, is_rank_zero, launched, start
from lightning_gradcomp.errors import refusal

WORDS = {"recipes": recipes.main}
"""Commands that are not runs."""


def main() -> None:
    """Runs the command line in `sys.argv`."""
    if sys.argv[1:2] and sys.argv[1] in WORDS:
        try:
            sys.exit(WORDS[sys.argv[1]](sys.argv[2:]))
        except (ValueError, OSError) as error:
            sys.exit(f"gradcomp: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
    compose.register()
    hydra.main(version_base="1.3", config_path=str(compose.shipped("conf")), config_name="train")(job)()


def job(config: DictConfig) -> float:
    """Trains, or validates, one composed run. Returns the validation accuracy, for Hydra's sweepers."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        config.folder = str(folder)
        compose.use_own_compressor(config, list(HydraConfig.get().overrides.task))
        if (folder / "config.yaml").exists():
            raise refusal("hydra.run.dir", str(folder), "a new folder: another run has written to this one")
        if ckpt := checkpoint.resolve(config, folder):
            config.ckpt = str(ckpt)
        run = compose.build(config)
        if is_rank_zero():
            OmegaConf.save(config, folder / "config.yaml")  # not resolved: no secret of the environment is in it
    except (ValueError, OSError, TypeError, OmegaConfBaseException, InstantiationException) as error:
        sys.exit(f"gradcomp: {_said(error)}")
    yaml = OmegaConf.to_yaml(config)
    try:
        if launched():
            return fit(yaml)["val_acc"]
        return start(run.trainer.strategy.num_processes, fit, yaml)["val_acc"]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == 143:
            sys.exit(143)
        sys.exit(f"gradcomp: rank {rank} failed: {_reason(failure)}; the run's folder is {folder}")
    except (ValueError, MisconfigurationException) as error:
        sys.exit(f"gradcomp: {error}")


def _said(error: Exception) -> str:
    """What a class said when Hydra could not make it, without Hydra's own words."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    return str(cause or error).strip()


def _reason(failure: object) -> str:
    message = getattr(failure, "message", "")
    text = message if isinstance(message, str) else json.dumps(message)
    return text.strip().splitlines()[-1] if text.strip() else f"exit code {getattr(failure, 'exitcode', '?')}"

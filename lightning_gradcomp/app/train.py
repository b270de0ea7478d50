"""The command `gradcomp`: Hydra composes a run, this process checks it, and fresh processes train it."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_gradcomp.app import checkpoint, compose, plan, ranks, report
from lightning_gradcomp.app.fit import fit, hide_messages
from lightning_gradcomp.errors import Refused, refusal

REFUSALS = (Refused, OSError, HydraException, OmegaConfBaseException)
"""Errors whose message is enough. All others have a traceback."""

DEBUG = os.environ.get("HYDRA_FULL_ERROR") == "1"
"""If True, errors are shown with tracebacks, as in Hydra's own commands."""


def list_recipes(words: list[str]) -> int:
    """`gradcomp recipes`: print the name and the first sentence of every recipe."""
    if words:
        raise refusal("gradcomp recipes", " ".join(words), "no further words")
    for path in sorted(compose.shipped("recipes").glob("*.yaml")):
        print(f"{path.stem:<24}{first_sentence(path.read_text())}")
    return 0


def first_sentence(text: str) -> str:
    """What the text of a recipe says that it trains, on one line."""
    lines = [line.removeprefix("# ") for line in text.splitlines()[1:] if line.startswith("#")]
    return " ".join(lines).partition(". ")[0].partition(" Result:")[0]


WORDS = {"plan": plan.main, "recipes": list_recipes, "report": report.main}
"""Commands that are not runs."""


def main() -> None:
    """Run the command line in `sys.argv`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print with a traceback
    try:
        if sys.argv[1:2] and sys.argv[1] in WORDS:
            sys.exit(WORDS[sys.argv[1]](sys.argv[2:]))
        with tempfile.TemporaryDirectory() as elsewhere:
            if not ranks.is_rank_zero():  # the run's folder is rank 0's
                sys.argv += [f"hydra.run.dir={elsewhere}", "hydra.output_subdir=null"]
            hide_messages()
            compose.register()
            compose.check_groups(sys.argv[1:])
            hydra.main(version_base="1.3", config_path=str(compose.shipped("conf")), config_name="train")(job)()
    except Exception as error:
        if DEBUG:
            raise
        sys.exit(f"gradcomp: {_reason(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def job(config: DictConfig) -> float:
    """Train or validate one composed run. Returns the metric that the task monitors, for Hydra's sweepers."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = _checked(config, folder)
    except Exception as error:
        _fail(_reason(error))
    try:
        yaml = OmegaConf.to_yaml(config)
        result = fit(yaml) if ranks.launched() else ranks.start(run.ranks.per_node, fit, yaml)
    except (ranks.RankFailed, *ranks.REFUSALS) as error:
        _fail(f"{error}; the run's folder is {folder}")
    if ranks.is_rank_zero() and (folder / "metrics.csv").exists():
        _report_on(folder)
    return result.get(run.task.monitor, math.nan)  # no result with limit_val_batches=0


def _checked(config: DictConfig, folder: Path) -> compose.Run:
    """Build the run once without starting it, so that errors are reported before any rank starts."""
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if is_sweep and ranks.launched():
        raise refusal("--multirun under torchrun or SLURM", "a sweep", "one run per launch")
    if (folder / "config.yaml").exists():
        raise refusal("hydra.run.dir", str(folder), "a new folder: another run has written to this one")
    compose.apply_overrides(config, HydraConfig.get().overrides.task)
    config.folder = str(folder)
    config.ckpt = checkpoint.resolve(config, folder, is_alone=not (is_sweep or ranks.launched()))
    run = compose.build(config)
    if ranks.is_rank_zero():
        OmegaConf.save(config, folder / "config.yaml")  # unresolved: it contains no secrets from the environment
    return run


def _reason(error: Exception) -> str:
    """The message of an error. Prints the traceback of one in the user's code or ours."""
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        return str(refusal(str(error.full_key), "no value", "a value, which gradcomp reads itself"))
    if isinstance(error, REFUSALS) and (isinstance(error, Refused) or not compose.in_users_code(error)):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _fail(error: object) -> NoReturn:
    """Print why a run failed and exit; in a sweep, Hydra runs the other jobs first."""
    if DEBUG:
        raise  # called from an except clause
    sentence = f"gradcomp: {str(error).strip()}"
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        print(sentence, file=sys.stderr)
        raise CompactHydraException("a job of the sweep failed")
    sys.exit(sentence)


def _report_on(folder: Path) -> None:
    """Write the report of a finished run, which is complete without it."""
    try:
        print(f"  {'report':<21}{report.write([folder])}")
    except KeyboardInterrupt:
        print(f"\ngradcomp: the run is complete; write its report with: gradcomp report {folder}", file=sys.stderr)
        raise
    except Exception as error:
        print(f"gradcomp: no report was written: {error}", file=sys.stderr)

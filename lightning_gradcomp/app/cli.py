"""The command `gradcomp`: compose a run with Hydra, check it, train it in a process of its own.

Neither torch nor Lightning is imported here, so that the answer to a wrong option comes at once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gradcomp.app import child, plan, ranks, runfile
from lightning_gradcomp.errors import refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXTRA_WORDS = "the extra 'recipes': pip install 'lightning-gradcomp[recipes]'"
EXTRA = {"hydra": "hydra-core", "torchvision": "torchvision", "sklearn": "scikit-learn"}


def main() -> None:
    """Run the command line in `sys.argv`."""
    try:
        if sys.argv[1:2] == ["plan"]:  # no override of Hydra's is a bare word
            sys.exit(plan_it(sys.argv[2:]))
        require(EXTRA_WORDS, EXTRA)
        from lightning_gradcomp.app import arguments  # needs Hydra

        flags, words = arguments.split(sys.argv[1:])
        arguments.check(flags, words)
        if ranks.started_elsewhere() and {"-m", "--multirun"} & set(flags):
            raise refusal("--multirun where torchrun or SLURM starts the ranks", "a sweep", "one run for each start")
    except ValueError as error:
        sys.exit(f"gradcomp: {error}")
    with tempfile.TemporaryDirectory() as elsewhere:
        if not ranks.is_first():  # the run's folder is rank 0's
            words += [f"hydra.run.dir='{elsewhere}'", "hydra.output_subdir=null"]
        sys.argv[1:] = [*flags, *words]
        compose_and_train()


def plan_it(words: list[str]) -> int:
    """Check `gradcomp plan`'s options, and let a process of its own measure; its exit code."""
    require(EXTRA_WORDS, plan.packages(plan.read(words)))
    return child.run("planning", *words)


def compose_and_train() -> None:
    """Let Hydra compose the config, or each of a sweep's configs, and call `job` with it."""
    import hydra

    from lightning_gradcomp.app.compose import register, shipped

    register()
    hydra.main(version_base="1.3", config_path=str(shipped("conf")), config_name="train")(job)()


def job(config: DictConfig) -> float | None:
    """Train one composed run; its validation accuracy, for Hydra's sweepers (None on ranks other than 0)."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException

    from lightning_gradcomp.app.compose import checked

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = checked(config)
        if run.logger.name == "tensorboard" and not find_spec("tensorboardX"):
            require("a package for logger=tensorboard: pip install tensorboard", {"tensorboard": "tensorboard"})
    except ValueError as error:
        sys.exit(f"gradcomp: {error}")  # not left to Hydra, which prints a traceback
    runfile.save(run, folder)
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)  # of an earlier run in this folder
    code = child.train(folder)
    if code or (ranks.is_first() and not summary.exists()):
        raise CompactHydraException(f"gradcomp: training failed with exit code {code}; its folder is {folder}")
    return json.loads(summary.read_text())["val_acc"] if ranks.is_first() else None


def require(what: str, modules: dict[str, str]) -> None:
    """ValueError that names the packages of `modules` (module -> package) which are not installed."""
    missing = [package for module, package in modules.items() if not find_spec(module)]
    if missing:
        raise ValueError(f"needs {what} (missing: {', '.join(missing)})")

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
EXTRA = {"hydra": "hydra-core", "torchvision": "torchvision", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def main() -> None:
    """Run the command line in `sys.argv`."""
    try:
        if (word := sys.argv[1:2]) and word[0] in WORDS:  # no override of Hydra's is a bare word
            sys.exit(WORDS[word[0]](sys.argv[2:]))
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


def show_recipes(words: list[str]) -> int:
    """`gradcomp recipes`."""
    none_follow("recipes", words)
    require(EXTRA_WORDS, EXTRA)
    from lightning_gradcomp.app import recipes  # needs Hydra, to know where they are

    print(recipes.table())
    return 0


def show_env(words: list[str]) -> int:
    """`gradcomp env`, in a process that may import torch."""
    none_follow("env", words)
    return child.run("env")


def write_report(words: list[str]) -> int:
    """`gradcomp report RUN...`."""
    require(EXTRA_WORDS, {"matplotlib": "matplotlib"})
    from lightning_gradcomp.app import report

    return report.main(words)


def none_follow(word: str, words: list[str]) -> None:
    """ValueError for words after one that takes none."""
    if words:
        raise refusal(f"gradcomp {word}", " ".join(words), "no further words")


def plan_it(words: list[str]) -> int:
    """Check `gradcomp plan`'s options, and let a process of its own measure; its exit code."""
    require(EXTRA_WORDS, plan.packages(plan.read(words)))
    return child.run("planning", *words)


WORDS = {"env": show_env, "plan": plan_it, "recipes": show_recipes, "report": write_report}
"""Commands that are not runs."""


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
    from hydra.types import RunMode

    from lightning_gradcomp.app import loggers, resume
    from lightning_gradcomp.app.compose import checked
    from lightning_gradcomp.app.data import missing

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = checked(config)
        loggers.check(run.logger)
        if not run.dry_run:
            missing.check(run.data)
        resume.resolve(run, folder, sweep=HydraConfig.get().mode == RunMode.MULTIRUN)
    except ValueError as error:
        sys.exit(f"gradcomp: {error}")  # not left to Hydra, which prints a traceback
    runfile.save(run, folder)
    result = folder / ("evaluation.json" if run.evaluate else "summary.json")
    result.unlink(missing_ok=True)  # of an earlier run in this folder
    code = child.train(folder)
    if code or (ranks.is_first() and not result.exists()):
        raise CompactHydraException(f"gradcomp: training failed with exit code {code}; its folder is {folder}")
    if not ranks.is_first():
        return None
    if (folder / "metrics.csv").exists() and not (run.evaluate or run.dry_run):
        from lightning_gradcomp.app import report

        print(f"  {'report':<21}{report.write([folder])}")
    return json.loads(result.read_text())["val_acc"]


def require(what: str, modules: dict[str, str]) -> None:
    """ValueError that names the packages of `modules` (module -> package) which are not installed."""
    missing = [package for module, package in modules.items() if not find_spec(module)]
    if missing:
        raise ValueError(f"needs {what} (missing: {', '.join(missing)})")

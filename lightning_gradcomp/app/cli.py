"""The command `gradcomp`: compose a run with Hydra, check it, and train it in a process of its own.

Lightning is not imported here: it takes seconds, and the answer to a wrong option should not.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gradcomp.app import processes, run_folder, server_arguments
from lightning_gradcomp.app.redaction import redacted
from lightning_gradcomp.errors import refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXTRA_WORDS = "the extra 'recipes': pip install 'lightning-gradcomp[recipes]'"
EXTRA = {"hydra": "hydra-core", "torchvision": "torchvision", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}

PRINTS = ("--cfg", "-c", "--info", "-i")
"""Flags with which Hydra prints a configuration, and runs nothing."""


def main() -> None:
    """Run the command line in `sys.argv`."""
    try:
        if (word := sys.argv[1:2]) and word[0] in WORDS:  # no override of Hydra's is a bare word
            sys.exit(WORDS[word[0]](sys.argv[2:]))
        require(EXTRA_WORDS, EXTRA)
        from lightning_gradcomp.app import arguments, help, shorthands  # need Hydra

        process, address, words = server_arguments.split(sys.argv[1:])
        flags, words = arguments.split(words)
        if {"--help", "-h"} & set(flags) and not arguments.own_config(flags):
            print(help.page())
            return
        words = shorthands.expand(words, own_config=arguments.own_config(flags))
        arguments.check(flags, words)
        if process != "train" and {"-m", "--multirun"} & set(flags):
            raise refusal(f"--multirun with gradcomp {process}", "a sweep", "one run for each start")
        if processes.started_by_launcher() and {"-m", "--multirun"} & set(flags):
            raise refusal("--multirun where torchrun or SLURM starts the ranks", "a sweep", "one run for each start")
    except (ValueError, OSError) as error:
        sys.exit(redacted(f"gradcomp: {error}"))
    with tempfile.TemporaryDirectory() as elsewhere:
        if not processes.is_rank_zero() or process == "join":  # the run's folder is rank 0's, or the server's
            words += [f"hydra.run.dir='{elsewhere}'", "hydra.output_subdir=null"]
        sys.argv[1:] = [*flags, *words]
        if any(flag.split("=")[0] in PRINTS for flag in flags):
            with redirect_stdout(io.StringIO()) as printed:
                compose_and_run(process, address)
            print(redacted(printed.getvalue()), end="")
        else:
            compose_and_run(process, address)


def show_recipes(words: list[str]) -> int:
    """`gradcomp recipes`."""
    no_more_words("recipes", words)
    require(EXTRA_WORDS, EXTRA)
    from lightning_gradcomp.app import recipes  # needs Hydra, to find the files

    print(recipes.table())
    return 0


def show_compressors(words: list[str]) -> int:
    """`gradcomp compressors [NAME]`."""
    from lightning_gradcomp.app import compressors

    print(compressors.options_of(words[0]) if words[:1] else compressors.table())
    return 0


def show_env(words: list[str]) -> int:
    """`gradcomp env`."""
    no_more_words("env", words)
    from lightning_gradcomp.app import env

    print(redacted(env.report()))
    return 0


def write_report(words: list[str]) -> int:
    """`gradcomp report RUN...`."""
    require(EXTRA_WORDS, {"matplotlib": "matplotlib"})
    from lightning_gradcomp.app import report

    return report.main(words)


def no_more_words(word: str, words: list[str]) -> None:
    """ValueError for words after one that takes none."""
    if words:
        raise refusal(f"gradcomp {word}", " ".join(words), "no further words")


def show_plan(words: list[str]) -> int:
    """`gradcomp plan MODEL`."""
    from lightning_gradcomp.app import plan

    options = plan.read(words)
    require(EXTRA_WORDS, {"torchvision": "torchvision"} if options.model in plan.NETWORKS else {})
    plan.main(options)
    return 0


WORDS = {
    "compressors": show_compressors,
    "env": show_env,
    "plan": show_plan,
    "recipes": show_recipes,
    "report": write_report,
}
"""Commands that are not runs."""


def compose_and_run(process: str, address: str) -> None:
    """Let Hydra compose the config, or each of a sweep's configs, and call `job` with it."""
    import hydra

    from lightning_gradcomp.app.compose import register, shipped

    def task(config: DictConfig) -> float | None:
        return job(config, process, address)

    register()
    hydra.main(version_base="1.3", config_path=str(shipped("conf")), config_name="train")(task)()


def job(config: DictConfig, process: str, address: str) -> float | None:
    """Train, serve or join one composed run; its validation accuracy, for Hydra's sweepers (None where another process
    writes it)."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from hydra.types import RunMode

    from lightning_gradcomp.app.before_run import prepare

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        redact_files_of_hydra(folder)
        run = prepare(config, folder, sweep=HydraConfig.get().mode == RunMode.MULTIRUN)
        if process != "train":
            server_arguments.check(run)
        run_folder.save(run, folder)
        result = folder / ("evaluation.json" if run.evaluate else "summary.json")
        result.unlink(missing_ok=True)  # of an earlier run in this folder
    except (ValueError, OSError) as error:
        sys.exit(redacted(f"gradcomp: {error}"))  # not left to Hydra, which prints a traceback
    words = [str(folder), *([address] if address else [])]
    code = processes.run(process, *words, environment=run_folder.environment(run))
    if process != "train" and code:
        sys.exit(code)  # it has said why
    if process == "join":
        return None
    if code or (processes.is_rank_zero() and not result.exists()):
        raise CompactHydraException(f"gradcomp: training failed with exit code {code}; its folder is {folder}")
    if not processes.is_rank_zero():
        return None
    if (folder / "metrics.csv").exists() and not (run.evaluate or run.dry_run):
        report_on(folder)
    return json.loads(result.read_text())["val_acc"]


def report_on(folder: Path) -> None:
    """Write the report of the run that has ended in `folder`. The run is complete without it."""
    from lightning_gradcomp.app import report

    try:
        print(f"  {'report':<21}{report.write([folder])}")
    except (ValueError, OSError) as error:
        print(f"gradcomp: no report was written: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        words = f"interrupted; the run is complete, and its report is written by: gradcomp report {folder}"
        print(f"\ngradcomp: {words}", file=sys.stderr)
        sys.exit(130)


def redact_files_of_hydra(folder: Path) -> None:
    """Take secrets out of what Hydra has written: the words of the command line, and what they compose to."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    sweep = Path(HydraConfig.get().sweep.dir) / "multirun.yaml"
    for path in [*folder.glob(".hydra/*.yaml"), *([sweep] if HydraConfig.get().mode == RunMode.MULTIRUN else [])]:
        if path.exists() and (shown := redacted(text := path.read_text())) != text:
            path.write_text(shown)


def require(what: str, modules: dict[str, str]) -> None:
    """ValueError that names the packages of `modules` (module -> package) which are not installed."""
    missing = [package for module, package in modules.items() if not find_spec(module)]
    if missing:
        raise ValueError(f"needs {what} (missing: {', '.join(missing)})")

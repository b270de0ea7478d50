"""report.md: what was compared under which conditions, a table, the figures, and what is missing.

Every name and value of a run's files is escaped: it can't add a column, a link or HTML to the page.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lightning_gradcomp.app.redaction import redacted
from lightning_gradcomp.app.report.figures import Drawn
from lightning_gradcomp.app.report.groups import Group
from lightning_gradcomp.app.report.runs import PHASES, SENT, TIME, VALIDATED, Run
from lightning_gradcomp.app.sizes import digits, human

HEAD = (
    "method",
    "runs (seeds)",
    "N",
    "validation accuracy",
    "best",
    "bytes sent by a rank",
    "ratio, whole run",
    "ratio, last step",
    "time",
    "ms a step",
)
NOTES = """\
Accuracy is that of the last validation, as mean ± standard deviation over the runs; best is the highest of any
validation of any run; other figures are means. Bytes are those of gradients that left one rank (rank 0). A ratio is
what a dense fp32 ring all-reduce between the same N ranks would have sent, over what was sent. Time is wall time since
the fit began, with validations, without the start of the processes. Milliseconds are medians of each phase by itself,
in this order: {phases}."""


def escaped(text: Any) -> str:
    """`text` as it is, on one line, in Markdown's sentences and table cells.

    >>> escaped("a|b <c>")
    'a\\\\|b &lt;c&gt;'
    """
    one_line = " ".join(redacted(str(text)).split())
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(one_line, quote=False))


def code(path: Path) -> str:
    """A path in Markdown."""
    text = " ".join(str(path).split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def page(groups: list[Group], figures: list[Drawn], left_out: dict[Path, str]) -> str:
    """The page, in Markdown. `left_out`: folders of runs that are not shown, and why."""
    runs = [run for group in groups for run in group.runs]
    parts = [f"# {_title(groups)}", _conditions(groups, runs)]
    parts += [table(groups), NOTES.format(phases=", ".join(PHASES)).replace("\n", " "), _bands(groups)]
    for figure in figures:
        if figure.canvas:
            kind = figure.kind
            parts.append(f"## {kind.title}\n\n![{kind.title}](figures/{kind.name}.png)\n\n{kind.reading}")
    if absent := [*_absent(figures), *_incomplete(runs, left_out)]:
        parts.append("## What is missing\n\n" + "\n".join(f"- {sentence}" for sentence in absent))
    lines = [f"- {escaped(group.label)}: {_place(run)}" for group in groups for run in group.runs]
    parts.append("## Runs\n\n" + "\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def _place(run: Run) -> str:
    return code(run.folder) + "".join(f", resumed from {code(folder)}" for folder in run.earlier)


def table(groups: list[Group]) -> str:
    """A row for each group."""
    rows = [HEAD, ["---"] * len(HEAD), *map(_row, groups)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(group: Group) -> list[str]:
    runs, n = group.runs, f"(N={group.world})"
    final = [run.last(VALIDATED) for run in runs]
    spread = f" ± {100 * stdev(final):.2f}" if len(runs) > 1 else ""
    ratios = [run.ratios for run in runs]
    last = [ratio for _, ratio in ratios if ratio is not None]
    phases = group.milliseconds
    return [
        escaped(group.label),
        f"{len(runs)} ({', '.join(escaped(run.config['seed']) for run in runs)})",
        str(group.world),
        f"{100 * mean(final):.2f}{spread} %",
        f"{100 * max(run.highest(VALIDATED) for run in runs):.2f} %",
        _number(mean(run.last(SENT) for run in runs), human),
        _number(mean(ratio for ratio, _ in ratios), lambda ratio: f"{digits(ratio)} {n}"),
        _number(mean(last), lambda ratio: f"{digits(ratio)} {n}") if last else "sends in rounds",
        _number(mean(run.last(TIME) for run in runs), lambda seconds: f"{seconds:.0f} s"),
        f"{digits(sum(phases.values()))} = " + " + ".join(digits(phases[phase]) for phase in PHASES),
    ]


def _number(value: float, words: Any) -> str:
    return "not logged" if math.isnan(value) else words(value)


def _title(groups: list[Group]) -> str:
    first = groups[0].runs[0].config
    subject = escaped(f"{first['model']['name']} on {first['data']['name']}")
    return (
        f"{subject}: {escaped(groups[0].label)}"
        if len(groups) == 1
        else f"{subject}: {len(groups)} configurations compared"
    )


def _conditions(groups: list[Group], runs: list[Run]) -> str:
    """Model, data, options and hardware; where runs differ, all values."""
    ended = [run.summary for run in runs if run.summary]
    configs = [run.config for run in runs]
    packages = [f"{name} {number}" for each in ended for name, number in each["packages"].items() if number]
    facts: dict[str, Iterable[Any]] = {
        "Model": (config["model"]["name"] for config in configs),
        "Data": (f"{c['data']['name']}, {c['data']['batch_size']} images a step over all ranks" for c in configs),
        "Epochs": (config["trainer"]["max_epochs"] for config in configs),
        "Optimizer": (", ".join(f"{k} {v}".removeprefix("name ") for k, v in c["optimizer"].items()) for c in configs),
        "Ranks": (f"N={group.world}{_shards(run)}" for group in groups for run in group.runs),
        "Topology": (_topology(run) for run in runs),
        "Hardware": (_hardware(each) for each in ended),
        "Versions": [", ".join(dict.fromkeys([*(f"Python {each['python']}" for each in ended), *packages]))],
    }
    lines = [f"- {name}: {'; '.join(dict.fromkeys(map(escaped, values)))}" for name, values in facts.items()]
    return "\n".join(line for line in lines if not line.endswith(": "))


def _shards(run: Run) -> str:
    shards = run.summary["communication"].get("shards") if run.summary else None
    return f" replicas of {shards} shards each" if shards else ""


def _topology(run: Run) -> str:
    chosen, inside = run.config["topology"], run.config["inside"]
    used = run.summary["communication"].get("topology", "rounds by all_gather") if run.summary else chosen
    return (used if used == chosen else f"{used} (topology={chosen})") + (f", inside={inside}" if inside else "")


def _hardware(summary: dict[str, Any]) -> str:
    nodes, ranks, threads = (summary[key] for key in ("nodes", "devices_per_node", "threads_per_process"))
    gpus = summary["gpus_per_node"]
    sharing = f", which share {gpus} GPU{'s' * (gpus > 1)}" if 0 < gpus < ranks else ""
    return (
        f"{summary['device']}, {summary['cpu_cores']} cores of {summary['processor']}, {nodes} node{'s' * (nodes > 1)} "
        f"with {ranks} process{'es' * (ranks > 1)} of {threads} thread{'s' * (threads > 1)}{sharing}"
    )


def _bands(groups: list[Group]) -> str:
    several = [f"{escaped(group.label)} (n = {len(group.runs)})" for group in groups if len(group.runs) > 1]
    if not several:
        return "Lines in the figures are single runs, without a measure of their variance."
    return (
        f"Lines in the figures are means over runs, bands reach from the lowest to the highest: {', '.join(several)}."
    )


def _absent(figures: list[Drawn]) -> list[str]:
    return [f"{figure.kind.title}, {escaped(label)}: {why}." for figure in figures for label, why in figure.missing]


def _incomplete(runs: list[Run], left_out: dict[Path, str]) -> list[str]:
    unfinished, missing = [run for run in runs if not run.summary], [run for run in runs if run.missing]
    return [
        *(f"{code(run.folder)} is not finished: without summary.json, no hardware and versions." for run in unfinished),
        *(
            f"{code(run.folder)} resumes {code(Path(str(run.missing)))}, which does not exist any more."
            for run in missing
        ),
        *(f"{code(folder)} is left out: {escaped(why)}." for folder, why in left_out.items()),
    ]

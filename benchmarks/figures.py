"""docs/figures.csv: the figures in the prose and the hand-written tables of README and docs, with their sources.

    python -m benchmarks.figures        # after further runs, or after a page has changed

It first writes the blocks that are generated as a whole, such as <!-- runs -->, from the data beside the pages.

A line of the CSV is a page, a figure, and where it comes from; lines are in the order of the page. A source that
`computed` knows, such as "results.csv: resnet18 dgc N=2 220 steps folds, difference", is computed from that file, and
the command writes what it is today into the page. Any other source is words: which benchmark, on which machine. The
command leaves the source of a figure that is new or has changed empty, for you to fill in; the test refuses it until
then. Blocks and code are not looked at.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks import ablation, results, step_times
from docs import tables
from lightning_gradcomp import entries
from lightning_gradcomp.app.models import build

ROOT = Path(__file__).parents[1]
CSV = ROOT / "docs" / "figures.csv"
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}

NUMBER = r"(?<![\w.,/#=^-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\d)"
FIGURE = re.compile(rf"{NUMBER} ± \d+(?:\.\d+)?|{NUMBER}(?=x\b| (?:ms|s|points|kB|MB|GB|times (?:fewer|the bytes))\b)")
BARE = re.compile(rf"{NUMBER}(?! [MG]bit)")
"""Without a unit, which may stand elsewhere, a number is a figure with a decimal point, and in a table from 100 on."""
NONE = re.compile(r"(19|20)\d\d|\d{4}\.\d{4,5}")
"""Years, and papers in the arXiv."""
SKIPPED = re.compile(
    r"<!-- ([\w ]+) -->.*?<!-- end(?: of \1)? -->|^```.*?^```|`[^`\n]+`|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE
)


def _dense() -> list[results.Result]:
    return results.cross_validated(results.read_csv())[results.Setting("resnet18", None, 2, 220)]["none"]


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/performance.md": {"step times": lambda: step_times.tables(step_times.read_csv())},
    "docs/from_the_notes.md": {"ablation": lambda: ablation.table(ablation.read_csv(), _dense())},
    "docs/results.md": {"runs": lambda: results.tables(results.read_csv())},
}
"""Page -> name of a block -> what is between its marks."""


def filled(page: str) -> str:
    """A page with its blocks as the data are today."""
    text = PAGES[page].read_text()
    for name, make in BLOCKS.get(page, {}).items():
        marked = rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- end of {name} -->)"
        text = re.sub(marked, make().replace("\\", r"\\"), text, flags=re.DOTALL)
    return text


COMPUTED = re.compile(r"[a-z_]+\.(csv|py): ")
"""How the source of a figure that `computed` knows begins."""

Source = tuple[str, str]
"""A figure, and where it comes from."""


def spans(text: str) -> list[tuple[int, int]]:
    """Where the figures of a page are."""
    bare = SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    found = [match.span() for match in FIGURE.finditer(bare)]
    bare = FIGURE.sub(lambda match: " " * len(match[0]), bare)
    for line in re.finditer(r"^.*$", bare, re.MULTILINE):
        least = 3 if line[0].startswith("|") else 99
        for match in BARE.finditer(bare, *line.span()):
            long = "." in match[0] or len(re.findall(r"\d", match[0])) >= least
            if long and not NONE.fullmatch(match[0]):
                found.append(match.span())
    return sorted(found)


def figures(page: str) -> list[str]:
    """The figures of a page, in order."""
    text = PAGES[page].read_text()
    return [text[begin:end] for begin, end in spans(text)]


def computed() -> dict[str, str]:
    """Source -> figure: what a page may quote of the CSVs beside it, and of the formulas of bytes."""
    found: dict[str, str] = {}
    runs = results.read_csv()
    of_seeds = results.grouped(runs)
    for (model, method), each in of_seeds.items():
        found |= _of_runs(f"{model} {method}", each, of_seeds.get((model, "none"), []))
    for (model, dirichlet, ranks, steps), methods in results.cross_validated(runs).items():
        setting = f"N={ranks} {steps} steps{'' if dirichlet is None else f' Dirichlet {dirichlet:g}'} folds"
        for method, each in methods.items():
            found |= _of_runs(f"{model} {method} {setting}", each, methods.get("none", []))
    for step in step_times.read_csv():
        ratio = step.ms / step.compute_ms
        name = f"step_times.csv: {step.method} {step.rate_mbit} Mbit/s"
        found |= {f"{name}, ratio": step.ratio, f"{name}, ratio in two digits": step_times.digits(ratio, 2)}
        found |= {f"{name}, ms": f"{step.ms:.0f}"}
    model = build(tables.MODELS["ResNet-18"], channels=1, classes=10)
    for entry in entries():
        found[f"tables.py: {entry.name}, ratio"] = f"{tables.step(entry.cls(), model)[1]:.0f}"
    quoted = ablation.quoted(ablation.read_csv(), _dense())
    found |= {f"ablation.csv: {name}": text for name, text in quoted.items()}
    return found


def _of_runs(name: str, runs: list[results.Result], dense: list[results.Result]) -> dict[str, str]:
    """What a page may say of a method, by the source of each figure."""
    accuracy, difference = results.accuracy(runs), results.paired(runs, dense)
    ratio = mean(run.dense_bytes / run.bytes_sent for run in runs)
    said = {
        "accuracy": accuracy.rpartition(" ")[0],
        "mean": f"{mean(run.percent for run in runs):.2f}",
        "ratio": results.ratio(runs),
        "ratio in two digits": f"{ratio:.2g}",
        "ratio of the last step": f"{runs[0].last_ratio:.3g}",
    }
    if difference != "—":
        said["difference"] = difference.rpartition(" ")[0]
        points, _, interval = said["difference"].partition(" ± ")
        said["loss"] = f"{abs(float(points)):.1f}"
        said["loss and interval"] = f"{said['loss']} ± {float(interval):.1f}"
    return {f"results.csv: {name}, {what}": figure for what, figure in said.items()}


def read_csv() -> dict[str, list[Source]]:
    """Page -> its figures."""
    found: dict[str, list[Source]] = {page: [] for page in PAGES}
    with CSV.open(newline="") as file:
        for line in csv.DictReader(file):
            found[line["page"]].append((line["figure"], line["source"]))
    return found


def write_csv(known: dict[str, list[Source]]) -> None:
    """All pages."""
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("page", "figure", "source"))
        writer.writerows((page, *each) for page, sources in known.items() for each in sources)


def aligned(now: list[str], known: list[Source]) -> list[str]:
    """The source of each figure that is on a page now: "" for one that is new or has been changed by hand.

    Where as many stand in a place as before, those that are computed keep their source.
    """
    sources = [""] * len(now)
    matcher = SequenceMatcher(None, [figure for figure, _ in known], now, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        same_length = b - a == d - c
        for old, new in zip(range(a, b), range(c, d), strict=False):
            source = known[old][1]
            if kind == "equal" or (same_length and COMPUTED.match(source)):
                sources[new] = source
    return sources


def update(page: str, known: list[Source], values: dict[str, str]) -> list[Source]:
    """Write computed figures into a page. Its figures then, and their sources."""
    text = PAGES[page].read_text()
    where = spans(text)
    sources = aligned([text[begin:end] for begin, end in where], known)
    now = [values.get(source, text[begin:end]) for source, (begin, end) in zip(sources, where, strict=True)]
    ends = [(0, 0), *where, (len(text), len(text))]
    between = [text[before[1] : after[0]] for before, after in pairwise(ends)]
    PAGES[page].write_text("".join(piece for pair in zip(between, [*now, ""], strict=True) for piece in pair))
    return list(zip(now, sources, strict=True))


def wrong(page: str, known: list[Source], values: dict[str, str]) -> list[str]:
    """What is to be said of a page's figures: none are right where this is empty."""
    now, errors = figures(page), []
    matcher = SequenceMatcher(None, [figure for figure, _ in known], now, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            there, here = ", ".join(now[c:d]) or "nothing", [" from ".join(each) for each in known[a:b]]
            errors.append(f"{page}: {there}; docs/figures.csv: {', '.join(here) or 'nothing'}")
    for figure, source in known:
        if not source:
            errors.append(f"{page}: {figure}: no source in docs/figures.csv")
        elif COMPUTED.match(source) and values.get(source) != figure:
            errors.append(f"{page}: {figure}; {source}: {values.get(source, 'not there')}")
    return errors


def main() -> None:
    known, values = read_csv() if CSV.exists() else {page: [] for page in PAGES}, computed()
    for page in BLOCKS:
        PAGES[page].write_text(filled(page))
    found = {page: update(page, known.get(page, []), values) for page in PAGES}
    write_csv(found)
    open_ones = [f"{page}: {figure}" for page, each in found.items() for figure, source in each if not source]
    print(f"{sum(map(len, found.values()))} figures; without a source: {len(open_ones)}")
    sys.exit("\n".join(open_ones) or None)


if __name__ == "__main__":
    main()

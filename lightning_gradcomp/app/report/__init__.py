"""`gradcomp report`: a page with figures on one run or several, from the files in their folders."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

from lightning_gradcomp.app.report.figures import draw
from lightning_gradcomp.app.report.groups import grouped
from lightning_gradcomp.app.report.page import page
from lightning_gradcomp.app.report.runs import find
from lightning_gradcomp.errors import refusal

OPTIONS = "RUN…, folders of runs or of sweeps; --out FOLDER"


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="gradcomp report",
        description="Write report.md with figures on one run, or on several to compare.",
        allow_abbrev=False,
    )
    made.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="a run's folder, or one with runs beneath it")
    made.add_argument("--out", metavar="FOLDER", type=Path, help="default: the run's folder; ./report for several")
    return made


def main(words: list[str]) -> int:
    """Write the report that `words` ask for, and print where it is; exit code 0.

    Raises:
        ValueError: unknown options, a folder that is missing, or no run with a validation.
    """
    options, rest = parser().parse_known_args(words)
    if rest:
        raise refusal("argument", rest[0], OPTIONS)
    if not options.runs:
        raise refusal("RUN", "nothing", OPTIONS)
    print(write(options.runs, options.out))
    return 0


def write(folders: list[Path], out: Path | None = None) -> Path:
    """Write report.md, and figures/*.png and *.svg beside it, on all runs in `folders` and beneath them.

    Args:
        out: the report's folder. Default: that of the run, or ./report for several.

    Returns:
        The path of report.md.

    Raises:
        ValueError: a folder that is missing or can't be written, or no run with a validation.
    """
    runs, left_out = find(folders)
    for why in left_out.values():
        print(f"gradcomp: left out of the report: {why}", file=sys.stderr)
    out = out or (runs[0].folder if len(runs) == 1 else Path("report"))
    groups = grouped(runs)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal("--out", str(out), f"a folder that can be written: {error}") from error
    figures = draw(groups)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text, which can be searched
        for figure in figures:
            for form in ("png", "svg"):
                if figure.canvas:
                    figure.canvas.savefig(out / "figures" / f"{figure.kind.name}.{form}", dpi=150)
    path = out / "report.md"
    path.write_text(page(groups, figures, left_out))
    return path

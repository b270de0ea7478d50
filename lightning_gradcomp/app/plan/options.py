"""The options of `gradcomp plan MODEL`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lightning_gradcomp.errors import refusal

NETWORKS = {"resnet18": "resnet18", "resnet50": "resnet50", "swin": "swin_t"}
"""MODEL -> torchvision's name."""

OF_NETWORKS = {"batch_size": 32, "image_size": 224, "classes": 1000}
"""Options of these networks, with defaults. A LightningModule has a batch of its own."""

OPTIONS = (
    "--batch-size, --image-size, --classes, --rate-mbit, --delay-ms, --ranks, --step-ms, --epochs, --steps, --out, "
    "--help"
)

DELAY_MS = 0.1
"""Delay one way of a link that is given by its rate alone."""


class Parser(argparse.ArgumentParser):
    """argparse, with ValueError for wrong options."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument --", "--"))


def whole(least: int, most: int) -> Callable[[str], int]:
    """The `type` of an argparse option that is a whole number."""

    def read(word: str) -> int:
        if not re.fullmatch(r"\d{1,9}", word) or not least <= int(word) <= most:
            raise argparse.ArgumentTypeError(f"got {word!r}, allowed: a whole number from {least} to {most}")
        return int(word)

    return read


def number(word: str) -> float:
    """The `type` of an argparse option that is a finite number above 0."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {word!r}, allowed: a number above 0")
    return value


def parser() -> Parser:
    """The options."""
    words = ", ".join(NETWORKS)
    made = Parser(
        prog="gradcomp plan",
        description="Measure a training step of a model here, and model the step with each compression method.",
        epilog="Started by torchrun or SLURM, it measures the link between the ranks. The model: docs/will_it_pay.md.",
        allow_abbrev=False,
    )
    made.add_argument(
        "model", metavar="MODEL", nargs="?", help=f"{words}, or your LightningModule: package.module:Class"
    )
    made.add_argument("--batch-size", type=whole(1, 1 << 20), metavar="B", help=f"samples a rank, for {words} (32)")
    made.add_argument("--image-size", type=whole(32, 4096), metavar="S", help=f"pixels of a side, for {words} (224)")
    made.add_argument("--classes", type=whole(2, 1 << 20), metavar="C", help=f"for {words} (1000)")
    made.add_argument("--rate-mbit", type=number, metavar="R", help="of each rank's link (default: measured, or four)")
    made.add_argument("--delay-ms", type=number, metavar="D", help=f"of that link, one way ({DELAY_MS:g})")
    made.add_argument("--ranks", type=whole(2, 1024), metavar="N", help="default: as many as it is started on, or 2")
    made.add_argument("--step-ms", type=number, metavar="MS", help="of a step without an exchange, measured elsewhere")
    made.add_argument("--epochs", type=whole(1, 1 << 20), metavar="E", help="of a whole run, warm-up included")
    made.add_argument("--steps", type=whole(1, 1 << 30), metavar="S", help="of an epoch of that run")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="for plan.json, plan.png and plan.svg")
    return made


def read(words: list[str]) -> argparse.Namespace:
    """The options in `words`.

    Raises:
        ValueError: what is unknown, missing, or doesn't fit.
    """
    options, rest = parser().parse_known_args(words)
    if rest:
        raise refusal("argument", rest[0], f"one MODEL; {OPTIONS}")
    networks = ", ".join(NETWORKS)
    if options.model in NETWORKS:
        for option, default in OF_NETWORKS.items():
            setattr(options, option, getattr(options, option) or default)
    elif not re.fullmatch(r"(\w+\.)*\w+:\w+", options.model or ""):
        raise refusal("MODEL", options.model, f"{networks}, or a LightningModule as package.module:Class")
    else:
        for option in OF_NETWORKS:
            if getattr(options, option) is not None:
                what = f"--{option.replace('_', '-')} with {options.model}"
                raise refusal(
                    what, getattr(options, option), f"with {networks}; a LightningModule has a batch of its own"
                )
        if "" not in sys.path:  # the working folder, after installed modules: a `queue.py` there replaces none of them
            sys.path.append("")
        package = re.split(r"[.:]", options.model)[0]
        if not find_spec(package):
            raise refusal("MODEL", options.model, f"what can be imported here; there is no module {package!r}")
    if options.delay_ms is not None and options.rate_mbit is None:
        raise refusal("--delay-ms", options.delay_ms, "with --rate-mbit")
    if (options.epochs is None) != (options.steps is None):
        raise refusal("--epochs, --steps", (options.epochs, options.steps), "both, for a whole run, or neither")
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refusal("--out", str(options.out), f"a folder that can be written: {error}") from error
    return options


def packages(options: argparse.Namespace) -> dict[str, str]:
    """Module -> package, of the extra `recipes`, that these options need."""
    drawing = {"matplotlib": "matplotlib"} if options.out else {}
    return drawing | ({"torchvision": "torchvision"} if options.model in NETWORKS else {})

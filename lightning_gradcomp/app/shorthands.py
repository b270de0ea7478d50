"""Words that stand for others: the Trainer's strategy names, and options of which one replaces another.

They are replaced before Hydra reads them, so that overrides.yaml of a run has the groups themselves.
"""

from __future__ import annotations

from dataclasses import fields

from lightning_gradcomp.app.config import STRATEGIES
from lightning_gradcomp.compressors.sparseloco import SPARSELOCO
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import entries

INSTEAD = {
    "optimizer.lr": "optimizer.lr_per_256",
    "optimizer.warmup_steps": "optimizer.warmup_epochs",
    "compressor.warmup_steps": "compressor.warmup_epochs",
    "trainer.checkpoint_every_n_epochs": "trainer.checkpoint_every_n_steps",
}
"""Options of which a run has one or the other."""


def strategies() -> list[str]:
    """Every word for `strategy=`: the group's own, then the Trainer's strategy names."""
    return [*STRATEGIES, *(entry.strategy for entry in entries()), "sparseloco"]


def expand(words: list[str], *, own_config: bool = False) -> list[str]:
    """The overrides `words`, with shorthands replaced by what they stand for.

    Args:
        own_config: there may be choices of the user's own, so that unknown ones are left to Hydra.

    >>> expand(["strategy=dgc", "optimizer.lr=0.1"])
    ['strategy=ddp', 'compressor=dgc', 'optimizer.lr=0.1', 'optimizer.lr_per_256=null']

    Raises:
        ValueError: a strategy name that isn't one, or another compressor beside it; a strategy's name for a compressor.
    """
    _check_compressor(words)
    return _free_options(_one_of_two(_without_strategy_names(words, own_config)))


def _value(words: list[str], name: str) -> str | None:
    """What the last of `words` sets `name` to."""
    return next((word.partition("=")[2] for word in reversed(words) if word.partition("=")[0] == name), None)


def _check_compressor(words: list[str]) -> None:
    """ValueError for `compressor=NAME` where NAME is a strategy's name alone."""
    compressors = {entry.strategy: entry.name for entry in entries()}
    for got in (_value(words, "compressor") or "").split(","):
        if got in compressors and got not in compressors.values():
            raise refusal("compressor", got, f"{compressors[got]}, or strategy={got}")
        if got == "sparseloco" or got in STRATEGIES:
            raise refusal("compressor", got, f"{', '.join(compressors.values())}; or strategy={got}")


def _without_strategy_names(words: list[str], own_config: bool) -> list[str]:
    given = _value(words, "strategy")
    names = (given or "").split(",")
    if given in (None, "", "null") or set(names) <= {*STRATEGIES}:
        return words
    compressors = {entry.strategy: entry.name for entry in entries()}
    if unknown := [name for name in names if name not in strategies()]:
        if own_config:
            return words
        raise refusal("strategy", unknown[0], ", ".join(strategies()))
    if given != "sparseloco" and not set(names) <= {*compressors}:
        raise refusal(
            "strategy in a sweep", given, f"all of {', '.join(STRATEGIES)}, or all of {', '.join(compressors)}"
        )
    if given == "sparseloco":
        compressor, options = "gradient_dropping", _sparseloco()
        stands_for = ["strategy=dga", f"compressor={compressor}", *options]
    else:
        compressor = ",".join(compressors[name] for name in names)
        stands_for = ["strategy=ddp", f"compressor={compressor}"]
    if (beside := _value(words, "compressor")) not in (None, compressor):
        raise refusal(f"compressor with strategy={given}", beside, f"{compressor}, which it is; or no strategy={given}")
    rest = [word for word in words if word.partition("=")[0] not in ("strategy", "compressor")]
    return [*stands_for, *rest]  # what the user sets goes last, and decides


def _sparseloco() -> list[str]:
    """SparseLoCo's options, where they are not the defaults."""
    compressor = SPARSELOCO["compressor"]
    own = [(field.name, getattr(compressor, field.name)) for field in fields(compressor)]
    default = type(compressor)()
    changed = [f"compressor.{name}={value}" for name, value in own if value != getattr(default, name)]
    return [*changed, *(f"strategy.{name}={value}" for name, value in SPARSELOCO.items() if name != "compressor")]


def _free_options(words: list[str]) -> list[str]:
    """With `++` before options that only a network of the user's knows: Hydra asks for it."""
    return [f"++{word}" if word.startswith("model.options") else word for word in words]


def _one_of_two(words: list[str]) -> list[str]:
    """With `optimizer.lr_per_256=null` behind an `optimizer.lr`, and the like, so that it decides over a recipe's."""
    found = list(words)
    for pair in INSTEAD.items():
        for option, other in (pair, pair[::-1]):
            if _value(words, option) not in (None, "null") and _value(words, other) is None:
                found.append(f"{other}=null")
    return found

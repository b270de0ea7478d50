"""Mistakes on the command line that Hydra would report without saying what is allowed, or with a traceback."""

from __future__ import annotations

import re
from dataclasses import fields

from lightning_gradcomp.app.compose import choices, default_choices
from lightning_gradcomp.app.config import ONE_CLASS, Run, classes
from lightning_gradcomp.errors import refusal

OVERRIDE = re.compile(r"(?P<root>\w+)(\.(?P<option>\w+)[\w.]*)?=(?P<value>.*)")  # without +, ~, and Hydra's rarer forms
SWITCHES = ("-m", "--multirun", "-r", "--run", "--resolve")  # flags without a value; the others have one
ALONE = tuple(field.name for field in fields(Run) if field.name not in {**ONE_CLASS, **classes()})  # in no group
OWN_CONFIG = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(flags with their values, all other words). Hydra's parser takes them in this order, but not always mixed."""
    flags: list[str] = []
    words: list[str] = []
    is_value = False
    for argument in arguments:
        (flags if is_value or argument.startswith("-") else words).append(argument)
        is_value = argument.startswith("-") and "=" not in argument and argument not in SWITCHES
    return flags, words


def own_config(flags: list[str]) -> bool:
    """Whether there may be groups and options of the user's own, which Hydra checks."""
    return any(flag.split("=")[0] in OWN_CONFIG for flag in flags)


def check(flags: list[str], words: list[str]) -> None:
    """ValueError for a bare word, an unknown group or option, an option of another choice than the default, a group
    without a choice, and an endless number."""
    for word in words:
        if long := re.search(r"\d{100,}", word):
            raise refusal(word.split("=")[0], f"{len(long[0])} digits", "a number of fewer than 100 digits")
        if "=" not in word and not word.startswith("~"):
            groups = ", ".join(f"{group}={'|'.join(names)}" for group, names in choices().items())
            more = "any option, such as trainer.max_epochs=5; plan MODEL, as the first words; --help"
            raise refusal("argument", word, f"{groups}; {more}")
    if own_config(flags):
        return  # groups and options of the user's own, which Hydra checks
    overrides = [found for word in words if (found := OVERRIDE.fullmatch(word))]
    chosen = {override["root"]: override["value"] for override in overrides if not override["option"]}
    groups, defaults = choices(), default_choices(chosen.get("recipe"))
    for override in overrides:
        root, option, value = override["root"], override["option"], override["value"]
        if root == "hydra":
            continue
        if root not in groups and root not in ALONE:
            raise refusal(root, value, ", ".join([*groups, *ALONE]))
        if option and option not in (allowed := _options(root, chosen.get(root))):
            raise refusal(f"{root}.{option}", value, ", ".join(allowed) or f"{root} alone, which has no options")
        if option and root not in chosen and option not in _options(root, default := defaults.get(root)):
            having = [name for name in classes()[root] if option in _options(root, name)]
            allowed = f"an option of {', '.join(having)}: add {root}={'|'.join(having)}"
            raise refusal(f"{root}.{option} with {root}={default}", value, allowed)
        if root in groups and not option and value in ("", "null"):
            raise refusal(root, value, ", ".join(groups[root]))


def _options(group: str, choice: str | None) -> list[str]:
    """The options of `group`: of the class that `choice` names, of all its classes where it doesn't name one."""
    of_group = {**classes(), **{name: {"": cls} for name, cls in ONE_CLASS.items()}}.get(group, {})
    meant = [of_group[choice]] if choice in of_group else of_group.values()
    return list(dict.fromkeys(field.name for cls in meant for field in fields(cls)))

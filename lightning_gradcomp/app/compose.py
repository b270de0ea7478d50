"""Hydra's side of a run: the YAML files, the choices of each group, and a checked `Run` from a composed config."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_gradcomp.app.config import Run, classes
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import entries

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str, package: Path = PACKAGE) -> Path:
    """`conf` or `recipes`: beside the package in a checkout, inside it in a wheel."""
    return (package.parent if (package.parent / "pyproject.toml").exists() else package) / folder


def register() -> None:
    """Store in Hydra what conf/ lacks: the types, the compressors (the dataclass is the config), the recipes."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Run)
    for group, choices_of_it in classes().items():
        within = group if group == "compressor" else f"hydra/schema/{group}"  # hydra/...: what Hydra's help leaves out
        for name, cls in choices_of_it.items():
            store.store(group=within, name=name, node=cls)
    for path in shipped("recipes").glob("*.yaml"):
        _register_recipe(store, path)


def _register_recipe(store: ConfigStore, path: Path) -> None:
    """Store a recipe, and its options for each group under the choice that they are for.

    conf/train.yaml merges `hydra/recipe/GROUP/RECIPE-CHOICE` where the composed run has that choice: so the options of
    a recipe don't apply to another choice that the command line makes.
    """
    recipe: Any = OmegaConf.to_container(OmegaConf.load(path))
    chosen = chosen_by(recipe)
    for group in [name for name, value in recipe.items() if isinstance(value, dict)]:
        options = recipe.pop(group)
        store.store(group=f"hydra/recipe/{group}", name=f"{path.stem}-{chosen[group]}", node=options, package="_group_")
    store.store(group="recipe", name=path.stem, node=recipe, package="_global_")


def chosen_by(recipe: dict[str, Any]) -> dict[str, str]:
    """Group -> the choice that the content of a recipe makes."""
    return {key.removeprefix("override /"): choice for entry in recipe["defaults"] for key, choice in entry.items()}


def default_choices(recipe: str | None) -> dict[str, str]:
    """Group -> the choice that a recipe makes, else conf/train.yaml; nothing where there is no such recipe."""
    main: Any = OmegaConf.to_container(OmegaConf.load(shipped("conf") / "train.yaml"))
    found = {group: name for entry in main["defaults"] if isinstance(entry, dict) for group, name in entry.items()}
    path = shipped("recipes") / f"{recipe or found['recipe']}.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.exists() else None
    return found | chosen_by(content) if content else {}


def choices() -> dict[str, list[str]]:
    """Group -> names to choose from. A folder of the user's own (--config-dir) may add to them."""
    found = {path.name: [option.stem for option in path.glob("*.yaml")] for path in shipped("conf").iterdir()}
    found["compressor"] = [entry.name for entry in entries()]
    found["recipe"] = [path.stem for path in shipped("recipes").glob("*.yaml")]
    return {group: sorted(names) for group, names in sorted(found.items()) if names}


def checked(config: DictConfig) -> Run:
    """The run that `config` describes.

    Raises:
        ValueError: an option that is unknown (Hydra lets `+group.option=1` pass), missing, or refused by its class.
    """
    _refuse_extra("", config)
    try:
        for field in fields(Run):
            if isinstance(node := config[field.name], DictConfig):
                _refuse_extra(f"{field.name}.", node)
        run = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise refusal(str(error.full_key), None, "a value of yours: there is no default") from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(run, Run)
    return run


def _refuse_extra(prefix: str, node: DictConfig) -> None:
    cls = OmegaConf.get_type(node)
    assert cls is not None  # Run and its groups are dataclasses
    allowed = [field.name for field in fields(cls)]
    values: Any = OmegaConf.to_container(node)
    for option in values:
        if option not in allowed:
            raise refusal(f"{prefix}{option}", values[option], ", ".join(allowed) or "none: it has no options")

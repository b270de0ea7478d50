"""conf/ says what the classes take: every option with its default and a comment, and nothing else."""

import dataclasses
import inspect
import re
from datetime import timedelta

import pytest
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

import lightning_gradcomp as lgc
from lightning_gradcomp.app import compose
from lightning_gradcomp.app.compose import shipped
from lightning_gradcomp.app.ranks import place
from lightning_gradcomp.registry import entries
from tests.app.conftest import built, composed
from tests.compressors.examples import RandomK, registered

CONF = shipped("conf")
OURS = ("augment", "compressor", "data", "scheduler", "strategy", "task")
"""Groups whose classes are ours. Of torch's and Lightning's, the files have the options that runs use."""
BY_CODE = {
    "CIFAR10": set(),
    "Synthetic": {"channels"},
    "Classifier": {"model", "data"},
    "LanguageModel": {"model", "data"},
    "resnet18": {"channels", "classes", "size"},
    "CompressedDDPStrategy": {"compressor"},
    "CompressedHSDPStrategy": {"compressor"},
    "DelayedStrategy": {"compressor"},
    "AsyncStrategy": {"compressor"},
}
"""Parameters that the application sets itself, or passes on."""


def files(*groups):
    """The files that name a class, by group and name."""
    paths = [path for group in groups or ["*"] for path in sorted(CONF.glob(f"{group}/*.yaml"))]
    return [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in paths]


def parts(path):
    """(class, options) of each part of a file that names a class."""
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    several = [part for part in content.values() if isinstance(part, dict) and "_target_" in part]
    for part in [content] if "_target_" in content else several:
        if part["_target_"] != "???":
            options = {name: value for name, value in part.items() if name not in ("_target_", "_partial_", "defaults")}
            yield get_object(part["_target_"]), options


def is_variant(path):
    """True if it changes options of another file."""
    return "defaults" in OmegaConf.load(path)


def parameters_of(cls):
    return {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


@pytest.mark.parametrize("path", files())
def test_every_option_is_a_parameter(path):
    for cls, options in parts(path):
        known = parameters_of(cls)
        takes_more = any(each.kind == each.VAR_KEYWORD for each in inspect.signature(cls).parameters.values())
        assert takes_more or set(options) <= set(known), set(options) - set(known)


@pytest.mark.parametrize("path", files(*OURS))
def test_every_parameter_is_an_option_with_its_default(path):
    if is_variant(path):
        return
    for cls, options in parts(path):
        known = parameters_of(cls)
        if path.parent.name != "model":
            assert set(known) - set(options) == BY_CODE.get(cls.__name__, set())
        for name, value in options.items():
            default = known[name].default
            if isinstance(value, str) and ("${" in value or value == ".inf"):
                continue
            if isinstance(value, dict):
                value = instantiate(value)
            if dataclasses.is_dataclass(cls) and default is inspect.Parameter.empty:
                continue
            if repr(default) == "<factory>":  # of a dataclass
                [default] = [field.default_factory() for field in dataclasses.fields(cls) if field.name == name]
            assert value == default and (isinstance(value, timedelta) or type(value) in (type(default), int)), name


@pytest.mark.parametrize("path", files(*OURS, "model", "optimizer", "trainer"))
def test_every_option_of_a_class_has_a_comment(path):
    options = re.findall(r"^(?!_|defaults)\w+: (?!\$\{\w+\}$).*", path.read_text(), re.MULTILINE)
    assert is_variant(path) or not [line for line in options if " # " not in line]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_compressor_has_a_file_that_makes_its_default(entry):
    assert (CONF / "compressor" / f"{entry.name}.yaml").exists()
    assert instantiate(composed(f"compressor={entry.name}").compressor, _convert_="all") == entry.cls()


@pytest.mark.parametrize("name", [path.stem for path in CONF.glob("strategy/*.yaml")])
def test_every_strategy_makes_what_its_name_makes_in_a_script(name):
    from lightning.pytorch.strategies import StrategyRegistry

    compressor = [] if "/compressor@" in (CONF / f"strategy/{name}.yaml").read_text() else ["compressor=onebit"]
    made = compose._strategy(composed(f"strategy={name}", *compressor), place("cpu", 2, 1))
    if name in StrategyRegistry and not compressor:
        asked = StrategyRegistry.get(name)
        assert type(made) is type(asked) and made.compressor == asked.compressor
    else:
        assert "gradcomp" in type(made).__module__
    assert compressor == [] or made.compressor == lgc.OneBit()


def test_muloco_brings_its_compressor_and_its_optimizer():
    config = composed("recipe=digits_swin", "strategy=muloco", "strategy.optimizer.lr=0.002")
    assert config.compressor == composed("compressor=muloco").compressor
    assert config.optimizer == composed("~recipe", "optimizer=muon", "optimizer.lr=0.002").optimizer
    assert {"compressor", "optimizer"}.isdisjoint(config.strategy)


def test_options_reach_the_classes():
    words = ("strategy.timeout.seconds=90", "compressor.exclude=[head.*]", "trainer.gradient_clip_val=2")
    run = built(*words, "callbacks=[default,early_stopping,sparsity_warmup]")
    made = run.trainer.strategy
    assert (made._timeout, made.compressor.exclude) == (timedelta(seconds=90), ["head.*"])
    assert run.trainer.gradient_clip_val == 2 and run.trainer.early_stopping_callback.patience == 3
    assert [each for each in run.trainer.callbacks if isinstance(each, lgc.SparsityWarmup)]


def test_a_compressor_of_another_package_is_a_choice():
    with registered():
        compose.register()
        made = composed("compressor=random_k", "+compressor.density=0.25").compressor
    assert made == {"_target_": "tests.compressors.examples.RandomK", "density": 0.25}
    assert instantiate(made) == RandomK(density=0.25)

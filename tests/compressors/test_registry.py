"""One table of compressors, to which a class, a notebook's cell or another package adds its own."""

import sys
import textwrap
import warnings
from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp import registry
from lightning_gradcomp.compressors import DGC, Compressor, NoCompression
from lightning_gradcomp.compressors.base import build
from tests.compressors.examples import EXAMPLES, separate_registry


@pytest.fixture
def table():
    """A table whose changes are undone at the end."""
    with separate_registry():
        yield


def cell(loudness=3):
    """Define and register a class, as running a notebook's cell does."""

    @registry.register("echo", strategy="ddp_echo")
    @dataclass(kw_only=True)
    class Echo(Compressor):
        """Sends everything.

        Twice.
        """

        loudness: int = 3

    Echo.loudness = loudness
    return Echo


def names():
    return [entry.name for entry in registry.entries()]


def test_a_name_and_a_trainer_name_build_the_class():
    assert build("dgc") == DGC()
    assert build("none") == build("ddp_dense") == NoCompression()


def test_an_instance_is_taken_as_it_is():
    dgc = DGC(sparsity=0.5)
    assert build(dgc) is dgc


def test_an_instance_of_a_class_without_a_name_trains():
    """It needs none unless a configuration or the Trainer is to find it."""
    compressor = EXAMPLES["qsgd"](min_elements=1)
    assert not any(isinstance(compressor, entry.cls) for entry in registry.entries())
    assert build(compressor) is compressor


@pytest.mark.parametrize("wrong", ["dcg", "", "DGC"])
def test_an_unknown_name_is_refused_with_the_known_ones(wrong):
    with pytest.raises(ValueError, match=rf"compressor: got '{wrong}', allowed: .*dgc.*none"):
        build(wrong)


@pytest.mark.parametrize("wrong", [None, 3, DGC, object(), {"sparsity": 0.5}])
def test_what_is_no_compressor_is_refused(wrong):
    with pytest.raises(ValueError, match=r"compressor: got .*, allowed: an instance of a Compressor"):
        build(wrong)


FLAGS = [(entry.cls, each.name) for entry in lgc.entries() for each in fields(entry.cls) if each.type == "bool"]


@pytest.mark.parametrize(("cls", "name"), FLAGS)
def test_a_word_is_neither_true_nor_false(cls, name):
    with pytest.raises(ValueError, match=rf"{cls.__name__}\.{name}: got 'no', allowed: True or False"):
        cls(**{name: "no"})


STRATEGIES = [lgc.CompressedDDPStrategy, lgc.CompressedHSDPStrategy, lgc.CompressedFabricStrategy]


@pytest.mark.parametrize("cls", [*STRATEGIES, partial(lgc.GradientAverager, torch.nn.Linear(1, 1), "dgc")])
def test_a_word_for_local_weights_is_refused(cls):
    with pytest.raises(ValueError, match=r"\.local_weights: got 'no', allowed: True or False"):
        cls(local_weights="no")


def test_every_entry_builds_itself_and_has_a_description():
    assert names() == sorted(set(names()))
    assert {"dgc", "none"} <= set(names())
    for entry in registry.entries():
        assert type(build(entry.name)) is type(build(entry.strategy)) is entry.cls
        assert entry.description.endswith(".")


def test_an_extension_is_a_class_and_one_line(table):
    echo = cell()
    assert build("echo") == build("ddp_echo") == echo(loudness=3)
    assert [entry.description for entry in registry.entries() if entry.name == "echo"] == ["Sends everything."]
    loud = echo(loudness=9)
    assert build(loud) is loud


def test_the_same_class_registered_again_replaces_itself(table):
    """Listeners hear of the new class too."""
    heard = []
    registry.notify(lambda entry: heard.append(entry.cls))
    first, second = cell(), cell()
    assert first is not second
    assert type(build("echo")) is second
    assert names().count("echo") == 1
    assert heard[-2:] == [first, second]
    old = first()
    assert build(old) is old


def test_another_class_of_a_taken_name_is_refused(table):
    for taken in ("dgc", "echo"):
        cell()
        with pytest.raises(ValueError, match=rf"@register: got '{taken}', allowed: a name that is free; taken: .*dgc"):
            registry.register(taken)(type("Other", (Compressor,), {"__doc__": "Other."}))
    assert build("dgc") == DGC()


@pytest.mark.parametrize(("name", "strategy"), [("other", "dgc"), ("other", "ddp_dense"), ("ddp_dense", None)])
def test_another_compressors_trainer_name_is_refused(table, name, strategy):
    """`build` would find only one of them."""
    other = type("Other", (Compressor,), {"__doc__": "Other."})
    with pytest.raises(ValueError, match=rf"@register: got '{strategy or name}', allowed: a name that is free"):
        registry.register(name, strategy=strategy)(other)
    assert build("ddp_dense") == NoCompression()
    assert "other" not in names()


# Entry points of installed packages


@pytest.fixture
def installed(tmp_path, monkeypatch, table):
    """Installs a package of one module, by its source, with an entry point."""

    def install(name, source, value=None):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nmethods = {value or name}\n")

    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


GOOD = """
    from dataclasses import dataclass
    import lightning_gradcomp as lgc

    @lgc.register("published")
    @dataclass(kw_only=True)
    class Published(lgc.TensorCodec):
        '''Of a package.'''

        def encode(self, x):
            return x

        def decode(self, parts, n):
            return parts[0]
"""


def test_an_installed_packages_compressor_is_registered(installed):
    installed("good_methods", GOOD)
    assert "published" not in names()
    registry.load_entry_points()
    assert type(build("published")).__module__ == "good_methods"


@pytest.mark.parametrize(
    ("source", "value", "error"),
    [
        ("import no_such_module", None, "importing bad_methods: ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", None, "importing bad_methods: ZeroDivisionError: division by zero"),
        ("", "elsewhere", "importing elsewhere: ModuleNotFoundError"),
        ("", "not a module", "importing not a module: "),
    ],
    ids=["import", "error", "another module", "no module"],
)
def test_a_broken_package_is_a_warning_that_names_it(installed, source, value, error):
    """And the others are registered."""
    installed("bad_methods", source, value)
    installed("good_methods", GOOD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry.load_entry_points()
    [message] = [str(warning.message) for warning in caught if "compressors of" in str(warning.message)]
    assert message.startswith(f"compressors of bad_methods are not available: {error}")
    assert "published" in names()

"""One table of compressors, open to anybody's."""

from dataclasses import dataclass

import pytest

from lightning_gradcomp import registry
from lightning_gradcomp.compressors import DGC, Compressor, NoCompression


@pytest.fixture
def extension(monkeypatch):
    """A compressor from outside the package, known for the length of a test."""
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    monkeypatch.setattr(registry, "_LISTENERS", [])

    @registry.register("echo", strategy="ddp_echo")
    @dataclass(kw_only=True, slots=True)
    class Echo(Compressor):
        """Says everything.

        Twice.
        """

        loudness: int = 3

    return Echo


def test_a_name_and_a_trainer_name_build_the_class_with_its_defaults():
    assert registry.build("dgc") == DGC()
    assert registry.build("none") == registry.build("ddp_dense") == NoCompression()


def test_an_instance_is_taken_as_it_is():
    dgc = DGC(sparsity=0.5)
    assert registry.build(dgc) is dgc


@pytest.mark.parametrize("wrong", ["dcg", "", "DGC"])
def test_an_unknown_name_is_refused_with_the_names_there_are(wrong):
    with pytest.raises(ValueError, match=rf"compressor: got '{wrong}', allowed: .*dgc.*none"):
        registry.build(wrong)


@pytest.mark.parametrize("wrong", [None, 3, DGC, object(), {"sparsity": 0.5}])
def test_what_is_no_compressor_is_refused(wrong):
    with pytest.raises(ValueError, match=r"compressor: got .*, allowed: an instance of a registered class"):
        registry.build(wrong)


def test_every_entry_builds_itself_and_says_what_it_is():
    names = [entry.name for entry in registry.entries()]
    assert names == sorted(set(names))
    assert {"dgc", "none"} <= set(names)
    for entry in registry.entries():
        assert type(registry.build(entry.name)) is type(registry.build(entry.strategy)) is entry.cls
        assert entry.description.endswith(".")


def test_an_extension_is_a_class_and_one_line(extension):
    assert registry.build("echo") == registry.build("ddp_echo") == extension(loudness=3)
    assert [entry.description for entry in registry.entries() if entry.name == "echo"] == ["Says everything."]
    loud = extension(loudness=9)
    assert registry.build(loud) is loud


def test_a_taken_name_is_refused(extension):
    with pytest.raises(ValueError, match=r"@register: got 'dgc', allowed: a name that is free; taken: .*dgc, echo"):
        registry.register("dgc")(extension)
    assert registry.build("dgc") == DGC()

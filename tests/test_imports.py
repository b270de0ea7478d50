"""Imports point one way: a folder imports lower ones alone, and only compressors/ names a method."""

import ast
from pathlib import Path

import pytest

import lightning_gradcomp
from lightning_gradcomp import registry

PACKAGE = Path(lightning_gradcomp.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = ["errors", "registry", "compressors", "averaging", "local_sgd", "parameter_server", "plugin", "app"]
"""Each may import those before it, and itself."""
LIGHTNING = ["lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"]
APP = ["hydra", "omegaconf", "torchvision", "sklearn", "matplotlib"]
FOREIGN = {
    "errors": ["torch", *LIGHTNING, *APP],
    "registry": ["torch", *LIGHTNING, *APP],
    "compressors": ["torch.distributed", *LIGHTNING, *APP],
    "averaging": [*LIGHTNING, *APP],
    "local_sgd": [*LIGHTNING, *APP],
    "parameter_server": [*LIGHTNING, *APP],
    "plugin": APP,
    "app": [],
}
"""Packages that a room may not import."""
BETWEEN = ("averaging", "local_sgd", "parameter_server", "plugin")
"""Rooms that treat all methods alike."""


def room_of(file):
    """None for the package's own two files."""
    top = file.split("/")[0].removesuffix(".py")
    return top if top in ROOMS else None


IN_ROOMS = [file for file in FILES if room_of(file)]


class Names(ast.NodeVisitor):
    """What a file imports, in functions and for type checkers too, and the names in its code, strings excepted."""

    def __init__(self, source):
        self.imported, self.names = set(), set()
        self.visit(ast.parse(source))

    def visit_Import(self, node):
        self.imported |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node):
        module = "." * node.level + (node.module or "")
        self.imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}

    def visit_Attribute(self, node):
        self.imported.add(ast.unparse(node))
        self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node):
        self.names.add(node.id)


def names_of(file):
    return Names(FILES[file].read_text())


def offending(imported, forbidden):
    return sorted(name for name in imported for outer in forbidden if name == outer or name.startswith(f"{outer}."))


def above(room):
    """The rooms that `room` may not import."""
    return [f"lightning_gradcomp.{other}" for other in ROOMS[ROOMS.index(room) + 1 :]]


def test_all_kinds_of_imports_are_found():
    source = """
import torch.distributed as dist
def later():
    from hydra.core import config_store
    return torch.distributed.nn, config_store
if TYPE_CHECKING:
    from lightning_gradcomp import plugin
"""
    found = Names(source).imported
    expected = {"torch.distributed", "hydra.core", "hydra.core.config_store", "torch.distributed.nn"}
    assert expected <= found
    assert offending(found, ["hydra"]) == ["hydra.core", "hydra.core.config_store"]
    assert offending(found, above("averaging")) == ["lightning_gradcomp.plugin"]
    assert offending({"lightning_gradcomp.errors"}, [*LIGHTNING, *above("registry")]) == []


def test_every_file_is_in_a_room():
    assert [file for file in FILES if not room_of(file)] == ["__init__.py", "__main__.py"]
    assert {room_of(file) for file in IN_ROOMS} == set(ROOMS)


@pytest.mark.parametrize("file", IN_ROOMS)
def test_a_file_imports_lower_rooms_alone(file):
    room, imported = room_of(file), names_of(file).imported
    assert offending(imported, [*above(room), *FOREIGN[room]]) == []
    assert "lightning_gradcomp" not in imported or room == "app", "rooms are imported by their names"
    assert not [name for name in imported if name.startswith(".")], "imports are written in full"


@pytest.mark.parametrize("file", [file for file in IN_ROOMS if room_of(file) in BETWEEN])
def test_no_method_is_named_outside_compressors(file):
    """Strings may name one: a default ("dgc"), an example in a docstring."""
    entries, found = registry.entries(), names_of(file)
    modules = {entry.cls.__module__ for entry in entries}
    classes = {entry.cls.__name__ for entry in entries}
    assert len(modules) > 5
    assert offending(found.imported, modules) == []
    assert not classes & (found.names | {name.split(".")[-1] for name in found.imported})

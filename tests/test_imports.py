"""Imports point one way, from the outer layers to the inner ones, and files stay short enough to read."""

import ast
from pathlib import Path

import pytest

import lightning_gradcomp

PACKAGE = Path(lightning_gradcomp.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
FORBIDDEN = {
    "compressors": (
        "torch.distributed",
        *LIGHTNING,
        "hydra",
        "omegaconf",
        "torchvision",
        "lightning_gradcomp.averaging",
        "lightning_gradcomp.local_sgd",
        "lightning_gradcomp.plugin",
        "lightning_gradcomp.app",
    ),
    "averaging": (
        *LIGHTNING,
        "hydra",
        "omegaconf",
        "torchvision",
        "lightning_gradcomp.local_sgd",
        "lightning_gradcomp.plugin",
        "lightning_gradcomp.app",
    ),
    "local_sgd": (
        *LIGHTNING,
        "hydra",
        "omegaconf",
        "torchvision",
        "lightning_gradcomp.plugin",
        "lightning_gradcomp.app",
    ),
    "plugin": ("hydra", "omegaconf", "torchvision", "lightning_gradcomp.app"),
}


class Imports(ast.NodeVisitor):
    """Every module that is imported, or named with its dots, wherever in the file; types that are only named do not
    count, for an annotation loads nothing."""

    def __init__(self, source):
        self.names = set()
        self.visit(ast.parse(source))

    def visit_Import(self, node):
        self.names |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node):
        module = "." * node.level + (node.module or "")
        self.names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}

    def visit_Attribute(self, node):
        self.names.add(ast.unparse(node))
        self.generic_visit(node)

    def visit_If(self, node):
        for part in node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else [node.test, *node.body, *node.orelse]:
            self.visit(part)


def imported(source):
    return Imports(source).names


def offending(names, forbidden):
    return sorted(name for name in names for outer in forbidden if name == outer or name.startswith(f"{outer}."))


def test_what_is_imported_is_found():
    source = """
import torch.distributed as dist
def later():
    from hydra.core import config_store
    return torch.distributed.nn, config_store
if TYPE_CHECKING:
    import omegaconf
else:
    import yaml
"""
    expected = {"torch.distributed", "hydra.core", "hydra.core.config_store", "torch.distributed.nn", "yaml"}
    assert expected <= imported(source)
    assert "omegaconf" not in imported(source)
    assert offending(imported(source), ("hydra",)) == ["hydra.core", "hydra.core.config_store"]
    assert offending({"lightning_gradcomp.errors"}, LIGHTNING) == []


@pytest.mark.parametrize("file", [file for file in FILES if "/" in file and file.split("/")[0] in FORBIDDEN])
def test_a_layer_knows_nothing_of_the_layers_around_it(file):
    names = imported(FILES[file].read_text())
    assert offending(names, FORBIDDEN[file.split("/")[0]]) == []
    assert not [name for name in names if name.startswith(".")], "imports are written in full"


@pytest.mark.parametrize("file", ["errors.py", "lazy.py", "registry.py"])
def test_what_every_layer_uses_knows_no_layer(file):
    layers = (*FORBIDDEN["compressors"], "lightning_gradcomp.compressors")
    assert offending(imported(FILES[file].read_text()), layers) == []


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_under_300_lines(file):
    assert len(FILES[file].read_text().splitlines()) < 300

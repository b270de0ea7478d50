"""Method × topology × workers × optimizer: one combination for each path through the code, and a run of each.

- all_gather carries every method. Options that change only a payload are left to test_laws.py.
- Owners of partitions decode and encode again, by a method's kind: sparse or packed, exact or rounded, drawn or not.
  test_two_phase.py compares every method with a simulation in one process.
- A server decodes the same payloads; in nodes a worker's gradient is a mean, as test_nodes.py shows, bit-identical.
- AdamW matters to methods that accumulate its steps, and no payload depends on it. Of the others, whose state is the
  same as with SGD, only no compression runs with it.
- Muon with AdamW is an optimizer of several rules, which no method owns.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.checkpoint_state import PARTITION
from tests.averaging.methods import EVERY, KEPT, LOSSY, REMEMBERING, with_defaults
from tests.averaging.workers import HAS_MUON, Table, backward, muon_adamw, prescribed_loss, weights
from tests.threads import GATHERS, checked_collectives, run_ranks, subgroups

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": partial(torch.optim.SGD, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    "muon": muon_adamw,
}
NODE = 2
"""Ranks per node. The sum of two is the same in any order."""
FEW = ("dgc", "onebit", "terngrad")
"""A method that sends few numbers, one that sends all in few bits, and one whose sums are exact."""
DENSE_STEP, END, STOPS = 5, 8, (2, 6)
"""A run compresses all steps but one. It stops before compressed steps and the dense one, and after the dense one."""


@dataclass(frozen=True)
class Cell:
    """One combination.

    Args:
        make: makes the compressor.
        topology: the averager's topology.
        per_node: number of ranks that form one worker.
        optimizer: a name in `OPTIMIZERS`.
    """

    make: Callable[[], Any]
    topology: str = "all_gather"
    per_node: int = 1
    optimizer: str = "sgd"

    @property
    def world(self) -> int:
        """Three ranks, whose sums depend on their order; or two nodes."""
        return 3 if self.per_node == 1 else 2 * self.per_node

    def begin(self, group, model=None, schedule=None):
        """A model, its optimizer and its averager."""
        model = model or Table()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        inside = {"inside": "dense", "ranks_per_node": self.per_node} if self.per_node > 1 else {}
        how = {"optimizer": optimizer, "process_group": group, "topology": self.topology, **inside}
        averager = GradientAverager(model, self.make(), **how)
        averager.schedule = schedule or (lambda epoch, step: 0.9 * (step != DENSE_STEP))
        return model, optimizer, averager

    def run(self, work, world=None):
        """Run `work(rank, group)` on all ranks."""
        with subgroups():
            return run_ranks(world or self.world, work)


OTHER_PATHS = (
    "dgc,momentum_masking=False",  # another update
    "dgc,values=int2",  # a sparse payload that is rounded
    "powersgd,rank=1,warm_start=False",  # no query in the state
    "terngrad,error_feedback=True,share_scaler=False",  # a residual of what is drawn
)
"""Options that do more than change a payload."""
COMBINATIONS = {
    ("all_gather", 1, "sgd"): (*with_defaults(EVERY), *OTHER_PATHS),
    ("two_phase", 1, "sgd"): (*FEW, OTHER_PATHS[1], OTHER_PATHS[3], "random_k"),
    ("server", 1, "sgd"): ("dgc", "terngrad"),
    ("all_gather", NODE, "sgd"): ("dgc", "powersgd"),
    ("two_phase", NODE, "sgd"): ("dgc", "onebit"),
    ("server", NODE, "sgd"): ("dgc",),
    ("all_gather", 1, "adamw"): ("dgc", "onebit", "powersgd", "none"),
    ("two_phase", 1, "adamw"): ("dgc", "onebit"),
    ("all_gather", 1, "muon"): ("onebit", "none") if HAS_MUON else (),
    ("all_gather", NODE, "adamw"): ("dgc",),
}
CELLS = {
    f"{topology}{'-nodes' * (per_node > 1)}-{optimizer}-{label}": Cell(EVERY[label], topology, per_node, optimizer)
    for (topology, per_node, optimizer), labels in COMBINATIONS.items()
    for label in labels
}
CELLS |= {
    f"{topology}-sgd-dgc,dense_values=bf16": Cell(partial(LOSSY["dgc"], dense_values="bf16"), topology)
    for topology in ("all_gather", "two_phase")
}
"""Uncompressed gradients also have a residual if they are rounded."""
LOSSLESS = {
    label: replace(cell, optimizer="plain")
    for label, cell in CELLS.items()
    if cell.optimizer == "sgd" and (cell.make in REMEMBERING.values() or "dense_values" in label)
}
"""Cells with error feedback, using SGD without momentum: they accumulate the gradient itself."""


def on(cells):
    """Parametrises a test with these cells."""
    return pytest.mark.parametrize("cell", cells.values(), ids=cells)


def end_of(parts):
    """Everything that the rest of a run depends on, under two levels of names."""
    model, optimizer, averager = parts
    moments = {
        f"{number} {name}": torch.as_tensor(value)
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if value is not None
    }
    rest = {"weights": weights(model), "steps": torch.tensor(averager.steps)}
    return deepcopy({**averager.state_dict()["memory"], "optimizer": moments, "rest": rest})


def differences(one, other):
    """Names of the tensors that are not bit-identical."""
    flat = [{(kind, name): part for kind, parts in end.items() for name, part in parts.items()} for end in (one, other)]
    names = set(flat[0].keys() ^ flat[1].keys())
    return names | {key for key in flat[0].keys() & flat[1].keys() if not torch.equal(flat[0][key], flat[1][key])}


def stored(parts):
    """A checkpoint of a run."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    return file.getvalue()


def load(parts, checkpoint):
    """Resume `parts` from a checkpoint, without running code from it."""
    for part, state in zip(parts, torch.load(io.BytesIO(checkpoint), weights_only=True), strict=True):
        part.load_state_dict(state)


@dataclass
class Record:
    """What one rank saw in a run.

    Args:
        said: the averager's description of itself.
        weights: weights after each step.
        traffic: (bytes sent, bytes received, bytes that collectives carried or None in nodes) of each step.
        saved: checkpoints by the number of steps before them.
        end: the result of `end_of`.
    """

    said: str
    weights: list = field(default_factory=list)
    traffic: list = field(default_factory=list)
    saved: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)


@cache
def straight(cell: Cell) -> list[Record]:
    """A run of `END` steps on every rank, the reference for all others. Ranks exchange equal lengths."""

    def work(rank, group):
        parts = model, optimizer, averager = cell.begin(group)
        averager.check_same_parameters()
        seen = Record(averager.describe())
        for step in range(END):
            if step in STOPS:
                seen.saved[step] = stored(parts)
            backward(model, optimizer, rank, step, prescribed_loss)
            already = len(log[rank])
            averager.step()
            carried = sum(carries(name, length, cell.world) for name, length in log[rank][already:])
            seen.traffic.append((averager.stats.bytes_sent, averager.stats.bytes_received, carried))
            seen.weights.append(weights(model))
        seen.end = end_of(parts)
        return seen

    with ExitStack() as stack:
        log = [[] for _ in range(cell.world)]
        if cell.per_node == 1:  # the ranks of a node communicate separately
            log = stack.enter_context(checked_collectives(cell.world))
        return cell.run(work)


def carries(collective, length, world):
    """Bytes that a rank sends in a collective given `length` bytes; on average, if owners' parts differ."""
    if collective == "isend":
        return length
    if collective in GATHERS:
        return (world - 1) * length
    return (world - 1) / world * length if collective == "scatter" else round(2 * (world - 1) / world * length)


class Ledger:
    """A rank's gradients, the averages it received, and what is left: fp64 [n] each."""

    def __init__(self, parts):
        self.parts = self.model, self.optimizer, self.averager = parts
        self.had = self.came = torch.zeros(0)

    def flat(self, tensors):
        """Tensors by parameter name as one vector, with 0 for missing ones."""
        each = [(tensors.get(name), p) for name, p in self.model.named_parameters()]
        return torch.cat([(torch.zeros(p.numel()) if t is None else t).double().reshape(-1) for t, p in each])

    def _gradients(self):
        return self.flat({name: p.grad for name, p in self.model.named_parameters()})

    def average(self):
        """Average the current gradients in one step, without changing the weights."""
        had = self._gradients()
        self.averager.average()
        self.averager.commit()
        came = self._gradients()
        self.had, self.came = (self.had + had, self.came + came) if len(self.had) else (had, came)

    def go(self, rank, steps, loss=prescribed_loss):
        """Take these steps."""
        for step in steps:
            backward(self.model, self.optimizer, rank, step, loss)
            self.average()

    def left(self):
        """This rank's residuals as a worker, and as an owner of a partition."""
        memory = self.averager.state_dict()["memory"]
        own = [self.flat(parts) for kind, parts in memory.items() if kind.removeprefix("dense_") in KEPT]
        return sum(own, torch.zeros(1).double()), self.flat(memory.get(PARTITION, {}))

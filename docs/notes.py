"""The ideas of docs/from_the_notes.md on one real gradient: `python -m docs.notes IDEA`, or all of them without IDEA.

It trains the recipes' ResNet-18 on the handwritten digits for a few steps, in one process on the CPU, and looks at the
gradient of the next batch. Each idea prints a short table. The pictures of that page were drawn from the same gradients
by this file at commit a61fec4.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp.app.data.digits import CHANNELS, CLASSES, digits
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.app.plan import EchoRanks
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.compressors.layout import Layout

LAYER = "layer2.0.conv1.weight"
"""The layer whose gradient is shown: 128 filters of 576 weights."""
START = 22
"""Steps of training before the gradient is looked at: an epoch of 64 images a step."""
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 5e-3
"""Those of recipe=digits."""
Table = list[list[Any]]
"""Rows, the first of which is the head."""


class Shown(NamedTuple):
    """What an idea shows: a table, and what it is about."""

    title: str
    table: Table


@dataclass
class Training:
    """A network, and what it is trained on.

    Args:
        model: images -> logits.
        images, labels: the training data.
        layer: name of the weight whose gradient is shown.
        batch: images of a rank in a step.
    """

    model: nn.Module
    images: torch.Tensor
    labels: torch.Tensor
    layer: str = LAYER
    batch: int = 32
    done: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )

    def gradient(self, number: int) -> dict[str, torch.Tensor]:
        """The gradient of batch `number` at the weights of this moment, of all weights with two dimensions or more."""
        epoch, place = divmod(number, len(self.images) // self.batch)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(epoch))
        chosen = order[place * self.batch : (place + 1) * self.batch]
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(self.images[chosen]), self.labels[chosen]).backward()
        named = self.model.named_parameters()
        return {name: weight.grad.detach().clone() for name, weight in named if weight.grad is not None}

    def train(self, steps: int) -> Iterator[torch.Tensor]:
        """The gradients of the layer in the next steps of the training."""
        for _ in range(steps):
            gradients = self.gradient(self.done)
            self.optimizer.step()
            self.done += 1
            yield gradients[self.layer]

    def matrices(self, number: int) -> tuple[torch.Tensor, Layout]:
        """The gradient of batch `number`, flat, of the tensors that a compressor takes."""
        chosen = {name: part for name, part in self.gradient(number).items() if part.dim() > 1}
        return torch.cat([part.reshape(-1) for part in chosen.values()]), Layout.of(chosen.items())


def on_digits() -> Training:
    """The recipes' ResNet-18 after a few steps."""
    torch.manual_seed(0)
    images, labels = digits()[0].tensors
    training = Training(resnet18(channels=CHANNELS, classes=CLASSES, size=8), images, labels)
    for _ in training.train(START):
        pass
    return training


class Sender:
    """A rank that compresses one weight's gradients, step by step. The other rank sends the same.

    `optimizer` has this weight alone, for momentum correction.
    """

    def __init__(
        self, compressor: lgc.LossyCompressor, weight: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model = nn.Module()
        self._model.weight = nn.Parameter(weight) if optimizer is None else optimizer.param_groups[0]["params"][0]
        self._compressor, self._steps, gradients = compressor, 0, Gradients(self._model, compressor)
        self._memory = Memory(compressor, gradients, EchoRanks(None, 2), Topology(), optimizer)

    def send(self, gradient: torch.Tensor) -> torch.Tensor:
        """What the others receive of this gradient and of what was left of earlier ones."""
        self._model.weight.grad = gradient.clone()
        average = average_compressed(self._memory, self._compressor, "all_gather", self._steps, Flags(), lgc.Stats())
        assert average.commit is not None
        average.commit({"weight"})
        self._steps += 1
        return self._model.weight.grad

    @property
    def bits(self) -> float:
        """Bits an element."""
        layout = self._memory.gradients.layout
        return 8 * sum(size for _, size in self._compressor.messages(layout)) / layout.n

    @property
    def residual(self) -> torch.Tensor:
        """What was left of the gradients so far."""
        unsent = self._memory.compressed.unsent
        return torch.zeros_like(self._model.weight) if unsent is None else unsent.view_as(self._model.weight)


def error(arrived: torch.Tensor, gradient: torch.Tensor) -> float:
    """The length of what is missing, in percent of the gradient's."""
    return 100 * float((gradient - arrived).norm() / gradient.norm())


# Quantisation


def quantised(compressor: Any) -> Callable[[Training], Shown]:
    """Of a compressor: how the gradient looks before and after."""

    def idea(training: Training) -> Shown:
        gradient = training.gradient(training.done)[training.layer]
        sender, sigma = Sender(compressor, gradient), float(gradient.std())
        arrived = sender.send(gradient)
        table: Table = [["element, in standard deviations", "of the gradient", "of what arrives"]]
        for low, high in ((-9, -2), (-2, -1), (-1, 0), (0, 0), (0, 1), (1, 2), (2, 9)):
            shares = [100 * float(within(each / sigma, low, high).float().mean()) for each in (gradient, arrived)]
            words = f"{low} to {high}" if low != high else "exactly 0"
            words = {-9: "below -2", 2: "above 2"}.get(low, words)
            table.append([words, *(f"{share:.1f} %" for share in shares)])
        fate = "which stays in the residual" if compressor.state_for(None).kind is not None else "which averages out"
        lost = error(arrived, gradient)
        title = f"{sender.bits:.2f} bits an element; the error is {lost:.0f} % of the gradient, {fate}"
        return Shown(title, table)

    return idea


def within(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Which are between the two; exactly 0 has a place of its own."""
    if low == high:
        return values == 0
    return ((values >= low) & (values < high) if low >= 0 else (values > low) & (values <= high)) & (values != 0)


# Sparsification

SHARES = (0.0005, 0.001, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def sparse(training: Training) -> Shown:
    """How much of the gradient is in its largest entries."""
    flat, layout = training.matrices(training.done)
    normal = torch.randn(layout.n, generator=torch.Generator().manual_seed(0))
    table: Table = [["entries sent", "of the gradient's energy", "of normal numbers' energy", "times fewer bytes"]]
    for share in SHARES:
        compressor = lgc.GradientDropping(sparsity=1 - share)
        energies = []
        for each in (flat, normal):
            sent = compressor.pack(each, layout)[1].values
            energies.append(100 * float(sent.square().sum() / each.square().sum()))
        ratio = 4 * layout.n / compressor.payload_bytes(layout)
        table.append([f"{100 * share:g} %", *(f"{each:.0f} %" for each in energies), f"{ratio:.0f}"])
    return Shown("The largest entries of all weights' gradients, and of as many normal numbers", table)


PATH_STEPS, PATH_DENSITY = 100, 0.01
FOLLOWED = 20
"""Steps for which an entry is followed once it was sent."""


def momentum(training: Training) -> Shown:
    """The same gradients applied in several ways: dense, dropped, and dropped with momentum correction."""
    start = training.model.get_parameter(training.layer).detach()
    ways: dict[str, tuple[Any, float]] = {  # compressor, and momentum of the optimizer that gets what arrives
        "dense": (None, MOMENTUM),
        "dropping": (lgc.GradientDropping(sparsity=1 - PATH_DENSITY), MOMENTUM),
        "correction": (lgc.DGC(sparsity=1 - PATH_DENSITY, values="fp32", momentum_masking=False), 0.0),
    }
    weights = {name: nn.Parameter(torch.zeros_like(start)) for name in ways}
    optimizers = {name: torch.optim.SGD([weights[name]], lr=LEARNING_RATE, momentum=m) for name, (_, m) in ways.items()}
    senders = {}
    for name, (compressor, _) in ways.items():
        if compressor:
            own = nn.Parameter(start.clone())
            rule = torch.optim.SGD([own], lr=LEARNING_RATE, momentum=MOMENTUM)
            senders[name] = Sender(compressor, own, rule if compressor.needs_optimizer else None)
    paths = {name: torch.zeros(PATH_STEPS + 1, start.numel()) for name in ways}
    sent = {name: torch.zeros(PATH_STEPS + 1, start.numel(), dtype=torch.bool) for name in ways}
    for step, gradient in enumerate(training.train(PATH_STEPS), 1):
        for name, weight in weights.items():
            weight.grad = senders[name].send(gradient) if name in senders else gradient.clone()
            sent[name][step] = weight.grad.view(-1) != 0
            optimizers[name].step()
            paths[name][step] = weight.detach().reshape(-1)
    left = {name: distance_left(paths[name], paths["dense"], sent[name]) for name in senders}
    table: Table = [["steps after it was sent", "dropping", "with momentum correction"]]
    table += [[step, *(f"{each[step]:.0f} %" for each in left.values())] for step in (0, 1, 2, 5, 10, 15, 20)]
    everything = [float((paths[name][-1] - paths["dense"][-1]).norm() / paths["dense"][-1].norm()) for name in senders]
    table.append(["all weights, at the end", *(f"{100 * each:.0f} %" for each in everything)])
    title = "Distance of a weight from its dense path, 100 % being that before it was sent"
    return Shown(title, table)


def distance_left(path: torch.Tensor, dense: torch.Tensor, sent: torch.Tensor) -> list[float]:
    """The distance from `dense` [steps, n], 0 to `FOLLOWED` steps after an entry was sent, in percent of that before.

    Over all entries that were sent, but for the last steps: the root of the mean of squares.
    """
    gaps, events = (path - dense).square(), sent[: PATH_STEPS + 1 - FOLLOWED]
    before = gaps[: len(events) - 1][events[1:]].sum()
    return [100 * float((gaps[k : k + len(events)][events].sum() / before).sqrt()) for k in range(FOLLOWED + 1)]


# Sums that fill up

RANKS = (1, 2, 4, 8, 16, 32)
DENSITIES = (0.001, 0.01)


def density(training: Training) -> Shown:
    """The density of the sum of N ranks' largest entries, each rank with a batch of its own."""
    chosen: dict[float, list[torch.Tensor]] = {share: [] for share in DENSITIES}
    for rank in range(max(RANKS)):
        flat, layout = training.matrices(training.done + rank)
        for share, found in chosen.items():
            found.append(lgc.GradientDropping(sparsity=1 - share).pack(flat, layout)[1].indices)
    kinds = [f"{100 * share:g} % each, {what}" for share in DENSITIES for what in ("measured", "formula")]
    table: Table = [["ranks", *kinds]]
    for ranks in RANKS:
        row = [f"{ranks}"]
        for share, found in chosen.items():
            measured = 100 * len(torch.cat(found[:ranks]).unique()) / layout.n
            formula = 100 * (1 - (1 - share) ** ranks)
            row += [f"{measured:.2f} %", f"{formula:.2f} %"]
        table.append(row)
    return Shown("Entries of the sum that are not 0", table)


# Low rank

RANKS_OF_FACTORS = (1, 2, 4, 8, 16)
ITERATIONS = 5


def powersgd(training: Training) -> Shown:
    """One layer's gradient as a product of two thin matrices."""
    gradient = training.gradient(training.done)[training.layer].flatten(1)
    singular = torch.linalg.svdvals(gradient)
    table: Table = [["rank", "numbers sent", "error, first step", f"error, step {ITERATIONS}", "least possible"]]
    for rank in RANKS_OF_FACTORS:
        if rank > min(gradient.shape):
            continue
        sender = Sender(lgc.PowerSGD(rank=rank, min_compression=1), gradient)
        errors = [error(sender.send(gradient - sender.residual), gradient) for _ in range(ITERATIONS)]
        best = 100 * float(singular[rank:].norm() / singular.norm())
        share = 100 * rank * sum(gradient.shape) / gradient.numel()
        table.append([rank, *(f"{each:.1f} %" for each in (share, errors[0], errors[-1], best))])
    title = f"A gradient of {gradient.shape[0]} x {gradient.shape[1]} numbers as P Qᵀ, the same one at each step"
    return Shown(title, table)


IDEAS: dict[str, Callable[[Training], Shown]] = {
    "onebit": quantised(lgc.OneBit()),
    "twobit": quantised(lgc.TwoBit()),
    "terngrad": quantised(lgc.TernGrad()),
    "sparse": sparse,
    "momentum": momentum,
    "density": density,
    "powersgd": powersgd,
}


def shown(idea: Shown) -> str:
    """The table in columns."""
    cells = [[str(cell) for cell in row] for row in idea.table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([idea.title, "", *lines, ""])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("idea", nargs="?", choices=[*IDEAS], metavar="IDEA", help=f"{', '.join(IDEAS)}; default: all")
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # sums in one order, and no waiting for a second core that is busy
    start = on_digits()
    for name, idea in IDEAS.items():
        if options.idea in (None, name):
            print(f"{name}\n{shown(idea(copy.deepcopy(start)))}")


if __name__ == "__main__":
    main()

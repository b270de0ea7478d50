"""The ideas of docs/from_the_notes.md on one real gradient: `python -m docs.notes IDEA`, or all of them without IDEA.

It trains the recipes' ResNet-18 on the handwritten digits for a few steps, in one process on the CPU, and looks at the
gradient of the next batch. Each idea prints a short table and writes its figures to docs/data/notes_*.csv.
`PICTURES` draws from those files, without any training.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import nn

import lightning_gradcomp as lgc
from docs.pictures import BLUE, GREEN, GREY, ORANGE, Picture, panels
from lightning_gradcomp.app.data.digits import CHANNELS, CLASSES, digits
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback
from lightning_gradcomp.compressors.layout import Layout

DATA = Path(__file__).with_name("data")
LAYER = "layer2.0.conv1.weight"
"""The layer whose gradient is shown: 128 filters of 576 weights."""
START = 22
"""Steps of training before the gradient is looked at: an epoch of 64 images a step."""
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 5e-3
"""Those of recipe=digits."""
DELAYS = {"dense": 4, "compressed": 2}
"""One-way delays in a step of two ranks: two messages in a row or one, and each waits for its receiver's word first."""

Table = list[list[Any]]
"""Rows, the first of which is the head."""


class Shown(NamedTuple):
    """What an idea shows.

    Args:
        title: what the table is about.
        table: for the screen.
        files: name of a CSV file -> its table.
    """

    title: str
    table: Table
    files: dict[str, Table]


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


class OneRank:
    """The `Collectives` of a rank that is alone: what it sends is what it receives."""

    workers, worker, partitions = 1, 0, None

    def __init__(self, n: int, step: int = 0) -> None:
        self.step, self._n = step, n

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def buffer(self) -> torch.Tensor:
        return torch.empty(self._n)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    maximum = mean

    def mean_of_payloads(self, codec: Any, flat: torch.Tensor, layout: Layout, **options: Any) -> tuple[Decoded, ...]:
        payload, sent = codec.pack(flat, layout)
        return codec.unpack(payload, layout), sent


class Sender:
    """A rank that compresses one tensor, step by step, with what its compressor keeps between steps.

    Args:
        compressor: how.
        weight: what the gradients belong to.
        optimizer: of this weight alone, for momentum correction.
    """

    def __init__(self, compressor: Any, weight: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.compressor, self.layout = compressor, Layout.of([("weight", weight)])
        self.state = ErrorFeedback(self.layout, weight.device, compressor.state_for(optimizer))
        self.state.attach(optimizer, [weight], shares_moments=False)
        self._out, self._steps = torch.zeros(self.layout.n), 0

    def send(self, gradient: torch.Tensor) -> torch.Tensor:
        """What the others receive of this gradient and of what was left of earlier ones."""
        self._out.copy_(gradient.reshape(-1))
        self.state.compensate(self._out)
        alone = OneRank(self.layout.n, self._steps)
        _, sent = self.compressor.average(self._out, self.layout, alone, self.state.update)
        arrived = torch.zeros(self.layout.n)
        sent.add_to(arrived)
        self.state.subtract(sent)
        self._out = self.state.commit({"weight"}, self._out)
        self._steps += 1
        return arrived.view_as(gradient)

    @property
    def bits(self) -> float:
        """Bits an element."""
        return 8 * sum(size for _, size in self.compressor.messages(self.layout)) / self.layout.n


def error(arrived: torch.Tensor, gradient: torch.Tensor) -> float:
    """The length of what is missing, in percent of the gradient's."""
    return 100 * float((gradient - arrived).norm() / gradient.norm())


def figure(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


# Bandwidth

NETWORKS = {
    "ResNet-18": "resnet18",
    "ResNet-50": "resnet50",
    "Swin-T": "swin_t",
    "ViT-B/16": "vit_b_16",
    "VGG-16": "vgg16",
}
"""And torchvision's names of them."""
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
STEP = 0.137
"""Seconds of a step in the notes."""


def parameters(network: str) -> int:
    """Of torchvision's network of this name, with 1,000 classes. No memory is filled."""
    import torchvision

    with torch.device("meta"):
        return sum(weight.numel() for weight in torchvision.models.get_model(network).parameters())


def bandwidth(training: Training) -> Shown:
    """What a step's exchange costs between two ranks: 4 bytes a parameter."""
    head = ["network", "parameters", "gradient", *(f"over {link}" for link in LINKS), "to hide behind 137 ms"]
    table: Table = [head]
    for network, name in NETWORKS.items():
        n = parameters(name)
        times = [32 * n / rate for rate in LINKS.values()]
        words = [f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms" for seconds in times]
        needed = f"{32 * n / STEP / 1e9:.1f} Gbit/s"
        table.append([network, f"{n / 1e6:.1f} million", f"{4 * n / 1e6:.0f} MB", *words, needed])
    return Shown("The gradient in fp32, between two ranks", table, {"bandwidth": table})


# Quantisation

WIDTH, BARS = 0.25, 20
"""Of a bar, in standard deviations; bars on either side of 0."""


def bars(values: torch.Tensor, sigma: float) -> list[float]:
    """The share of the values in each bar, in percent. Values beyond the last bar are in it."""
    places = (values.reshape(-1) / (WIDTH * sigma)).round().clamp(-BARS, BARS).long() + BARS
    return (100 * torch.bincount(places, minlength=2 * BARS + 1) / values.numel()).tolist()


def quantised(name: str, compressor: Any) -> Callable[[Training], Shown]:
    """Of a compressor: how the gradient looks before and after."""

    def idea(training: Training) -> Shown:
        gradient = training.gradient(training.done)[training.layer]
        sender, sigma = Sender(compressor, gradient), float(gradient.std())
        before, after = bars(gradient, sigma), bars(arrived := sender.send(gradient), sigma)
        rows = zip(range(-BARS, BARS + 1), before, after, strict=True)
        data = [["sigmas", "before_percent", "after_percent"]]
        data += [[figure(WIDTH * place), figure(first), figure(second)] for place, first, second in rows]
        table: Table = [["element, in standard deviations", "of the gradient", "of what arrives"]]
        for low, high in ((-9, -2), (-2, -1), (-1, 0), (0, 0), (0, 1), (1, 2), (2, 9)):
            shares = [100 * float(within(each / sigma, low, high).float().mean()) for each in (gradient, arrived)]
            words = f"{low} to {high}" if low != high else "exactly 0"
            words = {-9: "below -2", 2: "above 2"}.get(low, words)
            table.append([words, *(f"{share:.1f} %" for share in shares)])
        fate = "which stays in the residual" if compressor.state_for(None).kind is not None else "which averages out"
        lost = error(arrived, gradient)
        title = f"{sender.bits:.2f} bits an element; the error is {lost:.0f} % of the gradient, {fate}"
        return Shown(title, table, {name: data})

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
    data: Table = [["share_percent", "gradient_percent", "normal_percent"]]
    table: Table = [["entries sent", "of the gradient's energy", "of normal numbers' energy", "times fewer bytes"]]
    for share in SHARES:
        compressor = lgc.GradientDropping(sparsity=1 - share)
        energies = []
        for each in (flat, normal):
            sent = compressor.pack(each, layout)[1].values
            energies.append(100 * float(sent.square().sum() / each.square().sum()))
        data.append([figure(100 * share), *map(figure, energies)])
        ratio = 4 * layout.n / compressor.payload_bytes(layout)
        table.append([f"{100 * share:g} %", *(f"{each:.0f} %" for each in energies), f"{ratio:.0f}"])
    files = {"sparse": data} | quantised("topk", lgc.GradientDropping(sparsity=0.99))(training).files
    return Shown("The largest entries of all weights' gradients, and of as many normal numbers", table, files)


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
    times = sent["dropping"].sum(0)
    entry = int((paths["dense"][-1].abs() * ((times > 1) & (times < 4))).argmax())
    data: Table = [["step", *(f"{name}_weight" for name in ways), *(f"{name}_left_percent" for name in senders)]]
    left = {name: distance_left(paths[name], paths["dense"], sent[name]) for name in senders}
    for step in range(PATH_STEPS + 1):
        at = [figure(1000 * float(path[step, entry])) for path in paths.values()]
        data.append([step, *at, *(figure(each[step]) if step <= FOLLOWED else "" for each in left.values())])
    table: Table = [["steps after it was sent", "dropping", "with momentum correction"]]
    table += [[step, *(f"{each[step]:.0f} %" for each in left.values())] for step in (0, 1, 2, 5, 10, 15, 20)]
    everything = [float((paths[name][-1] - paths["dense"][-1]).norm() / paths["dense"][-1].norm()) for name in senders]
    table.append(["all weights, at the end", *(f"{100 * each:.0f} %" for each in everything)])
    title = "Distance of a weight from its dense path, 100 % being that before it was sent"
    return Shown(title, table, {"momentum": data})


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
    data: Table = [["ranks", "share_percent", "measured_percent", "formula_percent"]]
    for ranks in RANKS:
        row = [f"{ranks}"]
        for share, found in chosen.items():
            measured = 100 * len(torch.cat(found[:ranks]).unique()) / layout.n
            formula = 100 * (1 - (1 - share) ** ranks)
            data.append([ranks, figure(100 * share), figure(measured), figure(formula)])
            row += [f"{measured:.2f} %", f"{formula:.2f} %"]
        table.append(row)
    return Shown("Entries of the sum that are not 0", table, {"density": data})


# Low rank

RANKS_OF_FACTORS = (1, 2, 4, 8, 16)
ITERATIONS = 5
CORNER = (32, 96)
"""Rows and columns of the gradient that the picture shows."""


def powersgd(training: Training) -> Shown:
    """One layer's gradient as a product of two thin matrices."""
    gradient = training.gradient(training.done)[training.layer].flatten(1)
    singular = torch.linalg.svdvals(gradient)
    data: Table = [["rank", "numbers_percent", "first_percent", "later_percent", "best_percent"]]
    table: Table = [["rank", "numbers sent", "error, first step", f"error, step {ITERATIONS}", "least possible"]]
    corners: Table = [["matrix", *(f"c{column}" for column in range(min(CORNER[1], gradient.shape[1])))]]
    corners += corner("gradient", gradient, gradient)
    for rank in RANKS_OF_FACTORS:
        if rank > min(gradient.shape):
            continue
        compressor, layout = lgc.PowerSGD(rank=rank), Layout.of([("weight", gradient)])
        state, errors = compressor.state_for(None), []
        state.start(layout, gradient.device)
        for _ in range(ITERATIONS):
            sent = compressor.average(gradient.reshape(-1), layout, OneRank(layout.n), state)[1]
            state.queries = state.next_queries  # the warm start: this step's factor begins the next step
            arrived = torch.zeros(layout.n)
            sent.add_to(arrived)
            errors.append(error(arrived.view_as(gradient), gradient))
        best = 100 * float(singular[rank:].norm() / singular.norm())
        share = 100 * rank * sum(gradient.shape) / gradient.numel()
        data.append([rank, *map(figure, (share, errors[0], errors[-1], best))])
        table.append([rank, *(f"{each:.1f} %" for each in (share, errors[0], errors[-1], best))])
        if rank in (1, 4):
            corners += corner(f"rank {rank}", arrived.view_as(gradient), gradient)
    title = f"A gradient of {gradient.shape[0]} x {gradient.shape[1]} numbers as P Qᵀ, the same one at each step"
    return Shown(title, table, {"powersgd": data, "powersgd_matrix": corners})


def corner(name: str, matrix: torch.Tensor, scale: torch.Tensor) -> Table:
    """Rows of whole numbers from -99 to 99, which stand for four standard deviations of `scale`."""
    part = matrix[: CORNER[0], : CORNER[1]] / (4 * scale.std())
    return [[name, *row] for row in (99 * part.clamp(-1, 1)).round().int().tolist()]


# Latency and delay

EARTH = 6371.0
MUMBAI, SAN_FRANCISCO = (19.08, 72.88), (37.77, -122.42)
KM_A_MS = 200.0
"""Of light in glass fibre: two thirds of what it does in a vacuum."""


def kilometres(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Along the great circle, between two places in degrees of latitude and longitude."""
    (north, east), (north2, east2) = (map(math.radians, place) for place in (one, other))
    cosine = math.sin(north) * math.sin(north2) + math.cos(north) * math.cos(north2) * math.cos(east - east2)
    return EARTH * math.acos(cosine)


def latency(training: Training) -> Shown:
    """Light in a fibre, and a step of 137 ms that waits for it: two ranks, 1 Gbit/s, ResNet-18."""
    dense = 4 * sum(weight.numel() for weight in training.model.parameters())
    layout = Layout.of((name, weight) for name, weight in training.model.named_parameters() if weight.dim() > 1)
    few = lgc.DGC().payload_bytes(layout) + dense - 4 * layout.n
    places = {"one rack": 0.01, "one city": 50.0, "1,000 km": 1000.0}
    places["Mumbai to San Francisco"] = kilometres(MUMBAI, SAN_FRANCISCO)
    table: Table = [["", "distance", "light, one way", "dense step", "step with DGC", "delayed average"]]
    for place, km in places.items():
        light = km / KM_A_MS
        waits = [DELAYS["dense"] * light + 8e-6 * dense, DELAYS["compressed"] * light + 8e-6 * few, 0.0]
        times = [f"{1000 * STEP + wait:.0f} ms" for wait in waits]
        distance = f"{km:,.0f} km" if km >= 1 else f"{1000 * km:.0f} m"
        table.append([place, distance, f"{light:.3g} ms" if light > 0.01 else "0 ms", *times])
    return Shown("Arithmetic: two ranks, 1 Gbit/s, ResNet-18, 137 ms of computation", table, {"latency": table})


ALONE = 16


def delay(training: Training) -> Shown:
    """How far two ranks are apart that train alone from the same weights."""
    ranks = [copy.deepcopy(training) for _ in range(2)]
    start = nn.utils.parameters_to_vector(training.model.parameters()).detach()
    data: Table = [["steps_alone", "moved_percent", "apart_percent", "mean_percent"]]
    table: Table = [["steps alone", "a rank has moved", "ranks are apart", "their mean has moved"]]
    for rank, each in enumerate(ranks):
        each.done += 1000 * rank  # batches of its own
    for step in range(1, ALONE + 1):
        updates = []
        for each in ranks:
            list(each.train(1))
            updates.append(nn.utils.parameters_to_vector(each.model.parameters()).detach() - start)
        moved = sum(float(update.norm()) for update in updates) / 2
        figures = [
            100 * moved / float(start.norm()),
            100 * float((updates[0] - updates[1]).norm()) / moved,
            100 * float((updates[0] + updates[1]).norm()) / 2 / moved,
        ]
        data.append([step, *map(figure, figures)])
        if step & (step - 1) == 0:
            first, *others = figures
            table.append([step, f"{first:.1f} % of the weights' length", *(f"{each:.0f} % of that" for each in others)])
    return Shown("Two ranks that start from the same weights and average nothing", table, {"delay": data})


IDEAS: dict[str, Callable[[Training], Shown]] = {
    "bandwidth": bandwidth,
    "onebit": quantised("onebit", lgc.OneBit()),
    "twobit": quantised("twobit", lgc.TwoBit()),
    "terngrad": quantised("terngrad", lgc.TernGrad()),
    "sparse": sparse,
    "momentum": momentum,
    "density": density,
    "powersgd": powersgd,
    "latency": latency,
    "delay": delay,
}


# Pictures


def column(name: str, key: str) -> list[float]:
    """A column of a CSV file, in numbers; empty cells are left out."""
    with (DATA / f"notes_{name}.csv").open(newline="") as file:
        return [float(row[key]) for row in csv.DictReader(file) if row[key]]


def draw_quantisation(axes: Axes) -> None:
    """The layer's gradient before and after, by method."""
    titles = {
        "onebit": "1-bit SGD: two means a filter",
        "twobit": "2-bit: -t, 0 or t",
        "terngrad": "TernGrad: -s, 0 or s, at random",
        "topk": "Top-k: the largest 1 %",
    }
    grid = panels(axes, 2, 2, sharex=True, sharey=True)
    for each, (name, title) in zip(grid.flat, titles.items(), strict=True):
        places = column(name, "sigmas")
        each.bar(places, column(name, "before_percent"), WIDTH, color=GREY, alpha=0.45, linewidth=0)
        each.bar(places, column(name, "after_percent"), WIDTH * 0.6, color=BLUE, linewidth=0)
        each.set_title(title, fontsize=9, color=GREY)
        each.set(yscale="log", ylim=(0.005, 150), xlim=(-5.3, 5.3), xticks=(-4, -2, 0, 2, 4))
        each.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
        each.minorticks_off()
    grid[0, 0].text(-5, 60, "before", color=GREY)
    grid[0, 0].text(5, 60, "after", color=BLUE, ha="right")
    grid[0, 0].figure.supxlabel("value, in standard deviations of the gradient", fontsize=10, color=GREY)
    grid[0, 0].figure.supylabel("share of the elements", fontsize=10, color=GREY)


def draw_sparse(axes: Axes) -> None:
    """The energy in the largest entries."""
    shares = column("sparse", "share_percent")
    for key, color, label, at, side in (
        ("gradient_percent", BLUE, "a real gradient", (-6, 6), "right"),
        ("normal_percent", GREY, "normal numbers", (6, -12), "left"),
    ):
        energy = column("sparse", key)
        axes.plot([*shares, 100], [*energy, 100], marker=".", color=color)
        end = (2, energy[shares.index(2)])
        axes.annotate(label, end, at, textcoords="offset points", color=color, ha=side)
    axes.set(xscale="log", xlabel="largest entries that are sent", ylabel="share of the energy", ylim=(0, 105))
    axes.set_xticks(ticks := [0.1, 1, 10, 100], [f"{tick:g} %" for tick in ticks])
    axes.set_yticks(levels := [0, 25, 50, 75, 100], [f"{level} %" for level in levels])
    axes.minorticks_off()


def draw_momentum(axes: Axes) -> None:
    """One weight's path, and the distance of weights to their dense paths after they were sent."""
    upper, lower = panels(axes, 2, 1)
    for name, label, color in (
        ("dense", "dense", GREY),
        ("dropping", "dropping", ORANGE),
        ("correction", "momentum correction", BLUE),
    ):
        path = column("momentum", f"{name}_weight")
        upper.plot(path, color=color, linewidth=3 if name == "dense" else 1.5, label=label)
        if name != "dense":
            lower.plot(column("momentum", f"{name}_left_percent"), ".-", color=color)
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=9)
    upper.set(xlabel="step", ylabel="one weight (1/1000)", xlim=(0, PATH_STEPS))
    lower.set(xlabel="steps after a weight was sent", ylabel="distance\nfrom dense", ylim=(0, 105), xlim=(0, FOLLOWED))
    lower.set_xticks(range(0, FOLLOWED + 1, 5))
    lower.set_yticks(ticks := [0, 50, 100], [f"{tick} %" for tick in ticks])


def draw_density(axes: Axes) -> None:
    """The sum of N ranks' largest entries, and the formula."""
    with (DATA / "notes_density.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for share, color in (("1", BLUE), ("0.1", GREEN)):
        own = [row for row in rows if row["share_percent"] == share]
        ranks = [int(row["ranks"]) for row in own]
        measured, formula = ([float(row[f"{key}_percent"]) for row in own] for key in ("measured", "formula"))
        axes.plot(ranks, formula, "--", color=GREY)
        axes.plot(ranks, measured, "o-", color=color)
        axes.text(ranks[-1] * 1.15, measured[-1], f"{share} % each", color=color, va="center")
    axes.text(10, 18, "if they chose\nat random", color=GREY, ha="right", va="center")
    axes.set(xscale="log", xlabel="ranks", ylabel="not 0 in the sum", xlim=(0.9, 75))
    axes.set_xticks(RANKS, [f"{tick}" for tick in RANKS])
    axes.set_yticks(ticks := [0, 10, 20, 30], [f"{tick} %" for tick in ticks])
    axes.minorticks_off()


def draw_powersgd(axes: Axes) -> None:
    """A corner of the gradient, of its reconstructions, and their errors."""
    with (DATA / "notes_powersgd_matrix.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    names = list(dict.fromkeys(row[0] for row in rows))
    parts = panels(axes, len(names) + 1, 1, height_ratios=[1] * len(names) + [1.9])
    for each, name in zip(parts, names, strict=False):
        values = torch.tensor([[int(cell) for cell in row[1:]] for row in rows if row[0] == name]) / 99
        each.imshow(signed(values).numpy(), interpolation="nearest", aspect="auto")
        each.set(xticks=[], yticks=[])
        each.set_ylabel(name, rotation=0, ha="right", va="center")
    last, ranks = parts[-1], column("powersgd", "rank")
    places = range(len(ranks))
    for key, color, label, line in (
        ("first_percent", ORANGE, "first step", "o-"),
        ("later_percent", BLUE, f"step {ITERATIONS}", "o-"),
        ("best_percent", GREY, "least possible", "--"),
    ):
        last.plot(places, column("powersgd", key), line, color=color, label=label)
    last.set(xlabel="rank", ylabel="error", ylim=(0, 100))
    last.set_xticks(places, [f"{rank:g}" for rank in ranks])
    last.set_yticks(ticks := [0, 50, 100], [f"{tick} %" for tick in ticks])
    last.legend(frameon=False, fontsize=9, loc="lower left")


def signed(values: torch.Tensor) -> torch.Tensor:
    """RGBA of numbers from -1 to 1: blue above 0, orange below, and the ground shines through at 0."""
    colors = torch.tensor([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in (BLUE, ORANGE)])
    return torch.cat([colors[(values < 0).long()], values.abs().clamp(max=1).unsqueeze(-1)], -1)


PICTURES: dict[str, Picture] = {
    "notes_quantisation": (draw_quantisation, (5, 4)),
    "notes_sparse": (draw_sparse, (5, 3)),
    "notes_momentum": (draw_momentum, (5, 4)),
    "notes_density": (draw_density, (5, 3)),
    "notes_powersgd": (draw_powersgd, (5, 4.4)),
}


def write(folder: Path, files: dict[str, Table]) -> None:
    """Tables as CSV files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in files.items():
        with (folder / f"notes_{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


def shown(idea: Shown) -> str:
    """The table in columns."""
    cells = [[str(cell) for cell in row] for row in idea.table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([idea.title, "", *lines, ""])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("idea", nargs="?", choices=[*IDEAS], metavar="IDEA", help=f"{', '.join(IDEAS)}; default: all")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for the CSV files")
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # sums in one order, and no waiting for a second core that is busy
    start = on_digits()
    for name, idea in IDEAS.items():
        if options.idea in (None, name):
            found = idea(copy.deepcopy(start))
            write(options.out, found.files)
            print(f"{name}\n{shown(found)}")


if __name__ == "__main__":
    main()

"""Every compressor, registered or an example, made quick for small models; and what the laws look at."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp import registry
from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.compressors import Codec, LossyCompressor, TensorCodec
from tests.averaging.workers import averaged, seeded, weights
from tests.compressors.examples import EXAMPLES
from tests.threads import COLLECTIVES

QUICK = {"min_elements": 40, "warmup_epochs": 0, "dense_epochs": 0, "sparsity": 0.9}
"""For small tensors, without warm-up. A compressor takes of these what it knows."""

OTHER_OPTIONS = {
    "dgc": [{"momentum_masking": False}, {"values": "int8"}, {"values": "int2"}],
    "gradient_dropping": [{"scope": "tensor"}, {"values": "bf16"}, {"values": "int2"}],
    "onebit": [{"groups": "block", "threshold": "zero"}],
    "twobit": [{"threshold": 0.5}],
    "terngrad": [{"error_feedback": True, "share_scaler": False}],
    "powersgd": [{"rank": 1, "warm_start": False}],
}
"""What a compressor's defaults do not reach."""

KEPT = ("residual", "velocity", "unsent_step")
"""Kinds of state that hold gradients which were not sent."""


def quick(cls, **options):
    """An instance for tests."""
    known = {field.name for field in fields(cls)}
    return cls(**{**{key: value for key, value in QUICK.items() if key in known}, **options})


def cases(classes):
    """Label -> function that makes a compressor, for each of these classes (name -> class) and its `OTHER_OPTIONS`."""
    made = {}
    for name, cls in classes.items():
        for options in [{}, *OTHER_OPTIONS.get(name, [])]:
            label = ",".join([name, *(f"{key}={value}" for key, value in options.items())])
            made[label] = partial(quick, cls, **options)
    return made


def _remembers(make):
    """True if the compressor keeps a residual."""
    return make().state_for(None).kind is not None


REGISTERED = cases({entry.name: entry.cls for entry in registry.entries()})
EVERY = {**REGISTERED, **cases(EXAMPLES)}
"""The examples are registered for the length of a test (conftest.py)."""
LOSSY = {label: make for label, make in EVERY.items() if isinstance(make(), LossyCompressor)}
REMEMBERING = {label: make for label, make in EVERY.items() if _remembers(make)}
PARTITIONED = {label: make for label, make in LOSSY.items() if make().not_partitioned_because is None}
"""Those that work with topologies that have partitions."""
CODECS = {label: make for label, make in PARTITIONED.items() if isinstance(make(), (Codec, TensorCodec))}
"""Of these, those whose owners encode a mean again."""
SCALE_FREE = {label: make for label, make in EVERY.items() if label not in ("fp16", "twobit,threshold=0.5")}
"""Without those whose numbers have a unit."""


def with_defaults(makes):
    """Of these, the ones without `OTHER_OPTIONS`."""
    return {label: make for label, make in makes.items() if "," not in label}


class Parts(nn.Module):
    """Parameters of these shapes, and a loss that is linear in each."""

    def __init__(self, *shapes):
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(shape) for shape in shapes)
        for number, part in enumerate(self.parts):
            with torch.no_grad():
                part.copy_(torch.randn(part.shape, generator=seeded(number)))


def parts_loss(model, rank, step):
    """Gradients that do not depend on the weights, different for each rank and step, heavy-tailed."""
    generator = seeded(rank, step)
    total = 0
    for part in model.parts:
        slope = torch.randn(part.shape, generator=generator)
        total = total + (part * slope * slope.abs()).sum()
    return total


def with_adamw(model, group, compressor, *, topology="all_gather", weight_decay=0.01):
    """An optimizer and an averager; `averaged` has SGD."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
    averager = GradientAverager(model, compressor, optimizer=optimizer, process_group=group, topology=topology)
    return optimizer, averager


def without_momentum(model, group, compressor, schedule=None, **options):
    """An optimizer and an averager, with plain SGD: what is compressed is then the gradient itself."""
    return averaged(model, group, compressor, schedule, momentum=0.0, **options)


def finite(averager, model):
    """Whether weights and everything that is remembered are finite."""
    state = averager.state_dict()["memory"]
    parts = [part for kind in state.values() for part in kind.values() if part.is_floating_point()]
    return all(bool(torch.isfinite(part).all()) for part in [weights(model), *parts])


def kept(averager):
    """Name -> fp64 copy of what is remembered of this parameter."""
    state = averager.state_dict()["memory"]
    [parts] = [state[kind] for kind in KEPT if kind in state]
    return {name: part.double() for name, part in parts.items()}


def note_sent(averager):
    """A list that grows by name -> what this rank sent, at every step that counts."""
    state, layout, sent = averager.state, averager.gradients.layout, []
    subtract = state.subtract

    def noting(decoded):
        flat = torch.zeros(layout.n)
        decoded.add_to(flat)
        sent.append(layout.split(flat.double()))
        subtract(decoded)

    state.subtract = noting
    return sent


@contextmanager
def recorded_bytes(world):
    """Inside, a log for each rank of the bytes that it puts into each collective."""
    log = [[] for _ in range(world)]

    def recording(collective):
        def call(*tensors, group, **options):
            log[group.rank()].append(tensors[-1].view(torch.uint8).numpy().tobytes())
            return collective(*tensors, group=group, **options)

        return call

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, recording(getattr(dist, name))))
        yield log

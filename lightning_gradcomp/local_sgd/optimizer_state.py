"""The state of a rank's own optimizers: what a drain makes the same on all ranks.

Between drains each rank steps its own optimizers, and with `participation` below 1 not all ranks equally often. Their
state consists of

    moments   floating-point tensors: averaged
    numbers   tensors with one element and plain numbers, such as Adam's "step" or the numbers in a parameter group, of
              which some optimizers keep counts there: averaged in fp64. A mean of whole numbers is rounded.
    others    such as quantised moments: copied, with everything else that the optimizer keeps for the parameter

What is equal on all ranks keeps its bits.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.trainable import parameters_of

Optimizers = Sequence[torch.optim.Optimizer]
Held = dict[str, Any]
"""A parameter group, or the state of a parameter: torch's name -> value."""


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not _is_number(value)


def _is_other(value: Any) -> bool:
    return not (_is_number(value) or _is_moment(value) or isinstance(value, bool | str | None))


def _states(optimizers: Optimizers) -> Iterator[tuple[int, int, Held]]:
    """(number of the optimizer, number of the parameter, its state), in one order on all ranks."""
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(parameters_of(optimizer)):
            held = optimizer.state.get(parameter, {})
            yield number, index, {kind: held[kind] for kind in sorted(held, key=str)}


def moments_of(optimizers: Optimizers) -> list[torch.Tensor]:
    """The moments, in one order on all ranks."""
    return [value for *_, held in _states(optimizers) for value in held.values() if _is_moment(value)]


def _group_numbers(optimizer: torch.optim.Optimizer) -> list[Held]:
    """The numbers of each parameter group."""
    return [{key: group[key] for key in sorted(group) if _is_number(group[key])} for group in optimizer.param_groups]


def _layout(optimizers: Optimizers) -> str:
    """Describes everything but the values of moments and numbers."""

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        return value if isinstance(value, bool | str | None) else type(value).__name__

    states = [
        (number, index, {key: kind(each) for key, each in held.items()}) for number, index, held in _states(optimizers)
    ]
    groups = [{key: kind(each) for key, each in held.items()} for one in optimizers for held in _group_numbers(one)]
    return repr((states, groups))


def unify(ranks: Ranks, optimizers: Optimizers, device: torch.device) -> tuple[bool, int]:
    """Make all ranks' optimizers hold state of the same names and shapes, and the same others. Collective.

    The ranks whose optimizers hold the most elements, and among them the first, are right. Ranks that differ, such as
    one that has never stepped, receive their state. Returns False on these, and the bytes that this rank sent.
    """
    elements = sum(moment.numel() for moment in moments_of(optimizers))
    own = torch.tensor([elements, crc32(_layout(optimizers).encode())], device=device)
    everyones = ranks.gather(own).tolist()
    largest = max(everyones, key=lambda one: one[0])
    source, matches = everyones.index(largest), everyones[ranks.rank] == largest
    differ = any(one != largest for one in everyones)
    others = {(number, index) for number, index, held in _states(optimizers) if any(map(_is_other, held.values()))}
    sent = ranks.gather_traffic(own.nbytes)
    if not differ and not others:
        return True, sent
    content = None
    if ranks.rank == source:
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        if not differ:
            states = [{i: state[i] for i in state if (n, i) in others} for n, state in enumerate(states)]
        content = [(state, _group_numbers(one)) for state, one in zip(states, optimizers, strict=True)]
    content, length = _from_rank(source, content, ranks, device)
    if ranks.rank != source:
        for optimizer, (state, numbers) in zip(optimizers, content, strict=True):
            held = optimizer.state_dict()
            if matches:
                state, numbers = {**held["state"], **state}, [{} for _ in numbers]
            groups = [{**group, **new} for group, new in zip(held["param_groups"], numbers, strict=True)]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
    return matches, sent + length * (ranks.rank == source) * (ranks.world - 1)


def _from_rank(source: int, content: Any, ranks: Ranks, device: torch.device) -> tuple[Any, int]:
    """Rank `source`'s content, with tensors on the CPU, and its length in bytes. Collective."""
    file = io.BytesIO()
    if ranks.rank == source:
        torch.save(content, file)
    lengths = ranks.gather(torch.tensor([file.tell()], device=device)).flatten().tolist()
    message = torch.zeros(lengths[source], dtype=torch.uint8)
    if ranks.rank == source:
        message = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, group=ranks.group, group_src=source)
    file = io.BytesIO(message.cpu().numpy().tobytes())
    return torch.load(file, map_location="cpu", weights_only=False), len(message)  # another rank of this run wrote it


def average_numbers(ranks: Ranks, optimizers: Optimizers, samples: int, device: torch.device) -> int:
    """Replace numbers that differ between ranks with their mean, rounded if all are whole. Collective.

    All ranks' optimizers hold state of the same names. `samples` is the weight of this rank's numbers. Returns the
    bytes that this rank sent.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    states = [
        optimizer.state[parameter]
        for optimizer in optimizers
        for parameter in parameters_of(optimizer)
        if parameter in optimizer.state
    ]
    places = [(held, key) for held in (*groups, *states) for key in sorted(held, key=str) if _is_number(held[key])]
    own = torch.tensor([samples, *(float(held[key]) for held, key in places)], dtype=torch.float64, device=device)
    rows = ranks.gather(own).tolist()
    weights = [row[0] for row in rows]
    if not any(weights):
        weights[0] = 1.0
    for (held, key), values in zip(places, list(zip(*rows, strict=True))[1:], strict=True):
        if len(set(values)) == 1:
            continue
        mean = sum(w * value for w, value in zip(weights, values, strict=True) if w) / sum(weights)
        if all(value.is_integer() for value in values):
            mean = round(mean)
        if isinstance(held[key], torch.Tensor):
            held[key].fill_(mean)
        else:
            held[key] = type(held[key])(mean)
    return ranks.gather_traffic(own.nbytes)


def zero_nonfinite_state(optimizers: Optimizers) -> None:
    """Replace NaN and infinities in the optimizers' state with 0: a NaN in a momentum would spoil every later step."""
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.nan_to_num_(0.0, 0.0, 0.0)

"""Local weights, at which a rank computes its gradient: the shared weights minus the steps that it has not sent yet.

Only its own rank knows an unsent step, but that rank can use it at once. If each step sends 1 % of the elements, a
gradient at the shared weights misses an update for some hundred steps. At the local weights it misses only other ranks'
updates. CSER (Xie et al., NeurIPS 2020, arXiv 2007.13221) keeps such local models permanently. Here the weights are
local only in forward and backward passes; at all other times every rank holds the same weights.

If gradients are mostly noise, a rank's own steps are longer than the mean over all ranks. Scales compensate for that.

A write into a local weight would be lost. `restore` detects it by torch's version counters. A write through `.data`
does not change these, so `restore` also compares a few elements of every weight, or all on request.

A copy of local weights, such as a teacher's moving average, would differ between ranks. `Untrained` detects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn

from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import (
    checksum,
    first_difference,
    replicated,
    unlike_rank_zero,
)
from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import refusal

SAMPLE = 32
"""Number of elements of every weight that are compared."""


class LocalWeights:
    """Swaps the data of the compressed parameters for local weights, and back.

    The local weights use the buffer of the compressed gradients, which is free at that time. FSDP reads the memory of
    its shards, so local weights are written there, and the buffer holds a copy of the shared weights.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._parameters: list[torch.nn.Parameter] = []
        self._names: tuple[str, ...] = ()
        self._in_place = False
        self._shared: list[torch.Tensor] = []
        """The parameters' shared weights while local weights are in use."""
        self._local: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._before: torch.Tensor | None = None
        self.were_used = False
        """True once any weights have been local."""
        self.compares_all = False
        """True to compare every element of the weights, which takes two passes over the model."""
        self._unchecked: tuple[torch.Tensor, torch.Tensor] | None = None
        """On a GPU: the samples to compare when the host next synchronizes with it anyway."""

    @torch.no_grad()
    def use(self) -> None:
        """Set the parameters to the shared weights minus scale · unsent until `restore`. Does nothing if already set.

        Parameters whose dtype or memory format does not fit the buffer get separate memory.
        """
        state, gradients = self._memory.compressed, self._memory.gradients
        scales = state.local_scales(self._memory.ranks.workers)
        if self._shared or scales is None or state.empty or state.unsent is None:
            return
        layout, unsent = gradients.layout, state.unsent.to(gradients.device)
        self._parameters, self._names, self._in_place = gradients.compressed, layout.names, gradients.sharded
        for parameter, view, scale, (start, _) in zip(
            self._parameters, layout.views(unsent), scales, layout.bounds, strict=True
        ):
            other = _like(parameter, gradients.compressed_flat, start)
            if self._in_place:
                other.copy_(parameter)
                _subtract(parameter, view, scale, parameter.data)
                self._shared.append(other)
                continue
            _subtract(parameter, view, scale, other)
            self._shared.append(parameter.data)
            parameter.data = other
        self.were_used = True
        self._local = [parameter.data for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        self._before = self._look()

    @property
    def in_use(self) -> bool:
        return bool(self._shared)

    @torch.no_grad()
    def restore(self, *, check: bool = True) -> None:
        """Set the parameters back to the shared weights. With `check`, raises ValueError if one was written to."""
        locals_ = zip(self._parameters, self._local, self._versions, strict=True)
        written = [p.data_ptr() != own.data_ptr() or p._version != version for p, own, version in locals_]
        earlier = self._unchecked  # of a pass whose gradients are accumulated
        self._unchecked = (self._look(), self._before) if check and self._before is not None else None
        for parameter, weights in zip(self._parameters, self._shared, strict=True):
            if self._in_place:
                parameter.data.copy_(weights)
            else:
                parameter.data = weights
        self._shared, self._local = [], []
        if check and any(written):
            self._refuse(written)
        self._compare(earlier)
        if not self._parameters[0].is_cuda:
            self.check()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        if not self._shared or self._in_place:
            yield
            return
        for parameter, shared in zip(self._parameters, self._shared, strict=True):
            parameter.data = shared
        try:
            yield
        finally:
            for parameter, own in zip(self._parameters, self._local, strict=True):
                parameter.data = own

    def check(self) -> None:
        """Raise ValueError if the latest local weights were written to. Waits for a GPU."""
        unchecked, self._unchecked = self._unchecked, None
        self._compare(unchecked)

    def _compare(self, looks: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if looks and not torch.equal(*looks):
            self._refuse([not torch.equal(*pair) for pair in zip(*looks, strict=True)])

    def _look(self) -> torch.Tensor:
        """What is compared of each weight: int64 [parameters, 1 or SAMPLE], so that NaNs compare equal."""
        if self.compares_all:
            return torch.stack([checksum(parameter).view(1) for parameter in self._parameters])
        return torch.stack([_sample(parameter) for parameter in self._parameters]).double().view(torch.int64)

    def _refuse(self, written: list[bool]) -> None:
        names = [repr(name) for name, wrong in zip(self._names, written, strict=True) if wrong]
        got = ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")
        allowed = (
            "local_weights=False, or a write before the forward pass or after the optimizer's step "
            "(on_train_batch_start, on_train_batch_end)"
        )
        raise refusal("writes into local weights between the forward pass and the end of backward", got, allowed)


class Untrained:
    """The parameters that do not train, such as a teacher's. What a module writes into them must not differ by rank.

    Buffers are not compared, because DDP sends rank 0's before each forward pass.
    """

    def __init__(self, model: nn.Module, names: Set[str]) -> None:
        self._model = model
        self._start = self._state(self._named(names))

    def _named(self, names: Set[str]) -> dict[str, torch.Tensor]:
        every = [(plain_name(name), p) for name, p in replicated(self._model)]
        return {name: local(parameter).detach() for name, parameter in every if name in names}

    def _state(self, named: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
        """What changes if a parameter is written to: torch's version, and a checksum of elements at even intervals."""
        if not named:
            return {}
        looks = [checksum(p.reshape(-1)[:: max(p.numel() // SAMPLE, 1)]) for p in named.values()]
        sums = torch.stack(looks).tolist()
        return {name: (p._version, own) for (name, p), own in zip(named.items(), sums, strict=True)}

    def compare(self, names: Set[str], ranks: Ranks) -> None:
        """Compare the parameters `names` that have changed since the start. Sends 8 bytes for each. Collective.

        Raises ValueError on every rank if one differs.
        """
        named = self._named(names)
        if not named or ranks.world == 1:
            return
        state = self._state(named)
        unchanged = torch.zeros((), dtype=torch.int64, device=next(iter(named.values())).device)
        sums = [checksum(p) if state[name] != self._start.get(name) else unchanged for name, p in named.items()]
        differs = unlike_rank_zero(torch.stack(sums), ranks.group)
        if differs.any():
            first, which = first_difference(differs)
            got = f"{list(named)[first]!r}, which on rank {which} is not rank 0's"
            allowed = (
                "an optimizer that has it; an update in on_train_batch_end, where all ranks have the same weights; "
                "local_weights=False; or, if each rank is to have its own, its name in the module's "
                "_ddp_params_and_buffers_to_ignore"
            )
            raise refusal("a parameter that is not averaged, but changes in training", got, allowed)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Elements of a parameter at even intervals in memory: [SAMPLE], padded with zeros."""
    n = parameter.numel()
    few = parameter.data.as_strided((min(n, SAMPLE),), (max(n // SAMPLE, 1),))
    return few if n >= SAMPLE else torch.nn.functional.pad(few, (0, SAMPLE - n))


def _subtract(weights: torch.Tensor, unsent: torch.Tensor, scale: torch.Tensor | float, out: torch.Tensor) -> None:
    """out = weights - scale · unsent."""
    if isinstance(scale, torch.Tensor):
        torch.addcmul(weights, unsent, scale, value=-1, out=out)
    else:
        torch.add(weights, unsent, alpha=-scale, out=out)


def _like(parameter: torch.Tensor, out: torch.Tensor, start: int) -> torch.Tensor:
    """Memory for a tensor like `parameter`: in `out` from `start` if possible, else newly allocated."""
    whole = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    if parameter.dtype != out.dtype or not whole:
        return torch.empty_like(parameter)
    return out.as_strided(parameter.shape, parameter.stride(), out.storage_offset() + start)

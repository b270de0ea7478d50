"""Local weights, at which a rank computes its gradient: the shared weights less the steps that it has not sent yet.

Unsent steps are known to their rank alone, but that rank need not wait for them. A gradient at the shared weights lacks
an update of 1 % of the elements a step for some hundred steps; at the local weights it lacks only those of the other
ranks. CSER (Xie et al., NeurIPS 2020, arXiv 2007.13221) keeps such local models all the time. Here the weights are
local in forward and backward passes only: everywhere else all ranks hold the same weights.

A rank's own steps are longer than the mean of all ranks' where gradients are mostly noise; scales make up for it.

A write into a local weight would be lost. `restore` detects it: by torch's version counters, and, since a write by
`.data` does not count there, by comparing a few elements of every weight (all, on request).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.replicas import checksum
from lightning_gradcomp.errors import refusal

SAMPLE = 32
"""Elements of every weight that are compared."""


class LocalWeights:
    """Exchanges the data of the compressed parameters for local weights, and back.

    The local weights are in the buffer of the compressed gradients, which is free meanwhile. FSDP reads the memory of
    its shards, so their local weights are written there, and the buffer has a copy of the shared ones.

    Args:
        memory: error feedback, whose unsent steps are subtracted.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._parameters: list[torch.nn.Parameter] = []
        self._names: tuple[str, ...] = ()
        self._in_place = False
        self._shared: list[torch.Tensor] = []
        """The data of the parameters while their local weights are in use."""
        self._local: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._before: torch.Tensor | None = None
        self.compares_all = False
        """True to compare every element of the weights, which takes two passes over the model."""
        self._unchecked: tuple[torch.Tensor, torch.Tensor] | None = None
        """On a GPU: what to compare when the host has to wait for it anyway."""

    @torch.no_grad()
    def use(self) -> None:
        """Set the parameters to the shared weights minus scale · unsent until `restore`, unless they are already.

        Parameters that the buffer can't hold, of another type or memory format, get memory of their own.
        """
        state, gradients = self._memory.compressed, self._memory.gradients
        scales = state.update.local_scales(self._memory.ranks.workers)
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
        self._local = [parameter.data for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        self._before = self._look()

    @property
    def in_use(self) -> bool:
        """True while the parameters hold local weights."""
        return bool(self._shared)

    @torch.no_grad()
    def restore(self, *, check: bool = True) -> None:
        """Set the parameters to the shared weights again.

        Args:
            check: False to skip the check for writes.

        Raises:
            ValueError: if a local weight was written to. The parameters hold the shared weights all the same.
        """
        if not self._shared:
            return
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
        """Inside, the parameters hold the shared weights."""
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
        """Raises ValueError if the latest local weights had been written to. Waits for a GPU."""
        unchecked, self._unchecked = self._unchecked, None
        self._compare(unchecked)

    def _compare(self, looks: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if looks and not torch.equal(*looks):
            self._refuse([not torch.equal(*pair) for pair in zip(*looks, strict=True)])

    def _look(self) -> torch.Tensor:
        """What is compared of each weight: int64 [parameters, 1 or SAMPLE], in which NaNs compare equal."""
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
        raise refusal("local weights that were written between the forward pass and the end of backward", got, allowed)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Elements of a parameter, evenly spaced in its memory: [SAMPLE], padded with zeros."""
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
    """Memory for a tensor like `parameter`: in `out` from `start` on, if possible."""
    whole = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    if parameter.dtype != out.dtype or not whole:
        return torch.empty_like(parameter)
    return out.as_strided(parameter.shape, parameter.stride(), out.storage_offset() + start)

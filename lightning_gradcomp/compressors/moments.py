"""Moments that `optimizer.state` holds, under torch's names, while error feedback computes them in flat buffers.

Between steps `optimizer.state[p]["exp_avg"]` is a view of the buffer. Code that zeroes, replaces or clears a moment
there therefore changes the moment that the next step uses, as it does without compression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from lightning_gradcomp.compressors.layout import Layout

Seen = tuple[tuple[torch.Tensor | None, int], ...]
"""For each moment of a parameter: the tensor that `optimizer.state` held, and how often it had been written to."""


class OptimizerMoments:
    """The moments of a layout's parameters, shared by flat buffers and an optimizer.

    Args:
        layout: the parameters.
        keys: torch's names of the moments.
    """

    def __init__(self, layout: Layout, keys: Sequence[str]) -> None:
        self._layout, self._keys = layout, keys
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._seen: dict[str, Seen] = {}

    def attach(self, optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> None:
        """Use this optimizer. Its moments count, not those of an earlier one."""
        self._optimizer, self._parameters, self._seen = optimizer, parameters, {}

    def read(self, flats: Sequence[torch.Tensor], names: Set[str]) -> dict[str, Mapping[str, Any]]:
        """Copy into `flats` every moment that was written since the buffers were last in step with the optimizer.

        Args:
            flats: a buffer for each key, fp32 [n]. A moment that the optimizer does not hold becomes 0.
            names: of the parameters.

        Returns:
            Name -> the optimizer's state, of the parameters that were copied.
        """
        if self._optimizer is None:
            return {}
        read, bounds = {}, self._layout.bounds
        for name, parameter, (start, stop) in zip(self._layout.names, self._parameters, bounds, strict=True):
            held = self._optimizer.state.get(parameter, {})
            seen = self._look(held)
            if name not in names or _same(seen, self._seen.get(name)):
                continue
            for flat, (moment, _) in zip(flats, seen, strict=True):
                part = flat[start:stop].view(parameter.shape)
                part.copy_(moment) if moment is not None else part.zero_()
            self._seen[name], read[name] = seen, held
        return read

    def write(self, flats: Sequence[torch.Tensor], names: Set[str]) -> dict[str, Any]:
        """Let `optimizer.state` hold views of `flats`, for the parameters in `names`.

        A moment that was written since the last `read` stays as it is there, and is copied into `flats`.

        Returns:
            Name -> the optimizer's state, of the parameters in `names`.
        """
        self.read(flats, names & self._seen.keys())
        states: dict[str, Any] = {}
        if self._optimizer is None:
            return states
        views = zip(*(self._layout.views(flat.data) for flat in flats), strict=True)
        for name, parameter, moments in zip(self._layout.names, self._parameters, views, strict=True):
            if name in names:
                held = states[name] = self._optimizer.state[parameter]
                if parameter.dtype != torch.float32:
                    moments = tuple(torch.empty_like(parameter).copy_(moment) for moment in moments)
                # A version counter of its own: views of one buffer share theirs.
                held.update((key, moment.data) for key, moment in zip(self._keys, moments, strict=True))
                self._seen[name] = self._look(held)
        return states

    def hand_over(self, flats: Sequence[torch.Tensor], names: Set[str]) -> dict[str, Any]:
        """As `write`, with tensors of the optimizer's own, in the parameters' types and strides: torch steps them."""
        states = self.write(flats, names)
        for name, parameter in zip(self._layout.names, self._parameters, strict=True):
            if held := states.get(name):
                held.update((key, torch.empty_like(parameter).copy_(held[key])) for key in self._keys)
                del self._seen[name]
        return states

    def _look(self, held: Mapping[str, Any]) -> Seen:
        moments = [held.get(key) for key in self._keys]
        return tuple((moment, -1 if moment is None else moment._version) for moment in moments)


def _same(seen: Seen, earlier: Seen | None) -> bool:
    return earlier is not None and all(a is b and m == n for (a, m), (b, n) in zip(seen, earlier, strict=True))

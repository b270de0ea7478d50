"""Moments of torch's optimizers, computed in flat buffers and shared with `optimizer.state` under torch's names.

Between steps `optimizer.state[p]["exp_avg"]` is a view of the buffer. Code that zeroes, replaces or clears a moment
there changes the moment that the next step uses, as it does without compression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from lightning_gradcomp.compressors.layout import Layout

Seen = tuple[tuple[torch.Tensor | None, int], ...]
"""For each moment of a parameter: the tensor that `optimizer.state` held, and its version."""


class Moments:
    """The moments of a layout's parameters. New moments go to a second set of buffers; `commit` swaps the two.

    Args:
        keys: torch's names for the moments.
        counts_steps: True if the optimizer's state also has "step", the number of steps.
    """

    def __init__(self, layout: Layout, device: torch.device, keys: Sequence[str], *, counts_steps: bool) -> None:
        self._layout, self._keys, self._counts_steps = layout, keys, counts_steps
        self.flats = [torch.zeros(layout.n, dtype=torch.float32, device=device) for _ in keys]
        """One buffer for each key, fp32 [n]."""
        self.next = [torch.zeros_like(flat) for flat in self.flats]
        """Their values after the current step."""
        self.steps = dict.fromkeys(layout.names, 0)
        """Name -> number of steps in its moments."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._seen: dict[str, Seen] = {}

    def attach(self, optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> None:
        """Share the moments with this optimizer. Its own moments replace those of an earlier one."""
        self._optimizer, self._parameters, self._seen = optimizer, parameters, {}

    def read(self, names: Set[str]) -> None:
        """Copy every moment, and its "step", that was written in the optimizer's state since the two were last equal.

        A moment that the optimizer does not hold becomes 0.
        """
        for name, held in self._copy_written(names).items():
            known = held.get("step", 0) if self._counts_steps else any(held.get(key) is not None for key in self._keys)
            self.steps[name] = int(known)

    def _copy_written(self, names: Set[str]) -> dict[str, Mapping[str, Any]]:
        """Like `read`, without "step". Returns name -> the optimizer's state for the copied parameters."""
        found: dict[str, Mapping[str, Any]] = {}
        if self._optimizer is None or not self._keys:
            return found
        bounds = self._layout.bounds
        for name, parameter, (start, stop) in zip(self._layout.names, self._parameters, bounds, strict=True):
            held = self._optimizer.state.get(parameter, {})
            seen = self._look(held)
            if name not in names or _same(seen, self._seen.get(name)):
                continue
            for flat, (moment, _) in zip(self.flats, seen, strict=True):
                part = flat[start:stop].view(parameter.shape)
                part.copy_(moment) if moment is not None else part.zero_()
            self._seen[name], found[name] = seen, held
        return found

    def write(self, names: Set[str]) -> dict[str, Any]:
        """Store views of the buffers in `optimizer.state`. Returns it by name, for the parameters in `names`.

        A moment that was written there since the last `read` is first copied into the buffers.
        """
        self._copy_written(names & self._seen.keys())
        states: dict[str, Any] = {}
        if self._optimizer is None or not self._keys:
            return states
        views = zip(*(self._layout.views(flat.data) for flat in self.flats), strict=True)
        for name, parameter, moments in zip(self._layout.names, self._parameters, views, strict=True):
            if name in names:
                held = states[name] = self._optimizer.state[parameter]
                if parameter.dtype != torch.float32:
                    moments = tuple(torch.empty_like(parameter).copy_(moment) for moment in moments)
                # `.data` has its own version counter; views of one buffer would share one.
                held.update((key, moment.data) for key, moment in zip(self._keys, moments, strict=True))
                self._seen[name] = self._look(held)
        if self._counts_steps:
            self._write_steps(states)
        return states

    def _write_steps(self, states: Mapping[str, Any]) -> None:
        fused = any(group.get("fused") for group in self._optimizer.param_groups) if self._optimizer else False
        for name, held in states.items():
            if "step" not in held:  # on the device that torch uses
                device = held[self._keys[0]].device if fused else torch.device("cpu")
                held["step"] = torch.zeros((), dtype=torch.float32, device=device)
            held["step"].fill_(self.steps[name])

    def hand_over(self, names: Set[str]) -> None:
        """Like `write`, with copies in the parameters' dtypes and strides, which the optimizer then updates."""
        states = self.write(names)
        for name, parameter in zip(self._layout.names, self._parameters, strict=True):
            if held := states.get(name):
                held.update((key, torch.empty_like(parameter).copy_(held[key])) for key in self._keys)
                del self._seen[name]

    def commit(self, stepped: Set[str]) -> None:
        """Make the next moments current for the parameters that the optimizer has stepped."""
        for old, new in zip(self.flats, self.next, strict=True):
            self._layout.copy_except(stepped, old, new)
        self.flats, self.next = self.next, self.flats
        self.count(stepped)

    def replace(self, means: Mapping[str, torch.Tensor], stepped: Set[str]) -> None:
        """Copy in the moments (torch's name -> fp32 [n], overwritten) of parameters that the optimizer has stepped."""
        for key, flat in zip(self._keys, self.flats, strict=True):
            self._layout.copy_except(stepped, flat, means[key])
            flat.copy_(means[key])
        self.count(stepped)

    def count(self, stepped: Set[str]) -> None:
        self.steps = {name: t + (name in stepped) for name, t in self.steps.items()}

    def _look(self, held: Mapping[str, Any]) -> Seen:
        moments = [held.get(key) for key in self._keys]
        return tuple((moment, -1 if moment is None else moment._version) for moment in moments)


def _same(seen: Seen, earlier: Seen | None) -> bool:
    return earlier is not None and all(a is b and m == n for (a, m), (b, n) in zip(seen, earlier, strict=True))

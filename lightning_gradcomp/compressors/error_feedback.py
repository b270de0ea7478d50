"""Error feedback: the residual, which a worker has accumulated and not sent yet.

The update rule (updates.py) decides what accumulates: gradients, or the steps of an optimizer with momentum.

An average calls `compensate`, which adds the residual, and `subtract`, which removes what was sent. Both compute in
separate buffers. The optimizer's step calls `commit`, which swaps them with the old ones. An average that no step uses,
because a gradient was not finite on some rank or a hook skipped the step, leaves the state bit-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import reduce

import torch

from lightning_gradcomp.compressors.decoded import Decoded, all_finite
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.moments import Moments
from lightning_gradcomp.compressors.updates import StateDict, Update


class ErrorFeedback:
    """A worker's state: the residual, and the moments of the update rule.

    Args:
        layout: the parameters.
        device: where the buffers are during a step.
        update: the update rule. `Update()` accumulates nothing and drops whatever is not sent.
    """

    def __init__(self, layout: Layout, device: torch.device, update: Update) -> None:
        self.layout, self.device, self.update = layout, device, update
        self.unsent: torch.Tensor | None = None
        """The residual, fp32 [n]; None if nothing accumulates."""
        if update.kind is not None:
            self.unsent = torch.zeros(layout.n, dtype=torch.float32, device=device)
        self.moments = Moments(layout, device, tuple(update.moments.values()), counts_steps=update.counts_steps)
        self.started: set[str] = set()
        """Parameters that have stepped and have state here. The same on all ranks."""
        self._out = torch.empty(0, dtype=torch.float32, device=device)
        update.start(layout, device)

    def attach(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[torch.Tensor],
        *,
        shares_moments: bool = True,
    ) -> None:
        """Use this optimizer's options, and these parameters of the layout, from the next step on.

        With `shares_moments`, the optimizer's state holds the moments that are computed here.
        """
        self.update.optimizer, self.update.parameters = optimizer, parameters
        self.moments.attach(optimizer if shares_moments else None, parameters)

    @property
    def empty(self) -> bool:
        """True if there is no state."""
        return not self.started

    # A step

    def compensate(self, flat: torch.Tensor) -> torch.Tensor:
        """Replace this step's gradient in `flat` (fp32 [n]) by the compensated update to send.

        A CPU works on one chunk at a time, which stays in its cache.

        Returns:
            True if the gradient is finite: 0-d bool.
        """
        if self.unsent is None:
            return all_finite(flat)
        self.moments.read(self.update.sharing(self.layout.names))
        self._out, finite = flat, []
        for rule, place in self.layout.chunks_by(self.update.rules(self.moments), flat.device):
            finite.append(all_finite(flat[place]))
            self.update.accumulate(flat, place, rule, self.unsent, self.moments)
        return reduce(torch.logical_and, finite) if finite else all_finite(flat)

    def subtract(self, decoded: Decoded) -> None:
        """Remove what was sent, as receivers decode it."""
        if self.unsent is not None:
            decoded.subtract_from(self._out)
            self.update.after_sending(decoded, self.moments)

    def commit(self, stepped: Set[str], out: torch.Tensor) -> torch.Tensor:
        """Make the new state current after the optimizer's step.

        Args:
            stepped: parameters that the optimizer has stepped. The state of the others does not change.
            out: the buffer that `compensate` has changed.

        Returns:
            The buffer for the next step's gradient, fp32 [n].
        """
        if self.unsent is None:
            return out
        stepped = stepped & set(self.layout.names)
        self.moments.commit(stepped)
        self.layout.copy_except(stepped - self.update.withheld, self.unsent, out)
        self._out, self.unsent = self.unsent, out
        self.started = self.started | stepped
        self.update.commit(stepped)
        self.moments.write(self.update.sharing(self.started))
        return self._out

    # Between steps

    def decay(self, factor: float) -> None:
        """Multiply the residual by `factor`, from 0 to 1. What this removes is lost."""
        if self.unsent is not None:
            self.unsent.mul_(factor)

    def absorb(self, flat: torch.Tensor) -> None:
        """Add another rank's residual (fp32 [n]). Does nothing if nothing accumulates."""
        if self.unsent is not None:
            self.unsent.add_(flat)
            self.started = set(self.layout.names)

    def clear(self, names: Set[str]) -> None:
        """Clear the residuals of these parameters, after they were sent."""
        if self.unsent is not None:
            names = names - self.update.withheld
            self.layout.zero(names, self.unsent)
            self.started = self.started - names
            if not self.started:
                self.update.clear()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All state that differs between workers, to be averaged in place if several ranks become one worker."""
        unsent = [] if self.unsent is None else [self.unsent]
        return [*unsent, *self.moments.flats, *self.update.tensors]

    # The optimizer's moments

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's moments that are computed here: torch's name -> flat fp32 [n]."""
        return dict(zip(self.update.moments.values(), self.moments.flats, strict=True))

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        """Their values after the current step."""
        return dict(zip(self.update.moments.values(), self.moments.next, strict=True))

    def hand_over(self, optimizer_state: Mapping[str, torch.Tensor], stepped: Set[str]) -> None:
        """Give the optimizer these moments (flat fp32 [n] each) of the parameters it stepped, to go on alone."""
        stepped = stepped & set(self.layout.names)
        self.moments.replace(optimizer_state, stepped)
        self.moments.hand_over(self.update.sharing(stepped))

    def release(self) -> None:
        """Give the optimizer its moments back, and end this state."""
        self.moments.hand_over(self.update.sharing(self.started))

    # Checkpoints

    def state_dict(self) -> StateDict:
        """Copies of all state: kind -> parameter name -> tensor."""
        if self.unsent is None:
            return {}
        self.moments.read(self.update.sharing(self.layout.names))
        started = [name for name in self.layout.names if name in self.started]
        kinds, flats = [str(self.update.kind), *self.update.moments], [self.unsent, *self.moments.flats]
        state: StateDict = {}
        for kind, flat in zip(kinds, flats, strict=True):
            parts = self.layout.split(flat)
            state[kind] = {name: parts[name] for name in started}
        if self.update.counts_steps:
            steps = self.moments.steps
            state["step"] = {name: torch.tensor(float(steps[name]), dtype=torch.float32) for name in started}
        return {**state, **self.update.state_dict(started)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all state by a `state_dict` of any layout. Names that this layout lacks are ignored.

        Raises:
            ValueError: if a tensor's shape differs from its parameter's.
        """
        kind = self.update.kind
        if kind is None:
            return
        self.unsent = self.layout.join(state[kind], self.device)
        self.moments.flats = [self.layout.join(state[moment], self.device) for moment in self.update.moments]
        self.started = set(state[kind]) & set(self.layout.names)
        steps = {name: int(t) for name, t in state.get("step", {}).items()}
        first = int(not self.update.counts_steps)
        self.moments.steps = {name: steps.get(name, first * (name in self.started)) for name in self.layout.names}
        self.update.load_state_dict(state)
        self.moments.write(self.update.sharing(self.started))

"""Error feedback: what a worker has accumulated and not sent yet.

The update rule (updates.py) says what is accumulated: gradients, or the steps of an optimizer with momentum.

An average calls `compensate` (what to send now) and `subtract` (take out what was sent). The optimizer's step calls
`commit`. Both compute in buffers of their own, which `commit` swaps with the old ones. So an average that no step uses
leaves the state as it was, to the bit: a gradient was not finite on some rank, or a hook skipped the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from lightning_gradcomp.compressors.decoded import Decoded, all_finite
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.moments import Moments
from lightning_gradcomp.compressors.updates import StateDict, Update


class ErrorFeedback:
    """A worker's state: what is unsent, and the moments of the update rule.

    Args:
        layout: the parameters.
        device: of the buffers during a step.
        update: what is accumulated. `Update()`: nothing, so that what is not sent is lost.
    """

    def __init__(self, layout: Layout, device: torch.device, update: Update) -> None:
        self.layout, self.device, self.update = layout, device, update
        self.unsent: torch.Tensor | None = None
        """What is left to be sent, fp32 [n]; None if nothing is accumulated."""
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

        With `shares_moments`, its state holds the moments that are computed here.
        """
        self.update.optimizer, self.update.parameters = optimizer, parameters
        self.moments.attach(optimizer if shares_moments else None, parameters)

    @property
    def empty(self) -> bool:
        """True if there is no state."""
        return not self.started

    # A step

    def compensate(self, flat: torch.Tensor) -> torch.Tensor:
        """Replace this step's gradient in `flat` (fp32 [n]) by what to send for it.

        A CPU does so a chunk at a time, which stays in its cache.

        Returns:
            True if the gradient is finite: 0-d bool.
        """
        if self.unsent is None:
            return all_finite(flat)
        self.moments.read(self.update.sharing(self.layout.names))
        self._out, finite = flat, [flat.new_ones((), dtype=torch.bool)]
        for rule, place in self.layout.chunks_by(self.update.rules(self.moments), flat.device):
            finite.append(all_finite(flat[place]))
            self.update.accumulate(flat, place, rule, self.unsent, self.moments)
        return torch.stack(finite).all()

    def subtract(self, decoded: Decoded) -> None:
        """Take out what was sent, as decoded by the others."""
        if self.unsent is not None:
            decoded.subtract_from(self._out)
            self.update.after_sending(decoded, self.moments)

    def commit(self, stepped: Set[str], out: torch.Tensor) -> torch.Tensor:
        """Put the new state in force, after the optimizer's step.

        Args:
            stepped: parameters that the optimizer has stepped. The state of others stays as it was.
            out: what `compensate` has changed.

        Returns:
            fp32 [n], free for the next step's gradient.
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
        """Multiply what is unsent by `factor`. Below 1 this part of it is lost."""
        if self.unsent is not None:
            self.unsent.mul_(factor)

    def absorb(self, flat: torch.Tensor) -> None:
        """Add what another rank has not sent (fp32 [n]), unless nothing is accumulated."""
        if self.unsent is not None:
            self.unsent.add_(flat)
            self.started = set(self.layout.names)

    def clear(self, names: Set[str]) -> None:
        """Clear what is unsent of these parameters, after it was sent."""
        if self.unsent is not None:
            names = names - self.update.withheld
            for name, (start, stop) in zip(self.layout.names, self.layout.bounds, strict=True):
                if name in names:
                    self.unsent[start:stop] = 0
            self.started = self.started - names
            if not self.started:
                self.update.clear()

    def move(self, device: torch.device) -> None:
        """Keep what is unsent on `device` between steps. Moments stay, as those of any optimizer do."""
        if self.unsent is not None:
            self.unsent = self.unsent.to(device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of a worker's own state, to be averaged in place if several ranks become one worker."""
        unsent = [] if self.unsent is None else [self.unsent]
        return [*unsent, *self.moments.flats, *self.update.tensors]

    # The optimizer's moments

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's moments that are computed here: torch's name -> flat fp32 [n]."""
        return dict(zip(self.update.moments.values(), self.moments.flats, strict=True))

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        """What they become with the step under way."""
        return dict(zip(self.update.moments.values(), self.moments.next, strict=True))

    def hand_over(self, optimizer_state: Mapping[str, torch.Tensor], stepped: Set[str]) -> None:
        """Let the optimizer continue by itself with these moments (flat fp32 [n] each) of the parameters it stepped."""
        stepped = stepped & set(self.layout.names)
        self.moments.replace(optimizer_state, stepped)
        self.moments.hand_over(self.update.sharing(stepped))

    def release(self) -> None:
        """Let the optimizer have its moments for itself: this state ends here."""
        self.moments.hand_over(self.update.sharing(self.started))

    # Checkpoints

    def state_dict(self) -> StateDict:
        """Copies of everything: kind -> parameter name -> tensor."""
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
        """Replace everything by a `state_dict` of any layout; names that this layout lacks are ignored.

        Raises:
            ValueError: if the shape of a tensor is not its parameter's.
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

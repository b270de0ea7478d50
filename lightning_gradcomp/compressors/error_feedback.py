"""Error feedback: the residual, which a worker has accumulated and not sent yet.

Here gradients accumulate. In updates.py, the steps of an optimizer with momentum do.

An average calls `compensate`, which adds the residual, and `subtract`, which removes what was sent. Both compute in
separate buffers. The optimizer's step calls `commit`, which swaps them with the old ones. An average that no step uses,
because a gradient was not finite on some rank or a hook skipped the step, leaves the state bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import reduce
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded, all_finite
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.moments import Moments

StateDict = dict[str, dict[str, torch.Tensor]]
"""Kind -> parameter name -> tensor."""


class ErrorFeedback:
    """A worker's state between steps. This base class has none and drops whatever is not sent, as unbiased methods do.

    `start` it before anything else. A subclass has a `kind`, and accumulates what its `accumulate` computes.
    """

    kind: ClassVar[str | None] = None
    """The name of the residual in a `state_dict`; None if nothing accumulates."""
    moment_kinds: ClassVar[Mapping[str, str]] = {}
    """Kinds in a `state_dict` that the optimizer also has without compression -> torch's names for them."""
    counts_steps: ClassVar[bool] = False
    """True if the optimizer's state counts steps."""
    owns_momentum: ClassVar[bool] = False
    """True if the optimizer's momentum is applied to the local gradient before it accumulates."""
    accumulates_steps: ClassVar[bool] = False
    """True if steps of the weights are sent: update directions times `learning_rates`."""

    optimizer: torch.optim.Optimizer | None = None
    parameters: Sequence[torch.Tensor] = ()
    withheld: Set[str] = frozenset()
    """Parameters to which the current average applies nothing."""

    def start(self, layout: Layout, device: torch.device) -> ErrorFeedback:
        """Start with empty state for these parameters. Returns self."""
        self.layout, self.device = layout, device
        self.unsent: torch.Tensor | None = None
        """The residual, fp32 [n]; None if nothing accumulates."""
        if self.kind is not None:
            self.unsent = torch.zeros(layout.n, dtype=torch.float32, device=device)
        self.moments = Moments(layout, device, tuple(self.moment_kinds.values()), counts_steps=self.counts_steps)
        self.started: set[str] = set()
        """Parameters that have stepped and have state here. The same on all ranks."""
        self._out = torch.empty(0, dtype=torch.float32, device=device)
        return self

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
        self.optimizer, self.parameters = optimizer, parameters
        self.moments.attach(optimizer if shares_moments else None, parameters)

    @property
    def empty(self) -> bool:
        return not self.started

    # What accumulates

    def sharing(self, names: Iterable[str]) -> set[str]:
        """The parameters among `names` whose moments are also in the optimizer's state."""
        return set(names)

    def rules(self) -> Sequence[Any]:
        """How each parameter is treated in this step. Neighbours with equal rules are processed together."""
        return [None] * len(self.layout.names)

    def accumulate(self, flat: torch.Tensor, place: slice, rule: Any, unsent: torch.Tensor) -> None:
        """Replace the gradient at `place` by `unsent` plus this step's update; new moments go to `moments.next`.

        Args:
            flat: the gradients, fp32 [n].
            place: elements of parameters with the same rule, one of `rules`.
            unsent: the residual, fp32 [n]. It is not changed.
        """

    def after_sending(self, decoded: Decoded) -> None:
        """Update `moments.next` for the values that were sent."""

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """Record the squared norms of this worker's uncompressed gradient and of all workers' mean, 0-d."""

    def learning_rates(self) -> list[float] | None:
        """The learning rate in each parameter's steps; None unless `accumulates_steps`."""
        return None

    def local_scales(self, workers: int) -> Sequence[torch.Tensor | float] | None:
        """For each parameter, the factor of the residual that this worker applies before it computes its gradient.

        None: the gradient is computed at the weights that all ranks share.
        """
        return None

    # A step

    def compensate(self, flat: torch.Tensor) -> torch.Tensor:
        """Replace this step's gradient in `flat` (fp32 [n]) by the compensated update to send.

        A CPU works on one chunk at a time, which stays in its cache. Returns True if the gradient is finite: 0-d bool.
        """
        if self.unsent is None:
            return all_finite(flat)
        self.moments.read(self.sharing(self.layout.names))
        self._out, finite = flat, []
        for rule, place in self.layout.chunks_by(self.rules(), flat.device):
            finite.append(all_finite(flat[place]))
            self.accumulate(flat, place, rule, self.unsent)
        return reduce(torch.logical_and, finite) if finite else all_finite(flat)

    def subtract(self, decoded: Decoded) -> None:
        if self.unsent is not None:
            decoded.subtract_from(self._out)
            self.after_sending(decoded)

    def commit(self, stepped: Set[str], out: torch.Tensor) -> torch.Tensor:
        """Make the new state current after the optimizer's step. The state of parameters not in `stepped` stays.

        `out` is the buffer that `compensate` has changed. Returns the buffer for the next step's gradient, fp32 [n].
        """
        if self.unsent is None:
            return out
        stepped = stepped & set(self.layout.names)
        self.moments.commit(stepped)
        self.layout.copy_except(stepped - self.withheld, self.unsent, out)
        self._out, self.unsent = self.unsent, out
        self.started = self.started | stepped
        self.moments.write(self.sharing(self.started))
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
            names = names - self.withheld
            self.layout.zero(names, self.unsent)
            self.started = self.started - names

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All state that differs between workers, to be averaged in place if several ranks become one worker."""
        unsent = [] if self.unsent is None else [self.unsent]
        return [*unsent, *self.moments.flats]

    # The optimizer's moments

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's moments that are computed here: torch's name -> flat fp32 [n]."""
        return dict(zip(self.moment_kinds.values(), self.moments.flats, strict=True))

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.moment_kinds.values(), self.moments.next, strict=True))

    def hand_over(self, optimizer_state: Mapping[str, torch.Tensor], stepped: Set[str]) -> None:
        """Give the optimizer these moments (flat fp32 [n] each) of the parameters it stepped, to go on alone."""
        stepped = stepped & set(self.layout.names)
        self.moments.replace(optimizer_state, stepped)
        self.moments.hand_over(self.sharing(stepped))

    def release(self) -> None:
        """Give the optimizer its moments back, at the end."""
        self.moments.hand_over(self.sharing(self.started))

    # Checkpoints

    def state_dict(self) -> StateDict:
        """Copies of all state: kind -> parameter name -> tensor."""
        if self.unsent is None:
            return {}
        self.moments.read(self.sharing(self.layout.names))
        started = [name for name in self.layout.names if name in self.started]
        kinds, flats = [str(self.kind), *self.moment_kinds], [self.unsent, *self.moments.flats]
        state: StateDict = {}
        for kind, flat in zip(kinds, flats, strict=True):
            parts = self.layout.split(flat)
            state[kind] = {name: parts[name] for name in started}
        if self.counts_steps:
            steps = self.moments.steps
            state["step"] = {name: torch.tensor(float(steps[name]), dtype=torch.float32) for name in started}
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all state by a `state_dict` of any layout. Names that this layout lacks are ignored.

        Raises:
            ValueError: if a tensor's shape differs from its parameter's.
        """
        if self.kind is None:
            return
        self.unsent = self.layout.join(state[self.kind], self.device)
        self.moments.flats = [self.layout.join(state[moment], self.device) for moment in self.moment_kinds]
        self.started = set(state[self.kind]) & set(self.layout.names)
        steps = {
            name: round(float(t)) for name, t in state.get("step", {}).items()
        }  # a mean of equal counts may be less
        first = int(not self.counts_steps)
        self.moments.steps = {name: steps.get(name, first * (name in self.started)) for name in self.layout.names}
        self.moments.write(self.sharing(self.started))


class Gradient(ErrorFeedback):
    """The residual is added to the next gradient (Seide et al. 2014; Aji & Heafield 2017)."""

    kind = "residual"

    def accumulate(self, flat: torch.Tensor, place: slice, rule: None, unsent: torch.Tensor) -> None:
        flat[place].add_(unsent[place])

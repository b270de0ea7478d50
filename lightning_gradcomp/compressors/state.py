"""Error feedback: what a worker keeps of what it has not sent. Nothing, or a residual.

Momentum correction has states of its own: `SGDVelocity` for SGD, `AdamStep` for Adam and AdamW.

An average calls `compensate` (what to send now) and `subtract` (take out what was sent). The optimizer's step calls
`commit`. Both compute in buffers of their own, which `commit` exchanges for the old ones. So an average that no step
uses leaves the state as it was, to the bit: a gradient was not finite on some rank, a hook left the step out or
discarded a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.compressors.moments import OptimizerMoments

StateDict = dict[str, dict[str, torch.Tensor]]
"""Kind -> parameter name -> tensor."""


class State:
    """Nothing is remembered (for methods that are unbiased, say), and the base of the others.

    Args:
        layout: the parameters.
        device: where the buffers are while a step is made.
    """

    owns_momentum: ClassVar[bool] = False
    """Whether the optimizer's momentum is applied to the local gradient, before it is accumulated."""
    accumulates_steps: ClassVar[bool] = False
    """True if what is sent are steps of the weights: update directions times `learning_rates`."""
    moments: ClassVar[Mapping[str, str]] = {}
    """Kinds of `state_dict` that the optimizer has without compression -> torch's names for them."""
    withheld: Set[str] = frozenset()
    """Parameters of which the average under way applies nothing."""
    buffers: tuple[str, ...] = ()
    """Names of the attributes that hold what is remembered, flat fp32 [n] each."""
    scratch: tuple[str, ...] = ()
    """Names of the attributes that hold what they will be after the step under way."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.started: set[str] = set()
        """Parameters that have stepped and have state here. The same on all ranks."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._moments = OptimizerMoments(layout, tuple(self.moments.values()))

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
        self._optimizer, self._parameters = optimizer, parameters
        self._moments.attach(optimizer if shares_moments else None, parameters)

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered."""
        return not self.started

    @property
    def unsent(self) -> torch.Tensor | None:
        """What is left to be sent, flat fp32 [n]; None for a state without such a thing."""
        return None

    def local_scales(self, workers: int) -> Sequence[torch.Tensor | float] | None:
        """How much of `unsent` is taken from each parameter, of `workers`, where this worker computes its gradient.

        None: it is computed at the weights that all ranks share.
        """
        return None

    def compensate(self, gradient: LocalGradient, out: torch.Tensor) -> None:
        """Write into `out` (fp32 [n]) what to send for this step's gradient."""
        gradient.copy_to(out)

    def subtract(self, decoded: Decoded) -> None:
        """Take out what was sent, as the others have decoded it."""

    def commit(self, moved: Set[str], out: torch.Tensor) -> torch.Tensor:
        """The optimizer has stepped: put the new values in force.

        Args:
            moved: parameters that it has stepped. The state of others stays as it was.
            out: what `compensate` has filled.

        Returns:
            fp32 [n], free for the next step's `out`.
        """
        return out

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """The gradient of the tensors that travel uncompressed, in a committed step: of this worker, and the mean.

        Args:
            own, mean: the square of the norm of what all workers have decoded, 0-d each.
        """

    def absorb(self, flat: torch.Tensor) -> None:
        """Let `flat` (fp32 [n]), which another rank remembered so far, be left to be sent too, where something is."""
        if self.unsent is not None:
            self.unsent.add_(flat)
            self.started = set(self.layout.names)

    def clear(self, names: Set[str]) -> None:
        """Forget everything of these parameters, after all of it was sent."""

    @property
    def remembered(self) -> list[torch.Tensor]:
        """All that a worker keeps for itself, to be averaged in place where several ranks become one worker."""
        return [getattr(self, name) for name in self.buffers]

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's moments that are computed here: torch's name -> flat fp32 [n]."""
        return {}

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        """What `compensate` has made of them."""
        return {}

    def hand_over(self, optimizer_state: Mapping[str, torch.Tensor], names: Set[str]) -> None:
        """Let the optimizer go on by itself with this state (flat fp32 [n] each) of the parameters in `names`."""

    def release(self) -> None:
        """Let the optimizer have its moments for itself: this state ends here."""

    def learning_rates(self) -> list[float] | None:
        """With `accumulates_steps`: the learning rate that is in the steps of each parameter. None otherwise."""
        return None

    def state_dict(self) -> StateDict:
        """Copies of everything, by kind and parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace everything by a `state_dict` of any layout; names that this layout lacks are left out."""

    def move(self, device: torch.device) -> None:
        """Keep the buffers on `device` between steps: without scratch where that is not the gradients' device."""
        for name in self.buffers:
            setattr(self, name, getattr(self, name).to(device))
        for name in self.scratch:
            n = self.layout.n if device == self.device else 0
            setattr(self, name, torch.empty(n, dtype=torch.float32, device=device))

    def _keep(self, moved: Set[str], old: torch.Tensor, new: torch.Tensor) -> None:
        """Copy the old values of parameters that have not moved into the new ones."""
        for name, (start, stop) in zip(self.layout.names, self.layout.bounds, strict=True):
            if name not in moved:
                new[start:stop] = old[start:stop]

    def _zero(self, names: Set[str], *flats: torch.Tensor) -> None:
        for name, (start, stop) in zip(self.layout.names, self.layout.bounds, strict=True):
            if name in names:
                for flat in flats:
                    flat[start:stop] = 0


class Residual(State):
    """Error feedback: what was not sent is added to the next gradient (Seide et al. 2014; Aji & Heafield 2017)."""

    buffers = ("residual",)

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self.residual = torch.zeros(layout.n, dtype=torch.float32, device=device)
        self._out = torch.empty(0, dtype=torch.float32, device=device)

    @property
    def unsent(self) -> torch.Tensor | None:
        """The residual."""
        return self.residual

    def compensate(self, gradient: LocalGradient, out: torch.Tensor) -> None:
        """out = residual + gradient."""
        self._out = out
        for piece in gradient.pieces():
            torch.add(self.residual[piece.part], piece.g, out=out[piece.part])

    def subtract(self, decoded: Decoded) -> None:
        decoded.subtract_from(self._out)

    def commit(self, moved: Set[str], out: torch.Tensor) -> torch.Tensor:
        self._keep(moved, self.residual, out)
        self._out, self.residual = self.residual, out
        self.started = self.started | (moved & set(self.layout.names))
        return self._out

    def clear(self, names: Set[str]) -> None:
        self._zero(names, self.residual)
        self.started = self.started - names

    def state_dict(self) -> StateDict:
        parts = self.layout.split(self.residual)
        return {"residual": {name: part for name, part in parts.items() if name in self.started}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.residual = self.layout.join(state["residual"], self.device)
        self.started = set(state["residual"]) & set(self.layout.names)

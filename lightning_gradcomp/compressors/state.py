"""What a worker remembers between steps because it was not sent: nothing, or a residual.

Momentum correction has states of its own: `SGDVelocity` for SGD, `AdamStep` for Adam and AdamW.

A step calls `compensate` (what should be sent now), `subtract` (take out what was sent) and `commit` (the step counts).
A step that is not committed, because a gradient was not finite on some rank, leaves the state as it was, to the bit:
new values are computed in other buffers, which `commit` exchanges for the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient

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
    makes_step: ClassVar[bool] = False
    """Whether what is sent are steps of the weights, which `apply` makes in place of the optimizer."""
    moments: ClassVar[Mapping[str, str]] = {}
    """Kinds of `state_dict` that the optimizer has without compression -> torch's names for them."""
    buffers: tuple[str, ...] = ()
    """Names of the attributes that hold what is remembered, flat fp32 [n] each."""
    scratch: tuple[str, ...] = ()
    """Names of the attributes that hold what they will be after the step under way."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.started: set[str] = set()
        """Parameters of which something is remembered: those that had a gradient on any rank. The same on all ranks."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: Sequence[torch.Tensor] = ()

    def attach(self, optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer, and the layout's parameters, for a state that holds the optimizer's momentum."""
        self._optimizer, self._parameters = optimizer, parameters

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
        """Make the step count.

        Args:
            moved: parameters that had a gradient on any rank. The state of others stays as it was.
            out: what `compensate` has filled.

        Returns:
            fp32 [n], free for the next step's `out`.
        """
        return out

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """The gradient of the tensors that travel uncompressed, in a step that counts: of this worker, and the mean.

        Args:
            own, mean: the square of the norm of what all workers have decoded, 0-d each.
        """

    def absorb(self, flat: torch.Tensor) -> None:
        """Let `flat` (fp32 [n]), which another rank remembered so far, be left to be sent too, where something is."""
        if self.unsent is not None:
            self.unsent.add_(flat)
            self.started = set(self.layout.names)

    def clear(self) -> None:
        """Forget everything, after all of it was sent."""

    @property
    def remembered(self) -> list[torch.Tensor]:
        """All that a worker remembers for itself, to be averaged in place where several ranks become one worker."""
        return [getattr(self, name) for name in self.buffers]

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The state of the attached optimizer that is held here: torch's name for it -> flat fp32 [n]."""
        return {}

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        """What `compensate` has made of it."""
        return {}

    def give_back(self, optimizer_state: Mapping[str, torch.Tensor], moved: Set[str]) -> None:
        """Give the attached optimizer this state (flat fp32 [n] each) of the parameters that have `moved`."""

    def apply(self, mean: Decoded, moved: Set[str]) -> None:
        """With `makes_step`: step the parameters that have `moved`, by the mean of what all workers have sent."""

    def assigned(self, mean: Decoded) -> None:
        """Without `makes_step`: the mean, of a loss without a scale, has been written into every `p.grad`."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """For the length of `optimizer.step()` after a step whose average holds the optimizer's momentum already."""
        return nullcontext()

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
            setattr(self, name, torch.empty(n, device=device))

    def _keep(self, moved: Set[str], old: torch.Tensor, new: torch.Tensor) -> None:
        """Copy the old values of parameters that have not moved into the new ones."""
        for name, (start, stop) in zip(self.layout.names, self.layout.bounds, strict=True):
            if name not in moved:
                new[start:stop] = old[start:stop]


class Residual(State):
    """Error feedback: what was not sent is added to the next gradient (Seide et al. 2014; Aji & Heafield 2017)."""

    buffers = ("residual",)

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self.residual = torch.zeros(layout.n, device=device)
        self._out = torch.empty(0, device=device)

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

    def clear(self) -> None:
        self.residual.zero_()
        self.started = set()

    def state_dict(self) -> StateDict:
        parts = self.layout.split(self.residual)
        return {"residual": {name: part for name, part in parts.items() if name in self.started}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.residual = self.layout.join(state["residual"], self.device)
        self.started = set(state["residual"]) & set(self.layout.names)

"""What is remembered between steps because it was not sent.

A memory is used in three moves a step: `compensate` returns what should be sent now, `forget` takes out what was,
`commit` makes the step count. A step that is not committed (a rank met a non-finite gradient) leaves the memory as it
was, to the bit: new values are made in buffers of their own, which commit exchanges for the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lightning_gradcomp.compressors.incoming import Incoming
from lightning_gradcomp.compressors.layout import Layout, cut
from lightning_gradcomp.compressors.sent import Sent
from lightning_gradcomp.lazy import torch


@dataclass(frozen=True)
class Momentum:
    """How `torch.optim.SGD` treats one parameter, read from its group at every step."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


def accumulate_velocity(
    g: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor | None,
    rule: Momentum,
    first: bool,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Momentum correction (Lin et al. 2018, §3.2, eq. 7), into `out`: u ← m·u + g, v ← v + u; Nesterov v ← v + g + m·u.

    u is kept in the form of torch's `momentum_buffer` (also for Nesterov, where the authors' code keeps m times it), so
    that a momentum changed by a schedule acts as it does in `torch.optim.SGD`, and the two can be exchanged. Weight
    decay λ·w is added to g first: inside the momentum it has the strength that it has in SGD. `first`: no earlier
    gradient, hence no dampening, as in torch. All tensors 1-D fp32 of one length.
    """
    m, damp = rule.momentum, 0.0 if first else rule.dampening
    new_u, new_v = out
    if w is not None and rule.weight_decay:
        g = torch.add(g, w, alpha=rule.weight_decay, out=new_v)
    if damp:
        torch.mul(u, m, out=new_u).add_(g, alpha=1 - damp)
    else:
        torch.add(g, u, alpha=m, out=new_u)
    torch.add(v, g if rule.nesterov or not m else new_u, out=new_v)
    if rule.nesterov:
        new_v.add_(new_u, alpha=m)


def move(books: Any, device: torch.device, *, scratch: bool) -> None:
    """Let what `books.kept` names lie on `device`, with buffers for the coming step beside it or without."""
    for name in books.kept:
        kept = getattr(books, name).to(device)
        setattr(books, name, kept)
        setattr(books, f"_{name}", torch.empty_like(kept) if scratch else kept.new_empty(0))


class Memory:
    """Nothing is remembered: for what loses nothing on average."""

    kept: tuple[str, ...] = ()
    """Names of the buffers that hold what is remembered. Beside each, with `_` before its name, lies that of the step
    under way."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.started: set[str] = set()
        """Parameters that something is remembered of: those that had a gradient on any rank. The same on all ranks, as
        is whatever is decided by it."""

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered: nothing was accumulated yet, or all was handed back."""
        return not self.started

    @property
    def unsent(self) -> torch.Tensor | None:
        """What is left to be sent, flat fp32 [n]; None for a memory that holds nothing of the kind."""
        return None

    def compensate(
        self, g: Incoming, rules: list[Momentum], moving: set[str], weights: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """What to send for this step's gradient g: flat fp32 [n].

        Args:
            rules: how SGD would treat each parameter, for a memory that owns the momentum.
            moving: the parameters that take part.
            weights: the parameters themselves, flat, for their decay.
        """
        return g.whole()

    def forget(self, sent: Sent) -> None:
        """Take out what was sent."""

    def commit(self, moved: Set[str] = frozenset()) -> None:
        """Make the step count. `moved`: what any rank had a gradient for, so that all agree on what is moving."""

    def absorb(self, flat: torch.Tensor) -> None:
        """Remember `flat` (fp32 [n]) too, which somebody else did so far."""

    def clear(self) -> None:
        """Forget everything, once it has been handed back."""

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Kind -> parameter name -> tensor: copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace everything by a `state_dict` of any layout; names that this layout lacks are left out."""


class Residual(Memory):
    """Error feedback: what was not sent is added to the next gradient (Seide et al. 2014; Aji & Heafield 2017)."""

    kept = ("residual",)

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self.residual, self._residual = torch.zeros(layout.n, device=device), torch.zeros(layout.n, device=device)

    @property
    def unsent(self) -> torch.Tensor | None:
        """The residual."""
        return self.residual

    def compensate(
        self, g: Incoming, rules: list[Momentum], moving: set[str], weights: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """The residual and the gradient."""
        for i, (start, stop) in enumerate(self.layout.bounds):
            for begin, end in cut(start, stop, self.device):
                part = slice(begin, end)
                torch.add(self.residual[part], g.piece(i, begin - start, end - start), out=self._residual[part])
        return self._residual

    def forget(self, sent: Sent) -> None:
        sent.take_from(self._residual)

    def commit(self, moved: Set[str] = frozenset()) -> None:
        self.residual, self._residual = self._residual, self.residual
        self.started = self.started | (moved & set(self.layout.names))

    def absorb(self, flat: torch.Tensor) -> None:
        self.residual.add_(flat)
        self.started = set(self.layout.names)

    def clear(self) -> None:
        self.residual.zero_()
        self.started = set()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        parts = self.layout.split(self.residual)
        return {"residual": {name: part for name, part in parts.items() if name in self.started}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.residual = self.layout.join(state["residual"], self.device)
        self.started = set(state["residual"]) & set(self.layout.names)


class Velocity(Memory):
    """DGC's memory: momentum u and accumulated velocity v of every compressed parameter, per rank, flat fp32."""

    kept = ("u", "v")

    def __init__(self, layout: Layout, device: torch.device, *, masking: bool) -> None:
        super().__init__(layout, device)
        self.masking = masking
        self.u, self.v, self._u, self._v = (torch.zeros(layout.n, device=device) for _ in range(4))
        self._started = self.started

    @property
    def unsent(self) -> torch.Tensor:
        """The accumulated velocity v."""
        return self.v

    def compensate(
        self, g: Incoming, rules: list[Momentum], moving: set[str], weights: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """The velocity to send from: v + u after this step's gradient g.

        A parameter that is new among those `moving` starts without dampening.
        """
        for i, ((start, stop), name, rule) in enumerate(zip(self.layout.bounds, self.layout.names, rules, strict=True)):
            for begin, end in cut(start, stop, self.device):
                part = slice(begin, end)
                out = self._u[part], self._v[part]
                if name in moving:
                    w = weights[i][begin - start : end - start] if weights else None
                    first, own = name not in self.started, g.piece(i, begin - start, end - start)
                    accumulate_velocity(own, self.u[part], self.v[part], w, rule, first, out)
                else:
                    out[0].copy_(self.u[part])
                    out[1].copy_(self.v[part])
        self._started = self.started | moving
        return self._v

    def forget(self, sent: Sent) -> None:
        """Take what was sent out of v; with momentum factor masking (§3.2, eq. 9) also stop the momentum there."""
        sent.take_from(self._v)
        if self.masking:
            sent.zero(self._u)

    @property
    def coming_momentum(self) -> torch.Tensor:
        """u as the step that is under way would leave it, flat."""
        return self._u

    def commit(self, moved: Set[str] = frozenset()) -> None:
        self.u, self._u = self._u, self.u
        self.v, self._v = self._v, self.v
        self.started = self._started | moved

    def adopt(self, name: str, buffer: torch.Tensor) -> None:
        """Start `name` with the momentum that the optimizer has gathered for it (the same on every rank)."""
        self.layout.views(self.u)[self.layout.names.index(name)].copy_(buffer)
        self.started.add(name)

    def absorb(self, flat: torch.Tensor) -> None:
        self.v.add_(flat)
        self.started = set(self.layout.names)

    def clear(self) -> None:
        self.u.zero_()
        self.v.zero_()
        self.started = set()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            key: {name: part for name, part in self.layout.split(flat).items() if name in self.started}
            for key, flat in (("momentum", self.u), ("velocity", self.v))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.u, self.v = (self.layout.join(state[key], self.device) for key in ("momentum", "velocity"))
        self.started = set(state["momentum"]) & set(self.layout.names)

"""Momentum correction (DGC): SGD's momentum is applied to the local gradient, and what was not sent is remembered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.compressors.state import State, StateDict
from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class SGDRule:
    """How `torch.optim.SGD` treats one parameter, read from its group at every step."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


RULE = [field.name for field in fields(SGDRule)]


def correct_momentum(
    g: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    rule: SGDRule,
    first: bool,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Momentum correction (Lin et al. 2018, §3.2, eq. 7), into `out`: u ← m·u + g, v ← v + u; Nesterov v ← v + g + m·u.

    u has the form of torch's `momentum_buffer` (also for Nesterov, where the authors' code keeps m times it), so that a
    momentum that a schedule changes acts as it does in `torch.optim.SGD`, and the two can be exchanged.

    Args:
        g, u, v: gradient with weight decay, momentum, velocity; fp32 [n].
        rule: of the parameter.
        first: no earlier gradient, hence no dampening, as in torch.
        out: for the new u and v. The new v may share g's memory.
    """
    m, damp = rule.momentum, 0.0 if first else rule.dampening
    new_u, new_v = out
    if damp:
        torch.mul(u, m, out=new_u).add_(g, alpha=1 - damp)
    else:
        torch.add(g, u, alpha=m, out=new_u)
    torch.add(v, g if rule.nesterov or not m else new_u, out=new_v)
    if rule.nesterov:
        new_v.add_(new_u, alpha=m)


class SGDVelocity(State):
    """Momentum correction's state (DGC): momentum u and accumulated velocity v of every parameter.

    Momentum and weight decay are applied to the local gradient, before it is accumulated. The optimizer then applies
    the average without them (averaging/optimizer_step.py). u is its `momentum_buffer`.

    Args:
        masking: momentum factor masking (Lin et al. 2018, §3.2): the momentum of what was sent is set to 0.
    """

    owns_momentum = True
    moments: ClassVar[Mapping[str, str]] = {"momentum": "momentum_buffer"}
    buffers = ("u", "v")
    scratch = ("_u",)

    def __init__(self, layout: Layout, device: torch.device, *, masking: bool) -> None:
        super().__init__(layout, device)
        self.masking = masking
        self.u, self.v, self._u = (torch.zeros(layout.n, dtype=torch.float32, device=device) for _ in range(3))
        self._out = torch.empty(0, dtype=torch.float32, device=device)
        self._first = set(layout.names)
        """Parameters without a momentum, hence without an earlier gradient."""

    @staticmethod
    def check_optimizer(what: str, optimizer: Any, allowed: str) -> None:
        """ValueError for anything but `torch.optim.SGD` itself that minimises.

        Args:
            what: whose optimizer it is.
            allowed: what would do.
        """
        if type(optimizer) is not torch.optim.SGD:
            cls = type(optimizer)
            raise refusal(what, None if optimizer is None else f"{cls.__module__}.{cls.__qualname__}", allowed)
        if any(group["maximize"] or group["differentiable"] for group in optimizer.param_groups):
            raise refusal(what, "SGD(maximize=True) or SGD(differentiable=True)", "SGD with both of them False")

    @property
    def unsent(self) -> torch.Tensor:
        """The accumulated velocity v."""
        return self.v

    def local_scales(self, workers: int) -> list[float]:
        """Learning rate / √workers: a worker's own velocity is so many times longer than the mean of all workers',
        where gradients are mostly noise.
        """
        groups = self._optimizer.param_groups if self._optimizer else []
        rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
        return [rates.get(id(parameter), 0.0) / math.sqrt(workers) for parameter in self._parameters]

    def _rules(self) -> list[SGDRule]:
        """What the optimizer's groups say of each parameter at this moment."""
        known = {
            id(parameter): SGDRule(**{key: group[key] for key in RULE})
            for group in (self._optimizer.param_groups if self._optimizer else [])
            for parameter in group["params"]
        }
        return [known.get(id(parameter), SGDRule()) for parameter in self._parameters]

    def _with_momentum(self, names: Set[str]) -> set[str]:
        """Those of which torch keeps a momentum too."""
        named = zip(self.layout.names, self._rules(), strict=True)
        return {name for name, rule in named if rule.momentum and name in names}

    def _read_momentum(self) -> None:
        for name, held in self._moments.read([self.u], self._with_momentum(set(self.layout.names))).items():
            self._first = self._first - {name} if held.get("momentum_buffer") is not None else self._first | {name}

    def compensate(self, gradient: LocalGradient, out: torch.Tensor) -> None:
        """out = the velocity after this step's gradient.

        Weight decay λ·w is added to the gradient first: inside the momentum it has the strength that it has in SGD.
        """
        self._read_momentum()
        self._out = out
        rules = [(r, name in self._first) for r, name in zip(self._rules(), self.layout.names, strict=True)]
        for piece in gradient.pieces(rules):
            (rule, first), part, g = rules[piece.numbers[0]], piece.part, piece.g
            if rule.weight_decay:
                g = piece.plus(self._parameters, rule.weight_decay, out[part])
            correct_momentum(g, self.u[part], self.v[part], rule, first, (self._u[part], out[part]))

    def subtract(self, decoded: Decoded) -> None:
        """Take what was sent out of v; with masking (eq. 9) also stop the momentum there."""
        decoded.subtract_from(self._out)
        if self.masking:
            decoded.zero(self._u)

    def commit(self, moved: Set[str], out: torch.Tensor) -> torch.Tensor:
        moved = moved & set(self.layout.names)
        self._keep(moved, self.u, self._u)
        self._keep(moved, self.v, out)
        self.u, self._u = self._u, self.u
        self._out, self.v = self.v, out
        self.started, self._first = self.started | moved, self._first - moved
        self._moments.write([self.u], self._with_momentum(self.started))
        return self._out

    def move(self, device: torch.device) -> None:
        """Keep the velocity on `device` between steps. The momentum stays, as that of any optimizer."""
        self.v = self.v.to(device)

    def clear(self, names: Set[str]) -> None:
        self._zero(names, self.v)
        self.started = self.started - names

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": self.u}

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": self._u}

    def hand_over(self, optimizer_state: Mapping[str, torch.Tensor], names: Set[str]) -> None:
        self._moments.hand_over([optimizer_state["momentum_buffer"]], self._with_momentum(names))

    def release(self) -> None:
        self._moments.hand_over([self.u], self._with_momentum(self.started))

    def state_dict(self) -> StateDict:
        self._read_momentum()
        return {
            key: {name: part for name, part in self.layout.split(flat).items() if name in self.started}
            for key, flat in (("momentum", self.u), ("velocity", self.v))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.u, self.v = (self.layout.join(state[key], self.device) for key in ("momentum", "velocity"))
        self.started = set(state["momentum"]) & set(self.layout.names)
        self._first = set(self.layout.names) - self.started
        self._moments.write([self.u], self._with_momentum(self.started))

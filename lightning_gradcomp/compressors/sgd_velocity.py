"""Momentum correction (DGC): SGD's momentum is applied to the local gradient, and what was not sent is remembered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded, Sparse, by_tensor, locate
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


@dataclass(frozen=True)
class SparseGradient:
    """A gradient that is 0 in all but a few places, as it was written.

    Args:
        grad: the gradient.
        version: how often torch has counted it as changed.
        places, values: flat positions (int64 [k]), and what is there.
    """

    grad: torch.Tensor
    version: int
    places: torch.Tensor
    values: torch.Tensor

    def still_in(self, parameter: torch.Tensor) -> bool:
        """Whether nobody has changed it since."""
        return parameter.grad is self.grad and self.grad._version == self.version

    @torch.no_grad()
    def descend(self, parameter: torch.Tensor, lr: float) -> None:
        """parameter -= lr · gradient, where that is not 0: a thousandth of the memory that a whole step reads.

        A gradient that somebody has changed takes a whole step, and none takes no step.
        """
        if self.still_in(parameter):
            view, index = locate(self.places, parameter)
            view[index] = torch.add(view[index], self.values, alpha=-lr)
        elif parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-lr)


WITHOUT_MOMENTUM = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}


class SGDVelocity(State):
    """Momentum correction's state (DGC): momentum u and accumulated velocity v of every parameter.

    Momentum and weight decay are applied to the local gradient, before it is accumulated, so they must not act again in
    the optimizer. Its groups are never written to: while it steps, `stepping` shows it others, in which the parameters
    whose momentum is here have none. Changing them for good would end up in checkpoints and conflict with schedulers.

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
        self.u, self.v, self._u = (torch.zeros(layout.n, device=device) for _ in range(3))
        self._out = torch.empty(0, device=device)
        self._sparse: dict[int, SparseGradient] = {}
        """id of a parameter -> what is in its `p.grad`."""

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
            id(parameter): SGDRule(**{key: group[key] for key in WITHOUT_MOMENTUM})
            for group in (self._optimizer.param_groups if self._optimizer else [])
            for parameter in group["params"]
        }
        return [known.get(id(parameter), SGDRule()) for parameter in self._parameters]

    def _borrow_momentum(self) -> None:
        """Take over the momentum that the optimizer has from dense steps."""
        for name, parameter, u in zip(self.layout.names, self._parameters, self.layout.views(self.u), strict=True):
            buffer = self._optimizer.state.get(parameter, {}).pop("momentum_buffer", None) if self._optimizer else None
            if buffer is not None and name not in self.started:
                u.copy_(buffer)
                self.started.add(name)

    def compensate(self, gradient: LocalGradient, out: torch.Tensor) -> None:
        """out = the velocity after this step's gradient.

        Weight decay λ·w is added to the gradient first: inside the momentum it has the strength that it has in SGD.
        """
        self._borrow_momentum()
        self._out = out
        rules = [(r, name not in self.started) for r, name in zip(self._rules(), self.layout.names, strict=True)]
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
        self._keep(moved, self.u, self._u)
        self._keep(moved, self.v, out)
        self.u, self._u = self._u, self.u
        self._out, self.v = self.v, out
        self.started = self.started | (moved & set(self.layout.names))
        return self._out

    def clear(self) -> None:
        self.u.zero_()
        self.v.zero_()
        self.started = set()

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": self.u}

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": self._u}

    def give_back(self, optimizer_state: Mapping[str, torch.Tensor], moved: Set[str]) -> None:
        assert self._optimizer is not None
        views = self.layout.views(optimizer_state["momentum_buffer"])
        for name, parameter, rule, u in zip(self.layout.names, self._parameters, self._rules(), views, strict=True):
            if rule.momentum and name in moved:
                self._optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(u)

    def assigned(self, mean: Decoded) -> None:
        self._sparse = {}
        if isinstance(mean, Sparse):
            for parameter, (places, values) in zip(self._parameters, by_tensor(mean, self.layout), strict=True):
                if parameter.grad is not None and places is not None and parameter.dtype == torch.float32:
                    written = SparseGradient(parameter.grad, parameter.grad._version, places, values)
                    self._sparse[id(parameter)] = written

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """While this is entered, `optimizer` applies neither momentum nor weight decay to the attached parameters.

        Those whose gradients are sparse, and as they were written, are stepped here, where they are not 0: at the end,
        since Lightning's `on_before_optimizer_step` may still change a gradient.
        """
        here, sparse, groups = {id(parameter) for parameter in self._parameters}, self._sparse, optimizer.param_groups
        left = [
            (parameter, sparse[id(parameter)], group)
            for group in groups
            for parameter in group["params"]
            if id(parameter) in sparse and sparse[id(parameter)].still_in(parameter)
        ]
        self._sparse = {}
        apart = {id(parameter) for parameter, *_ in left}
        optimizer.param_groups = [part for group in groups for part in _split(group, here, apart)]
        try:
            yield
        finally:
            optimizer.param_groups = groups
        for parameter, gradient, group in left:
            gradient.descend(parameter, float(group["lr"]))

    def state_dict(self) -> StateDict:
        return {
            key: {name: part for name, part in self.layout.split(flat).items() if name in self.started}
            for key, flat in (("momentum", self.u), ("velocity", self.v))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.u, self.v = (self.layout.join(state[key], self.device) for key in ("momentum", "velocity"))
        self.started = set(state["momentum"]) & set(self.layout.names)


def _split(group: dict[str, Any], here: set[int], apart: set[int]) -> list[dict[str, Any]]:
    """An optimizer's group as two, without those in `apart`: of the parameters in `here`, without momentum and
    decay, and of the others."""
    ours = [parameter for parameter in group["params"] if id(parameter) in here - apart]
    others = [parameter for parameter in group["params"] if id(parameter) not in here]
    return [{**group, **WITHOUT_MOMENTUM, "params": ours}, {**group, "params": others}]

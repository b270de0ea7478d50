"""Error feedback after the preconditioner: momentum correction for Adam and AdamW.

What a worker accumulates is the step that Adam would have made with its gradient (Kingma & Ba 2015, Algorithm 1;
decoupled weight decay: Loshchilov & Hutter 2019, Algorithm 2), so that what is sent late still moves the weights as far
as it would have moved them in time. Error feedback on the gradient does not do that under Adam: what arrives late in an
element that was silent meets a small second moment, and each instalment becomes a full step.

    rank i:   m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) ρ g²      u = lr · m̂ / (√v̂ + ε)
              e ← e + u                    s = C(e)                      e ← e - s
    all:      θ ← (1 - lr · λ) θ - mean s

Moments are each rank's own. So weights that were sent + the mean of e = the sum of the mean of all u, along the way.

ρ is the square of the mean gradient over that of the rank's own, so that v stands for what Adam has in DDP: the second
moment of the mean, which is up to N times smaller where the ranks' gradients differ by noise. It is measured on the
tensors that travel uncompressed, whose mean every rank knows (McCandlish et al. 2018, arXiv 1812.06162, measure noise
by the same norms).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded, by_tensor, locate
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.compressors.state import State, StateDict
from lightning_gradcomp.errors import refusal

MOMENTS = ("exp_avg", "exp_avg_sq")
"""m and v, by the names that they have in the state of torch's optimizers."""
UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's Adam that are not computed here."""


@dataclass(frozen=True)
class AdamRule:
    """How `torch.optim.Adam` or `AdamW` treats one parameter, read from its group at every step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    fused: bool

    @property
    def shrink(self) -> float:
        """What decoupled weight decay leaves of a weight in a step."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0


def add_adam_step(
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    e: torch.Tensor,
    rule: AdamRule,
    t: int,
    scale: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """m, v and e + u after a gradient, into `out`, in the order of operations of `torch.optim.Adam`.

    Args:
        g, m, v, e: gradient (with a weight decay that is not decoupled), moments, and what is not sent; fp32 [n].
        rule: of the parameter.
        t: the number of this step, from 1.
        scale: √ρ, 0-d.
        out: for the new m, v and e. The new e may share g's memory.
    """
    (beta1, beta2), (new_m, new_v, new_e) = rule.betas, out
    torch.lerp(m, g, 1 - beta1, out=new_m)
    scaled = torch.mul(g, scale, out=new_e)
    torch.mul(v, beta2, out=new_v).addcmul_(scaled, scaled, value=1 - beta2)
    denominator = torch.sqrt(new_v, out=new_e).div_((1 - beta2**t) ** 0.5).add_(rule.eps)
    torch.div(new_m, denominator, out=new_e).mul_(rule.lr / (1 - beta1**t)).add_(e)


def takes_optimizer(optimizer: Any) -> bool:
    """Whether this optimizer's step is computed here: `torch.optim.Adam` or `AdamW` itself, without rare options."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    return not any(group[option] for group in groups for option in UNSUPPORTED if option in group) and not any(
        isinstance(number, torch.Tensor) for group in groups for number in (group["lr"], *group["betas"])
    )


@contextmanager
def some_gradient(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """While this is entered, `optimizer` has a gradient of something, if only a zero of no parameter.

    Where all tensors are compressed (of LoRA, say), `AdamStep.apply` leaves none, and torch's `GradScaler` ends with an
    AssertionError.
    """
    groups = optimizer.param_groups
    if any(parameter.grad is not None for group in groups for parameter in group["params"]):
        yield
        return
    zero = torch.zeros(1, device=device)
    zero.grad = torch.zeros_like(zero)
    optimizer.param_groups = [*groups, {**groups[0], "params": [zero]}]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        optimizer.state.pop(zero, None)


class AdamStep(State):
    """Adam's moments of the local gradient, and the sum of its steps that were not sent yet.

    The optimizer's state holds the moments under torch's names all the time: as views of the buffers here, or, for
    weights that are not contiguous fp32, as copies with their type and strides. The averaged step is made by `apply`,
    not by the optimizer, for which these parameters have no gradient then.
    """

    owns_momentum = makes_step = True
    moments: ClassVar[Mapping[str, str]] = {kind: kind for kind in MOMENTS}
    buffers = ("unsent_step", *MOMENTS)
    scratch = ("_exp_avg", "_exp_avg_sq")

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        names = (*self.buffers, *self.scratch)
        self.unsent_step, self.exp_avg, self.exp_avg_sq, self._exp_avg, self._exp_avg_sq = (
            torch.zeros(layout.n, device=device) for _ in names
        )
        self._out = torch.empty(0, device=device)
        self._squares = torch.zeros(2, device=device)
        """Squared norms of this rank's gradient and of the mean, of uncompressed tensors: sums over steps, fading."""
        self._t = dict.fromkeys(layout.names, 0)
        self._shown: dict[str, torch.Tensor] = {}
        """Parameter name -> m as the optimizer's state holds it."""
        self._loaded: set[str] = set()
        """Parameters whose moments were loaded here, which the optimizer's state does not hold yet."""

    @staticmethod
    def check_optimizer(what: str, optimizer: Any, allowed: str) -> None:
        """ValueError for an optimizer whose step is not computed here.

        Args:
            what: whose optimizer it is.
            allowed: what would do.
        """
        if takes_optimizer(optimizer):
            return
        got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            options = [option for option in UNSUPPORTED if any(group.get(option) for group in optimizer.param_groups)]
            got += f"({', '.join(options) or 'a tensor as lr or betas'})"
        raise refusal(what, got, allowed)

    @property
    def unsent(self) -> torch.Tensor:
        """The sum of the steps that were not sent."""
        return self.unsent_step

    def _rules(self) -> list[AdamRule | None]:
        """What the optimizer's groups say of each parameter at this moment; None for one that it does not have."""
        decoupled = isinstance(self._optimizer, torch.optim.AdamW)
        known = {
            id(parameter): AdamRule(
                group["lr"],
                tuple(group["betas"]),
                group["eps"],
                group["weight_decay"],
                group.get("decoupled_weight_decay", decoupled),
                bool(group.get("fused")),
            )
            for group in (self._optimizer.param_groups if self._optimizer else [])
            for parameter in group["params"]
        }
        return [known.get(id(parameter)) for parameter in self._parameters]

    @property
    def local_scale(self) -> torch.Tensor:
        """√ρ, 0-d: the mean gradient's norm over that of this rank's own; 1 before anything was seen of the mean."""
        own, mean = self._squares
        return torch.where(own > 0, mean / own, 1.0).sqrt()

    def local_scales(self, workers: int) -> list[torch.Tensor]:
        """√ρ for all."""
        return [self.local_scale] * len(self._parameters)

    @property
    def remembered(self) -> list[torch.Tensor]:
        return [*super().remembered, self._squares]

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        beta2 = next((rule.betas[1] for rule in self._rules() if rule), 0.0)
        squares = beta2 * self._squares + torch.stack([own, mean])
        self._squares = torch.where(squares.isfinite().all(), squares, self._squares)  # squares of 2e19 are not

    def _take_over_moments(self) -> None:
        """Copy the moments of dense steps, or those that the optimizer has loaded."""
        assert self._optimizer is not None
        views = zip(self.layout.views(self.exp_avg), self.layout.views(self.exp_avg_sq), strict=True)
        for name, parameter, moments in zip(self.layout.names, self._parameters, views, strict=True):
            held = self._optimizer.state.get(parameter, {})
            if "exp_avg" not in held or name in self._loaded:
                continue
            if held["exp_avg"] is not self._shown.get(name) or name not in self.started:  # dense steps in between
                for kind, moment in zip(MOMENTS, moments, strict=True):
                    moment.copy_(held[kind])
                self._t[name] = int(held["step"])

    def _show_moments(self, names: Set[str]) -> None:
        """Let the optimizer's state hold views of the moments of these parameters, and the number of steps."""
        assert self._optimizer is not None
        views = zip(self.layout.views(self.exp_avg), self.layout.views(self.exp_avg_sq), strict=True)
        rules = self._rules()
        for name, parameter, rule, moments in zip(self.layout.names, self._parameters, rules, views, strict=True):
            if name in names and rule is not None:
                if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                    moments = tuple(torch.empty_like(parameter).copy_(moment) for moment in moments)
                held = self._optimizer.state[parameter]
                if "step" not in held:
                    held["step"] = torch.zeros((), device=parameter.device if rule.fused else "cpu")  # as torch's own
                held["step"].fill_(self._t[name])
                held.update(zip(MOMENTS, moments, strict=True))
                self._shown[name] = moments[0]
        self._loaded = self._loaded - names

    def compensate(self, gradient: LocalGradient, out: torch.Tensor) -> None:
        """out = what is not sent, with the step for this gradient."""
        self._take_over_moments()
        self._out, scale = out, self.local_scale
        rules = [(rule, self._t[name]) for rule, name in zip(self._rules(), self.layout.names, strict=True)]
        for piece in gradient.pieces(rules):
            (rule, t), part, g = rules[piece.numbers[0]], piece.part, piece.g
            if rule is None:
                out[part] = self.unsent_step[part]
                continue
            if rule.weight_decay and not rule.decoupled:
                g = piece.plus(self._parameters, rule.weight_decay, out[part])
            old = self.exp_avg[part], self.exp_avg_sq[part], self.unsent_step[part]
            new = self._exp_avg[part], self._exp_avg_sq[part], out[part]
            add_adam_step(g, *old, rule, t + 1, scale, new)

    def subtract(self, decoded: Decoded) -> None:
        decoded.subtract_from(self._out)

    def commit(self, moved: Set[str], out: torch.Tensor) -> torch.Tensor:
        self._keep(moved, self.exp_avg, self._exp_avg)
        self._keep(moved, self.exp_avg_sq, self._exp_avg_sq)
        self._keep(moved, self.unsent_step, out)
        self.exp_avg, self._exp_avg = self._exp_avg, self.exp_avg
        self.exp_avg_sq, self._exp_avg_sq = self._exp_avg_sq, self.exp_avg_sq
        self._out, self.unsent_step = self.unsent_step, out
        self.started = self.started | (moved & set(self.layout.names))
        self._t = {name: t + (name in moved) for name, t in self._t.items()}
        self._show_moments(self.started)
        return self._out

    @torch.no_grad()
    def apply(self, mean: Decoded, moved: Set[str]) -> None:
        """Decay the weights, if that is decoupled, and subtract the mean; `p.grad` becomes None."""
        tensors = zip(self.layout.names, self._parameters, self._rules(), by_tensor(mean, self.layout), strict=True)
        for name, parameter, rule, (places, values) in tensors:
            if name not in moved or rule is None:
                continue
            if rule.shrink != 1:
                parameter.mul_(rule.shrink)
            if places is None:
                parameter.sub_(values.view(parameter.shape))
            else:
                view, index = locate(places, parameter)
                view[index] -= values
            parameter.grad = None

    def move(self, device: torch.device) -> None:
        """Keep what is not sent on `device` between steps. The moments stay, as those of any optimizer."""
        self.unsent_step = self.unsent_step.to(device)

    def clear(self) -> None:
        self.unsent_step.zero_()
        self._squares.zero_()
        self.started = set()

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return {kind: getattr(self, kind) for kind in MOMENTS}

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        return {kind: getattr(self, f"_{kind}") for kind in MOMENTS}

    def give_back(self, optimizer_state: Mapping[str, torch.Tensor], moved: Set[str]) -> None:
        self._t = {name: t + (name in moved) for name, t in self._t.items()}
        for kind, mean in optimizer_state.items():
            self._keep(moved, getattr(self, kind), mean)
            getattr(self, kind).copy_(mean)
        self._show_moments(moved)

    def state_dict(self) -> StateDict:
        kinds: StateDict = {
            kind: {name: part for name, part in self.layout.split(getattr(self, kind)).items() if name in self.started}
            for kind in self.buffers
        }
        kinds["squares"] = {name: self._squares.clone() for name in kinds["exp_avg"]}  # of all tensors the same
        return {**kinds, "step": {name: torch.tensor(float(self._t[name])) for name in kinds["exp_avg"]}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for kind in self.buffers:
            setattr(self, kind, self.layout.join(state[kind], self.device))
        self.started = set(state["step"]) & set(self.layout.names)
        self._t.update({name: int(state["step"][name]) for name in self.started})
        self._loaded = set(self.started)
        for squares in state["squares"].values():
            self._squares = squares.to(self.device, copy=True)

"""Error feedback that accumulates momentum SGD's velocity (DGC) or Adam's step.

It reads the optimizer's options at every step. The mathematics is in `correct_momentum` and `add_adam_step`.

If gradients accumulate, the optimizer applies momentum to their average. Here momentum is applied to the local gradient
before it accumulates, and the optimizer applies the average without momentum
(averaging/optimizer_step.py). Updates that are sent late then move the weights as far as if sent at once.

For Adam and AdamW (Kingma & Ba 2015, Algorithm 1; decoupled weight decay: Loshchilov & Hutter 2019, Algorithm 2), error
feedback on the gradient does not achieve this. If an element has been silent, a late gradient meets a small second
moment, and each instalment becomes a full step. A worker therefore accumulates the steps that Adam would have made:

    rank i:   m ← β1 m + (1 - β1) g        v ← β v + (1 - β) ρ g²        u = lr · m̂ / (√v̂ + ε)
              e ← e + u                    s = C(e)                      e ← e - s
    all:      d = mean s / lr, in p.grad   θ ← (1 - lr · λ) θ - lr · d

Each rank has its own moments. At every step, sum of applied means of s + mean of e = sum of the means of u.

ρ is the squared norm of the mean gradient divided by that of the rank's own. v then estimates what Adam has in DDP: the
second moment of the mean, which is up to N times smaller if the ranks' gradients differ by noise. ρ is measured on the
uncompressed tensors, whose mean every rank has (McCandlish et al. 2018, arXiv 1812.06162, measure noise by the same
norms).

β = 1 - (1 - β2) min(ρ, 1). A rank has N times fewer gradients than the mean has, and v averages over N times more
steps. A rare gradient of one rank then makes the same step as in DDP: (1 - β) ρ is (1 - β2) / N², as for the mean,
which divides it by N. If a rank's own gradient is smaller than the mean, ρ is above 1 and has no bound; β stays β2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback, StateDict
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.errors import refusal

# Momentum SGD


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

    u equals torch's `momentum_buffer`, even with Nesterov, where the authors' code keeps m times it. The two can be
    exchanged, and a schedule that changes the momentum acts as in `torch.optim.SGD`.

    Args:
        g, u, v: gradient with weight decay, momentum, velocity; fp32 [n].
        first: True for a parameter's first gradient, which torch does not dampen.
        out: receives the new u and v. The new v may share g's memory.
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


class SGDVelocity(ErrorFeedback):
    """Momentum correction for SGD (Lin et al. 2018): the velocity v accumulates, the momentum u is `momentum_buffer`.

    Args:
        masking: set the momentum of sent entries to 0 (momentum factor masking, §3.2).
    """

    kind = "velocity"
    moment_kinds: ClassVar[Mapping[str, str]] = {"momentum": "momentum_buffer"}
    owns_momentum = True

    def __init__(self, *, masking: bool) -> None:
        self.masking = masking

    def _options(self) -> list[SGDRule]:
        options = [field.name for field in fields(SGDRule)]
        groups = _groups(self.optimizer, self.parameters)
        return [SGDRule(**{key: group[key] for key in options}) if group else SGDRule() for group in groups]

    def sharing(self, names: Iterable[str]) -> set[str]:
        """The parameters that have momentum."""
        with_momentum = {name for name, rule in zip(self.layout.names, self._options(), strict=True) if rule.momentum}
        return with_momentum & set(names)

    def rules(self) -> list[tuple[SGDRule, bool]]:
        """Each parameter's options, and True in its first step."""
        return [(o, not self.moments.steps[name]) for o, name in zip(self._options(), self.layout.names, strict=True)]

    def accumulate(self, flat: torch.Tensor, place: slice, rule: tuple[SGDRule, bool], unsent: torch.Tensor) -> None:
        """gradient ← the new velocity.

        Weight decay λ·w is first added to the gradient, so that momentum applies to it as in SGD.
        """
        [u], [new_u], (options, first), g = self.moments.flats, self.moments.next, rule, flat[place]
        if options.weight_decay:
            _decay(self, flat, place, options.weight_decay)
        correct_momentum(g, u[place], unsent[place], options, first, (new_u[place], g))

    def after_sending(self, decoded: Decoded) -> None:
        """With masking (eq. 9), set the momentum of the sent entries to 0."""
        if self.masking:
            decoded.zero(self.moments.next[0])

    def local_scales(self, workers: int) -> list[float]:
        """Learning rate / √workers. If gradients are mostly noise, a worker's own velocity is √workers times longer
        than the mean of all workers'.
        """
        groups = _groups(self.optimizer, self.parameters)
        return [float(group["lr"] if group else 0.0) / math.sqrt(workers) for group in groups]


def check_sgd(what: str, optimizer: Any, allowed: str) -> None:
    """Raises ValueError unless this is `torch.optim.SGD` itself without `maximize` or `differentiable`."""
    if type(optimizer) is not torch.optim.SGD:
        cls = type(optimizer)
        raise refusal(what, None if optimizer is None else f"{cls.__module__}.{cls.__qualname__}", allowed)
    if any(group["maximize"] or group["differentiable"] for group in optimizer.param_groups):
        raise refusal(what, "SGD(maximize=True) or SGD(differentiable=True)", "SGD with both of them False")


# Adam

UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's Adam that are not supported here."""


@dataclass(frozen=True)
class AdamRule:
    """How `torch.optim.Adam` or `AdamW` treats one parameter, read from its group at every step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool


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
    """Write m, v and e + u after a gradient into `out`, in the order of operations of `torch.optim.Adam`.

    Args:
        g, m, v, e: gradient (with weight decay unless it is decoupled), moments, and unsent steps; fp32 [n].
        t: the number of this step, from 1.
        scale: √ρ, 0-d.
        out: receives the new m, v and e. The new e may share g's memory.
    """
    (beta1, beta2), (new_m, new_v, new_e) = rule.betas, out
    share = (1 - beta2) * scale.square().clamp(max=1)  # 1 - β
    torch.lerp(m, g, 1 - beta1, out=new_m)
    scaled = torch.mul(g, scale * share.sqrt(), out=new_e)
    torch.mul(v, 1 - share, out=new_v).addcmul_(scaled, scaled)
    correction = -torch.expm1(t * torch.log1p(-share))  # 1 - βᵗ
    denominator = torch.sqrt(new_v, out=new_e).div_(correction.sqrt()).add_(rule.eps)
    torch.div(new_m, denominator, out=new_e).mul_(rule.lr / (1 - beta1**t)).add_(e)


class AdamStep(ErrorFeedback):
    """The sum of Adam's unsent steps. A parameter whose learning rate is 0 sends nothing."""

    kind = "unsent_step"
    moment_kinds: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    counts_steps = owns_momentum = accumulates_steps = True

    def start(self, layout: Layout, device: torch.device) -> ErrorFeedback:
        self._squares = torch.zeros(2, dtype=torch.float32, device=device)
        """Squared norms of this rank's uncompressed gradient and of the mean: sums over steps that decay by β2."""
        self._now: list[AdamRule | None] = []
        """Each parameter's options in the latest step."""
        self._scale = self.local_scale
        """`local_scale` in the latest step."""
        return super().start(layout, device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, self._squares]

    @property
    def local_scale(self) -> torch.Tensor:
        """√ρ, 0-d: the mean gradient's norm divided by that of this rank's own; 1 while either is 0."""
        own, mean = self._squares
        return torch.where((own > 0) & (mean > 0), mean / own, 1.0).sqrt()

    def local_scales(self, workers: int) -> list[torch.Tensor]:
        return [self.local_scale] * len(self.parameters)

    def rules(self) -> list[tuple[AdamRule | None, int]]:
        """Each parameter's options (None if the optimizer does not hold it), and its number of steps so far."""
        decoupled, groups = isinstance(self.optimizer, torch.optim.AdamW), _groups(self.optimizer, self.parameters)
        self._scale = self.local_scale
        self._now = [_adam_rule(group, decoupled) if group else None for group in groups]
        named = list(zip(self.layout.names, self._now, strict=True))
        self.withheld = {name for name, options in named if options is None or options.lr == 0}
        return [(options, self.moments.steps[name]) for name, options in named]

    def accumulate(
        self, flat: torch.Tensor, place: slice, rule: tuple[AdamRule | None, int], unsent: torch.Tensor
    ) -> None:
        (options, t), g = rule, flat[place]
        if options is not None:
            if options.weight_decay and not options.decoupled:
                _decay(self, flat, place, options.weight_decay)
            m, v = (each[place] for each in self.moments.flats)
            new_m, new_v = (each[place] for each in self.moments.next)
            add_adam_step(g, m, v, unsent[place], options, t + 1, self._scale, (new_m, new_v, g))
        if options is None or options.lr == 0:
            g.zero_()

    def observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        beta2 = next((rule.betas[1] for rule in self._now if rule), 0.0)
        squares = beta2 * self._squares + torch.stack([own, mean])
        self._squares = torch.where(squares.isfinite().all(), squares, self._squares)  # norms above 2e19 overflow

    def learning_rates(self) -> list[float]:
        return [rule.lr if rule else 0.0 for rule in self._now]

    def clear(self, names: Set[str]) -> None:
        super().clear(names)
        if self.empty:
            self._squares.zero_()

    def state_dict(self) -> StateDict:
        state = super().state_dict()
        return {**state, "squares": {name: self._squares.clone() for name in state["step"]}}  # the same for all tensors

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for squares in state["squares"].values():
            self._squares = squares.to(self._squares.device, copy=True)
        super().load_state_dict(state)


def _adam_rule(group: dict[str, Any], decoupled: bool) -> AdamRule:
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return AdamRule(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"], decoupled)


def is_adam(optimizer: Any) -> bool:
    """True if this is `torch.optim.Adam` or `AdamW` itself, without `UNSUPPORTED` options or tensors as lr or betas."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    return not any(group[option] for group in groups for option in UNSUPPORTED if option in group) and not any(
        isinstance(number, torch.Tensor) for group in groups for number in (group["lr"], *group["betas"])
    )


def check_adam(what: str, optimizer: Any, allowed: str) -> None:
    """Raises ValueError unless `is_adam(optimizer)`, an instance of Adam or AdamW, or of a subclass."""
    if is_adam(optimizer):
        return
    got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        options = [option for option in UNSUPPORTED if any(group.get(option) for group in optimizer.param_groups)]
        got += f"({', '.join(options) or 'a tensor as lr or betas'})"
    raise refusal(what, got, allowed)


def _groups(optimizer: Any, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any] | None]:
    """Each parameter's group in the optimizer; None if the optimizer does not hold it."""
    groups = optimizer.param_groups if optimizer else []
    known = {id(parameter): group for group in groups for parameter in group["params"]}
    return [known.get(id(parameter)) for parameter in parameters]


def _decay(state: ErrorFeedback, flat: torch.Tensor, place: slice, weight_decay: float) -> None:
    weights = state.layout.cut(state.parameters, place)
    torch._foreach_add_(flat[place].split([len(each) for each in weights]), weights, alpha=weight_decay)

"""Error feedback after the preconditioner: momentum correction for Adam and AdamW.

What a worker accumulates is the step that Adam would have made with its gradient (Kingma & Ba 2015, Algorithm 1;
decoupled weight decay: Loshchilov & Hutter 2019, Algorithm 2), so that what is sent late still moves the weights as far
as it would have moved them in time. Error feedback on the gradient does not do that under Adam: what arrives late in an
element that was silent meets a small second moment, and each instalment becomes a full step.

    rank i:   m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) ρ g²      u = lr · m̂ / (√v̂ + ε)
              e ← e + u                    s = C(e)                      e ← e - s
    all:      d = mean s / lr, in p.grad   θ ← (1 - lr · λ) θ - lr · d

Moments are each rank's own. So weights that were sent + the mean of e = the sum of the mean of all u, along the way.

ρ is the square of the mean gradient over that of the rank's own, so that v stands for what Adam has in DDP: the second
moment of the mean, which is up to N times smaller where the ranks' gradients differ by noise. It is measured on the
tensors that travel uncompressed, whose mean every rank knows (McCandlish et al. 2018, arXiv 1812.06162, measure noise
by the same norms).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded
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


class AdamStep(State):
    """Adam's moments of the local gradient, and the sum of its steps that were not sent yet.

    The optimizer's state holds the moments under torch's names, and the optimizer applies the averaged step
    (averaging/optimizer_step.py). A parameter whose learning rate is 0 sends nothing.
    """

    owns_momentum = accumulates_steps = True
    moments: ClassVar[Mapping[str, str]] = {kind: kind for kind in MOMENTS}
    buffers = ("unsent_step", *MOMENTS)
    scratch = ("_exp_avg", "_exp_avg_sq")

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        names = (*self.buffers, *self.scratch)
        self.unsent_step, self.exp_avg, self.exp_avg_sq, self._exp_avg, self._exp_avg_sq = (
            torch.zeros(layout.n, dtype=torch.float32, device=device) for _ in names
        )
        self._out = torch.empty(0, dtype=torch.float32, device=device)
        self._squares = torch.zeros(2, dtype=torch.float32, device=device)
        """Squared norms of this rank's gradient and of the mean, of uncompressed tensors: sums over steps, fading."""
        self._t = dict.fromkeys(layout.names, 0)
        self._now: list[AdamRule | None] = []
        """What the optimizer's groups said of each parameter in the latest `compensate`."""

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
        beta2 = next((rule.betas[1] for rule in self._now if rule), 0.0)
        squares = beta2 * self._squares + torch.stack([own, mean])
        self._squares = torch.where(squares.isfinite().all(), squares, self._squares)  # squares of 2e19 are not

    def learning_rates(self) -> list[float]:
        return [rule.lr if rule else 0.0 for rule in self._now]

    def _read_moments(self) -> None:
        for name, held in self._moments.read([self.exp_avg, self.exp_avg_sq], set(self.layout.names)).items():
            self._t[name] = int(held.get("step", 0))

    def _count_steps(self, states: Mapping[str, Any]) -> None:
        """Let the optimizer's state hold the number of steps too."""
        groups = self._optimizer.param_groups if self._optimizer else []
        fused = any(group.get("fused") for group in groups)
        for name, held in states.items():
            if "step" not in held:  # on the device that torch would choose
                device = held["exp_avg"].device if fused else torch.device("cpu")
                held["step"] = torch.zeros((), dtype=torch.float32, device=device)
            held["step"].fill_(self._t[name])

    def compensate(self, gradient: LocalGradient, out: torch.Tensor) -> None:
        """out = what is not sent, with the step for this gradient."""
        self._read_moments()
        self._out, scale = out, self.local_scale
        self._now = self._rules()
        rules = [(rule, self._t[name]) for rule, name in zip(self._now, self.layout.names, strict=True)]
        named = zip(self.layout.names, rules, strict=True)
        self.withheld = {name for name, (rule, _) in named if rule is None or rule.lr == 0}
        for piece in gradient.pieces(rules):
            (rule, t), part, g = rules[piece.numbers[0]], piece.part, piece.g
            if rule is None:
                out[part] = 0
                continue
            if rule.weight_decay and not rule.decoupled:
                g = piece.plus(self._parameters, rule.weight_decay, out[part])
            old = self.exp_avg[part], self.exp_avg_sq[part], self.unsent_step[part]
            new = self._exp_avg[part], self._exp_avg_sq[part], out[part]
            add_adam_step(g, *old, rule, t + 1, scale, new)
            if rule.lr == 0:
                out[part] = 0

    def subtract(self, decoded: Decoded) -> None:
        decoded.subtract_from(self._out)

    def commit(self, moved: Set[str], out: torch.Tensor) -> torch.Tensor:
        moved = moved & set(self.layout.names)
        self._keep(moved, self.exp_avg, self._exp_avg)
        self._keep(moved, self.exp_avg_sq, self._exp_avg_sq)
        self._keep(moved - self.withheld, self.unsent_step, out)
        self.exp_avg, self._exp_avg = self._exp_avg, self.exp_avg
        self.exp_avg_sq, self._exp_avg_sq = self._exp_avg_sq, self.exp_avg_sq
        self._out, self.unsent_step = self.unsent_step, out
        self.started = self.started | moved
        self._count(moved)
        self._count_steps(self._moments.write([self.exp_avg, self.exp_avg_sq], self.started))
        return self._out

    def _count(self, moved: Set[str]) -> None:
        self._t = {name: t + (name in moved) for name, t in self._t.items()}

    def move(self, device: torch.device) -> None:
        """Keep what is not sent on `device` between steps. The moments stay, as those of any optimizer."""
        self.unsent_step = self.unsent_step.to(device)

    def clear(self, names: Set[str]) -> None:
        names = names - self.withheld
        self._zero(names, self.unsent_step)
        self.started = self.started - names
        if not self.started:
            self._squares.zero_()

    @property
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return {kind: getattr(self, kind) for kind in MOMENTS}

    @property
    def next_optimizer_state(self) -> dict[str, torch.Tensor]:
        return {kind: getattr(self, f"_{kind}") for kind in MOMENTS}

    def hand_over(self, optimizer_state: Mapping[str, torch.Tensor], names: Set[str]) -> None:
        self._count(names)
        for kind, mean in optimizer_state.items():
            self._keep(names, getattr(self, kind), mean)
            getattr(self, kind).copy_(mean)
        self._hand_over(names)

    def release(self) -> None:
        self._hand_over(self.started)

    def _hand_over(self, names: Set[str]) -> None:
        self._count_steps(self._moments.hand_over([self.exp_avg, self.exp_avg_sq], names & set(self.layout.names)))

    def state_dict(self) -> StateDict:
        self._read_moments()
        kinds: StateDict = {
            kind: {name: part for name, part in self.layout.split(getattr(self, kind)).items() if name in self.started}
            for kind in self.buffers
        }
        kinds["squares"] = {name: self._squares.clone() for name in kinds["exp_avg"]}  # of all tensors the same
        return {
            **kinds,
            "step": {name: torch.tensor(float(self._t[name]), dtype=torch.float32) for name in kinds["exp_avg"]},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for kind in self.buffers:
            setattr(self, kind, self.layout.join(state[kind], self.device))
        self.started = set(state["step"]) & set(self.layout.names)
        self._t.update({name: int(state["step"][name]) for name in self.started})
        for squares in state["squares"].values():
            self._squares = squares.to(self.device, copy=True)
        self._count_steps(self._moments.write([self.exp_avg, self.exp_avg_sq], self.started))

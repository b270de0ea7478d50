"""The anchor: what all ranks agree on while each one's weights are its own; and how one's own weights follow it.

Zhu, Lin, Lu, Lin, Han: Delayed Gradient Averaging: Tolerate the Communication Latency for Federated Learning, NeurIPS
2021. A rank goes on training while the sum of its last K gradients G_j travels, and D steps later replaces its own by
everybody's: w_j -= lr · (mean G - G_j). Here what the optimizer added, U_j, travels: w_j += mean U - U_j. For SGD at a
constant learning rate that is the same; with momentum, Adam, clipping, schedules or skipped steps only updates cancel
exactly.

z is what all ranks agree on, to the bit: all that has arrived so far. `base` is where the rank's weights stood when it
sent its last U = base - z. When mean U arrives, z += mean U, and the weights become z + (w - base): all that is common,
and what was added locally since. With a delay of 0 they become z.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_gradcomp.errors import refusal


class Anchor(nn.Module):
    """z as a module: fp32 parameters with the model's names, and rounds' updates, negated, as their gradients.

    An optimizer can step it, and a GradientAverager average it.

    Args:
        model: whose weights it starts with.
        stale_only: whether a rank's own steps are kept out of its weights.

    Raises:
        ValueError: a parameter that fp32 can't hold.
    """

    def __init__(self, model: nn.Module, *, stale_only: bool = False) -> None:
        super().__init__()
        self.stale_only = stale_only
        live = {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}
        for name, parameter in live.items():
            if parameter.itemsize > 4:
                raise refusal(f"parameter {name!r}", parameter.dtype, "16 or 32 bits: updates travel in fp32")
            path, _, last = name.rpartition(".")
            _room(self, path).register_parameter(last, nn.Parameter(parameter.detach().float().clone()))
        self._every = [(z, live[name]) for name, z in self.named_parameters()]
        self._base: list[torch.Tensor] = []
        self._apart: list[torch.Tensor] = []
        """With `stale_only`, what the rank's own steps add up to since it last sent."""
        self.follow()

    @property
    def stale(self) -> bool:
        """Whether a parameter was frozen or unfrozen since `follow`."""
        return any(z.requires_grad != w.requires_grad for z, w in self._every)

    def follow(self) -> None:
        """Go on with the parameters that train now; nothing is under way."""
        for z, w in self._every:
            z.requires_grad_(w.requires_grad).grad = None
        self._pairs = [(z, w) for z, w in self._every if w.requires_grad]
        self._apart = [torch.zeros_like(z) for z, _ in self._pairs] if self.stale_only else []

    @torch.no_grad()
    def begin(self) -> None:
        """All ranks hold the same weights now: so does z."""
        for z, w in self._pairs:
            z.copy_(w)

    @torch.no_grad()
    def after_step(self) -> None:
        """The optimizer has stepped. With `stale_only`, note what it added, and take it back."""
        if self.stale_only:
            for apart, (z, w) in zip(self._apart, self._pairs, strict=True):
                apart.add_(w - z)
            self._go_to_z()

    @torch.no_grad()
    def take_update(self) -> bool:
        """-U into the gradients: z - w, what the rank's steps have added since nothing was under way, negated.

        Returns:
            Whether it is finite. If not, it is 0 instead, and the weights go back to z.
        """
        updates = [apart.neg() for apart in self._apart] if self.stale_only else [z - w for z, w in self._pairs]
        finite = bool(torch.stack([update.isfinite().all() for update in updates]).all())
        if not finite:
            updates = [torch.zeros_like(update) for update in updates]
            self.rest()
        for (z, _), update in zip(self._pairs, updates, strict=True):
            z.grad = update
        return finite

    @torch.no_grad()
    def depart(self) -> None:
        """The update is on its way: what is added from now on belongs to the next round."""
        if self.stale_only:
            for apart in self._apart:
                apart.zero_()
        else:
            self._base = [w.detach().clone() for _, w in self._pairs]

    @torch.no_grad()
    def rejoin(self) -> float:
        """z holds the average of what was under way: let it take the place of the rank's own part of it.

        Returns:
            How far the rank's weights were from z's new value when it sent them.
        """
        if self.stale_only:
            self._go_to_z()
            return 0.0
        squares = []
        for base, (z, w) in zip(self._base, self._pairs, strict=True):
            squares.append((base - z).square().sum())
            w.copy_(z + (w - base))  # in fp32, also where the weights have 16 bits
        self._base = []
        return float(torch.stack(squares).sum()) ** 0.5

    @torch.no_grad()
    def rest(self) -> None:
        """The weights become z; what the rank has added since is in it, or lost."""
        self._go_to_z()
        self._base = []
        for apart in self._apart:
            apart.zero_()

    def _go_to_z(self) -> None:
        for z, w in self._pairs:
            w.copy_(z)

    def length(self) -> float:
        """Of z as one vector."""
        return float(torch.stack([z.detach().square().sum() for z, _ in self._pairs]).sum()) ** 0.5


def _room(module: nn.Module, path: str) -> nn.Module:
    """The module at `path` inside `module`, made where there is none."""
    for part in path.split(".") if path else []:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module

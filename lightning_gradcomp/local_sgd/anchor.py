"""The anchor: the weights that all ranks agree on, while each rank trains its own copy of the model.

Zhu, Lin, Lu, Lin, Han: Delayed Gradient Averaging: Tolerate the Communication Latency for Federated Learning, NeurIPS
2021. Rank j sends the sum G_j of the gradients of its last K steps and continues to train. D steps later it replaces
its own gradients with the mean: w_j -= lr · (mean G - G_j). Here rank j sends its update U_j, the change that its
optimizer made to the weights in the round: w_j += mean U - U_j. For SGD at a constant learning rate the two are
equivalent. With momentum, Adam, clipping, learning rate schedules or skipped steps, only updates cancel exactly.

The anchor z is bit-identical on all ranks: the initial weights plus every mean update applied so far. A rank takes a
snapshot s of its weights w when it sends U = s - z. When mean U arrives, z += mean U and w = z + (w - s): the anchor
plus the local steps since the snapshot. With D = 0 this reduces to w = z.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_gradcomp.averaging.trainable import check_trainable
from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import refusal


class Anchor:
    """z: a copy of the model's parameters, in fp32 if trainable. Their gradients are the pseudo-gradients -U.

    A torch optimizer can therefore step them, and a GradientAverager can average them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.module = nn.Module()
        """Holds the parameters z."""
        self.live = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        """The model's own parameters, by name."""
        for name, parameter in self.live.items():
            path, _, last = name.rpartition(".")
            dtype = torch.float32 if _fits_fp32(parameter) else parameter.dtype
            z = nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
            _submodule(self.module, path).register_parameter(last, z)
        self._all_pairs = [(z, self.live[name]) for name, z in self.module.named_parameters()]
        self._snapshot: list[torch.Tensor] = []
        """The weights when the pending update was sent."""
        self.refresh_trainable()

    @property
    def num_elements(self) -> int:
        """Number of elements in an update: those of the trainable parameters."""
        return sum(z.numel() for z, _ in self._pairs)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The model's parameters whose updates are averaged."""
        return [w for _, w in self._pairs]

    @property
    def device(self) -> torch.device:
        """The device of updates."""
        return self._all_pairs[0][0].device

    @property
    def trainable_changed(self) -> bool:
        """True if a parameter of the model was frozen or unfrozen since `refresh_trainable`."""
        return any(z.requires_grad != w.requires_grad for z, w in self._all_pairs)

    def refresh_trainable(self) -> None:
        """Lay out updates for the parameters that are trainable now. No update may be pending.

        Raises ValueError if one is not a dense 16- or 32-bit tensor.
        """
        check_trainable(self._model)
        for name, w in self.live.items():
            if w.requires_grad and not _fits_fp32(w):
                raise refusal(f"parameter {name!r}", w.dtype, "16 or 32 bits: updates are sent in fp32")
        for z, w in self._all_pairs:
            z.requires_grad_(w.requires_grad).grad = None
        self._pairs = [(z, w) for z, w in self._all_pairs if w.requires_grad]

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """z = w. The model's weights must be the same on all ranks."""
        for z, w in self._pairs:
            z.copy_(w)

    @torch.no_grad()
    def set_pseudo_gradients(self) -> bool:
        """Set the gradients of z to -U = z - w, the negated sum of the local steps since the last snapshot.

        Returns False if U is not finite. U is then set to 0 and the weights to z.
        """
        updates = [z - w for z, w in self._pairs]
        finite = bool(torch.stack([update.isfinite().all() for update in updates]).all())
        if not finite:
            updates = [torch.zeros_like(update) for update in updates]
            self.reset_model()
        for (z, _), update in zip(self._pairs, updates, strict=True):
            z.grad = update
        return finite

    @torch.no_grad()
    def snapshot_model(self, share: float) -> None:
        """Save a copy of the weights when their update is sent. Later steps belong to the next round.

        A `share` of the update stays in the weights until the average arrives.
        """
        if share != 1:
            for z, w in self._pairs:
                w.copy_(z + share * (w - z))
        self._snapshot = [w.detach().clone() for _, w in self._pairs]

    @torch.no_grad()
    def apply_average(self) -> float:
        """w = z + (w - snapshot): replace the rank's own pending update with the average, which is in z.

        Returns the L2 distance between the snapshot and z.
        """
        squares = []
        for snapshot, (z, w) in zip(self._snapshot, self._pairs, strict=True):
            squares.append((snapshot - z).square().sum())
            w.copy_(z + (w - snapshot))  # in fp32, even for 16-bit weights
        self._snapshot = []
        return float(torch.stack(squares).sum()) ** 0.5

    @torch.no_grad()
    def reset_model(self) -> None:
        """w = z. Drops local steps that are not in z."""
        for z, w in self._pairs:
            w.copy_(z)
        self._snapshot = []

    def norm(self) -> float:
        """L2 norm of z."""
        return float(torch.stack([z.detach().square().sum() for z, _ in self._pairs]).sum()) ** 0.5


def _fits_fp32(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.itemsize <= 4


def _submodule(module: nn.Module, path: str) -> nn.Module:
    """The submodule of `module` at `path`; missing modules on the path are added."""
    for part in path.split(".") if path else []:
        if part not in module._modules:
            setattr(module, part, nn.Module())
        module = module._modules[part]  # pyrefly: ignore[bad-assignment] - not getattr: `part` may be a method's name
    return module

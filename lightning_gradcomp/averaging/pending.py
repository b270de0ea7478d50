"""An average between `GradientAverager.average` and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.averaging.step import Average


class Pending:
    """An average that no optimizer step has used yet.

    Args:
        average: the average's outcome.
        named: name and parameter of everything that was averaged, as in the model.
        optimizers: the optimizers whose steps use it.
    """

    def __init__(
        self,
        average: Average,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.average, self._optimizers = average, optimizers
        self._named = [(name, p) for name, p in named if name in average.names and p.grad is not None]
        self._written = {id(p): (p.grad, _versions(p.grad)) for _, p in self._named if p.grad is not None}

    def belongs_to(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """True if this optimizer's step uses it."""
        return optimizer is None or any(optimizer is each for each in self._optimizers)

    def _is_untouched(self, parameter: nn.Parameter) -> bool:
        grad, versions = self._written.get(id(parameter), (None, (0, 0)))
        return grad is not None and parameter.grad is grad and _versions(grad) == versions

    @property
    def is_in_gradients(self) -> bool:
        """True if error feedback is uncommitted and some `p.grad` still holds the average."""
        return self.average.commit is not None and any(self._is_untouched(p) for _, p in self._named)

    def used(self) -> set[str]:
        """Names of the parameters whose average is still in `p.grad`, neither None nor zeroed."""
        present = [(name, p, p.grad) for name, p in self._named if p.grad is not None]
        names = {name for name, _, _ in present}
        touched = [(name, local(grad)) for name, p, grad in present if p.numel() and not self._is_untouched(p)]
        if not touched:
            return names
        largest = torch.stack([grad.abs().max().float() for _, grad in touched]).tolist()
        zero = {name for (name, _), most in zip(touched, largest, strict=True) if most == 0}
        return names - {name for name in zero if bool(self.average.values(name).any())}


def _versions(grad: torch.Tensor) -> tuple[int, int]:
    """torch's counts of writes to `grad`. A DTensor and its local part have separate counts."""
    return grad._version, local(grad)._version

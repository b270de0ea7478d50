"""What every compressor is: options that check themselves, and which tensors it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

from lightning_gradcomp.compressors.schedules import Schedule
from lightning_gradcomp.errors import refusal


@dataclass(kw_only=True, slots=True)
class Compressor:
    """Options that all compressors share.

    Args:
        min_elements: tensors with fewer elements travel uncompressed, as all 1-D tensors do (biases, norm weights).
        exclude: shell patterns of parameter names that travel uncompressed, e.g. `["head.*"]`.
    """

    owns_momentum: ClassVar[bool] = False
    """Whether momentum and weight decay of `torch.optim.SGD` are computed here, before the exchange."""

    dense: ClassVar[bool] = False
    """Whether nothing is ever compressed: a baseline."""

    min_elements: int = 1024
    exclude: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.min_elements < 1:
            raise refusal(f"{type(self).__name__}.min_elements", self.min_elements, "1 or more")

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter `name` of this shape is compressed."""
        elements = 1
        for size in shape:
            elements *= size
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return len(shape) > 1 and elements >= self.min_elements and not excluded

    def schedule(self) -> Schedule | None:
        """Sparsity as a function of training progress; None for a compressor that has no sparsity."""
        return None

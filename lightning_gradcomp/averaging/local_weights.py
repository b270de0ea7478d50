"""The weights at which a rank computes its gradient: those of all ranks, less the steps that it has not sent yet.

What waits to be sent is known to its rank alone, but that rank need not wait for it. In a gradient at the shared
weights, an update of 1 % of the elements a step is missing for some hundred steps; at the local weights only those of
the other ranks are missing. CSER (Xie et al., NeurIPS 2020, arXiv 2007.13221) keeps such local models all the time.
Here the weights are local in forward and backward passes alone: wherever else one looks, all ranks hold the same.

A rank's own steps are longer than the mean of all ranks' where gradients are mostly noise; `scales` make up for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_gradcomp.compressors.layout import Layout


class LocalWeights:
    """Exchanges the data of parameters for that of their local weights, and back.

    Args:
        parameters: those of `layout`.
        layout: of the flat buffers that `use` is given.
        in_place: write local weights into the memory of the parameters, which others read too, and keep a copy of the
            shared ones. Otherwise that memory is only exchanged for another.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: Layout, *, in_place: bool = False) -> None:
        self._parameters, self._layout, self._in_place = parameters, layout, in_place
        self._shared: list[torch.Tensor] = []
        """The data of the parameters while their local weights are in use."""

    @torch.no_grad()
    def use(self, unsent: torch.Tensor, scales: Sequence[torch.Tensor | float], out: torch.Tensor) -> None:
        """Let the parameters be the shared weights minus scale · `unsent` (fp32 [n]), unless they are already.

        There is a scale for each parameter, a number or 0-d. `out` (fp32 [n]) holds the local weights, or `in_place`
        the shared ones, until `restore`; parameters of another type or layout have memory of their own.
        """
        if self._shared:
            return
        views = zip(self._parameters, self._layout.views(unsent), scales, self._layout.bounds, strict=True)
        for parameter, view, scale, (start, _) in views:
            other = _like(parameter, out, start)
            if self._in_place:
                other.copy_(parameter)
                _subtract(parameter, view, scale, parameter.data)
                self._shared.append(other)
                continue
            _subtract(parameter, view, scale, other)
            self._shared.append(parameter.data)
            parameter.data = other

    @property
    def in_use(self) -> bool:
        """Whether the parameters are the local weights."""
        return bool(self._shared)

    @torch.no_grad()
    def restore(self) -> None:
        """Let the parameters be the shared weights again."""
        for parameter, shared in zip(self._parameters, self._shared):  # noqa: B905 - none while they are shared
            if self._in_place:
                parameter.copy_(shared)
            else:
                parameter.data = shared
        self._shared = []


def _subtract(weights: torch.Tensor, unsent: torch.Tensor, scale: torch.Tensor | float, out: torch.Tensor) -> None:
    """out = weights - scale · unsent."""
    if isinstance(scale, torch.Tensor):
        torch.addcmul(weights, unsent, scale, value=-1, out=out)
    else:
        torch.add(weights, unsent, alpha=-scale, out=out)


def _like(parameter: torch.Tensor, out: torch.Tensor, start: int) -> torch.Tensor:
    """Memory for a tensor like `parameter`, in `out` from `start` on where that is possible."""
    whole = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    if parameter.dtype != out.dtype or not whole:
        return torch.empty_like(parameter)
    return out.as_strided(parameter.shape, parameter.stride(), out.storage_offset() + start)

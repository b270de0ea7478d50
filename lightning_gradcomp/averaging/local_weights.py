"""The weights at which a rank computes its gradient: those of all ranks, less the steps that it has not sent yet.

What waits to be sent is known to its rank alone, but that rank need not wait for it. In a gradient at the shared
weights, an update of 1 % of the elements a step is missing for some hundred steps; at the local weights only those of
the other ranks are missing. CSER (Xie et al., NeurIPS 2020, arXiv 2007.13221) keeps such local models all the time.
Here the weights are local in forward and backward passes alone: wherever else one looks, all ranks hold the same.

A rank's own steps are longer than the mean of all ranks' where gradients are mostly noise; `scale` makes up for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_gradcomp.compressors.layout import Layout


class LocalWeights:
    """Exchanges the data of parameters for that of their local weights, and back. Memory: as much as the parameters.

    Args:
        parameters: those of `layout`.
        layout: of the flat buffer that `use` is given.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: Layout) -> None:
        self._parameters, self._layout = parameters, layout
        self._local: list[torch.Tensor] = []
        self._shared: list[torch.Tensor] = []
        """The data of the parameters while their local weights are in use."""

    @torch.no_grad()
    def use(self, unsent: torch.Tensor, scale: torch.Tensor) -> None:
        """Let the parameters be the shared weights minus scale (0-d) · `unsent` (fp32 [n]), unless they are already."""
        if self._shared:
            return
        self._local = self._local or [torch.empty_like(parameter) for parameter in self._parameters]
        for parameter, local, view in zip(self._parameters, self._local, self._layout.views(unsent), strict=True):
            torch.addcmul(parameter, view, scale, value=-1, out=local)
            self._shared.append(parameter.data)
            parameter.data = local

    def restore(self) -> None:
        """Let the parameters be the shared weights again."""
        for parameter, shared in zip(self._parameters, self._shared):  # noqa: B905 - none while they are shared
            parameter.data = shared
        self._shared = []

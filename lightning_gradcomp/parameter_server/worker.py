"""What a worker does with gradients and pulls: the rules, without a network.

The counterpart of `partition.py`: gradients become the bodies of pushes, one for each server; what they leave out is
remembered; the bodies of pulls become weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor, PayloadCodec
from lightning_gradcomp.compressors.decoded import Decoded, Dense, concatenate
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.compressors.state import Residual, State
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.partition import codec_of, parts


class Worker:
    """A model, and what has not been pushed of its gradients.

    Args:
        model: the bare module.
        optimizer: over its parameters; learning rates are read from it.
        compressor: of the pushes.
        pull: of the pulls; None: whole weights in fp32.
        servers: over how many servers the weights are divided.
        world: number of workers by which learning rates are divided.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor,
        pull: Compressor | None = None,
        servers: int = 1,
        world: int = 1,
    ) -> None:
        self.compressor, self.optimizer, self.pull_compressor = compressor, optimizer, pull
        self.gradients = Gradients(model, compressor)
        self.parts = parts(self.gradients.layout, self.gradients.dense_layout, servers)
        """What each server holds."""
        self.state, self.dense_state = self._blank()
        self.world, self.steps = world, 0
        """Steps so far: this worker's clock."""
        self.present: list[torch.Tensor] = []
        """Which of each server's parameters the latest push is of (uint8, 0 or 1): those with a gradient, or a rest."""
        self._sent: list[Decoded] = []
        self._groups = self._options()

    def _blank(self) -> tuple[State, State]:
        layout, device = self.gradients.layout, self.gradients.device
        state: State = Residual(layout, device)  # also of what is unbiased: a dropped push has to stay somewhere
        if isinstance(self.compressor, LossyCompressor) and self.compressor.remembers(self.optimizer) is not State:
            state = self.compressor.state(layout, device, self.optimizer)
        state.attach(self.optimizer, self.gradients.compressed, shares_moments=False)  # servers step
        return state, Residual(self.gradients.dense_layout, device)

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rate of each of the optimizer's groups, as a push has it."""
        return tuple(float(group["lr"]) / self.world for group in self.optimizer.param_groups)

    def _options(self) -> list[dict[str, Any]]:
        """What the servers' optimizers have been made with: of each group, all but the learning rate."""
        return [
            {name: group[name] for name in self.optimizer.defaults if name != "lr"}
            for group in self.optimizer.param_groups
        ]

    def check_unchanged(self) -> None:
        """ValueError for what servers would have to know, and are not told."""
        if self.gradients.is_stale:
            allowed = "the same from start to end: the servers hold what trained at the start"
            raise refusal("layers that train with dist_async", "one that was frozen or unfrozen", allowed)
        if (options := self._options()) != self._groups:
            pairs = zip(self._groups, options, strict=False)
            others = {f"another {name}" for old, new in pairs for name in old if old[name] != new[name]}
            allowed = "as at the start: learning rates alone may change (OneCycleLR: cycle_momentum=False)"
            got = ", ".join(sorted(others)) or "one that was added"
            raise refusal("groups of the optimizer with dist_async", got, allowed)

    # Pushes

    @torch.no_grad()
    def encode(self, worker: int, grad_scale: float = 1.0) -> list[torch.Tensor] | None:
        """The bodies (uint8) of a push of the gradients in `p.grad`, one for each server; None where one is not finite.

        Args:
            worker: this worker's number.
            grad_scale: the loss scale that is in the gradients.
        """
        gradients = self.gradients
        gradients.scale = grad_scale
        local = gradients.local_gradient()
        local_dense = LocalGradient.of(gradients.dense_flat.clone(), gradients.dense_layout)
        self.state.compensate(local, gradients.compressed_flat)
        self.dense_state.compensate(local_dense, gradients.dense_flat)
        if not bool(local.finite & local_dense.finite):
            return None
        codec, bodies, self._sent, self.present = codec_of(self.compressor, worker, self.steps), [], [], []
        has = dict(zip(gradients.names, gradients.present, strict=True))
        for part in self.parts:
            flat, dense = part.of(gradients.compressed_flat, gradients.dense_flat)
            payload, decoded = _encode(codec, flat, part.layout)
            bodies.append(torch.cat([dense.cpu().view(torch.uint8), payload.cpu()]))
            self._sent.append(decoded)
            views = zip(part.names, [*part.layout.views(flat), *part.dense_layout.views(dense)], strict=True)
            self.present.append(
                torch.tensor([has[name] or bool(view.any()) for name, view in views], dtype=torch.uint8)
            )
        return bodies

    def commit(self, accepted: list[bool]) -> None:
        """Let the push count: what a server has accepted is taken out of what is remembered."""
        names = {name for name, has in zip(self.gradients.names, self.gradients.present, strict=True) if has}
        names |= self.state.started | self.dense_state.started
        taken = [
            (part, decoded)
            for part, decoded, counts in zip(self.parts, self._sent, accepted, strict=True)
            if counts and part.layout.n
        ]
        if taken:
            self.state.subtract(concatenate([decoded for _, decoded in taken], [part.start for part, _ in taken]))
        pushed = torch.zeros_like(self.gradients.dense_flat)
        for part, counts in zip(self.parts, accepted, strict=True):
            if counts:
                _, values = part.of(self.gradients.compressed_flat, self.gradients.dense_flat)
                part.of(self.gradients.compressed_flat, pushed)[1].copy_(values)
        self.dense_state.subtract(Dense(pushed))
        self.gradients.compressed_flat = self.state.commit(names, self.gradients.compressed_flat)
        self.gradients.dense_flat = self.dense_state.commit(names, self.gradients.dense_flat)

    # Pulls

    def pull_bytes(self, number: int, whole: bool) -> int:
        """Length of the body of a pull from a server."""
        part = self.parts[number]
        if whole or self.pull_compressor is None:
            return 4 * (part.layout.n + part.dense_layout.n)
        return part.body_bytes(codec_of(self.pull_compressor, 0, 0))

    def assign(self, number: int, body: torch.Tensor, whole: bool) -> None:
        """Lets the model have the weights of a pull."""
        part, end = self.parts[number], 4 * self.parts[number].dense_layout.n
        self._write(part.dense_layout, body[:end].view(torch.float32), add=False)
        if part.layout.n and (whole or self.pull_compressor is None):
            self._write(part.layout, body[end:].view(torch.float32), add=False)
        elif part.layout.n and self.pull_compressor is not None:
            change = torch.zeros(part.layout.n, dtype=torch.float32)
            codec_of(self.pull_compressor, 0, 0).decode(body[end:], part.layout).add_to(change)
            self._write(part.layout, change, add=True)

    @torch.no_grad()
    def _write(self, layout: Layout, values: torch.Tensor, *, add: bool) -> None:
        by_name = self._by_name
        for name, view in zip(layout.names, layout.views(values), strict=True):
            if add:
                by_name[name].add_(view.to(by_name[name].device))
            else:
                by_name[name].copy_(view)

    @property
    def _by_name(self) -> Mapping[str, torch.Tensor]:
        return dict(zip(self.gradients.names, self.gradients.parameters, strict=True))

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this worker remembers: tensors by parameter name and plain numbers."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense_state.state_dict().items()}
        return {
            "steps": self.steps,
            "memory": {**self.state.state_dict(), **dense},
            "shapes": self.gradients.chosen,
            "dense_shapes": self.gradients.left_dense,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned, of this worker or of one that is gone."""
        compressed, dense = self._blank()
        compressed.load_state_dict(state["memory"])
        dense.load_state_dict({"residual": state["memory"]["dense_residual"]})
        self.state, self.dense_state, self.steps = compressed, dense, state["steps"]


def _encode(codec: PayloadCodec, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]:
    """A server that has too few parameters gets an empty payload."""
    return codec.encode(flat, layout) if layout.n else (torch.empty(0, dtype=torch.uint8), Dense(flat))

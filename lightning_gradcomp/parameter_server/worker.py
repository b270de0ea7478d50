"""How a worker handles gradients and pulls, without networking.

The counterpart of `partition.py`: gradients become the bodies of pushes, one per server, with error feedback; the
bodies of pulls become weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.compressors.decoded import Decoded, Sparse, concatenate
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import pack_slice
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.partition import codec_of, parts


class Worker:
    """A model, and the error feedback of its pushes.

    Args:
        model: the bare module.
        optimizer: the optimizer of its parameters; learning rates are read from it.
        compressor: compressor of the pushes.
        pull: compressor of the pulls; None: whole weights in fp32.
        servers: number of servers that share the weights.
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
        self.memory = Memory(compressor, self.gradients, Ranks(None), Topology(), optimizer, by_servers=True)
        self.world, self.steps = world, 0
        """Steps so far: this worker's clock."""
        self.present: list[torch.Tensor] = []
        """For each server, uint8: 1 for every parameter in the latest push that has a gradient or a residual."""
        self._sent: list[Decoded] = []
        self._groups = self._options()

    @property
    def rates(self) -> tuple[float, ...]:
        """Learning rate of each of the optimizer's groups in a push."""
        return tuple(float(group["lr"]) / self.world for group in self.optimizer.param_groups)

    def _options(self) -> list[dict[str, Any]]:
        """Each group's options that servers can't follow: all but the learning rate."""
        return [
            {name: group[name] for name in self.optimizer.defaults if name != "lr"}
            for group in self.optimizer.param_groups
        ]

    def check_unchanged(self) -> None:
        """Raises ValueError if anything has changed that servers are not told about."""
        if self.gradients.is_stale:
            allowed = "the same throughout: the servers hold what was trainable at the start"
            raise refusal("trainable layers with dist_async", "one that was frozen or unfrozen", allowed)
        if (options := self._options()) != self._groups:
            pairs = zip(self._groups, options, strict=False)
            others = {f"a different {name}" for old, new in pairs for name in old if old[name] != new[name]}
            allowed = "those at the start: only learning rates may change (OneCycleLR: cycle_momentum=False)"
            got = ", ".join(sorted(others)) or "one that was added"
            raise refusal("optimizer groups with dist_async", got, allowed)

    # Pushes

    @torch.no_grad()
    def encode(self, worker: int, grad_scale: float = 1.0) -> list[torch.Tensor] | None:
        """Encode the gradients in `p.grad` as bodies (uint8) of a push, one per server; None if one is not finite.

        Args:
            worker: this worker's number.
            grad_scale: the loss scale by which the gradients are multiplied.
        """
        gradients = self.gradients
        gradients.scale = grad_scale
        gradients.collect()
        if not self.memory.compensate():
            return None
        codec, bodies, self._sent, self.present = codec_of(self.compressor, worker, self.steps), [], [], []
        has = dict(zip(gradients.names, gradients.present, strict=True))
        for part in self.parts:
            flat, dense = part.of(gradients.compressed_flat, gradients.dense_flat)
            payload, decoded = pack_slice(codec, flat, part.layout)
            bodies.append(torch.cat([dense.cpu().view(torch.uint8), payload.cpu()]))
            self._sent.append(decoded)
            views = zip(part.names, [*part.layout.views(flat), *part.dense_layout.views(dense)], strict=True)
            self.present.append(
                torch.tensor([has[name] or bool(view.any()) for name, view in views], dtype=torch.uint8)
            )
        return bodies

    def commit(self, accepted: list[bool]) -> None:
        """Subtract what the servers accepted from the residual; the rest of the push stays.

        Args:
            accepted: for each server, True if it accepted the push.
        """
        gradients = self.gradients
        taken = [
            (part.start, decoded)
            for part, decoded, counts in zip(self.parts, self._sent, accepted, strict=True)
            if counts and part.layout.n
        ]
        dense_sent = gradients.dense_flat.clone()
        for part, counts in zip(self.parts, accepted, strict=True):
            if not counts:
                part.of(gradients.compressed_flat, dense_sent)[1].zero_()
        empty = torch.empty(0, dtype=torch.float32, device=gradients.device)
        nothing = Sparse(empty.long(), empty)  # not a dense payload, which would clear the momentum
        sent = concatenate([sent for _, sent in taken], [start for start, _ in taken]) if taken else nothing
        self.memory.subtract(sent, dense_sent)
        self.memory.commit(gradients.marked(gradients.present) | self.memory.started)

    # Pulls

    def pull_bytes(self, number: int, whole: bool) -> int:
        """Length in bytes of the body of a pull from a server."""
        part = self.parts[number]
        if whole or self.pull_compressor is None:
            return 4 * (part.layout.n + part.dense_layout.n)
        return part.body_bytes(codec_of(self.pull_compressor, 0, 0))

    def assign(self, number: int, body: torch.Tensor, whole: bool) -> None:
        """Write the weights of a pull into the model."""
        part, end = self.parts[number], 4 * self.parts[number].dense_layout.n
        self._write(part.dense_layout, body[:end].view(torch.float32), add=False)
        if part.layout.n and (whole or self.pull_compressor is None):
            self._write(part.layout, body[end:].view(torch.float32), add=False)
        elif part.layout.n and self.pull_compressor is not None:
            change = torch.zeros(part.layout.n, dtype=torch.float32)
            codec_of(self.pull_compressor, 0, 0).unpack(body[end:], part.layout).add_to(change)
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
        """This worker's error feedback and clock, in the format of `GradientAverager.state_dict`."""
        return {
            "steps": self.steps,
            "memory": self.memory.state_dict(),
            "shapes": self.gradients.chosen,
            "dense_shapes": self.gradients.left_dense,
            "workers": 1,
            "trained": list(self.gradients.layout.names),
            "shared_by": 1,
            "autotune": None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of this worker, or of one that has left."""
        self.memory.load_state_dict(state["memory"])
        self.steps = state["steps"]

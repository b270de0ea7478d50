"""How a worker handles gradients and pulls, without networking.

The counterpart of `partition.py`: gradients become pushes, one per server, with error feedback; pulls become weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.averaging.checkpoint_state import check_state
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.averaging.trainable import check_none_ignored
from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.compressors.decoded import EMPTY, Decoded, concatenate
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import pack_slice
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.partition import codec_of, dense_format, parts


class Worker:
    """A model, and the error feedback of its pushes.

    Learning rates are read from `optimizer`, and divided by `world`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor,
        pull: str = "fp32",
        servers: int = 1,
        world: int = 1,
    ) -> None:
        self.compressor, self.optimizer, self._pull_format = compressor, optimizer, pull
        check_none_ignored(model, "dist_async")
        self.gradients = Gradients(model, compressor, optimizers=[optimizer])
        self.parts = parts(self.gradients.layout, self.gradients.dense_layout, servers)
        """What each server holds."""
        self.memory = Memory(compressor, self.gradients, Ranks(None), Topology(), optimizer, by_servers=True)
        self.world, self.steps = world, 0
        """Steps so far: this worker's clock."""
        self._sent: Decoded = EMPTY
        self._dense_sent = self.gradients.dense_flat
        """What the latest push decodes to."""
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
    def encode(self, worker: int, grad_scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Encode the gradients in `p.grad`, divided by `grad_scale`, as pushes; [] if a gradient is not finite.

        Returns for each server the arguments of `ServerPartition.push` after the header.
        """
        gradients = self.gradients
        gradients.scale = grad_scale
        gradients.collect()
        if not self.memory.compensate():
            return []
        codec, values = codec_of(self.compressor, worker, self.steps), dense_format(self.compressor)
        pushes, sent, dense_sent = [], [], []
        has = dict(zip(gradients.names, gradients.present, strict=True))
        for part in self.parts:
            flat, dense = part.of(gradients.compressed_flat, gradients.dense_flat)
            payload, decoded = pack_slice(codec, flat, part.layout)
            packed = pack_values(dense, values)
            views = zip(part.names, [*part.layout.views(flat), *part.dense_layout.views(dense)], strict=True)
            present = torch.tensor([has[name] or bool(view.any()) for name, view in views], dtype=torch.uint8)
            pushes.append((packed.cpu(), payload.cpu(), present))
            sent.append(decoded)
            dense_sent.append(unpack_values(packed, part.dense_layout.n, values))
        taken = [(decoded, part.start) for decoded, part in zip(sent, self.parts, strict=True) if part.layout.n]
        self._sent = concatenate(*zip(*taken, strict=True)) if taken else EMPTY
        self._dense_sent = torch.cat(dense_sent)
        return pushes

    def commit(self) -> None:
        """Subtract the latest push, which all servers have, from the residual."""
        self.memory.subtract(self._sent, self._dense_sent)
        self.memory.commit(self.gradients.marked(self.gradients.present) | self.memory.started)

    # Pulls

    def pull_bytes(self, number: int, whole: bool) -> int:
        """Length in bytes of the body of a pull from a server."""
        few, rest = self.parts[number].pull_layouts
        return 4 * few.n + value_bytes(rest.n, self._format(whole))

    def assign(self, number: int, body: torch.Tensor, whole: bool) -> None:
        """Write the weights of a pull into the model."""
        few, rest = self.parts[number].pull_layouts
        self._write(few, unpack_values(body[: 4 * few.n], few.n, "fp32"))
        self._write(rest, unpack_values(body[4 * few.n :], rest.n, self._format(whole)))

    def _format(self, whole: bool) -> str:
        return "fp32" if whole else self._pull_format

    @torch.no_grad()
    def _write(self, layout: Layout, values: torch.Tensor) -> None:
        by_name = self.by_name
        for name, view in zip(layout.names, layout.views(values), strict=True):
            by_name[name].copy_(view)

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
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
        check_state(state, ())
        self.memory.load_state_dict(state["memory"])
        self.steps = state["steps"]

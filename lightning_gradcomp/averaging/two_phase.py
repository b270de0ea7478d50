"""Two phases: each rank owns a stretch of the gradients, gathers what all ranks send of it, and sends on the mean.

What arrives at an owner is decoded, added in rank order, divided, and compressed again; what that leaves out stays with
the owner and is added to the next mean (error feedback on the server's side: DoubleSqueeze, Tang et al. 2019, Algorithm
1). Everybody decodes the same bytes, so replicas are equal to the bit. A rank sends about twice its payload whatever
the number of ranks; in an all-gather, N - 1 times. With sparse payloads the second selection keeps the average as
sparse as one rank's (as in Ok-Topk, Li and Hoefler 2022).

Nothing is lost: applied so far + mean of what ranks remember + what owners remember = mean of all gradients so far.

topology="server" is MXNet's kvstore with its servers on the ranks: the push is compressed; the pull is dense, written
as `dense_values` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_gradcomp.averaging.ownership import Ownership
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.relay import Relay
from lightning_gradcomp.compressors.base import Codec
from lightning_gradcomp.compressors.layout import Layout, Stretch
from lightning_gradcomp.compressors.sent import NOTHING, Everything, Mean, Sent, joined, mean_of
from lightning_gradcomp.compressors.values import pack_values, unpack_values, value_bytes


class Pull:
    """What servers send: the whole mean, in fp32 or what `dense_values` says. Takes a codec's place."""

    def __init__(self, values: str) -> None:
        self.values = values

    def payload_bytes(self, layout: Layout, density: float) -> int:
        """Length of what `encode` makes."""
        return value_bytes(layout.n, self.values)

    def encode(self, flat: torch.Tensor, layout: Layout, density: float) -> tuple[torch.Tensor, Everything]:
        """The payload, and what it decodes to."""
        packed = pack_values(flat, self.values)
        return packed, self.decode(packed, layout, density)

    def decode(self, payload: torch.Tensor, layout: Layout, density: float) -> Everything:
        """All values."""
        return Everything(unpack_values(payload, layout.n, self.values))


class Owners(Ownership):
    """Owners who compress what they send on, and remember what that leaves out.

    Args:
        codec: writes what ranks send to owners, and owners to ranks, unless those are servers.
        layout: all that is compressed.
        dense: number of elements that travel uncompressed.
        ranks: the workers, who are the owners too.
        device: of what is remembered.
        dense_pull: whether owners are servers.
    """

    kept = ("residual",)

    def __init__(
        self, codec: Codec, layout: Layout, dense: int, ranks: Ranks, device: torch.device, *, dense_pull: bool
    ) -> None:
        super().__init__(layout, dense, codec.dense_values, ranks)
        self.codec = codec
        self.back: Codec | Pull = Pull(codec.dense_values) if dense_pull else codec
        self.residual, self._residual = (torch.zeros(self.own.layout.n, device=device) for _ in range(2))
        self.used = False
        """Whether owners may remember something; the same on all ranks."""

    def push_bytes(self, stretch: Stretch, density: float) -> int:
        return _bytes(self.codec, stretch, density)

    def pull_bytes(self, stretch: Stretch, density: float) -> int:
        return _bytes(self.back, stretch, density)

    def average(self, flat: torch.Tensor, density: float, relay: Relay, memory: Any) -> tuple[Mean, Sent]:
        stats = relay.stats
        to_owners, back = self.frames(density, relay.flags.numel())
        with stats.phase("compress"):
            parts = [_encode(self.codec, stretch, stretch.of(flat), density) for stretch in self.stretches]
        rows = relay.to_owners([payload for payload, _ in parts], to_owners)
        with stats.phase("decompress"):
            mean = torch.zeros_like(self.residual)
            for row in rows:
                _decode(self.codec, self.own, row, density).add_to(mean)
            mean.div_(len(rows)).add_(self.residual)
        with stats.phase("compress"):
            payload, sent_on = _encode(self.back, self.own, mean, density)
            self._residual.copy_(mean)
            sent_on.take_from(self._residual)
        payloads = relay.to_everyone(payload, back)
        with stats.phase("decompress"):
            means = [_decode(self.back, s, row, density) for s, row in zip(self.stretches, payloads, strict=True)]
            starts = [stretch.start for stretch in self.stretches]
            return mean_of([joined(means, starts)], relay.buffer), joined([sent for _, sent in parts], starts)

    def commit(self) -> None:
        """Make the step count."""
        self.residual, self._residual = self._residual, self.residual
        self.used = True

    def clear(self) -> None:
        """Forget everything, once it has been handed back."""
        self.residual.zero_()
        self.used = False

    def spread(self) -> torch.Tensor:
        """What this rank remembers as an owner, where it lies in the whole buffer: fp32 [n]."""
        flat = self.residual.new_zeros(self.layout.n)
        self.own.of(flat).copy_(self.residual)
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameter name -> tensor, 0 in rows of other owners; without the names of which it owns no row."""
        parts = self.layout.split(self.spread())
        return {name: parts[name] for name in self.own.layout.names}

    def load_state_dict(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Replace everything by this owner's rows of a `state_dict`."""
        self.residual = self.own.of(self.layout.join(parts, self.residual.device)).clone()
        self.used = True


# An owner has nothing where there are more ranks than rows.


def _bytes(codec: Codec | Pull, stretch: Stretch, density: float) -> int:
    return codec.payload_bytes(stretch.layout, density) if stretch.layout.n else 0


def _encode(codec: Codec | Pull, stretch: Stretch, own: torch.Tensor, density: float) -> tuple[torch.Tensor, Sent]:
    return codec.encode(own, stretch.layout, density) if len(own) else (own.new_empty(0, dtype=torch.uint8), NOTHING)


def _decode(codec: Codec | Pull, stretch: Stretch, payload: torch.Tensor, density: float) -> Sent:
    return codec.decode(payload, stretch.layout, density) if stretch.layout.n else NOTHING

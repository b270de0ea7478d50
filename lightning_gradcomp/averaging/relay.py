"""The two exchanges of a step where stretches of the gradients have owners: to them, and from them to everyone."""

from __future__ import annotations

import torch

from lightning_gradcomp.averaging.exchange import Exchange, mean_of_rows
from lightning_gradcomp.averaging.message import Frame


class Relay(Exchange):
    """The two exchanges of a step; the uncompressed gradients are owned and averaged like the others."""

    def to_owners(self, payloads: list[torch.Tensor], frames: list[Frame]) -> list[torch.Tensor]:
        """Payload j goes to worker j; returns what all workers sent this one, in their order."""
        worker = self.ranks.worker
        with self.stats.phase("compress"):
            parts = self._dense.split([frame.dense for frame in frames])
            dense = [frame.pack_dense(part) for frame, part in zip(frames, parts, strict=True)]
            self.dense_sent = torch.cat([frame.read_dense(part) for frame, part in zip(frames, dense, strict=True)])
            flags = self.flags
            messages = [frame.pack(d, p, flags) for frame, d, p in zip(frames, dense, payloads, strict=True)]
        with self.stats.phase("exchange"):
            rows = self.ranks.scatter(messages)
        lengths = [frame.length for frame in frames]
        self._book(self.ranks.scatter_traffic(lengths, worker), self.ranks.gather_traffic(lengths[worker]))
        with self.stats.phase("decompress"):
            self.dense_mean = mean_of_rows([frames[worker].read_dense(row) for row in rows])
            self._hear([frames[worker].read_flags(row) for row in rows])
        return [frames[worker].read_payload(row) for row in rows]

    def to_everyone(self, payload: torch.Tensor, frames: list[Frame]) -> list[torch.Tensor]:
        """This owner's payload goes to every rank; returns all owners'."""
        frame, longest = frames[self.ranks.worker], max(frame.length for frame in frames)
        with self.stats.phase("compress"):
            message = frame.pack(frame.pack_dense(self.dense_mean), payload, self.flags)
            message = torch.nn.functional.pad(message, (0, longest - frame.length))
        with self.stats.phase("exchange"):
            rows = self.ranks.gather(message)
        self._book(self.ranks.gather_traffic(longest))
        with self.stats.phase("decompress"):
            self.dense_mean = torch.cat([frame.read_dense(row) for frame, row in zip(frames, rows, strict=True)])
            self._hear([frame.read_flags(row) for frame, row in zip(frames, rows, strict=True)])
        return [frame.read_payload(row) for frame, row in zip(frames, rows, strict=True)]

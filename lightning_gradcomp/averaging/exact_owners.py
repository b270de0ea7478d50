"""Owners who lose nothing: TernGrad's, whose ranks share one s a tensor, so that all they send is multiples of it.

A rank's ternary digits 0, 1 and 2 stand for -s, 0 and s. An owner adds up the digits of all N ranks, and sends the sums
on, digits 0 to 2N of base 2N + 1: what the paper shares scalers for, since a server then answers with log2(2N + 1) bits
an element instead of 32 (Wen et al. 2017, §3). Nothing is rounded twice, so that owners have nothing to remember, and
the mean is that of an all-gather.

Servers send the sums in fp32, whatever `dense_values` says: whole numbers up to 2^24 are exact in it.
"""

from __future__ import annotations

import torch

from lightning_gradcomp.averaging.ownership import Ownership
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.relay import Relay
from lightning_gradcomp.compressors import lattice, terngrad
from lightning_gradcomp.compressors.draws import Drawing, Generator
from lightning_gradcomp.compressors.layout import Layout, Stretch, cut
from lightning_gradcomp.compressors.sent import Everything, Piecewise
from lightning_gradcomp.compressors.terngrad import DIGITS, TernGrad


class ExactOwners(Ownership):
    """Who adds up what.

    Args:
        compressor: with `share_scaler`.
        layout: all that is compressed.
        dense: number of elements that travel uncompressed.
        ranks: the workers, who are the owners too.
        dense_pull: whether owners are servers.
    """

    def __init__(self, compressor: TernGrad, layout: Layout, dense: int, ranks: Ranks, *, dense_pull: bool) -> None:
        super().__init__(layout, dense, compressor.dense_values, ranks)
        self.compressor, self.dense_pull = compressor, dense_pull
        self.base = 2 * ranks.workers + 1

    def push_bytes(self, stretch: Stretch, density: float) -> int:
        return terngrad.packed_bytes(stretch.layout.n)

    def pull_bytes(self, stretch: Stretch, density: float) -> int:
        return 4 * stretch.layout.n if self.dense_pull else lattice.packed_bytes(stretch.layout.n, self.base)

    def traffic(self, density: float, flags: int) -> int:
        return self.ranks.maximum_traffic(4 * len(self.layout.sizes)) + super().traffic(density, flags)

    def average(
        self, flat: torch.Tensor, density: float, relay: Relay, memory: Drawing
    ) -> tuple[Everything, Piecewise]:
        stats, layout, workers = relay.stats, self.layout, self.ranks.workers
        to_owners, back = self.frames(density, relay.flags.numel())
        limits, scalers = self.compressor.scalers(flat, layout, relay)
        pieces = terngrad.pieces(layout, flat.device)

        def drawn(generator: Generator) -> torch.Tensor:
            return torch.cat([*self.compressor.digits(flat, layout, limits, scalers, generator)])

        with stats.phase("compress"):
            digits = memory.draw(drawn)
            payloads = [_packed(stretch.of(digits)) for stretch in self.stretches]
        rows = relay.to_owners(payloads, to_owners)
        with stats.phase("decompress"):
            sums = _added(rows, self.own.layout.n)
        with stats.phase("compress"):
            payload = sums.view(torch.uint8) if self.dense_pull else lattice.pack(sums, self.base)
        rows = relay.to_everyone(payload, back)
        with stats.phase("decompress"):
            mean = relay.buffer
            for stretch, row in zip(self.stretches, rows, strict=True):
                if self.dense_pull:
                    stretch.of(mean).copy_(row.view(torch.float32))
                else:
                    lattice.unpack(row, self.base, stretch.of(mean))
            per_one = scalers / workers  # N · s may be too large for fp32
            for start, stop, tensor in pieces:
                mean[start:stop].sub_(workers).mul_(per_one[tensor])

        def sent(number: int) -> torch.Tensor:
            start, stop, tensor = pieces[number]
            return digits[start:stop].float().sub_(1).mul_(scalers[tensor])

        return Everything(mean), Piecewise([(start, stop) for start, stop, _ in pieces], sent)


def _packed(digits: torch.Tensor) -> torch.Tensor:
    """A stretch's ternary digits (uint8 [n]), five in a byte."""
    pieces = cut(0, digits.numel(), digits.device, multiple=DIGITS)
    return torch.cat([digits[:0], *(terngrad.pack(digits[start:stop]) for start, stop in pieces)])


def _added(rows: list[torch.Tensor], n: int) -> torch.Tensor:
    """The sums (fp32 [n], 0 to 2N) of the digits that `_packed` wrote on N ranks."""
    sums = torch.empty(n, device=rows[0].device)
    table = terngrad.table_of(sums.device) + 1
    for start, stop in cut(0, n, sums.device, multiple=DIGITS):
        part = slice(start // DIGITS, start // DIGITS + terngrad.packed_bytes(stop - start))
        first, *others = (terngrad.unpack(row[part], stop - start, table) for row in rows)
        for other in others:
            first.add_(other)
        sums[start:stop] = first
    return sums

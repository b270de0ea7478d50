"""The report that each rank sends with a round: samples, a flag, and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from lightning_gradcomp.averaging.workers import Ranks


@dataclass(frozen=True)
class RoundReport:
    """One rank's report on a round.

    Args:
        samples: the weight of its update in the average.
        flag: set by the caller, for example "no more data" or "received SIGTERM".
        distance: L2 distance of its weights from the anchor in the last round that was applied.
        step_seconds: median time of a step in this round, without waits for the network.
        exchange_seconds: time of its last exchange.
    """

    samples: int
    flag: bool = False
    distance: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0


REPORT_BYTES = 8 * len(fields(RoundReport))
"""Bytes of one report: each field as fp64, in which whole numbers are exact up to 2**53."""


def gather_reports(ranks: Ranks, own: RoundReport, device: torch.device) -> list[RoundReport]:
    """The reports of all ranks, in rank order. Collective."""
    numbers = torch.tensor([float(value) for value in astuple(own)], dtype=torch.float64, device=device)
    rows = ranks.gather(numbers.view(torch.uint8))
    return [_decode(*row.view(torch.float64).tolist()) for row in rows]


def _decode(samples: float, flag: float, *measured: float) -> RoundReport:
    return RoundReport(int(samples), bool(flag), *measured)


def sample_weight(own: int, counts: Sequence[int]) -> float:
    """The factor for this rank's tensor that turns a plain mean over ranks into a mean over samples.

    Args:
        own: samples of this rank.
        counts: samples of every rank.
    """
    return own * len(counts) / max(sum(counts), 1)

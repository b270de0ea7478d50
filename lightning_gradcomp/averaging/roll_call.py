"""What ranks tell each other before an average: samples, who wants to end, how long things take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from lightning_gradcomp.averaging.ranks import Ranks


@dataclass(frozen=True)
class Report:
    """One rank's.

    Args:
        samples: by which its update is weighted.
        flag: the caller's, such as "I have no more data", or "I was told to end".
        apart: distance of its weights from what all agreed on, when it last sent them.
        step_seconds: of a step of its last round, in the median, waiting for the network left out.
        exchange_seconds: its last exchange took.
    """

    samples: int
    flag: bool = False
    apart: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0


LENGTH = 8 * len(fields(Report))
"""Bytes of one: each number in fp64, in which whole numbers are exact up to 2**53."""


def roll_call(ranks: Ranks, own: Report, device: torch.device) -> list[Report]:
    """Every rank's report, in their order. Collective."""
    numbers = torch.tensor([float(value) for value in astuple(own)], dtype=torch.float64, device=device)
    rows = ranks.gather(numbers.view(torch.uint8))
    return [_read(*row.view(torch.float64).tolist()) for row in rows]


def _read(samples: float, flag: float, *rest: float) -> Report:
    return Report(int(samples), bool(flag), *rest)


def share_of(own: int, everyones: Sequence[int]) -> float:
    """What a rank's part is multiplied by before a plain mean over the ranks, so that the mean is one over samples."""
    return own * len(everyones) / max(sum(everyones), 1)

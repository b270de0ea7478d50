"""The report that each rank sends ahead of a round or drain: where it is, samples, a flag, and measured times.

It is the first message of each, and as long for both: ranks that are not at the same step find out by it, before they
meet at collectives that differ. gloo answers those by aborting the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_gradcomp.averaging.faults import ExchangeFailed
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits
from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class RoundReport:
    """One rank's report on a round.

    Args:
        samples: the weight of its update in the average.
        flag: set by the caller, for example "no more data" or "received SIGTERM".
        distance: L2 distance of its weights from the anchor in the last round that was applied.
        step_seconds: median time of a step in this round, without waits for the network.
        exchange_seconds: time of its last exchange.
        steps: its optimizer steps so far, where all ranks must have made as many.
        frozen: for each parameter of the model, whether it is frozen, where that must be the same on all ranks.
    """

    samples: int
    flag: bool = False
    distance: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    steps: int = 0
    frozen: tuple[bool, ...] = ()


NUMBERS = 6
"""Numbers in a report, each sent as fp64, in which whole numbers are exact up to 2**53."""


def report_bytes(parameters: int) -> int:
    """Bytes of a report that says of so many parameters whether they are frozen."""
    return 8 * (NUMBERS + (parameters + 63) // 64)


def gather_reports(ranks: Ranks, own: RoundReport, device: torch.device) -> list[RoundReport]:
    """The reports of all ranks, in rank order. Collective."""
    numbers = (own.samples, own.flag, own.distance, own.step_seconds, own.exchange_seconds, own.steps)
    message = torch.zeros(report_bytes(len(own.frozen)), dtype=torch.uint8)
    message[: 8 * NUMBERS] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
    bits = pack_bits(torch.tensor(own.frozen, dtype=torch.bool))
    message[8 * NUMBERS : 8 * NUMBERS + len(bits)] = bits
    return [_decode(row, len(own.frozen)) for row in ranks.gather(message.to(device)).cpu()]


def _decode(message: torch.Tensor, parameters: int) -> RoundReport:
    samples, flag, distance, step_seconds, exchange_seconds, steps = message[: 8 * NUMBERS].view(torch.float64).tolist()
    frozen = unpack_bits(message[8 * NUMBERS :], parameters).bool().tolist()
    return RoundReport(int(samples), bool(flag), distance, step_seconds, exchange_seconds, int(steps), tuple(frozen))


def check_in_step(reports: Sequence[RoundReport], rank: int, names: Sequence[str], doing: str) -> None:
    """Raise, on every rank, an error if the ranks are not at the same step or do not train the same parameters.

    Args:
        reports: of all ranks, in rank order.
        rank: this one.
        names: of the parameters that `frozen` is about.
        doing: the phase, in words.

    Raises:
        ValueError: a parameter that is frozen on some ranks only.
        ExchangeFailed: ranks at different steps.
    """
    for name, frozen in zip(names, zip(*(report.frozen for report in reports), strict=True), strict=False):
        if len(set(frozen)) > 1:
            where = ", ".join(str(other) for other, is_frozen in enumerate(frozen) if is_frozen)
            allowed = "the same parameters on every rank, frozen and unfrozen at the same step"
            raise refusal("parameters that train", f"{name}, which is frozen on rank {where} only", allowed)
    steps = [report.steps for report in reports]
    if len(set(steps)) > 1:
        found = ", ".join(f"rank {other} is at step {step}" for other, step in enumerate(steps))
        raise ExchangeFailed(
            f"rank {rank} of {len(steps)}, step {steps[rank]}, {doing}: the exchange failed; {found}. All ranks must "
            "have the same number of batches, and save checkpoints and validate at the same step."
        )


def sample_weight(own: int, counts: Sequence[int]) -> float:
    """The factor for this rank's tensor that turns a plain mean over ranks into a mean over samples.

    Args:
        own: samples of this rank.
        counts: samples of every rank.
    """
    return own * len(counts) / max(sum(counts), 1)

"""The schedule of rounds: period and delay, fixed or chosen from measured times, and the ranks that take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Any

from lightning_gradcomp.errors import is_number, is_whole, refusal
from lightning_gradcomp.local_sgd.rounds import RoundReport

MAX_AUTO_DELAY = 64
"""The largest delay, in steps, that "auto" chooses: accuracy falls as the delay grows (docs/local_steps.md)."""
MARGIN = 1.2
"""An exchange may take this many times its measured time before a step waits for it."""
MEASURED_ROUNDS = 3
"""Rounds that "auto" measures. The first also opens connections, and the time of the last is not reported yet."""


def steps_to_hide(reports: Sequence[RoundReport]) -> int:
    """Number of steps that hide an exchange: slowest exchange over fastest step time, times the margin."""
    step = min((report.step_seconds for report in reports if report.step_seconds > 0), default=1.0)
    return min(max(ceil(MARGIN * max(report.exchange_seconds for report in reports) / step), 1), MAX_AUTO_DELAY)


class RoundSchedule:
    """Period K and delay D, both in steps, as for `DelayedStrategy`.

    With delay="auto", the first rounds are averaged without delay. D is then chosen from the times measured on all
    ranks, and is the same on all of them. K is the larger of `period` and D. D is chosen again after each drain.
    """

    def __init__(self, period: int, delay: int | str) -> None:
        if not is_whole(period) or period < 1:
            raise refusal("period", period, "a whole number of steps, 1 or more")
        if delay != "auto" and (not is_whole(delay) or not 0 <= delay <= period):
            raise refusal("delay", delay, f"0 to {period}, the period (one exchange at a time), or 'auto'")
        self.shortest, self._auto = period, delay == "auto"
        """The smallest K."""
        self.period, self.delay = period, 0 if isinstance(delay, str) else delay
        self._rounds_to_measure = MEASURED_ROUNDS if self._auto else 0
        self._reports: Sequence[RoundReport] = ()

    def round_applied(self, reports: Sequence[RoundReport]) -> None:
        """Record the reports of a round whose average was applied. No exchange may be pending."""
        self._reports = reports
        if self._rounds_to_measure:
            self._rounds_to_measure -= 1
            if not self._rounds_to_measure:
                self.set_delay()

    @property
    def measuring(self) -> bool:
        """True until "auto" has chosen a delay."""
        return self._rounds_to_measure > 0

    def set_delay(self) -> None:
        """Set D and K from the latest reports if "auto" has finished measuring."""
        if self._auto and not self._rounds_to_measure and self._reports:
            self.delay = steps_to_hide(self._reports)
            self.period = max(self.shortest, self.delay)

    def state_dict(self) -> dict[str, int]:
        """Period, delay and the number of rounds still to measure."""
        return {"period": self.period, "delay": self.delay, "rounds_to_measure": self._rounds_to_measure}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state` if "auto"; keep a fixed period and delay."""
        if self._auto:
            self.period, self.delay = state["period"], state["delay"]
            self._rounds_to_measure = state["rounds_to_measure"]
            self._reports = ()


@dataclass(frozen=True)
class Participants:
    """A fraction of the ranks, drawn from the round number so that all ranks agree without communication.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017, arXiv 1602.05629, Algorithm 1: a fraction C of the clients
    (`share`), at least one.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise refusal("participation", self.share, "a number above 0, up to 1")

    def of_round(self, number: int, world: int) -> list[int]:
        """The ranks that take part in round `number`.

        >>> Participants(0.5).of_round(0, 4), Participants(0.01).of_round(1, 4), Participants().of_round(7, 3)
        ([1, 3], [1], [0, 1, 2])
        """
        drawn = max(round(self.share * world), 1)
        return sorted(Random(number).sample(range(world), drawn))

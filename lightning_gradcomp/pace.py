"""How long a round is, and how late its average comes: given, or chosen from what is measured. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from lightning_gradcomp.errors import refusal

if TYPE_CHECKING:
    from lightning_gradcomp.averaging.roll_call import Report

LONGEST = 64
"""Steps of delay that "auto" chooses at most: accuracy falls with it (docs/latency.md)."""
MARGIN = 1.2
"""How much longer than the one measured an exchange may take before steps wait for it."""
MEASURED_ROUNDS = 3
"""Rounds that "auto" measures: the first pays for connections, and what the last took is not reported yet."""


def steps_to_hide(reports: Sequence[Report]) -> int:
    """Steps that an exchange takes, with the margin: of the rank with the quickest steps, and the slowest exchange."""
    step = min((report.step_seconds for report in reports if report.step_seconds > 0), default=1.0)
    return min(max(ceil(MARGIN * max(report.exchange_seconds for report in reports) / step), 1), LONGEST)


class Pace:
    """Period K and delay D.

    With delay="auto" the first rounds are averaged without delay, and D is then chosen from what all ranks have
    measured, the same on all; K is `period`, or D where that is more. After each drain it is chosen anew.

    Args:
        period: K, steps in a round.
        delay: D, steps from a round's end to its average's arrival, 0 to `period`; or "auto".

    Raises:
        ValueError: other numbers.
    """

    def __init__(self, period: int, delay: int | str) -> None:
        if not isinstance(period, int) or period < 1:
            raise refusal("period", period, "a whole number of steps, 1 or more")
        if delay != "auto" and (not isinstance(delay, int) or not 0 <= delay <= period):
            raise refusal("delay", delay, f"0 to {period}, the period (one message is under way at most), or 'auto'")
        self._least, self._auto = period, delay == "auto"
        self.period, self.delay = period, 0 if isinstance(delay, str) else delay
        self._left = MEASURED_ROUNDS if self._auto else 0
        self._reports: Sequence[Report] = ()

    def landed(self, reports: Sequence[Report]) -> None:
        """A round has been averaged; nothing is under way."""
        self._reports = reports
        if self._left:
            self._left -= 1
            if not self._left:
                self.choose()

    @property
    def measuring(self) -> bool:
        """Whether "auto" has not chosen yet."""
        return self._left > 0

    def choose(self) -> None:
        """With "auto", once everything is measured: what the latest reports ask for."""
        if self._auto and not self._left and self._reports:
            self.delay = steps_to_hide(self._reports)
            self.period = max(self._least, self.delay)

    def state_dict(self) -> dict[str, int]:
        """Whole numbers."""
        return {"period": self.period, "delay": self.delay, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what "auto" has chosen; numbers that are given stay."""
        if self._auto:
            self.period, self.delay, self._left = state["period"], state["delay"], state["left"]
            self._reports = ()

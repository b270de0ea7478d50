"""Sparsity as a function of training progress. A schedule is any callable `(epoch, step) -> sparsity` in [0, 1).

It must depend on its arguments alone, so that all ranks get the same value.

Sparsity 0 means dense: everything is sent, by the fastest dense exchange. None means compressed by a method without a
sparsity.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_gradcomp.errors import check_whole, is_number, refusal

Schedule = Callable[[int, int], float | None]

BY = ("epoch", "step", "coverage")
"""How long a level of a ramp lasts: an epoch, a step, or until the number of entries sent equals that of elements."""


def exponential(sparsity: float, periods: int) -> list[float]:
    """`periods` levels on the way to `sparsity`. The density falls by the same factor from each level to the next.

    density(i) = ρ^((i + 1) / (periods + 1)). Four periods to 99.9 % are within 0.1 points of the DGC paper's list.

    >>> [round(level, 3) for level in exponential(0.999, 4)]
    [0.749, 0.937, 0.984, 0.996]
    """
    density = 1 - sparsity
    return [1 - density ** ((period + 1) / (periods + 1)) for period in range(periods)]


def linear(sparsity: float, periods: int) -> list[float]:
    """`periods` equally spaced levels on the way to `sparsity`.

    >>> linear(0.8, 3)
    [0.2, 0.4, 0.6]
    """
    return [round(sparsity * (period + 1) / (periods + 1), 12) for period in range(periods)]


def quarters(start: float, sparsity: float) -> list[float]:
    """Levels from `start` on the way to `sparsity`. The density falls to a quarter from each level to the next.

    From 75 % to 99.9 % they are the DGC paper's list.

    >>> quarters(0.75, 0.999)
    [0.75, 0.9375, 0.984375, 0.99609375]
    """
    levels, density = [], 1 - start
    while density > 1 - sparsity:
        levels.append(1 - density)
        density /= 4
    return levels


@dataclass(frozen=True)
class Ramp:
    """Dense for `dense` periods, then one of `levels` per period, then `final`. A period is an epoch or a step.

    The DGC paper's ramp (Lin et al. 2018, §3.3) is `Ramp((0.75, 0.9375, 0.984375, 0.996), 0.999)`.

    With by="coverage" a period is a step, and a level of density ρ lasts ⌈1/ρ⌉ steps: 4 at 75 %, 16 at 93.75 %. Each
    level then sends at least as many entries as there are elements, whatever the length of an epoch.
    """

    levels: tuple[float, ...]
    final: float | None
    dense: int = 0
    by: str = "epoch"

    def __post_init__(self) -> None:
        for sparsity in (*self.levels, self.final):
            if sparsity is not None:
                check_sparsity("sparsity level", sparsity)
        check_whole("dense periods", self.dense, 0)
        if self.by not in BY:
            raise refusal("by", self.by, "'epoch', 'step' or 'coverage'")

    def __call__(self, epoch: int, step: int) -> float | None:
        period = (epoch if self.by == "epoch" else step) - self.dense
        if period < 0:
            return 0.0
        return (*self.levels, self.final)[bisect_right(self._ends, period)]

    @cached_property
    def _ends(self) -> list[int]:
        """For each level, the number of periods after the dense ones at which it ends."""
        if self.by != "coverage":
            return list(range(1, len(self.levels) + 1))
        return list(accumulate(math.ceil(round(1 / (1 - level), 6)) for level in self.levels))  # 1 / (1 - 0.9) > 10

    @property
    def periods(self) -> int:
        """Number of periods before `final`."""
        return self.dense + (self._ends[-1] if self.levels else 0)

    @property
    def counts_epochs(self) -> bool:
        return self.by == "epoch" and bool(self.dense or self.levels)


def dense_start(schedule: Schedule | None, step: str = "step") -> str:
    """Describes a schedule's dense steps. Returns "" if it has none or is not a `Ramp`.

    Args:
        step: the word for a period that is not an epoch.

    >>> dense_start(Ramp((), 0.99, dense=22, by="step"))
    '22 dense steps'
    >>> dense_start(Ramp((), 0.99, dense=1))
    '1 dense epoch'
    """
    if not isinstance(schedule, Ramp) or not schedule.dense:
        return ""
    period = "epoch" if schedule.by == "epoch" else step
    return f"{schedule.dense:,} dense {period}{'s' * (schedule.dense > 1)}"


def check_sparsity(what: str, sparsity: float) -> float:
    """Returns `sparsity`. Raises ValueError unless it lies in [0, 1)."""
    if not is_number(sparsity) or not 0 <= sparsity < 1:
        raise refusal(what, sparsity, "0 <= sparsity < 1")
    return sparsity


def as_levels(levels: str | Sequence[float], sparsity: float, periods: int) -> tuple[float, ...]:
    """The levels of a ramp from `"exponential"`, `"linear"` or a list of sparsities."""
    if isinstance(levels, str):
        shapes = {"exponential": exponential, "linear": linear}
        if levels not in shapes:
            raise refusal("schedule", levels, "'exponential', 'linear', a list, or a callable (epoch, step)")
        return tuple(shapes[levels](sparsity, periods))
    return tuple(levels)

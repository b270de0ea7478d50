"""Which ranks take part in a round: all, or some that are drawn anew each time.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, arXiv 1602.05629, Algorithm 1: a fraction C of the clients, at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lightning_gradcomp.errors import is_number, refusal


@dataclass(frozen=True)
class Participants:
    """A share of the ranks, drawn by the number of the round, so that all ranks know without asking.

    Args:
        share: C, above 0 and up to 1.

    Raises:
        ValueError: another share.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise refusal("participation", self.share, "a number above 0, up to 1")

    def of_round(self, number: int, world: int) -> list[int]:
        """The ranks that take part.

        >>> Participants(0.5).of_round(0, 4), Participants(0.01).of_round(1, 4), Participants().of_round(7, 3)
        ([1, 3], [1], [0, 1, 2])
        """
        taking = max(round(self.share * world), 1)
        return sorted(Random(number).sample(range(world), taking))

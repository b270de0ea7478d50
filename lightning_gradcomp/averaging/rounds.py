"""Rounds: averages of what ranks have added to their weights, with every compressor that gradients have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.anchor import Anchor
from lightning_gradcomp.averaging.averager import GradientAverager
from lightning_gradcomp.averaging.elastic import all_floating
from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.averaging.roll_call import LENGTH, Report, roll_call, share_of
from lightning_gradcomp.compressors.base import Compressor, Lossy
from lightning_gradcomp.outer import Nesterov


class Rounds(GradientAverager):
    """A GradientAverager whose model is the anchor, whose steps are rounds, and whose gradients are updates, negated.

    A compressor that owns the momentum (DGC) owns the outer optimizer's: the user's keeps its own.

    Args:
        anchor: what all ranks agree on.
        compressor: an instance, or a name with default options.
        process_group: one that nothing else uses.
        outer: how the anchor follows the mean update.
        epoch: the epoch to begin with.
    """

    def __init__(
        self,
        anchor: Anchor,
        compressor: Compressor | str,
        process_group: dist.ProcessGroup | None,
        outer: Nesterov,
        epoch: int | None,
    ) -> None:
        self.anchor, momentum = anchor, outer.momentum
        self.sgd = torch.optim.SGD(anchor.parameters(), lr=outer.lr, momentum=momentum, nesterov=momentum > 0)
        super().__init__(anchor, compressor, optimizer=self.sgd, process_group=process_group, epoch=epoch)

    def exchange(self, own: Report, training_step: int) -> list[Report]:
        """Make the anchor's gradients the mean over all samples. Collective.

        Returns:
            What every rank reports.
        """
        with explained(training_step, f"averaging round {self.steps + 1}", self.ranks.group):
            reports = roll_call(self.ranks, own, self.gradients.flat.device)
            share = share_of(own.samples, [report.samples for report in reports])
            for z in self.anchor.parameters():
                if z.grad is not None and share != 1:
                    z.grad.mul_(share)
            self._average(1.0)
            self.stats.bytes_sent += self.ranks.gather_traffic(LENGTH)
            return reports

    def advance(self) -> None:
        """The anchor follows the mean update."""
        with self.taken_over(self.sgd):
            self.sgd.step()

    @property
    def settled(self) -> bool:
        """Whether compressed rounds have left nothing out."""
        return self._compression is None or self._compression.books.empty

    def settle(self, own: Report, training_step: int) -> list[Report]:
        """Average what there is, uncompressed, with all that compressed rounds have left out. Collective.

        The anchor takes it as it is, whatever the outer optimizer.

        Returns:
            What every rank reports.
        """
        schedule, self.schedule = self.schedule, None
        reports = self.exchange(own, training_step)
        self.schedule = schedule
        with torch.no_grad():
            for z in self.anchor.parameters():
                if z.grad is not None:
                    z.sub_(z.grad)
        return reports

    def shared_state(self) -> dict[str, Any]:
        """The state without what is a rank's own (random generators), which then begins afresh; once settled."""
        state = self.state_dict()
        state["memory"] = {kind: parts for kind, parts in state["memory"].items() if all_floating(parts)}
        velocities = {name: self.sgd.state[z].get("momentum_buffer") for name, z in self.anchor.named_parameters()}
        return {**state, "outer": {name: v.clone() for name, v in velocities.items() if v is not None}}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `shared_state` returned, here or on another rank.

        Raises:
            ValueError: a tensor of another shape than its parameter's.
        """
        self.load_state_dict(state)
        for name, z in self.anchor.named_parameters():
            if name in state["outer"]:
                self.sgd.state[z]["momentum_buffer"] = state["outer"][name].to(z, copy=True)

    def start_afresh(self) -> None:
        """Forget what is a rank's own."""
        if isinstance(self.compressor, Lossy):
            self.load_shared_state(self.shared_state())

"""Rounds: compressed averages of the ranks' updates. All use of GradientAverager's internals is in this file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.errors import is_number, refusal
from lightning_gradcomp.local_sgd.anchor import Anchor
from lightning_gradcomp.local_sgd.outer_optimizer import Nesterov
from lightning_gradcomp.local_sgd.round_report import (
    RoundReport,
    check_in_step,
    gather_reports,
    report_bytes,
    sample_weight,
)
from lightning_gradcomp.local_sgd.sync import moments_of
from lightning_gradcomp.registry import build

LOCAL = "local_"
"""What the kinds of state begin with that belong to the local optimizer: "local_exp_avg"."""


def check_error_decay(error_decay: float | None) -> None:
    """ValueError for what is neither None nor a number from 0 to 1 (SparseLoCo's factor)."""
    if error_decay is not None and not (is_number(error_decay) and 0 <= error_decay <= 1):
        raise refusal("error_decay", error_decay, "None, or a number from 0 to 1")


class Rounds(GradientAverager):
    """A GradientAverager whose model is the anchor, whose steps are rounds, and whose gradients are pseudo-gradients.

    The optimizer is the outer one. A compressor that applies the momentum itself (DGC) applies the outer optimizer's;
    the momentum of the user's optimizer is not affected.

    Args:
        anchor: the weights that all ranks agree on.
        compressor: an instance, or a name with default options.
        process_group: a group that nothing else uses.
        outer: options of the outer optimizer.
        epoch: the first epoch.
        local_optimizer: of the model. With `error_decay` its moments are in this rank's state.
        error_decay: factor of what earlier rounds have left out, once a round. None: it is left as it is.
        period: training steps in a round, in which the compressor's `warmup_steps` count.

    Raises:
        ValueError: an error_decay that is no number from 0 to 1.
    """

    def __init__(
        self,
        anchor: Anchor,
        compressor: Compressor | str,
        process_group: dist.ProcessGroup | None,
        outer: Nesterov,
        epoch: int | None,
        local_optimizer: torch.optim.Optimizer,
        error_decay: float | None = None,
        *,
        period: int,
    ) -> None:
        self.anchor, momentum = anchor, outer.momentum
        self.local_optimizer, self.error_decay = local_optimizer, error_decay
        self.sgd = torch.optim.SGD(anchor.module.parameters(), lr=outer.lr, momentum=momentum, nesterov=momentum > 0)
        compressor = build(compressor)
        if isinstance(compressor, LossyCompressor) and (dense := compressor.dense_steps):
            compressor = replace(compressor, warmup_steps=dense // period)
        super().__init__(anchor.module, compressor, optimizer=self.sgd, process_group=process_group, epoch=epoch)
        self.parameters_agree = True  # reports say which parameters are frozen
        check_error_decay(error_decay)

    def gather_reports(self, own: RoundReport, doing: str) -> list[RoundReport]:
        """The reports of all ranks, in rank order. Collective.

        Args:
            own: this rank's report.
            doing: the phase, in words, for error messages.

        Raises:
            ValueError: a parameter that is frozen on some ranks only.
            ExchangeFailed: ranks at different steps, or that can't be reached.
        """
        reports = gather_reports(self.ranks, own, self.anchor.device)
        check_in_step(reports, self.ranks.rank, list(self.anchor.live), doing)
        return reports

    def exchange(self, own: RoundReport, training_step: int) -> list[RoundReport]:
        """Replace the anchor's gradients by their mean over all samples. Collective.

        Args:
            own: this rank's report.
            training_step: optimizer steps so far, for error messages.

        Returns:
            The reports of all ranks.

        Raises:
            ValueError: a parameter that is frozen on some ranks only.
            ExchangeFailed: ranks at different steps, or that can't be reached.
        """
        doing = f"averaging round {self.steps + 1}"
        with explained(training_step, doing, self.ranks.group):
            reports = self.gather_reports(own, doing)
            weight = sample_weight(own.samples, [report.samples for report in reports])
            for z in self.anchor.module.parameters():
                if z.grad is not None and weight != 1:
                    z.grad.mul_(weight)
            if self.error_decay is not None and self.world == 1:
                self.after_dense_step()  # alone: the update is the mean, and what waits to be sent goes on waiting
            else:
                self.average()
            self.stats.bytes_sent += self.ranks.gather_traffic(report_bytes(len(own.frozen)))
            return reports

    def step_outer_optimizer(self) -> None:
        """Step the anchor on the mean pseudo-gradient."""
        self.sgd.step()
        self._decay_error()

    def _decay_error(self) -> None:
        if self.error_decay is not None and self.state is not None and self.state.unsent is not None:
            self.state.unsent.mul_(self.error_decay)  # as e <- decay · e + U at the end of the next round

    def exchange_uncompressed(self, own: RoundReport, training_step: int) -> list[RoundReport]:
        """Average the updates and everything that compressed rounds have left out, uncompressed. Collective.

        The mean update is added to the anchor without the outer optimizer.

        Returns:
            The reports of all ranks.
        """
        schedule, self.schedule = self.schedule, None
        reports = self.exchange(own, training_step)
        self.schedule = schedule
        with torch.no_grad():
            for z in self.anchor.module.parameters():
                if z.grad is not None:
                    z.sub_(z.grad)
        self.commit()
        return reports

    def _local_moments(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Kind, parameter name, and the local optimizer's state of that parameter's shape."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.anchor.live.items()}
        for parameter, kind, value in moments_of(self.local_optimizer):
            yield LOCAL + kind, names[parameter], value

    def state_dict(self) -> dict[str, Any]:
        """As `GradientAverager.state_dict`; with `error_decay` also this rank's moments."""
        state = super().state_dict()
        if self.error_decay is not None:
            for kind, name, value in self._local_moments():
                state["memory"].setdefault(kind, {})[name] = value.float().clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `GradientAverager.load_state_dict`, and the moments that the state has."""
        memory = {kind: parts for kind, parts in state["memory"].items() if not kind.startswith(LOCAL)}
        super().load_state_dict({**state, "memory": memory})
        for kind, name, value in self._local_moments():
            if name in (saved := state["memory"].get(kind, {})):
                value.copy_(saved[name])

    def shared_state(self) -> dict[str, Any]:
        """The state, the outer optimizer's included; the same on all ranks where nothing is remembered."""
        velocities = {
            name: self.sgd.state[z].get("momentum_buffer") for name, z in self.anchor.module.named_parameters()
        }
        return {**self.state_dict(), "outer": {name: v.clone() for name, v in velocities.items() if v is not None}}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `shared_state` returned on any rank.

        Raises:
            ValueError: a tensor whose shape is not its parameter's.
        """
        self.load_state_dict(state)
        for name, z in self.anchor.module.named_parameters():
            if name in state["outer"]:
                self.sgd.state[z]["momentum_buffer"] = state["outer"][name].to(z, copy=True)

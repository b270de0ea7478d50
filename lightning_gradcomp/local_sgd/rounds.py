"""Rounds: compressed averages of the ranks' updates, one per round of local steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.checkpoint_state import check_state
from lightning_gradcomp.averaging.faults import ExchangeFailed, explained
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.trainable import parameters_of
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits
from lightning_gradcomp.errors import check_share, refusal
from lightning_gradcomp.local_sgd.anchor import Anchor
from lightning_gradcomp.local_sgd.sync import sample_weight

LOCAL = "local"
"""Prefix of the local optimizers' state names, as in "local0_exp_avg", of the first optimizer."""
NUMBERS = 6
"""Count of numbers in a report. Each is sent as fp64, which is exact for integers up to 2**53."""


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo: `torch.optim.SGD(nesterov=True)` on the negated mean update of a round.

    Source: Douillard et al. 2023, arXiv 2311.08105.

    Args:
        lr: outer learning rate, above 0. With `momentum=0`, 1 is plain averaging.
        momentum: outer momentum, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise refusal("Nesterov.lr", self.lr, "a number above 0")
        if not 0 <= self.momentum < 1:
            raise refusal("Nesterov.momentum", self.momentum, "0 <= momentum < 1")


PLAIN_AVERAGING = Nesterov(lr=1.0, momentum=0.0)
"""No outer optimizer: the mean update is added to the anchor."""


class Rounds:
    """Averages the updates of rounds: a GradientAverager of the anchor, whose gradients are pseudo-gradients.

    A step of the averager is a round, and its optimizer is the outer one. A compressor that corrects momentum (DGC)
    corrects the outer optimizer's; the user's optimizer is not affected.

    Args:
        local_optimizers: the model's optimizers. With `error_decay`, their state is part of this rank's.
        error_decay: factor by which the residuals are multiplied once per round; None for no decay.
        period: training steps in a round; converts the compressor's `warmup_steps` to rounds.
    """

    def __init__(
        self,
        anchor: Anchor,
        compressor: Compressor,
        process_group: dist.ProcessGroup | None,
        *,
        outer: Nesterov,
        epoch: int | None,
        local_optimizers: Sequence[torch.optim.Optimizer],
        error_decay: float | None,
        period: int,
    ) -> None:
        check_share("error_decay", error_decay)
        self.anchor, self.local_optimizers, self.error_decay = anchor, local_optimizers, error_decay
        momentum = outer.momentum
        self.sgd = torch.optim.SGD(anchor.module.parameters(), lr=outer.lr, momentum=momentum, nesterov=momentum > 0)
        if isinstance(compressor, LossyCompressor) and (dense := compressor.dense_steps):
            compressor = replace(compressor, warmup_steps=dense // period)
        self.averager = GradientAverager(
            anchor.module, compressor, optimizer=self.sgd, process_group=process_group, epoch=epoch
        )
        self.averager.parameters_agree = True  # reports say which parameters are frozen
        self.compressor, self.ranks = self.averager.compressor, self.averager.ranks
        self.world, self.rank = self.ranks.world, self.ranks.rank
        self.bytes_sent = 0
        """Bytes that left this rank in the latest exchange, including the report."""

    @property
    def steps(self) -> int:
        """Rounds so far."""
        return self.averager.steps

    @property
    def gradients(self) -> Gradients:
        """The anchor's pseudo-gradients."""
        return self.averager.gradients

    # The exchange

    def gather_reports(self, own: RoundReport, doing: str) -> list[RoundReport]:
        """The reports of all ranks, in rank order. Collective."""
        reports = own.gather(self.ranks, self.anchor.device)
        check_in_step(reports, self.ranks.rank, list(self.anchor.live), doing)
        self.bytes_sent = self.ranks.gather_traffic(report_bytes(len(own.frozen)))
        return reports

    def exchange(self, own: RoundReport, training_step: int, epoch: int | None = None) -> list[RoundReport]:
        """Replace the anchor's gradients with their mean over all samples. Returns all ranks' reports. Collective."""
        doing = f"averaging round {self.steps + 1}"
        with explained(training_step, doing, self.ranks.group):
            reports = self.gather_reports(own, doing)
        self.averager.epoch = epoch
        samples = [report.samples for report in reports]
        usual = sample_weight(own.samples, samples)
        among_senders = sample_weight(own.samples, [number for number in samples if number])
        sparse = self._divided_by_senders()
        for z in self.anchor.module.parameters():
            weight = among_senders if z in sparse else usual
            if z.grad is not None and weight != 1:
                z.grad.mul_(weight)
        self.averager.average(during=(training_step, doing))
        self.bytes_sent += self.averager.stats.bytes_sent
        return reports

    def _divided_by_senders(self) -> set[nn.Parameter]:
        """The anchor's parameters whose sums the next exchange divides by the number of ranks that send an entry.

        A rank without samples has nothing to send, so it must not count in their weights.
        """
        compressor = self.averager.begin_step().compressor
        return set(self.gradients.compressed) if compressor and compressor.averages_over_senders else set()

    def exchange_uncompressed(self, own: RoundReport, training_step: int) -> list[RoundReport]:
        """Average the updates and all residuals, uncompressed. Returns all ranks' reports. Collective.

        The mean update is added to the anchor without the outer optimizer.
        """
        averager = self.averager
        usual, (averager.schedule, averager.wire) = (averager.schedule, averager.wire), (None, "fp32")
        reports = self.exchange(own, training_step, averager.epoch)
        averager.schedule, averager.wire = usual
        with torch.no_grad():
            for z in self.anchor.module.parameters():
                if z.grad is not None:
                    z.sub_(z.grad)
        self.averager.commit()
        return reports

    def step_outer_optimizer(self) -> None:
        """Step the anchor on the mean pseudo-gradient."""
        self.sgd.step()
        if self.error_decay is not None:
            self.averager.state.decay(self.error_decay)  # as e <- decay · e + U at the end of the next round

    # Checkpoints

    def _local_states(self) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, dict[str, Any]]]]:
        """(prefix, optimizer, parameter name -> torch's name -> value) for each local optimizer."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.anchor.live.items()}
        for number, optimizer in enumerate(self.local_optimizers):
            states = {names[p]: optimizer.state.get(p, {}) for p in parameters_of(optimizer)}
            yield f"{LOCAL}{number}", optimizer, states

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, in GradientAverager's format.

        With `error_decay`, also the tensors and numbers in the local optimizers' state. Floating-point tensors are in
        fp32.
        """
        state = self.averager.state_dict()
        for prefix, _, states in self._local_states() if self.error_decay is not None else ():
            memory = {**state["memory"], prefix: {}}  # empty: says that the optimizer's state is here
            for name, held in states.items():
                for kind, value in held.items():
                    if isinstance(value, (torch.Tensor, int, float)):
                        saved = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
                        if isinstance(value, torch.Tensor) and value.is_floating_point():
                            saved = value.float()
                        memory.setdefault(f"{prefix}_{kind}", {})[name] = saved.clone()
            state = {**state, "memory": memory}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's state, and the local optimizers' if it is in `state`."""
        check_state(state, ())
        memory = {kind: parts for kind, parts in state["memory"].items() if not kind.startswith(LOCAL)}
        self.averager.load_state_dict({**state, "memory": memory})
        for prefix, optimizer, states in self._local_states():
            if prefix not in state["memory"]:
                continue
            start, loaded = f"{prefix}_", {}
            kinds = {kind[len(start) :]: parts for kind, parts in state["memory"].items() if kind.startswith(start)}
            for index, (name, held) in enumerate(states.items()):
                saved = {kind: parts[name] for kind, parts in kinds.items() if name in parts}
                if saved:  # else this rank has not stepped it
                    plain = {kind for kind, value in held.items() if isinstance(value, (int, float))}
                    saved = {kind: value.item() if kind in plain else value for kind, value in saved.items()}
                    loaded[index] = {**held, **saved}
            optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})

    def shared_state(self) -> dict[str, Any]:
        """`state_dict` plus the outer optimizer's state; the same on all ranks if there are no residuals."""
        velocities = {
            name: self.sgd.state[z].get("momentum_buffer") for name, z in self.anchor.module.named_parameters()
        }
        return {**self.state_dict(), "outer": {name: v.clone() for name, v in velocities.items() if v is not None}}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the `shared_state` of any rank."""
        self.load_state_dict(state)
        for name, z in self.anchor.module.named_parameters():
            if name in state["outer"]:
                self.sgd.state[z]["momentum_buffer"] = state["outer"][name].to(z, copy=True)


# Reports


@dataclass(frozen=True)
class RoundReport:
    """One rank's report on a round, the first message of each round and drain.

    Both have the same length, so ranks at different steps detect this before they enter collectives with different
    shapes, on which gloo aborts the process.
    """

    samples: int  # the weight of its update in the average
    flag: bool = False  # the caller's, such as "received SIGTERM"
    distance: float = 0.0  # L2 distance of its weights from the anchor in the last round that was applied
    step_seconds: float = 0.0  # median time of a step in this round, without waits for the network
    exchange_seconds: float = 0.0  # duration of its last exchange
    steps: int = 0  # its optimizer steps so far
    frozen: tuple[bool, ...] = ()  # for each parameter of the model

    def gather(self, ranks: Ranks, device: torch.device) -> list[RoundReport]:
        """The reports of all ranks, in rank order. Collective."""
        numbers = (self.samples, self.flag, self.distance, self.step_seconds, self.exchange_seconds, self.steps)
        message = torch.zeros(report_bytes(len(self.frozen)), dtype=torch.uint8)
        message[: 8 * NUMBERS] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        bits = pack_bits(torch.tensor(self.frozen, dtype=torch.bool))
        message[8 * NUMBERS : 8 * NUMBERS + len(bits)] = bits
        return [_decode(row, len(self.frozen)) for row in ranks.gather(message.to(device)).cpu()]


def report_bytes(parameters: int) -> int:
    """Size in bytes of a report on a model with `parameters` parameters."""
    return 8 * (NUMBERS + (parameters + 63) // 64)


def _decode(message: torch.Tensor, parameters: int) -> RoundReport:
    samples, flag, distance, step_seconds, exchange_seconds, steps = message[: 8 * NUMBERS].view(torch.float64).tolist()
    frozen = unpack_bits(message[8 * NUMBERS :], parameters).bool().tolist()
    return RoundReport(int(samples), bool(flag), distance, step_seconds, exchange_seconds, int(steps), tuple(frozen))


def check_in_step(reports: Sequence[RoundReport], rank: int, names: Sequence[str], doing: str) -> None:
    """Raise an error on every rank if ranks are at different steps or train different parameters."""
    for name, frozen in zip(names, zip(*(report.frozen for report in reports), strict=True), strict=True):
        if len(set(frozen)) > 1:
            where = ", ".join(str(other) for other, is_frozen in enumerate(frozen) if is_frozen)
            allowed = "the same parameters on every rank, frozen and unfrozen at the same step"
            raise refusal("parameters that train", f"{name}, which is frozen on rank {where} only", allowed)
    steps = [report.steps for report in reports]
    if len(set(steps)) > 1:
        found = ", ".join(f"rank {other} is at step {step}" for other, step in enumerate(steps))
        raise ExchangeFailed(
            f"rank {rank} of {len(steps)}, step {steps[rank]}, {doing}: the exchange failed; {found}. All ranks must "
            "have the same number of batches, step in the same batches, and save checkpoints and validate at the same "
            "step."
        )

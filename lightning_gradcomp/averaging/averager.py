"""GradientAverager: averages gradients, compressed, once per optimizer step, after backward, on `p.grad`.

It works on the gradients that backward has left, not inside a DDP hook: the state is then keyed by parameter name
whatever DDP does to its buckets, there is one message a step, and a failing step leaves DDP usable. The step itself is
in step.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.autotune import CANDIDATES, DENSE, Autotune
from lightning_gradcomp.averaging.checkpoint_state import check_shapes, check_state, warn_of_lost_kinds
from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.averaging.fsdp import Shards, check_group, is_sharded, reshard
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.stats import Stats, residual_to_gradient
from lightning_gradcomp.averaging.step import CompressedStep, average_dense
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.averaging.traffic import traffic
from lightning_gradcomp.averaging.workers import ranks_of
from lightning_gradcomp.compressors.adam_step import some_gradient
from lightning_gradcomp.compressors.base import Compressor, Lossy
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, check_sparsity, dense_start
from lightning_gradcomp.compressors.state import State
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import build


@dataclass(frozen=True)
class Decision:
    """What the coming step does.

    Args:
        sparsity: what the schedule asks for.
        compressor: as it is in the step; None for a dense one.
        topology: how its messages travel; "dense" without a compressor.
    """

    sparsity: float = 0.0
    compressor: Lossy | None = None
    topology: str = DENSE


class GradientAverager:
    """Averages a model's gradients over a process group, compressed, in place of DDP.

        averager = GradientAverager(model, DGC(), optimizer=optimizer)
        with averager.local_weights():  # of DGC; other methods need no such line
            loss(model, batch).backward()
        averager.step()  # = averager.average(), then optimizer.step()

    Every rank ends each step with bitwise the same gradients. State is fp32 and keyed by parameter name.

    Args:
        model: the bare module (not wrapped in DDP), with the same parameters on every rank. Or one that
            `torch.distributed.fsdp.fully_shard` has prepared with a mesh of one dimension: each rank then averages its
            own shards with the ranks of `process_group`, which hold the same shards of other replicas.
        compressor: an instance, or a name with default options.
        optimizer: DGC needs `torch.optim.SGD`, `Adam` or `AdamW` itself, whose momentum it corrects. With Adam and
            AdamW, whatever has error feedback, except PowerSGD, accumulates the optimizer's steps instead of gradients:
            `average` then makes the steps of compressed parameters, and their `p.grad` is None afterwards.
        process_group: default: the world; a process without torch.distributed is a world of one. For a sharded model,
            that of the mesh's replicate dimension: `mesh.get_group("replicate")`.
        topology: "all_gather": payloads go to every rank. "two_phase": each rank averages a shard, and sends the mean
            on, compressed again; for many ranks. "server": the same with dense means. "auto": what a trial in the first
            steps finds quickest: dense steps, or one of the first two. Or a kvstore's name: "device", "dist_sync",
            "dist_sync_device" (docs/topologies.md).
        inside: "compressed": every rank compresses its own gradient. "dense": ranks of a node average theirs first, and
            only nodes exchange payloads. Default: "compressed"; with topology="auto" "dense" where there are several
            nodes of several ranks (`ranks_per_node`).
        residual_device: where what is not sent is kept between steps: with the gradients ("device", default), or in
            "cpu" memory.
        ranks_per_node: for inside="dense", whose default is what torchrun has started on this node.
        steps_per_epoch: lets a schedule that counts epochs count them.
        epoch: the epoch to begin with, for a caller that counts epochs itself, in `averager.epoch`.

    Raises:
        ValueError: an option, optimizer or model that can't be honoured, before anything is exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor | str,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        topology: str = "all_gather",
        inside: str | None = None,
        residual_device: str | None = None,
        ranks_per_node: int | None = None,
        steps_per_epoch: int | None = None,
        epoch: int | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise refusal("GradientAverager(model)", "DistributedDataParallel", "the module inside it")
        self.compressor: Compressor = build(compressor).for_optimizer(optimizer)
        self.compressor.check_optimizer(optimizer)
        route = resolve(topology, inside, residual_device, self.compressor)
        self.shards = Shards(model, optimizer) if is_sharded(model) else None
        """Of a sharded model: where its parameters, gradients and optimizer become plain tensors, and back."""
        if self.shards:
            check_group(self.shards, process_group, route)
        elif process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.ranks = ranks_of(process_group, route.inside, ranks_per_node, self.shards.group if self.shards else None)
        self.world = self.ranks.world
        self.model, self.optimizer, self.steps_per_epoch = model, optimizer, steps_per_epoch
        self.schedule: Schedule | None = self.compressor.schedule()
        """Sparsity as a function of (epoch, step); may be replaced at any time."""
        self.epoch, self.steps = epoch, 0
        self._check_epochs_are_counted()
        self.stats = Stats()
        """What the last step cost."""
        self.spent = Stats()
        """What all steps have cost."""
        self.flag = self.flagged = False
        """What this rank tells the others along with its gradients, and whether any rank did in the last `average`."""
        self.measures_residual = False
        """Whether compressed steps also measure `stats.residual_to_gradient`: two passes over the model."""
        self._holds_momentum = False
        """Whether the gradients are the average of a compressed step, in which momentum is contained."""
        self.gradients = Gradients(model, self.compressor, self.shards)
        self._decision: tuple[Any, Decision] | None = None
        self._known_traffic: dict[str, tuple[Any, int]] = {}
        self._compressed: CompressedStep | None = None
        self._topologies = [route.name]
        self.autotune: Autotune | None = None
        """With topology="auto": finds out what is quickest."""
        if isinstance(self.compressor, Lossy):
            stepped = self.shards.optimizer if self.shards else optimizer
            self._compressed = CompressedStep(self.compressor, self.gradients, self.ranks, route, stepped)
            if route.name == "auto":
                sharded = self.ranks.workers > 2 and self.compressor.not_sharded_because is None
                self._topologies = list(CANDIDATES) if sharded else ["all_gather"]
                if self.ranks.workers > 1 and self.gradients.compressed:
                    self.autotune = Autotune(process_group, self.gradients.device, self._topologies)

    def _check_epochs_are_counted(self) -> None:
        counts_epochs = isinstance(self.schedule, Ramp) and self.schedule.counts_epochs
        if counts_epochs and self.epoch is None and self.steps_per_epoch is None:
            allowed = "steps_per_epoch=len(loader), or a compressor without warm-up (warmup_epochs=0, dense_epochs=0)"
            raise refusal("steps_per_epoch, with a warm-up that counts epochs", None, allowed)

    # What a step does

    @property
    def decision(self) -> Decision:
        """What the coming step does. The schedule is asked once a step."""
        asked = self.steps, self.epoch, self.schedule, self.gradients
        if self._decision is None or self._decision[0] != asked:
            self._decision = asked, self._decide()
        return self._decision[1]

    def _decide(self) -> Decision:
        alone = self.ranks.workers == 1
        largest = self.gradients.largest
        if alone or self.schedule is None or self._compressed is None or not largest.layout.n:
            return Decision()
        self._check_epochs_are_counted()
        epoch = self.steps // (self.steps_per_epoch or 1) if self.epoch is None else self.epoch
        sparsity = check_sparsity("the schedule's sparsity", self.schedule(epoch, self.steps))
        if not sparsity:
            return Decision()
        compressor, dense = self._compressed.compressor.at(sparsity), self.ranks.dense_traffic(largest.nbytes)
        affordable = [name for name in self._topologies if self._traffic(compressor, name) < dense]
        topology = affordable[0] if affordable else DENSE
        if self.autotune:
            topology = self.autotune.choose(1 - sparsity, affordable)
        return Decision(sparsity) if topology == DENSE else Decision(sparsity, compressor, topology)

    @property
    def sparsity(self) -> float:
        """Share that the coming step leaves out: the schedule's, or 0 where sparse would cost more than dense."""
        return self.decision.sparsity if self.decision.compressor else 0.0

    @property
    def dense_step(self) -> bool:
        """Whether the coming step is an ordinary dense average, which DDP may as well do, overlapped with backward."""
        return self.decision.compressor is None and self.settled

    @property
    def topology(self) -> str:
        """How the latest compressed messages have travelled; "all_reduce" where none can be."""
        return self._compressed.state.topology if self._compressed else "all_reduce"

    @property
    def state(self) -> State | None:
        """What this rank has not sent yet; None for a baseline, which sends everything."""
        return self._compressed.state.compressed if self._compressed else None

    @property
    def settled(self) -> bool:
        """Whether compressed steps have left nothing out that is remembered."""
        return self._compressed is None or self._compressed.state.empty

    # Steps

    @contextmanager
    def local_weights(self) -> Iterator[None]:
        """For forward and backward, with an optimizer that the compressor corrects (DGC's SGD, Adam, AdamW): let the
        weights be without what this rank has not sent yet.

            with averager.local_weights():
                loss(model(x), y).backward()
            averager.step()

        A gradient there knows this rank's latest steps. In other methods, and without it, gradients are taken at the
        weights that all ranks share. One backward at a time: no graph of inside may be used outside.
        """
        self.use_local_weights()
        try:
            yield
        finally:
            self.use_shared_weights()

    def use_local_weights(self) -> None:
        """Enter `local_weights`, for a caller that leaves it by `use_shared_weights`."""
        if self._compressed and not self.gradients.stale:
            with self._plain_tensors():
                self._compressed.use_local_weights()
            if self.shards:
                reshard(self.model)

    def use_shared_weights(self) -> None:
        """Let the weights be those of all ranks."""
        if self._compressed and self._compressed.local_weights.in_use:
            self._compressed.local_weights.restore()
            if self.shards:
                reshard(self.model)

    def _plain_tensors(self) -> AbstractContextManager[None]:
        """Inside, the parameters of `gradients` are plain tensors with the model's gradients and optimizer state."""
        return self.shards.entered() if self.shards else nullcontext()

    def step(self) -> None:
        """Average the gradients, then step the optimizer, which applies no momentum that was applied already.

        A collective call.

        Raises:
            ValueError: there is no optimizer.
            ExchangeFailed: the other ranks can't be reached; it names rank, step and who is missing.
        """
        if self.optimizer is None:
            raise refusal(
                "GradientAverager.step()", "no optimizer", "GradientAverager(..., optimizer=opt), or .average()"
            )
        self.average()
        with self.taken_over(self.optimizer):
            self.optimizer.step()

    def average(self, *, grad_scale: float = 1.0) -> None:
        """Replace every `p.grad` by its average over the ranks, as the compressor sends it. A collective call.

        Where any rank's gradient is not finite, all ranks get non-finite gradients and all state stays as it was.

        Args:
            grad_scale: the loss scale that is in the gradients; what is remembered is free of it.

        Raises:
            ExchangeFailed: the other ranks can't be reached; it names rank, step and who is missing.
        """
        with explained(self.steps, "averaging gradients", self.ranks.group):
            self._average(grad_scale)

    def _average(self, grad_scale: float) -> None:
        self.use_shared_weights()
        with self._plain_tensors():
            if self.gradients.stale:
                self.gradients = Gradients(self.model, self.compressor, self.shards)
                if self._compressed:
                    self._compressed.lay_out(self.gradients)
            dense_step, seconds = self.dense_step, 0.0
            if dense_step:
                seconds = self._average_densely(grad_scale)
            else:
                self._average_compressed(grad_scale)
        if dense_step:
            self.after_dense_step(grad_scale=grad_scale, seconds=seconds)

    def _average_densely(self, grad_scale: float) -> float:
        stats = Stats()
        with stats.phase("exchange"):
            self.flagged = average_dense(self.compressor, self.gradients, self.ranks, grad_scale, self.flag)
        return stats.seconds["exchange"]

    def _average_compressed(self, grad_scale: float) -> None:
        assert self._compressed is not None
        decision, compressed = self.decision, self._compressed
        has_sparsity = decision.compressor is not None and hasattr(decision.compressor, "sparsity")
        self.stats = Stats(dense_bytes=self._dense_traffic(), sparsity=decision.sparsity if has_sparsity else 0.0)
        with self._measured_residual(grad_scale):
            if decision.compressor:
                how = decision.compressor, decision.topology, self.steps
                self.flagged = compressed.compressed(*how, grad_scale, self.stats, self.flag)
            else:
                self.flagged = compressed.sparse_to_dense(grad_scale, self.stats, self.flag)
        self._holds_momentum = self.compressor.owns_momentum(self.optimizer)
        self._end_step()

    def _measured_residual(self, grad_scale: float) -> AbstractContextManager[None]:
        state = self.state
        timed = self.autotune is not None and self.autotune.measuring
        if not self.measures_residual or timed or state is None or state.unsent is None:
            return nullcontext()
        gradients = [parameter.grad for parameter in self.gradients.compressed if parameter.grad is not None]
        return residual_to_gradient(gradients, state, self.stats, grad_scale)

    def after_dense_step(self, *, grad_scale: float = 1.0, seconds: float = 0.0) -> None:
        """Record a dense step; DDP may have done the averaging, in `seconds` that backward did not hide."""
        self._holds_momentum = False
        dense = self._dense_traffic()
        sent = dense * self.compressor.wire_dtype.itemsize // 4
        self.stats = Stats(bytes_sent=sent, bytes_received=sent, dense_bytes=dense)
        self.stats.seconds["exchange"] = seconds
        self.compressor.clip_average([p for p in self.model.parameters() if p.requires_grad], grad_scale)
        self._end_step()

    def _end_step(self) -> None:
        decision = self.decision
        self.steps += 1
        self.spent.add(self.stats)
        decided = self.autotune and self.autotune.step_ended(decision.topology, 1 - decision.sparsity)
        if self.autotune and decided and self.autotune.choice == DENSE and self.ranks.rank == 0:
            what = f"{type(self.compressor).__name__}: {self.autotune.outcome}."
            warnings.warn(f"{what} topology='all_gather' compresses all the same.", stacklevel=2)

    @contextmanager
    def taken_over(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """For the length of `optimizer.step()`: no momentum or weight decay where the average already holds them."""
        with ExitStack() as stack:
            if self._holds_momentum and self.state is not None:
                if not self.shards:
                    stack.enter_context(self.state.stepping(optimizer))
                elif self.shards.optimizer is not None:
                    self.shards.enter()
                    stack.enter_context(self.state.stepping(self.shards.optimizer))
                    stack.enter_context(self.shards.stepping(optimizer))
                if self.state.makes_step:
                    stack.enter_context(some_gradient(optimizer, self.gradients.device))
            yield

    def _traffic(self, compressor: Lossy, topology: str) -> int:
        """Bytes that a step of this compressor sends; known for the latest sparsity."""
        key = topology, getattr(compressor, "sparsity", 0.0), self.gradients
        if self._known_traffic.get(topology, (None, 0))[0] != key:
            self._known_traffic[topology] = key, traffic(compressor, self.gradients.largest, self.ranks, topology)
        return self._known_traffic[topology][1]

    def _dense_traffic(self) -> int:
        return self.ranks.dense_traffic(self.gradients.nbytes)

    # Log and checkpoints

    def describe(self) -> str:
        """One line for the log: dense steps first, what is compressed, and what a step sends then, how and why."""
        name, ranks, dense = type(self.compressor).__name__, self.ranks, self._dense_traffic()
        if ranks.group is None or ranks.world == 1:
            return f"{name}: world size 1, so nothing is exchanged and nothing compressed; training is as without it."
        nodes = f" on {ranks.workers} nodes" if ranks.per_worker > 1 else ""
        shards = f" replicas of {self.shards.number} shards each" if self.shards else ""
        where = f"N={ranks.world}{nodes}{shards}, {ranks.group.name()}"
        if self._compressed is None:
            sent = dense * self.compressor.wire_dtype.itemsize // 4
            return f"{name}: {sent:,} bytes sent a step ({where}, ring all-reduce)."
        tried = f" {self.autotune.describe()}." if self.autotune else ""
        return f"{name}: {self._describe_message(self._compressed)}, against {dense:,} dense ({where}).{tried}"

    def _describe_message(self, compressed: CompressedStep) -> str:
        gradients, sparsity = self.gradients, compressed.compressor.final_sparsity
        if not gradients.compressed:
            return "no tensor is large enough to be compressed, all travel dense"
        final = compressed.compressor.at(sparsity)
        between = "" if self.ranks.per_worker == 1 else " between nodes"
        sent = [f"{self._traffic(final, name):,} bytes sent{between} a step by {name}" for name in self._topologies]
        listed = " or ".join(sent)
        at_sparsity = f"at sparsity {sparsity:g} " if hasattr(compressed.compressor, "sparsity") else ""
        first = f"{start}, then " if (start := dense_start(self.schedule)) else ""
        return (
            f"{first}{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, "
            f"{len(gradients.dense)} ({gradients.dense_layout.n:,}) dense in the same message; {at_sparsity}{listed}"
        )

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Parameter -> torch's name -> mean over ranks of the optimizer's state that is kept here. Collective."""
        with self._plain_tensors():
            kept = self._compressed.optimizer_state() if self._compressed else {}
        return self.shards.whole_state(kept, self.gradients.chosen) if self.shards else kept

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name and plain numbers; `torch.load(weights_only=True)` reads it.

        A world of another size goes on from `averaging.mean_state` of all ranks' states.
        """
        state = self._compressed.state.state_dict() if self._compressed else {}
        remembers_dense = any(kind.startswith("dense_") for kind in state)
        return {
            "steps": self.steps,
            "memory": state,
            "shapes": self.gradients.chosen,
            "dense_shapes": self.gradients.left_dense if remembers_dense else {},
            "workers": self.ranks.workers,
            "trained": list(self.gradients.layout.names),
            "shared_by": self._compressed.state.shared_by if self._compressed else 1,
            "autotune": self.autotune and {"world": self.world, **self.autotune.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's state. A parameter that only the state or only the model has is named in a warning.

        Raises:
            ValueError: what is no such state, another method's, or a tensor whose shape is not its parameter's, or of a
                parameter that is not compressed here.
        """
        check_state(state, self.state.state_dict() if self.state is not None else ())
        if self._compressed and state["memory"]:
            check_shapes(state["shapes"], state["dense_shapes"], self.gradients, warn=self.ranks.rank == 0)
            how = {key: state[key] for key in ("workers", "trained", "shared_by")}
            self._compressed.state.load_state_dict(state["memory"], **how)
            if self.ranks.rank == 0:
                warn_of_lost_kinds(state["memory"], self._compressed.state.state_dict(), self.gradients)
        tuned = state["autotune"]
        # Other ranks need a trial of their own; version 0.1.0 had no rounds.
        if self.autotune and tuned and tuned["world"] == self.world and "round" in tuned:
            self.autotune.load_state_dict(tuned)
        self.steps, self._decision = state["steps"], None

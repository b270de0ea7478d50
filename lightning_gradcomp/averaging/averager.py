"""GradientAverager: averages gradients, compressed, once per optimizer step, after backward, on `p.grad`.

It works on the gradients that backward has left, not inside a DDP hook: the state is then keyed by parameter name
whatever DDP does to its buckets, there is one message a step, and a failing step leaves DDP usable. The average itself
is in step.py.

An average is an ordinary gradient until the optimizer steps. The step applies what `p.grad` is by then, and commits the
error feedback of the parameters that it has stepped (optimizer_step.py). An average that no step uses is dropped, with
its batch: the state stays as it was.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.autotune import CANDIDATES, DENSE, Autotune
from lightning_gradcomp.averaging.checkpoint_state import check_shapes, check_state, warn_of_lost_kinds
from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.averaging.fsdp.shards import Shards, check_group, is_sharded, local, reshard
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.optimizer_step import OptimizerStep
from lightning_gradcomp.averaging.ranks import ranks_of
from lightning_gradcomp.averaging.stats import Stats, norm
from lightning_gradcomp.averaging.step import Average, CompressedStep, Flags, average_dense
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.averaging.traffic import traffic
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.compressors.schedules import COMPRESSED, Ramp, Schedule, check_sparsity, dense_start
from lightning_gradcomp.compressors.state import State
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import build


@dataclass(frozen=True)
class Decision:
    """What a step does.

    Args:
        sparsity: what the schedule asks for: 0 in a dense phase, None for a method without a sparsity.
        compressor: as it is in this step; None for a dense step.
        topology: how the payloads travel; "dense" without a compressor.
        by_ddp: True for an ordinary dense average with nothing unsent, which DDP can overlap with backward.
    """

    sparsity: float | None
    compressor: LossyCompressor | None
    topology: str
    by_ddp: bool

    @property
    def density(self) -> float:
        """Share of all elements that the schedule asks to send."""
        return 1 - (COMPRESSED if self.sparsity is None else self.sparsity)


@dataclass(frozen=True)
class Unused:
    """An average that no optimizer step has used yet.

    Args:
        average: what became of it.
        written: id of a parameter of the model -> its gradient as it was written, and its versions then.
        optimizers: those whose step uses it.
    """

    average: Average
    written: Mapping[int, tuple[torch.Tensor, tuple[int, int]]]
    optimizers: Sequence[torch.optim.Optimizer]

    def belongs_to(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """True if it is this optimizer that uses it."""
        return optimizer is None or any(optimizer is each for each in self.optimizers)

    def is_untouched(self, parameter: torch.Tensor) -> bool:
        """True if `parameter.grad` is the average as it was written."""
        grad, versions = self.written.get(id(parameter), (None, (0, 0)))
        return grad is not None and parameter.grad is grad and _versions(grad) == versions


def _versions(grad: torch.Tensor) -> tuple[int, int]:
    """How often torch has seen it written to. A DTensor and its local part count their own writes."""
    return grad._version, local(grad)._version


class GradientAverager:
    """Averages a model's gradients over a process group, compressed, in place of DDP.

        averager = GradientAverager(model, DGC(), optimizer=optimizer)
        with averager.local_weights():  # of DGC; other methods need no such line
            loss(model, batch).backward()
        averager.step()  # = averager.average(), then optimizer.step()

    Between the two lines of `step`, `p.grad` is the averaged gradient, or, where the compressor owns the momentum, the
    averaged update direction: `optimizer.step()` subtracts lr · `p.grad`. It may be changed, clipped or discarded.

    Every rank ends each step with bitwise the same gradients. State is fp32 and keyed by parameter name.

    Args:
        model: the bare module (not wrapped in DDP), with the same parameters on every rank. Or one that
            `torch.distributed.fsdp.fully_shard` has prepared with a mesh of one dimension: each rank then averages its
            own shards with the ranks of `process_group`, which hold the same shards of other replicas.
        compressor: an instance, or a name with default options.
        optimizer: what steps the parameters; those that it does not have are not averaged. DGC needs `torch.optim.SGD`,
            `Adam` or `AdamW` itself, whose momentum it corrects. With Adam and AdamW, whatever has error feedback,
            except PowerSGD, accumulates the optimizer's steps instead of gradients. Without an optimizer, error
            feedback is committed by `average`, of all parameters.
        optimizers: where there are several; the compressor owns the momentum of none of them. All their parameters are
            averaged.
        local_weights: False: `local_weights()` has no effect, and gradients are taken at the weights that all ranks
            share. It costs accuracy (docs/dgc.md), and allows writes into the weights during a forward pass.
        process_group: default: the world; a process without torch.distributed is a world of one. For a sharded model,
            that of the mesh's replicate dimension: `mesh.get_group("replicate")`.
        topology: "all_gather": payloads go to every rank. "two_phase": each rank averages a shard, and sends the mean
            on, compressed again; for many ranks. "server": the same with dense means. "auto": what a trial in the first
            steps finds quickest: dense steps, or one of the first two. Or a kvstore's name: "device", "dist_sync",
            "dist_sync_device" (docs/clusters.md).
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
        optimizers: Sequence[torch.optim.Optimizer] = (),
        process_group: dist.ProcessGroup | None = None,
        topology: str = "all_gather",
        inside: str | None = None,
        residual_device: str | None = None,
        ranks_per_node: int | None = None,
        steps_per_epoch: int | None = None,
        epoch: int | None = None,
        local_weights: bool = True,
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
        self.optimizers = list(optimizers) if optimizer is None else [optimizer]
        self._local_weights = local_weights
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
        self._directions: frozenset[int] = frozenset()
        """ids of the parameters whose gradients are update directions, from the latest average on."""
        self._unused: Unused | None = None
        self._dropped: Unused | None = None
        self._compressed_average, self._gradient_norm = False, 0.0
        self.parameters_agree = False
        """True once the ranks have compared which parameters train."""
        self._averaged_for = self.optimizers
        self._stepped = self._ids(self.optimizers)
        self.gradients = self._lay_out()
        self.decision = Decision(0.0, None, DENSE, by_ddp=True)
        """What the latest `begin_step` decided."""
        self._decided_for: Any = None
        self._known_traffic: dict[str, tuple[Any, int]] = {}
        self._compressed: CompressedStep | None = None
        self._topologies = [route.name]
        self.autotune: Autotune | None = None
        """With topology="auto": finds out what is quickest."""
        if isinstance(self.compressor, LossyCompressor):
            stepped = self.shards.optimizer if self.shards else optimizer
            self._compressed = CompressedStep(self.compressor, self.gradients, self.ranks, route, stepped)
            if route.name == "auto":
                sharded = self.ranks.workers > 2 and self.compressor.not_partitioned_because is None
                self._topologies = list(CANDIDATES) if sharded else ["all_gather"]
                if self.ranks.workers > 1 and self.gradients.compressed:
                    self.autotune = Autotune(process_group, self.gradients.device, self._topologies)
        self._optimizer_steps = self._attached()

    def _check_epochs_are_counted(self) -> None:
        counts_epochs = isinstance(self.schedule, Ramp) and self.schedule.counts_epochs
        if counts_epochs and self.epoch is None and self.steps_per_epoch is None:
            allowed = "steps_per_epoch=len(loader), or a compressor without warm-up (warmup_epochs=0, dense_epochs=0)"
            raise refusal("steps_per_epoch, with a warm-up that counts epochs", None, allowed)

    # What a step does

    def begin_step(self) -> Decision:
        """Decide what the coming step does: ask the schedule, and let topology="auto" choose.

        `average` calls it too. Further calls return the same decision until the step is committed, `epoch` or
        `schedule` changes, or other parameters train.
        """
        decided_for = self.steps, self.epoch, self.schedule, self.gradients
        if self._decided_for != decided_for:
            self._decided_for, self.decision = decided_for, self._decide()
        return self.decision

    def _decide(self) -> Decision:
        dense = Decision(0.0, None, DENSE, by_ddp=not self.has_unsent)
        alone = self.ranks.workers == 1
        largest = self.gradients.largest
        if alone or self.schedule is None or self._compressed is None or not largest.layout.n:
            return dense
        self._check_epochs_are_counted()
        epoch = self.steps // (self.steps_per_epoch or 1) if self.epoch is None else self.epoch
        sparsity = check_sparsity("the schedule's sparsity", self.schedule(epoch, self.steps))
        if not sparsity:
            return dense
        compressor = self._compressed.compressor.with_sparsity(sparsity)
        budget = self.ranks.dense_traffic(largest.nbytes)
        affordable = [name for name in self._topologies if self._traffic(compressor, name) < budget]
        topology = affordable[0] if affordable else DENSE
        if self.autotune:
            topology = self.autotune.choose(1 - sparsity, affordable)
        asked = sparsity if hasattr(compressor, "sparsity") else None
        if topology == DENSE:
            return replace(dense, sparsity=asked)
        return Decision(asked, compressor, topology, by_ddp=False)

    @property
    def topology(self) -> str:
        """How the latest compressed messages have travelled; "all_reduce" where none can be."""
        return self._compressed.state.topology if self._compressed else "all_reduce"

    @property
    def state(self) -> State | None:
        """What this rank has not sent yet; None for a baseline, which sends everything."""
        return self._compressed.state.compressed if self._compressed else None

    @property
    def has_unsent(self) -> bool:
        """True if compressed steps have left something out that error feedback still has to send."""
        return self._compressed is not None and not self._compressed.state.empty

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

        Raises:
            ValueError: a weight was written to inside, which would be lost.
        """
        self.use_local_weights()
        with self.leaving_local_weights():
            yield

    @contextmanager
    def leaving_local_weights(self) -> Iterator[None]:
        """At the end the weights are those of all ranks. Writes into them are checked unless an exception ends it."""
        try:
            yield
        except BaseException:
            self.use_shared_weights(check=False)
            raise
        self.use_shared_weights()

    @property
    def has_local_weights(self) -> bool:
        """True if gradients are taken at this rank's own weights."""
        state = self.state
        return self._local_weights and state is not None and state.local_scales(self.ranks.workers) is not None

    @property
    def in_local_weights(self) -> bool:
        """True inside `local_weights`, where it has an effect."""
        return self._compressed is not None and self._compressed.local_weights.in_use

    def use_local_weights(self) -> None:
        """Enter `local_weights`, for a caller that leaves it by `use_shared_weights`. It drops an unused average."""
        self._drop_unused()
        if self._compressed and self._local_weights and not self._changed():
            with self._plain_tensors():
                self._compressed.use_local_weights()
            if self.shards:
                reshard(self.model)

    def use_shared_weights(self, *, check: bool = True) -> None:
        """Let the weights be those of all ranks.

        Args:
            check: raise ValueError for a weight that was written to inside `local_weights`.
        """
        if self._compressed and self._compressed.local_weights.in_use:
            try:
                self._compressed.local_weights.restore(check=check)
            finally:
                if self.shards:
                    reshard(self.model)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside, the weights are those of all ranks, also in the midst of `local_weights`: to save them."""
        if self._compressed is None:
            yield
        else:
            with self._compressed.local_weights.suspended():
                yield

    def compare_all_local_weights(self) -> None:
        """Let `local_weights` notice every write, at the cost of two passes over the model."""
        if self._compressed:
            self._compressed.local_weights.compares_all = True

    def _plain_tensors(self) -> AbstractContextManager[None]:
        """Inside, the parameters of `gradients` are plain tensors with the model's gradients and optimizer state."""
        return self.shards.entered() if self.shards else nullcontext()

    def _whole(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The model's own parameters, for those of `gradients`: of a sharded model, DTensors."""
        return [self.shards.whole_of(each) for each in parameters] if self.shards else parameters

    def step(self) -> None:
        """Average the gradients, then step the optimizer.

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
        self.optimizer.step()
        self.commit(self.optimizer)

    def average(
        self,
        *,
        grad_scale: float = 1.0,
        optimizer: torch.optim.Optimizer | None = None,
        during: tuple[int, str] | None = None,
    ) -> None:
        """Replace every `p.grad` by its average over the ranks, as the compressor sends it. A collective call.

        Where any rank's gradient is not finite, all ranks get non-finite gradients and all state stays as it was.

        Args:
            grad_scale: the loss scale that is in the gradients; error feedback is free of it.
            optimizer: one of several, to average the gradients of its parameters alone.
            during: step and phase that an error names. Default: `steps`, and "averaging gradients".

        Raises:
            ValueError: the ranks train different parameters; or an average of other parameters waits for its step.
            ExchangeFailed: the other ranks can't be reached; it names rank, step and who is missing.
        """
        if optimizer is not None and not any(optimizer is each for each in self.optimizers):
            allowed = "one of those that the averager was given"
            raise refusal("GradientAverager.average(optimizer)", type(optimizer).__name__, allowed)
        with explained(*(during or (self.steps, "averaging gradients")), self.ranks.group):
            self._average(grad_scale, self.optimizers if optimizer is None else [optimizer])

    def _average(self, grad_scale: float, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.use_shared_weights()
        self._check_average_was_used()
        self._drop_unused()
        self._dropped = None
        with self._plain_tensors():
            if [*map(id, optimizers)] != [*map(id, self._averaged_for)]:  # optimizers take turns, on all ranks alike
                self._averaged_for = list(optimizers)
                self._follow()
            if not self.parameters_agree:
                self._follow()
                self.check_same_parameters()
            average = self._average_once(grad_scale, Flags(self.flag, self._changed()))
            if average.flags.changed:
                self._follow()
                self.check_same_parameters()
                average = self._average_once(grad_scale, Flags(self.flag))
            self.flagged = average.flags.stop
            if self._compressed:
                self._compressed.local_weights.check()
        named = zip(self.gradients.names, self._whole(self.gradients.parameters), strict=True)
        present = [(p, p.grad) for name, p in named if name in average.names and p.grad is not None]
        written = {id(p): (grad, _versions(grad)) for p, grad in present}
        self._unused = Unused(average, written, self._averaged_for)
        if not self._compressed_average:
            self._clip_dense(grad_scale)
        self._record()

    def _average_once(self, grad_scale: float, flags: Flags) -> Average:
        decision, dense = self.begin_step(), self._dense_traffic()
        self._compressed_average = not decision.by_ddp
        self._directions = frozenset()
        if decision.by_ddp:
            self._record_dense()
            with self.stats.phase("exchange"):
                return Average(average_dense(self.compressor, self.gradients, self.ranks, grad_scale, flags))
        assert self._compressed is not None
        self.stats = Stats(dense_bytes=dense, sparsity=decision.sparsity or 0.0 if decision.compressor else 0.0)
        self._gradient_norm = self._measured_norm() / grad_scale
        if self.compressor.owns_momentum(self.optimizer):
            self._directions = frozenset(map(id, self._whole(self.gradients.compressed)))
        if decision.compressor:
            how = decision.compressor, decision.topology, self.steps
            return self._compressed.compressed(*how, grad_scale, self.stats, flags)
        return self._compressed.sparse_to_dense(grad_scale, self.stats, flags)

    def _measured_norm(self) -> float:
        """The norm of this rank's gradient; 0 where it is not asked for."""
        timed = self.autotune is not None and self.autotune.measuring
        if not self.measures_residual or timed or self.state is None or self.state.unsent is None:
            return 0.0
        begin = time.perf_counter()
        found = norm([parameter.grad for parameter in self.gradients.compressed if parameter.grad is not None])
        self.stats.norm_seconds += time.perf_counter() - begin
        return found if found < math.inf else 0.0

    def after_dense_step(
        self,
        *,
        grad_scale: float = 1.0,
        seconds: float = 0.0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Record a dense average that DDP has made, in `seconds` that backward did not hide.

        Args:
            grad_scale: the loss scale that is in the gradients.
            seconds: as said.
            optimizer: one of several, whose parameters' gradients it is.
        """
        self._check_average_was_used()
        self._drop_unused()
        self.begin_step()
        self._dropped, self._directions = None, frozenset()
        self._record_dense(seconds)
        self._unused = Unused(Average(Flags()), {}, self.optimizers if optimizer is None else [optimizer])
        self._clip_dense(grad_scale)
        self._record()

    def _record_dense(self, seconds: float = 0.0) -> None:
        dense = self._dense_traffic()
        sent = dense * self.compressor.wire_dtype.itemsize // 4
        self.stats = Stats(bytes_sent=sent, bytes_received=sent, dense_bytes=dense)
        self.stats.seconds["exchange"] = seconds

    def _clip_dense(self, grad_scale: float) -> None:
        stepped = self._stepped
        mine = [p for p in self.model.parameters() if p.requires_grad and (stepped is None or id(p) in stepped)]
        self.compressor.clip_average(mine, grad_scale)

    def _record(self) -> None:
        self.spent.add(self.stats)
        decided = self.autotune and self.autotune.step_ended(self.decision.topology, self.decision.density)
        if self.autotune and decided and self.autotune.choice == DENSE and self.ranks.rank == 0:
            what = f"{type(self.compressor).__name__}: {self.autotune.outcome}."
            warnings.warn(f"{what} topology='all_gather' compresses all the same.", stacklevel=2)
        if not self.optimizers:
            self.commit()

    # The optimizer's step

    def is_direction(self, parameter: torch.Tensor) -> bool:
        """True if `parameter.grad` is an update direction, which contains the optimizer's momentum."""
        return id(parameter) in self._directions

    def commit(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The optimizer has stepped: what it has used of the latest average leaves error feedback.

        torch's optimizers call it at the end of their step. A second call does nothing. The state of a parameter whose
        gradient was discarded (None, or all zeros where the average was not) stays as it was.

        Raises:
            ValueError: the optimizer has used an average that a later forward pass had dropped.
        """
        if self._dropped is not None and self._dropped.belongs_to(optimizer):
            self._check_not_dropped()
        unused = self._unused
        if unused is None or not unused.belongs_to(optimizer):
            return
        self._unused = None
        if unused.average.commit is not None:
            with self._plain_tensors():
                unused.average.commit(self._used(unused))
            self._measure_residual()
        self.steps += 1

    def _used(self, unused: Unused) -> set[str]:
        """Names of the parameters whose gradients the optimizer has used."""
        named = zip(self.gradients.names, self._whole(self.gradients.parameters), strict=True)
        present = [(name, p, p.grad) for name, p in named if name in unused.average.names and p.grad is not None]
        names = {name for name, _, _ in present}
        touched = [(name, local(grad)) for name, p, grad in present if p.numel() and not unused.is_untouched(p)]
        if not touched:
            return names
        largest = torch.stack([grad.abs().max().float() for _, grad in touched]).tolist()
        zero = {name for (name, _), most in zip(touched, largest, strict=True) if most == 0}
        return names - {name for name in zero if bool(unused.average.values(name).any())}

    def _measure_residual(self) -> None:
        state, begin = self.state, time.perf_counter()
        if self._gradient_norm and state is not None and state.unsent is not None and not state.empty:
            self.stats.residual_to_gradient = norm([state.unsent]) / self._gradient_norm
            self.spent.residual_to_gradient = self.stats.residual_to_gradient
            self.spent.norm_seconds += time.perf_counter() - begin

    def check_same_parameters(self) -> None:
        """Compare with the other ranks which parameters train. Collective; the first `average` does it otherwise.

        Raises:
            ValueError: on every rank; it names a parameter, and the ranks that differ.
        """
        self.gradients.check_same(self.ranks)
        self.parameters_agree = True

    def use_optimizers(
        self, optimizer: torch.optim.Optimizer | None, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        """These optimizers step the parameters from now on: their moments and hyper-parameters count.

        Args:
            optimizer: as for the averager.
            optimizers: likewise.

        Raises:
            ValueError: error feedback accumulates something else with it than with the one before.
        """
        every = list(optimizers) if optimizer is None else [optimizer]
        if [*map(id, every)] == [*map(id, self.optimizers)]:
            return
        self.compressor.check_optimizer(optimizer)
        if isinstance(self.compressor, LossyCompressor):
            before, now = self.compressor.remembers(self.optimizer), self.compressor.remembers(optimizer)
            if before is not now:
                what = f"another optimizer in mid-run with {type(self.compressor).__name__}"
                allowed = f"one of the same class, {type(self.optimizer).__name__}, whose steps are accumulated already"
                raise refusal(what, type(optimizer).__name__, allowed)
        self._drop_unused()
        self.detach()
        self.optimizer, self.optimizers, self._averaged_for = optimizer, every, every
        if self.shards:
            self.shards.use_optimizer(optimizer)
        if self._compressed:
            self._compressed.state.use_optimizer(self.shards.optimizer if self.shards else optimizer)
        self._optimizer_steps = self._attached()

    def _attached(self) -> list[OptimizerStep]:
        owned = self.compressor.owns_momentum(self.optimizer)
        return [OptimizerStep(each, self, directions=owned) for each in self.optimizers]

    def detach(self) -> None:
        """Leave the optimizers as they were before this averager."""
        for step in self._optimizer_steps:
            step.detach()

    def _drop_unused(self) -> None:
        if self._unused is not None:
            self._dropped, self._unused = self._unused, None
            if self._compressed:
                self._compressed.state.offload()

    def _check_average_was_used(self) -> None:
        """ValueError if an average of these parameters, or of others, is in `p.grad` and was not used yet."""
        unused = self._unused
        if unused is None or unused.average.commit is None:
            return
        if any(unused.is_untouched(parameter) for parameter in self._whole(self.gradients.parameters)):
            allowed = "a step of the optimizer, or zero_grad(), before gradients are averaged again"
            raise refusal("averaging gradients", "averages that no optimizer step has used", allowed)

    def _check_not_dropped(self) -> None:
        dropped, self._dropped = self._dropped, None
        assert dropped is not None
        parameters = self._whole(self.gradients.parameters)
        if dropped.average.commit is not None and any(dropped.is_untouched(p) for p in parameters):
            allowed = "a step before the next forward pass, or averages made after it"
            raise refusal("an optimizer step", "averages that a later forward pass has dropped", allowed)

    # What trains

    def _ids(self, optimizers: Sequence[torch.optim.Optimizer]) -> frozenset[int] | None:
        """ids of the parameters that these optimizers have; None without any."""
        if not optimizers:
            return None
        return frozenset(id(p) for each in optimizers for group in each.param_groups for p in group["params"])

    def _lay_out(self) -> Gradients:
        return Gradients(self.model, self.compressor, self.shards, self._stepped)

    def _changed(self) -> bool:
        """True if other parameters train than the gradients are laid out for."""
        return self.gradients.stale or self._ids(self._averaged_for) != self._stepped

    def _follow(self) -> None:
        """Lay the gradients out for the parameters that train now."""
        if self._changed():
            self._stepped = self._ids(self._averaged_for)
            self.gradients = self._lay_out()
            if self._compressed:
                self._compressed.lay_out(self.gradients)

    def _traffic(self, compressor: LossyCompressor, topology: str) -> int:
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
        final = compressed.compressor.with_sparsity(sparsity)
        between = "" if self.ranks.per_worker == 1 else " between nodes"
        sent = [f"{self._traffic(final, name):,} bytes sent{between} a step by {name}" for name in self._topologies]
        listed = " or ".join(sent)
        at_sparsity = f"at sparsity {sparsity:g} " if hasattr(compressed.compressor, "sparsity") else ""
        first = f"{start}, then " if (start := dense_start(self.schedule)) else ""
        return (
            f"{first}{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, "
            f"{len(gradients.dense)} ({gradients.dense_layout.n:,}) dense in the same message; {at_sparsity}{listed}"
        )

    def metrics(self) -> dict[str, float]:
        """The residual after the latest step over its gradient, by the name of its metric, if it was measured."""
        residual = self.stats.residual_to_gradient
        return {} if residual is None else {"memory/residual_to_gradient": residual}

    def summary(self) -> dict[str, Any]:
        """The topology of the latest step, what topology="auto" chose, and the number of shards if there are any."""
        topology = "all_reduce" if self.decision.by_ddp else self.topology
        shards = {"shards": self.shards.number} if self.shards else {}
        return {"topology": topology, "auto": self.autotune.outcome if self.autotune else "", **shards}

    def why_uncompressed(self, step: str = "step") -> str:
        """The reason why no step was compressed, other than in trials of topology="auto".

        Empty if one was, or if there is nothing to compress.

        Args:
            step: the word for a step.
        """
        auto, ranks, schedule = self.autotune, self.ranks, self.schedule
        compressed = self.spent.bytes_sent < self.spent.dense_bytes
        if not isinstance(self.compressor, LossyCompressor) or (
            auto.choice not in (None, DENSE) if auto else compressed
        ):
            return ""
        if ranks.workers == 1:
            alone = "replica" if self.shards else "rank" if ranks.world == 1 else "node, and only nodes compress"
            return f"there is one {alone}"
        if not self.gradients.compressed:
            return "no tensor is large enough"
        if schedule is not None and not schedule(self.epoch or 0, self.steps - 1):
            start = dense_start(schedule, step)
            return f"its warm-up of {start} lasted to the end" if start else "its sparsity was 0"
        if auto:
            return f'topology="auto" {"had not chosen yet" if auto.choice is None else "found dense steps the fastest"}'
        return f"a compressed {step} costs no fewer bytes than a dense one"

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Parameter -> torch's name -> mean over ranks of the optimizer's state that is kept here. Collective."""
        with self._plain_tensors():
            kept = self._compressed.optimizer_state() if self._compressed else {}
        return self.shards.whole_state(kept, self.gradients.chosen) if self.shards else kept

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name and plain numbers; `torch.load(weights_only=True)` reads it.

        A world of another size goes on from `averaging.mean_state` of all ranks' states.
        """
        with self._plain_tensors():
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
            with self._plain_tensors():
                self._compressed.state.load_state_dict(state["memory"], **how)
            if self.ranks.rank == 0:
                warn_of_lost_kinds(state["memory"], self._compressed.state.state_dict(), self.gradients)
        tuned = state["autotune"]
        # Other ranks need a trial of their own; version 0.1.0 had no rounds.
        if self.autotune and tuned and tuned["world"] == self.world and "round" in tuned:
            self.autotune.load_state_dict(tuned)
        self.steps, self._decided_for = state["steps"], None

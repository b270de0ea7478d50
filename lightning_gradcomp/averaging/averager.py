"""GradientAverager: averages `p.grad` with compression, after backward, once per optimizer step.

It works on the gradients that backward leaves, not inside a DDP hook. State is therefore keyed by parameter name
whatever DDP does to its buckets, a step sends one message, and a failed step leaves DDP usable. step.py computes the
average.

An average is an ordinary gradient until the optimizer steps. The step applies whatever `p.grad` holds by then, and
commits the error feedback of the parameters that it stepped (optimizer_step.py). An average that no step uses is
dropped with its batch, and the state stays as it was.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.checkpoint_state import check_shapes, check_state, warn_of_lost_kinds
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.averaging.fsdp.shards import Shards, check_group, is_sharded, reshard
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.local_weights import LocalWeights, Untrained
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.optimizer_step import OptimizerStep
from lightning_gradcomp.averaging.ranks import ranks_of
from lightning_gradcomp.averaging.stats import Stats, norm
from lightning_gradcomp.averaging.step import Average, Pending, average_compressed, average_dense, flush
from lightning_gradcomp.averaging.topology import Choice, Decision, dense_step_traffic, dense_topology, resolve
from lightning_gradcomp.averaging.trainable import check_same_step, parameters_of
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor, build
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, check_sparsity, dense_start
from lightning_gradcomp.errors import check_flag, refusal

UNKNOWN = "the optimizer has none of the model's parameters"
"""The reason why nothing is compressed if another optimizer steps the model."""


class GradientAverager:
    """Averages a model's gradients over a process group with compression; replaces DDP.

        averager = GradientAverager(model, DGC(), optimizer=optimizer)
        with averager.local_weights():  # for DGC, Adam and AdamW; has no effect otherwise
            loss(model, batch).backward()
        averager.step()  # averager.average(), then optimizer.step()

    Between the two halves of `step`, `p.grad` is the averaged gradient. If the compressor owns the momentum, it is the
    averaged update direction, and `optimizer.step()` subtracts lr · `p.grad`. You may change, clip or discard it. A
    direction is often 10 to 100 times as long as a gradient with Adam, so clip gradients with `clip_norm` instead.

    After each step all ranks hold bit-identical gradients. State is fp32 and keyed by parameter name.

    Args:
        model: the bare module (not wrapped in DDP), with the same parameters on every rank. Or a model that
            `torch.distributed.fsdp.fully_shard` has prepared with a one-dimensional mesh: each rank then averages its
            own shards with the ranks of `process_group`, which hold the same shards of other replicas.
        compressor: an instance, or a name with default options.
        optimizer: steps the parameters; parameters that it does not have are not averaged. If it has none of the
            model's, all are averaged, but methods with error feedback then compress nothing and warn. DGC requires
            `torch.optim.SGD`, `Adam` or `AdamW` itself, whose momentum it corrects. With Adam and AdamW, every method
            with error feedback accumulates optimizer steps instead of gradients. Without an optimizer, `average`
            commits the error feedback of all parameters.
        optimizers: several optimizers, instead of `optimizer`. All their parameters are averaged, and the compressor
            owns the momentum of none.
        local_weights: False: `local_weights()` has no effect, and gradients are taken at the weights that all ranks
            share. This costs accuracy (docs/dgc.md), but a forward pass may then write into the weights.
        process_group: default: the world; a process without torch.distributed is a world of one. For a sharded model,
            the group of the mesh's replicate dimension: `mesh.get_group("replicate")`.
        topology: "all_gather": payloads go to every rank. "two_phase": each rank averages a partition and sends the
            mean on, compressed again; for many ranks. "server": the same with dense means. "auto": a trial over the
            first steps chooses the fastest of dense steps and the first two. MXNet's kvstore names "device",
            "dist_sync" and "dist_sync_device" also work (docs/clusters.md).
        inside: "compressed": every rank compresses its own gradient. "dense": the ranks of a node average their
            gradients first, and only nodes exchange payloads. Default: "compressed"; with topology="auto" it is "dense"
            if several nodes have several ranks each (`ranks_per_node`).
        fallback: the format of the steps that topology="auto" does not compress after the warm-up: "int8", as with
            `Int8`; "eden1" to "eden4", as with `EDEN` in so many bits; or "none", in fp32.
        ranks_per_node: for inside="dense". Default: the number that torchrun started on this node.
        steps_per_epoch: lets a schedule that counts epochs derive them from steps.
        epoch: the first epoch, for a caller that sets `averager.epoch` itself.

    Raises:
        ValueError: if an option, optimizer or model is not supported; before anything is exchanged.
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
        fallback: str = "none",
        ranks_per_node: int | None = None,
        steps_per_epoch: int | None = None,
        epoch: int | None = None,
        local_weights: bool = True,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise refusal("GradientAverager(model)", "DistributedDataParallel", "the module inside it")
        check_flag("GradientAverager.local_weights", local_weights)
        self.compressor: Compressor = build(compressor).for_optimizer(optimizer)
        self.compressor.check_optimizer(optimizer)
        route = resolve(topology, inside, self.compressor, fallback)
        self.shards = Shards(model, optimizer) if is_sharded(model) else None
        """For a sharded model: converts parameters, gradients and optimizer state to plain tensors and back."""
        if self.shards:
            check_group(self.shards, process_group, route.name, route.inside)
        elif process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.ranks = ranks_of(process_group, route.inside, ranks_per_node, self.shards.group if self.shards else None)
        self.world, self.rank = self.ranks.world, self.ranks.rank
        self.model, self.optimizer, self.steps_per_epoch = model, optimizer, steps_per_epoch
        self.optimizers = list(optimizers) if optimizer is None else [optimizer]
        self.schedule: Schedule | None = self.compressor.schedule()
        """Sparsity as a function of (epoch, step). You may replace it at any time."""
        self.wire = self.compressor.wire
        """The format of a plain dense step."""
        if self.wire in FORMATS and self.ranks.workers == 1:
            self.wire = "fp32"
        self.epoch, self.steps = epoch, 0
        self._check_epochs_are_counted()
        self.stats = Stats()
        """Costs of the latest step."""
        self.spent = Stats()
        """Costs of all steps."""
        self.flag = self.flagged = False
        """This rank's flag, which travels with the gradients; and, after `average`, True if any rank set its flag."""
        self.measures_residual = False
        """True to measure `stats.residual_to_gradient` in compressed steps, which takes two passes over the model."""
        self.parameters_agree = False
        """True once the ranks have compared which parameters train."""
        self.decision = Decision()
        """The latest `begin_step`'s decision."""
        self._decided_for: Any = None
        self._averaged_for = self.optimizers
        self.gradients = Gradients(model, self.compressor, self.shards, self._averaged_for)
        stepped = self.shards.optimizer if self.shards else optimizer
        self._memory = Memory(self.compressor, self.gradients, self.ranks, route, stepped)
        self._choice = None
        if isinstance(self.compressor, LossyCompressor):
            self._choice = Choice(self.compressor, self.ranks, route, process_group, self.gradients)
        self.autotune = self._choice.autotune if self._choice else None
        """The trials, with topology="auto"."""
        self._may_be_local, self._local = local_weights, LocalWeights(self._memory)
        self._untrained = Untrained(model, self.gradients.left_out)
        self._directions: dict[int, int] = {}
        """id of each parameter whose gradient is an update direction -> its `direction_exponent`."""
        self._pending: Pending | None = None
        self._dropped: Pending | None = None
        self._gradient_norm = 0.0
        self._optimizer_steps = self._attached()
        if self.gradients.are_unknown and self._choice and self.world > 1 and self.rank == 0:
            name = type(self.compressor).__name__
            warnings.warn(
                f"{name}: {UNKNOWN}, so all gradients are averaged uncompressed. With Lightning, configure_optimizers "
                "must return the optimizer that steps them.",
                stacklevel=2,
            )

    def _check_epochs_are_counted(self) -> None:
        counts_epochs = isinstance(self.schedule, Ramp) and self.schedule.counts_epochs
        if counts_epochs and self.epoch is None and self.steps_per_epoch is None:
            allowed = "steps_per_epoch=len(loader), or a compressor without warm-up (warmup_epochs=0, dense_epochs=0)"
            raise refusal("steps_per_epoch, with a warm-up that counts epochs", None, allowed)

    # A step: begin_step, average, commit

    def begin_step(self) -> Decision:
        """Decide what the next step does: the schedule gives the sparsity, and topology="auto" may choose.

        `average` calls it too. The decision stays the same until the step is committed, or `epoch`, `schedule`, `wire`
        or the set of trainable parameters changes.
        """
        decided_for = self.steps, self.epoch, self.schedule, self.wire, self.gradients
        if self._decided_for != decided_for:
            self._decided_for, self.decision = decided_for, self._decide()
        return self.decision

    def _decide(self) -> Decision:
        dense = Decision(is_plain=not self.has_unsent, wire=self.wire)
        compressible = self.gradients.largest.layout.n
        if self._choice is None or self.schedule is None or self.ranks.workers == 1 or not compressible:
            return dense
        self._check_epochs_are_counted()
        epoch = self.steps // (self.steps_per_epoch or 1) if self.epoch is None else self.epoch
        if (sparsity := self.schedule(epoch, self.steps)) is not None:
            check_sparsity("the schedule's sparsity", sparsity)
        return dense if sparsity == 0 else self._choice.decide(sparsity, self.gradients, dense)

    @property
    def has_unsent(self) -> bool:
        """True if error feedback holds something to send."""
        return self._memory.has_unsent

    @property
    def names_with_unsent(self) -> set[str]:
        """Names of the parameters for which it does, including those left out now."""
        return self._memory.names_with_unsent

    @property
    def state(self) -> ErrorFeedback:
        """Error feedback of the compressed parameters."""
        return self._memory.compressed

    def step(self) -> None:
        """Average the gradients, then step the optimizer. Collective.

        Raises:
            ValueError: if there is no optimizer.
            ExchangeFailed: as `average`.
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
        revocable: bool = False,
    ) -> None:
        """Replace every `p.grad` with its average over the ranks, compressed as this step requires. Collective.

        If any rank's gradient is not finite, all ranks get non-finite gradients, and all state stays as it was.

        Args:
            grad_scale: the loss scale in the gradients; error feedback is kept without it.
            optimizer: one of several, to average the gradients of its parameters only.
            during: the step and phase that an error names. Default: `steps` and "averaging gradients".
            revocable: True to keep this rank's own gradients until the optimizer steps, for `revoke`.

        Raises:
            ValueError: if the ranks are at different steps or train different parameters, or if no optimizer step has
                used the previous average.
            ExchangeFailed: if the other ranks can't be reached; names this rank, the step and the missing ranks.
        """
        if optimizer is not None and not any(optimizer is each for each in self.optimizers):
            allowed = "one of the optimizers that the averager was given"
            raise refusal("GradientAverager.average(optimizer)", type(optimizer).__name__, allowed)
        optimizers = self.optimizers if optimizer is None else [optimizer]
        with explained(*(during or (self.steps, "averaging gradients")), self.ranks.group):
            self.use_shared_weights()
            self._check_average_was_used()
            own = self._own_gradients(optimizers) if revocable else None
            with self._plain_tensors():
                takes_turns = [*map(id, optimizers)] != [*map(id, self._averaged_for)]  # the same on all ranks
                self._averaged_for = optimizers
                if takes_turns or not self.parameters_agree:
                    self._follow()
                if not self.parameters_agree:
                    self.check_same_parameters()
                while True:
                    decision = self._begin_average(grad_scale)
                    flags = Flags.at(self.steps, stop=self.flag, changed=self._changed())
                    memory, stats = self._memory, self.stats
                    if decision.is_plain:
                        stats.now("exchange")
                        average = average_dense(self.gradients, self.ranks, decision.wire, self.steps, flags)
                    elif decision.compressor:
                        how = decision.compressor, decision.topology, self.steps
                        average = average_compressed(memory, *how, flags, stats)
                    else:
                        average = flush(memory, flags, stats)
                    stats.now(None)
                    if average.flags.steps_differ:
                        check_same_step(self.ranks, self.gradients.device, self.steps, differ=True)
                    if not average.flags.changed:
                        break
                    self._follow()
                    self.check_same_parameters()
                self._local.check()
            if self.steps & (self.steps - 1) == 0:  # 0, 1, 2, 4, 8, ...: soon, and at no cost in the long run
                self.compare_untrained()
            self.flagged, named = average.flags.stop, self._named()
            if not decision.is_plain and self.state.owns_momentum:
                compressed = [id(p) for _, p in named[: len(self.gradients.compressed)]]
                self._directions = dict(zip(compressed, self.gradients.exponents, strict=True))
            self._record(Pending(average, named, optimizers, own))

    @staticmethod
    def _own_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(p, p.grad.detach().clone()) for p in parameters_of(*optimizers) if p.grad is not None]

    def revoke(self) -> list[nn.Parameter]:
        """Restore this rank's own gradients if no optimizer step has used the latest average, made with `revocable`.

        A backward can then add to them, and `average` averages the sum. Dense averages stay, because a sum with them
        can be averaged again. Raises ValueError if averages were changed, and neither discarded nor used.

        Returns:
            The parameters whose gradients were restored.
        """
        if self._pending is None or not self._pending.is_revocable:
            return []
        restored = self._pending.revoke()
        self._drop_pending()
        return restored

    def check_same_turn(self, optimizer: torch.optim.Optimizer, backwards: int) -> None:
        """Raise ValueError on every rank unless all are about to average this optimizer's gradients. Collective.

        They must be at the same step, after the same number of `backwards` passes.
        """
        index = [*map(id, self.optimizers)].index(id(optimizer))
        if self.world > 1:
            with explained(self.steps, "averaging gradients", self.ranks.group):
                check_same_step(self.ranks, self.gradients.device, self.steps, index, backwards)

    def _begin_average(self, grad_scale: float) -> Decision:
        decision = self.begin_step()
        self.gradients.scale, self._directions = grad_scale, {}
        if decision.is_plain:
            self.stats = self._dense_stats()
            return decision
        sparsity = decision.sparsity if decision.compressor else 0.0
        self.stats = Stats(dense_bytes=self.ranks.dense_traffic(self.gradients.nbytes), sparsity=sparsity)
        self._gradient_norm = self._measured_norm() / grad_scale
        return decision

    def after_dense_step(
        self, *, grad_scale: float = 1.0, seconds: float = 0.0, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Record a dense average that DDP computed. Backward did not hide `seconds` of its exchange.

        For `grad_scale` and `optimizer` see `average`.
        """
        self._check_average_was_used()
        self.begin_step()
        self.gradients.scale, self._directions = grad_scale, {}
        self.stats = self._dense_stats()
        self.stats.seconds["exchange"] = seconds
        optimizers = self.optimizers if optimizer is None else [optimizer]
        self._record(Pending(Average(Flags()), [], optimizers), is_plain=True)

    def _dense_stats(self) -> Stats:
        dense = self.ranks.dense_traffic(self.gradients.nbytes)
        sent = dense_step_traffic(self.gradients, self.ranks, self.decision.wire)
        return Stats(bytes_sent=sent, bytes_received=sent, dense_bytes=dense)

    def _record(self, pending: Pending, *, is_plain: bool = False) -> None:
        """Record an average, which is pending until the optimizer steps, and its costs."""
        self._pending = pending
        if is_plain or self.decision.is_plain:
            trained = [p for p in self.gradients.averaged if p.requires_grad]
            self.compressor.clip_average(trained, self.gradients.scale)
        self.spent.add(self.stats)
        decided = self.autotune and self.autotune.step_ended(self.decision.topology, self.decision.density)
        if self.autotune and decided and self.autotune.choice == self.autotune.uncompressed and self.ranks.rank == 0:
            what = f"{type(self.compressor).__name__}: {self.autotune.outcome}."
            warnings.warn(f"{what} topology='all_gather' would compress anyway.", stacklevel=2)
        if not self.optimizers or self.gradients.are_unknown:
            self.commit()

    def commit(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Commit the error feedback of the parameters whose average the optimizer has used in its step.

        torch's optimizers call it at the end of their step. A second call does nothing. If you discarded a parameter's
        gradient (None, or all zeros where the average was not), the parameter's state stays as it was.

        Raises:
            ValueError: if the optimizer used an average that a later forward pass had dropped.
        """
        if self._dropped is not None and self._dropped.belongs_to(optimizer):
            dropped, self._dropped = self._dropped, None
            if dropped.is_in_gradients:
                allowed = "a step before the next forward pass, or averages made after it"
                raise refusal("an optimizer step", "averages that a later forward pass has dropped", allowed)
        pending = self._pending
        if pending is None or not pending.belongs_to(optimizer):
            return
        self._pending = None
        if pending.average.commit is not None:
            with self._plain_tensors():
                pending.average.commit(pending.used())
            self._measure_residual()
        self.steps += 1

    @property
    def has_directions(self) -> bool:
        return bool(self._directions)

    def direction_exponent(self, parameter: torch.Tensor) -> int | None:
        """k if 2^k · `parameter.grad` is an update direction, which includes the optimizer's momentum; else None.

        k is above 0 only if the direction itself would overflow: in fp16 after a steep fall of the learning rate.
        """
        return self._directions.get(id(parameter))

    @property
    def clip_norm(self) -> float | None:
        """The norm at which compressed steps clip each rank's gradient, times √N. Initially the compressor's; you may
        replace it before an average, with the same value on all ranks.
        """
        return self._memory.clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        self._memory.clip_norm = value

    def _check_average_was_used(self) -> None:
        """Drop an average that no optimizer step has used. Raises ValueError if it is still in `p.grad`."""
        if self._pending is not None and self._pending.is_in_gradients:
            allowed = "an optimizer step or zero_grad() before gradients are averaged again"
            raise refusal("averaging gradients", "averages that no optimizer step has used", allowed)
        self._drop_pending()
        self._dropped = None

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._dropped, self._pending = self._pending, None

    # Local weights

    @contextmanager
    def local_weights(self) -> Iterator[None]:
        """Run forward and backward at local weights: the shared weights minus the steps that this rank has not sent.

            with averager.local_weights():
                loss(model(x), y).backward()
            averager.step()

        It has an effect if the compressor corrects the optimizer's momentum, as DGC does for SGD, Adam and AdamW.
        Gradients then account for this rank's latest steps. Otherwise they are taken at the shared weights. Run one
        backward per block, and do not use a graph from the block after it.

        Raises:
            ValueError: if a weight was written to in the block, because the write would be lost.
        """
        self.use_local_weights()
        with self.leaving_local_weights():
            yield

    @contextmanager
    def leaving_local_weights(self) -> Iterator[None]:
        """Return to the shared weights after the block, and check for writes into local weights unless it raises."""
        try:
            yield
        except BaseException:
            self.use_shared_weights(check=False)
            raise
        self.use_shared_weights()

    @property
    def has_local_weights(self) -> bool:
        """True if gradients are taken at local weights."""
        return self._may_be_local and self.state.local_scales(self.ranks.workers) is not None

    @property
    def in_local_weights(self) -> bool:
        return self._local.in_use

    def use_local_weights(self) -> None:
        """Enter `local_weights`; call `use_shared_weights` to leave. Drops an unused average."""
        self._drop_pending()
        if self.has_local_weights and not self._changed():
            with self._plain_tensors():
                self._local.use()
            if self.shards:
                reshard(self.model)

    def use_shared_weights(self, *, check: bool = True) -> None:
        """Return to the shared weights. With `check`, raises ValueError if a local weight was written to."""
        if self._local.in_use:
            try:
                self._local.restore(check=check)
            finally:
                if self.shards:
                    reshard(self.model)

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the parameters hold the shared weights even within `local_weights`, so that they can be saved."""
        return self._local.suspended()

    def compare_untrained(self) -> None:
        """Raise ValueError on every rank if a parameter that is not averaged has come to differ by rank. Collective.

        `average` does it in some of its steps. A teacher's copy of local weights differs by rank, and so does a
        parameter that the module steps by its own gradient. Without either, nothing is compared.
        """
        if self._local.were_used or self.gradients.trains_others:
            self._untrained.compare(self.gradients.left_out, self.ranks)

    def compare_all_local_weights(self) -> None:
        """Make `local_weights` detect every write, at the cost of two passes over the model."""
        self._local.compares_all = True

    # Trainable parameters and optimizers

    def _changed(self) -> bool:
        """True if the trainable parameters are not those that the gradients are laid out for."""
        return not self.gradients.fits(self._averaged_for)

    def _follow(self) -> None:
        """Lay the gradients out for the parameters that train now."""
        if self._changed():
            self.gradients = Gradients(self.model, self.compressor, self.shards, self._averaged_for)
            self._memory.lay_out(self.gradients)

    def check_same_parameters(self) -> None:
        """Raise ValueError on every rank unless all train the same parameters. Collective.

        The first `average` does it if you do not.
        """
        self.gradients.check_same(self.ranks)
        self.parameters_agree = True

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is averaged, as in the model: DTensors if it is sharded."""
        own, shards = self.gradients.parameters, self.shards
        wholes = [shards.whole_of(each) for each in own] if shards else own
        return list(zip(self.gradients.names, wholes, strict=True))

    def _plain_tensors(self) -> AbstractContextManager[None]:
        """Inside, the parameters of `gradients` are plain tensors with the model's gradients and optimizer state."""
        return self.shards.entered() if self.shards else nullcontext()

    def use_optimizers(
        self, optimizer: torch.optim.Optimizer | None, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        """Replace `optimizer` and `optimizers`, whose moments and hyper-parameters apply from now on.

        Raises:
            ValueError: if error feedback accumulates something different with this optimizer than with the last one.
        """
        every = list(optimizers) if optimizer is None else [optimizer]
        if [*map(id, every)] == [*map(id, self.optimizers)]:
            return
        self.compressor.check_optimizer(optimizer)
        if type(self.compressor.state_for(self.optimizer)) is not type(self.compressor.state_for(optimizer)):
            what = f"another optimizer in mid-run with {type(self.compressor).__name__}"
            allowed = f"one of the same class, {type(self.optimizer).__name__}, whose steps the residual already holds"
            raise refusal(what, type(optimizer).__name__, allowed)
        self._drop_pending()
        self.detach()
        self.optimizer, self.optimizers, self._averaged_for = optimizer, every, every
        if self.shards:
            self.shards.use_optimizer(optimizer)
        self._memory.use_optimizer(self.shards.optimizer if self.shards else optimizer)
        self._optimizer_steps = self._attached()

    def _attached(self) -> list[OptimizerStep]:
        owned = self.compressor.state_for(self.optimizer).owns_momentum
        return [OptimizerStep(each, self, directions=owned) for each in self.optimizers]

    def detach(self) -> None:
        """Restore the optimizers to their state before this averager."""
        for step in self._optimizer_steps:
            step.detach()

    # Logging

    def _measured_norm(self) -> float:
        """The norm of this rank's gradient; 0 if it is not measured."""
        timed = self.autotune is not None and self.autotune.measuring
        if not self.measures_residual or timed or self.state.unsent is None:
            return 0.0
        begin = time.perf_counter()
        found = norm([parameter.grad for parameter in self.gradients.compressed if parameter.grad is not None])
        self.stats.norm_seconds += time.perf_counter() - begin
        return found if found < math.inf else 0.0

    def _measure_residual(self) -> None:
        state, begin = self.state, time.perf_counter()
        if self._gradient_norm and state.unsent is not None and not state.empty:
            self.stats.residual_to_gradient = norm([state.unsent]) / self._gradient_norm
            self.spent.residual_to_gradient = self.stats.residual_to_gradient
            self.spent.norm_seconds += time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """What CommunicationMonitor logs about the latest step besides costs."""
        residual = self.stats.residual_to_gradient
        return {} if residual is None else {"memory/residual_to_gradient": residual}

    def summary(self) -> dict[str, Any]:
        """What CommunicationMonitor's summary reports besides costs: topology, outcome of "auto", number of shards."""
        topology = dense_topology(self.decision.wire, self.ranks) if self.decision.is_plain else self._memory.topology
        shards = {"shards": self.shards.number} if self.shards else {}
        return {"topology": topology, "auto": self.autotune.outcome if self.autotune else "", **shards}

    def why_uncompressed(self, unit: str = "step") -> str:
        """The reason why no `unit` ("step" or "round") was compressed, apart from trial steps.

        Empty if one was, or for a baseline.
        """
        auto, compressed = self.autotune, self.spent.bytes_sent < self.spent.dense_bytes
        if self._choice is None or (auto.compresses if auto else compressed):
            return ""
        if self.ranks.workers == 1:
            alone = "replica" if self.shards else "rank" if self.world == 1 else "node, and only nodes compress"
            return f"there is one {alone}"
        if self.gradients.are_unknown:
            return UNKNOWN
        if not self.gradients.compressed:
            return "no tensor is large enough"
        if self.schedule is not None and self.schedule(self.epoch or 0, self.steps - 1) == 0:
            start = dense_start(self.schedule, unit)
            return f"its warm-up of {start} lasted to the end" if start else "its sparsity was 0"
        if auto:
            outcome = "had not chosen yet" if auto.choice is None else f"found {auto.uncompressed} steps the fastest"
            return f'topology="auto" {outcome}'
        return f"a compressed {unit} costs no fewer bytes than a dense one"

    def describe(self) -> str:
        """One line for the log: initial dense steps, what is compressed, and the bytes a step then sends."""
        name, ranks, dense = type(self.compressor).__name__, self.ranks, self.ranks.dense_traffic(self.gradients.nbytes)
        if ranks.group is None or ranks.world == 1:
            return f"{name}: world size 1, so nothing is exchanged or compressed; training runs as without it."
        nodes = f" on {ranks.workers} nodes" if ranks.per_worker > 1 else ""
        shards = f" replicas of {self.shards.number} shards each" if self.shards else ""
        where = f"N={ranks.world}{nodes}{shards}, {ranks.group.name()}"
        if self._choice is None:
            sent, topology = dense_step_traffic(self.gradients, ranks, self.wire), dense_topology(self.wire, ranks)
            return f"{name}: {sent:,} bytes sent{ranks.between} a step by {topology} ({where})."
        tried = f" {self.autotune.describe()}." if self.autotune else ""
        reason = UNKNOWN if self.gradients.are_unknown else "no tensor is large enough to compress"
        message = f"{reason}; all are sent dense"
        if self.gradients.compressed:
            first = f"{start}, then " if (start := dense_start(self.schedule)) else ""
            message = first + self._choice.describe(self.gradients)
        return f"{name}: {message}, against {dense:,} dense ({where}).{tried}"

    # Checkpoints

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Parameter -> torch's name -> mean over ranks of the optimizer state that the averager keeps. Collective."""
        with self._plain_tensors():
            kept = self._memory.optimizer_state()
        return self.shards.whole_state(kept, self.gradients.chosen) if self.shards else kept

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name, and plain numbers. `torch.load(weights_only=True)` reads it.

        To resume with a different world size, load `averaging.mean_state` of all ranks' states.
        """
        with self._plain_tensors():
            memory = self._memory.state_dict()
        keeps_dense = any(kind.startswith("dense_") for kind in memory)
        return {
            "steps": self.steps,
            "memory": memory,
            "shapes": self.gradients.chosen,
            "dense_shapes": self.gradients.left_dense if keeps_dense else {},
            "workers": self.ranks.workers,
            "trained": list(self.gradients.layout.names),
            "shared_by": self._memory.shared_by,
            "autotune": self.autotune and {"world": self.world, **self.autotune.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's state. Warns about parameters that only the state or only the model has.

        Load the optimizer's state first: with DGC, this rank's momentum replaces what the optimizer has loaded.

        Raises:
            ValueError: if `state` is not an averager's or is another method's; if a tensor's shape is not its
                parameter's, or the parameter is not compressed here.
        """
        check_state(state, self.state.state_dict())
        if self._choice and state["memory"]:
            check_shapes(state["shapes"], state["dense_shapes"], self.gradients, warn=self.ranks.rank == 0)
            how = {key: state[key] for key in ("workers", "trained", "shared_by")}
            with self._plain_tensors():
                self._memory.load_state_dict(state["memory"], **how)
            if self.ranks.rank == 0:
                loaded, accumulates = self._memory.state_dict(), self.state.unsent is not None
                warn_of_lost_kinds(state["memory"], loaded, self.gradients, accumulates=accumulates)
        auto, tuned = self.autotune, state["autotune"]
        # A different world, or fallback, needs its own trial.
        if auto and tuned and (tuned["world"], tuned["uncompressed"]) == (self.world, auto.uncompressed):
            auto.load_state_dict(tuned)
        self.steps, self._decided_for = state["steps"], None

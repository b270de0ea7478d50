"""GradientAverager: compress, exchange, decompress, once per optimizer step, after backward, on `p.grad`.

It works on the gradients that backward has left, not inside a DDP hook: the state is then keyed by parameter name
whatever DDP does to its buckets, there is one message a step, and a failing step leaves DDP usable.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.auto import Auto
from lightning_gradcomp.averaging.compare import compare, warn_of_lost_kinds
from lightning_gradcomp.averaging.compression import Compression
from lightning_gradcomp.averaging.describe import describe
from lightning_gradcomp.averaging.exchange import all_reduce_mean
from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.nodes import workers
from lightning_gradcomp.averaging.takeover import check_optimizer, momentum_taken_over
from lightning_gradcomp.averaging.trial import Trial
from lightning_gradcomp.averaging.weighing import weighed
from lightning_gradcomp.compressors.base import Compressor, Lossy
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, check_sparsity
from lightning_gradcomp.compressors.sent import Everything
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import build
from lightning_gradcomp.routes import Route, route


class GradientAverager:
    """Averages a model's gradients over a process group, compressed, in place of DDP.

        averager = GradientAverager(model, DGC(sparsity=0.999), optimizer=opt, steps_per_epoch=len(loader))
        loss.backward()
        averager.step()              # = averager.average(), then opt.step()

    Every rank ends each step with bitwise the same gradients. State is fp32 and keyed by parameter name.

    Args:
        model: the bare module (not wrapped in DDP), with the same parameters on every rank.
        compressor: an instance, or a name with default options.
        optimizer: needed by compressors that own the momentum (DGC): `torch.optim.SGD` itself.
        process_group: default: the world; a process without torch.distributed is a world of one.
        topology: "all_gather": payloads go to every rank. "two_phase": to the owners of stretches, which send the
            means on, compressed again; for many ranks. "server": the same with dense means. "auto": the quickest of
            the first two by a model of the link, but dense where a trial in the first steps finds that quicker. Or a
            kvstore's name: "device", "dist_sync", "dist_sync_device" (docs/topologies.md).
        inside: "compressed" (default): every rank compresses its own gradient. "dense": ranks of a node average theirs
            first, and only nodes exchange payloads.
        residual_device: where what is not sent lies between steps: with the gradients ("device", default), or in "cpu"
            memory.
        ranks_per_node: for inside="dense"; default: what torchrun has started on this node.
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
        self.compressor: Compressor = build(compressor)
        check_optimizer(self.compressor, optimizer)
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.route: Route = route(topology, inside, residual_device, self.compressor)
        self.ranks = workers(process_group, self.route.inside, ranks_per_node)
        self.world = self.ranks.world
        self.model, self.optimizer, self.steps_per_epoch = model, optimizer, steps_per_epoch
        self.schedule: Schedule | None = self.compressor.schedule()
        """Sparsity as a function of (epoch, step); may be replaced at any time."""
        self.epoch, self.steps = epoch, 0
        self._check_epochs_are_counted()
        self.stats = Stats()
        """What the last step cost."""
        self.flag = self.flagged = False
        """What this rank tells the others along with its gradients, and whether any rank did in the last `average`."""
        self.weighs = False
        """Whether compressed steps also measure `stats.residual_to_gradient`: two passes over the model."""
        self._taken_over = False
        self.gradients = Gradients(model, self.compressor)
        self._compression: Compression | None = None
        self.auto: Auto | None = None
        self.trial: Trial | None = None
        """With topology="auto": which topology is quickest, and whether compressing pays here."""
        if isinstance(self.compressor, Lossy):
            compression = Compression(self.compressor, self.gradients, self.ranks, self.route, optimizer)
            self._compression = compression
            if self.route.topology == "auto" and self.ranks.workers > 1 and self.gradients.compressed:
                self.auto, self.trial = Auto(compression), Trial(process_group, self.gradients.flat.device)

    @property
    def memory(self) -> Any:
        """What this rank has not sent yet; None for a baseline, which sends everything."""
        return self._compression and self._compression.books.memory

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

    def _check_epochs_are_counted(self) -> None:
        counts_epochs = isinstance(self.schedule, Ramp) and self.schedule.counts_epochs
        if counts_epochs and self.epoch is None and self.steps_per_epoch is None:
            allowed = "steps_per_epoch=len(loader), or a compressor without warm-up (warmup_epochs=0, dense_epochs=0)"
            raise refusal("steps_per_epoch, with a warm-up that counts epochs", None, allowed)

    @property
    def sparsity(self) -> float:
        """Share that the coming step leaves out: the schedule's, or 0 where sparse would cost more than dense."""
        alone = self.ranks.workers == 1
        if alone or self.schedule is None or self._compression is None or not self.gradients.compressed:
            return 0.0
        self._check_epochs_are_counted()
        epoch = self.steps // (self.steps_per_epoch or 1) if self.epoch is None else self.epoch
        sparsity = check_sparsity("the schedule's sparsity", self.schedule(epoch, self.steps))
        if not sparsity:
            return 0.0
        if self._compression.traffic(1 - sparsity, self.topology_at(1 - sparsity)) >= self._dense_traffic():
            return 0.0
        return sparsity if self.trial is None or self.trial.allows(1 - sparsity) else 0.0

    @property
    def topology(self) -> str:
        """How the latest compressed messages have travelled; "all_reduce" where none can be."""
        return self._compression.books.topology if self._compression else "all_reduce"

    def topology_at(self, density: float) -> str:
        """How compressed messages of this density travel."""
        return self.auto.topology(density) if self.auto else self.route.topology

    @property
    def dense_step(self) -> bool:
        """Whether the coming step is an ordinary dense average, which DDP may as well do, overlapped with backward."""
        return self.sparsity == 0 and (self._compression is None or self._compression.books.empty)

    def average(self, *, grad_scale: float = 1.0) -> None:
        """Replace every `p.grad` by its average over the ranks, as the compressor sends it. A collective call.

        Where any rank's gradient is not finite, all ranks get non-finite gradients and every memory stays as it was.

        Args:
            grad_scale: the loss scale that is in the gradients; what is remembered is free of it.

        Raises:
            ExchangeFailed: the other ranks can't be reached; it names rank, step and who is missing.
        """
        with explained(self.steps, "averaging gradients", self.ranks.group):
            self._average(grad_scale)

    def _average(self, grad_scale: float) -> None:
        if self.gradients.stale:
            self.gradients = Gradients(self.model, self.compressor)
            if self._compression:
                self._compression.lay_out(self.gradients)
        if self.dense_step:
            stats = Stats()
            self.gradients.collect(1.0)
            with stats.phase("exchange"):
                present = [*self.gradients.present, self.flag]
                [mean], (*anywhere, self.flagged) = all_reduce_mean(
                    self.ranks, [self.gradients.flat], present, self.compressor.wire, saturate=grad_scale == 1
                )
            compressed, dense = mean.split([self.gradients.layout.n, self.gradients.dense_layout.n])
            self.gradients.assign(Everything(compressed), dense, anywhere, 1.0)
            self.after_dense_step(grad_scale=grad_scale, seconds=stats.seconds["exchange"])
            return
        assert self._compression is not None
        sparsity = self.sparsity
        has_sparsity = hasattr(self.compressor, "sparsity")
        self.stats = Stats(dense_bytes=self._dense_traffic(), sparsity=sparsity if has_sparsity else 0.0)
        with self._weighed(grad_scale):
            if sparsity:
                self._compression.books.travel(self.topology_at(1 - sparsity))
                self.flagged = self._compression.average(1 - sparsity, grad_scale, self.stats, self.flag)
            else:
                self.flagged = self._compression.settle(grad_scale, self.stats, self.flag)
        self._taken_over = self.compressor.owns_momentum
        self._step_ended(1 - sparsity)

    def _weighed(self, grad_scale: float) -> AbstractContextManager[None]:
        timed = self.trial and not self.trial.won
        if not self.weighs or timed or self.memory.unsent is None:
            return nullcontext()
        gradients = [parameter.grad for parameter in self.gradients.compressed if parameter.grad is not None]
        return weighed(gradients, self.memory, self.stats, grad_scale)

    def _step_ended(self, density: float) -> None:
        self.steps += 1
        if self.trial and self.trial.step_ended(density) and self.trial.lost and self.ranks.rank == 0:
            name = type(self.compressor).__name__
            warnings.warn(f"{name}: {self.trial.outcome}. topology='all_gather' compresses all the same.", stacklevel=2)

    def after_dense_step(self, *, grad_scale: float = 1.0, seconds: float = 0.0) -> None:
        """Book a dense step; DDP may have done the averaging, in `seconds` that backward did not hide."""
        self._taken_over = False
        dense = self._dense_traffic()
        sent = dense * self.compressor.wire.itemsize // 4
        self.stats = Stats(bytes_sent=sent, bytes_received=sent, dense_bytes=dense)
        self.stats.seconds["exchange"] = seconds
        self.compressor.clip_average(self.gradients.parameters, grad_scale)
        self._step_ended(1.0)

    def taken_over(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """For the length of `optimizer.step()`: no momentum or weight decay where the average already holds them."""
        return momentum_taken_over(optimizer, self.gradients.compressed) if self._taken_over else nullcontext()

    def describe(self) -> str:
        """One line for the log: what is compressed, and what a step sends at the final sparsity, how and why."""
        topology, dense = self.topology_at(self._final_density), self._dense_traffic()
        return describe(self.compressor, self._compression, topology, self.ranks, dense, self.auto, self.trial)

    @property
    def modelled(self) -> str:
        """With topology="auto": what travels how at the final sparsity, and the figures that say so."""
        return self.auto.describe(self._final_density) if self.auto else ""

    @property
    def _final_density(self) -> float:
        return 1 - self.compressor.final_sparsity if isinstance(self.compressor, Lossy) else 1.0

    def _dense_traffic(self) -> int:
        return self.ranks.dense_traffic(self.gradients.flat.nbytes)

    def momentum_buffers(self) -> dict[nn.Parameter, torch.Tensor]:
        """Parameter -> mean over ranks of the momentum that is kept here instead of in the optimizer. Collective."""
        return self._compression.momentum_buffers() if self._compression else {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name and plain numbers; `torch.load(weights_only=True)` reads it.

        A world of another size goes on from `averaging.mean_state` of all ranks' states.
        """
        memory = self._compression.books.state_dict() if self._compression else {}
        remembers_dense = any(kind.startswith("dense_") for kind in memory)
        dense_shapes = self.gradients.left_dense if remembers_dense else {}
        return {
            "steps": self.steps,
            "memory": memory,
            "shapes": self.gradients.chosen,
            "dense_shapes": dense_shapes,
            "owners": self.ranks.workers,
            "trained": list(self.gradients.layout.names),
            "shared_by": self._compression.books.shared_by if self._compression else 1,
            "auto": self.auto and self.auto.state_dict(),
            "trial": self.trial and self.trial.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's state. A parameter that only the state or only the model has is named in a warning.

        Raises:
            ValueError: a tensor whose shape is not its parameter's, or of a parameter that is not compressed here.
        """
        if self._compression and state["memory"]:
            compare(state["shapes"], state["dense_shapes"], self.gradients, warn=self.ranks.rank == 0)
            how = {key: state[key] for key in ("owners", "trained", "shared_by") if key in state}
            self._compression.books.load_state_dict(state["memory"], **how)
            if self.ranks.rank == 0:
                warn_of_lost_kinds(state["memory"], self._compression.books.state_dict(), self.gradients)
        if self.auto and self.trial and state.get("auto"):
            self.auto.load_state_dict(state["auto"])
            self.trial.load_state_dict(state["trial"])
        self.steps = state["steps"]

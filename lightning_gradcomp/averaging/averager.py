"""GradientAverager: compress, exchange, decompress, once per optimizer step, after backward, on `p.grad`.

It works on the gradients that backward has left, not inside a DDP hook: the state is then keyed by parameter name
whatever DDP does to its buckets, there is one message a step, and a failing step leaves DDP usable.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.exchange import Exchange, message_bytes
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.takeover import adopt, check_optimizer, decay, hand_back, momentum_taken_over, rules
from lightning_gradcomp.averaging.topologies import dense_traffic
from lightning_gradcomp.averaging.topologies import topology as named_topology
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, check_sparsity
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import build


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
        topology: "auto" or "all_gather".
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
        topology: str = "auto",
        steps_per_epoch: int | None = None,
        epoch: int | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise refusal("GradientAverager(model)", "DistributedDataParallel", "the module inside it")
        self.compressor: Compressor = build(compressor)
        check_optimizer(self.compressor, optimizer)
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.world = process_group.size() if process_group else 1
        self.topology = named_topology(topology, process_group)
        self.model, self.optimizer, self.steps_per_epoch = model, optimizer, steps_per_epoch
        self.schedule: Schedule | None = self.compressor.schedule()
        """Sparsity as a function of (epoch, step); may be replaced at any time."""
        if (
            epoch is None
            and steps_per_epoch is None
            and isinstance(self.schedule, Ramp)
            and self.schedule.counts_epochs
        ):
            allowed = "steps_per_epoch=len(loader), or a compressor without warm-up (warmup_epochs=0, dense_epochs=0)"
            raise refusal("steps_per_epoch, with a warm-up that counts epochs", None, allowed)
        self.epoch, self.steps = epoch, 0
        self.stats = Stats()
        """What the last step cost."""
        self._taken_over = False
        self._parked: dict[str, dict[str, torch.Tensor]] = {}  # state of parameters that are frozen just now
        self._lay_out()

    def _lay_out(self) -> None:
        self.gradients = Gradients(self.model, self.compressor)
        layout, device = self.gradients.layout, self.gradients.flat.device
        self.memory = None if self.compressor.dense else self.compressor.memory(layout, device)

    def step(self) -> None:
        """Average the gradients, then step the optimizer, which applies no momentum that was applied already."""
        if self.optimizer is None:
            raise refusal(
                "GradientAverager.step()", "no optimizer", "GradientAverager(..., optimizer=opt), or .average()"
            )
        self.average()
        with self.taken_over(self.optimizer):
            self.optimizer.step()

    @property
    def sparsity(self) -> float:
        """Share that the coming step leaves out: the schedule's, or 0 where sparse would cost more than dense."""
        if self.world == 1 or self.schedule is None or not self.gradients.compressed:
            return 0.0
        epoch = self.steps // (self.steps_per_epoch or 1) if self.epoch is None else self.epoch
        sparsity = check_sparsity("the schedule's sparsity", self.schedule(epoch, self.steps))
        if sparsity and self._traffic(1 - sparsity) < self._dense_traffic():
            return sparsity
        return 0.0

    @property
    def dense_step(self) -> bool:
        """Whether the coming step is an ordinary dense average, which DDP may as well do, overlapped with backward."""
        return self.sparsity == 0 and (self.memory is None or self.memory.empty)

    def average(self, *, grad_scale: float = 1.0) -> None:
        """Replace every `p.grad` by its average over the ranks, as the compressor sends it. A collective call.

        Where any rank's gradient is not finite, all ranks get non-finite gradients and every memory stays as it was.

        Args:
            grad_scale: the loss scale that is in the gradients; what is remembered is free of it.
        """
        if self.gradients.stale:
            self._carry_over()
        if self.dense_step:
            present = self.gradients.collect(1.0)
            stats = Stats()
            with stats.phase("exchange"):
                _, anywhere = self._all_reduce_mean(present)
            self.gradients.assign(anywhere, 1.0)
            self.after_dense_step(grad_scale=grad_scale, seconds=stats.seconds["exchange"])
            return
        sparsity = self.sparsity
        self.stats = Stats(dense_bytes=self._dense_traffic(), sparsity=sparsity)
        if sparsity:
            self._average_compressed(1 - sparsity, grad_scale)
        else:
            self._settle(grad_scale)
        self._taken_over = self.compressor.owns_momentum
        self.steps += 1

    def after_dense_step(self, *, grad_scale: float = 1.0, seconds: float = 0.0) -> None:
        """Book a dense step; DDP may have done the averaging, in `seconds` that backward did not hide."""
        self._taken_over = False
        traffic = self._dense_traffic()
        self.stats = Stats(bytes_sent=traffic, bytes_received=traffic, dense_bytes=traffic)
        self.stats.seconds["exchange"] = seconds
        self.compressor.clip_average(self.gradients.parameters, grad_scale)
        self.steps += 1

    def taken_over(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """For the length of `optimizer.step()`: no momentum or weight decay where the average already holds them."""
        return momentum_taken_over(optimizer, self.gradients.compressed) if self._taken_over else nullcontext()

    def momentum_buffers(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> mean over ranks of the momentum that is kept here instead of in the optimizer. Collective."""
        memory, gradients = self.memory, self.gradients
        if memory is None or memory.empty:
            return {}
        momentum = memory.u.clone()
        if self.world > 1:
            dist.all_reduce(momentum, group=self.topology.group)
        views = gradients.layout.views(momentum / self.world)
        named = zip(gradients.layout.names, gradients.compressed, views, strict=True)
        return {parameter: view.clone() for name, parameter, view in named if name in memory.started}

    def describe(self) -> str:
        """One line for the log: what is compressed, and what a step sends at the final sparsity."""
        gradients, name = self.gradients, type(self.compressor).__name__
        if self.world == 1:
            return f"{name}: world size 1, so nothing is exchanged and nothing compressed; training is as without it."
        if self.compressor.dense:
            return f"{name}: dense, {self._dense_traffic():,} bytes sent a step (N={self.world}, ring all-reduce)."
        sparsity = self.compressor.sparsity
        sent = self._traffic(1 - sparsity)
        return (
            f"{name}: {len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, "
            f"{len(gradients.dense)} ({gradients.dense_layout.n:,}) dense in the same message; "
            f"at sparsity {sparsity:g} {sent:,} bytes sent a step against {self._dense_traffic():,} dense "
            f"(N={self.world}, {self.topology.name})."
        )

    def _compensate(self, grad_scale: float) -> tuple[bool, list[bool], torch.Tensor]:
        """Collect the gradients; (whether they are finite, what this rank adds to, what should be sent)."""
        gradients, memory, names = self.gradients, self.memory, self.gradients.layout.names
        present = gradients.collect(grad_scale)
        if self.compressor.owns_momentum:
            adopt(self.optimizer, gradients.compressed, names, memory)
        if not torch.isfinite(gradients.flat.sum()):
            return False, present, torch.zeros_like(gradients.compressed_flat)
        self.compressor.clip_local(gradients.flat, self.world)
        momenta = rules(self.optimizer, gradients.compressed)
        present = [
            has or more for has, more in zip_longest(present, (n in memory.started for n in names), fillvalue=False)
        ]
        moving = {name for name, has in zip(names, present, strict=False) if has}
        if self.compressor.owns_momentum:
            views = gradients.layout.views(gradients.compressed_flat)
            decay(views, gradients.compressed, momenta, [name in moving for name in names])
        return True, present, memory.compensate(gradients.compressed_flat, momenta, moving)

    def _average_compressed(self, density: float, grad_scale: float) -> None:
        gradients, memory, stats = self.gradients, self.memory, self.stats
        with stats.phase("compress"):
            finite, present, outgoing = self._compensate(grad_scale)
        exchange = Exchange(self.topology, gradients.dense_flat, finite, present, stats)
        mean, sent = self.compressor.average(outgoing, gradients.layout, density, exchange)
        with stats.phase("decompress"):
            if exchange.finite:
                memory.forget(sent)
                names = gradients.layout.names
                memory.commit({name for name, has in zip(names, exchange.anywhere, strict=False) if has})
                gradients.compressed_flat.copy_(mean)
                gradients.dense_flat.copy_(exchange.dense_mean)
            else:
                gradients.flat.fill_(torch.nan)
            gradients.assign(exchange.anywhere, grad_scale)

    def _settle(self, grad_scale: float) -> None:
        """From sparse back to dense: send all that is remembered, and give the optimizer its momentum back."""
        gradients, memory, stats = self.gradients, self.memory, self.stats
        with stats.phase("compress"):
            finite, present, outgoing = self._compensate(grad_scale)
            gradients.compressed_flat.copy_(outgoing if finite else torch.full_like(outgoing, torch.nan))
        with stats.phase("exchange"):
            [momentum], anywhere = self._all_reduce_mean(present, memory.coming_momentum)
        with stats.phase("decompress"):
            if torch.isfinite(gradients.flat.sum()):
                hand_back(self.optimizer, gradients.compressed, gradients.layout.views(momentum), anywhere)
                memory.clear()
            gradients.assign(anywhere, grad_scale)
        stats.bytes_sent = stats.bytes_received = dense_traffic(
            4 * (gradients.flat.numel() + momentum.numel()), self.world
        )

    def _all_reduce_mean(self, present: list[bool], *others: torch.Tensor) -> tuple[list[torch.Tensor], list[bool]]:
        """Average `gradients.flat`, in place, and `others` in one all-reduce; also tell what is present anywhere."""
        flat = self.gradients.flat
        parts = [flat, *others, torch.tensor(present, dtype=flat.dtype, device=flat.device)]
        buffer = torch.cat(parts)
        if self.world > 1:
            dist.all_reduce(buffer, group=self.topology.group)
        own, *means, anywhere = (buffer / self.world).split([part.numel() for part in parts])
        flat.copy_(own)
        return means, (anywhere > 0).tolist()

    def _traffic(self, density: float) -> int:
        payload = self.compressor.payload_bytes(self.gradients.layout, density)
        flags = 1 + len(self.gradients.parameters)
        return self.topology.traffic(message_bytes(self.gradients.dense_layout.n, payload, flags))

    def _dense_traffic(self) -> int:
        return dense_traffic(4 * self.gradients.flat.numel(), self.world)

    def _carry_over(self) -> None:
        """A parameter was frozen or unfrozen: lay out anew, by name; what is frozen keeps its state aside."""
        state = self._full_memory()
        self._lay_out()
        self._load_memory(state)

    def _full_memory(self) -> dict[str, dict[str, torch.Tensor]]:
        state = self.memory.state_dict() if self.memory else {}
        return {key: {**self._parked.get(key, {}), **parts} for key, parts in state.items()}

    def _load_memory(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        if self.memory and state:
            self.memory.load_state_dict(state)
            here = self.gradients.layout.names
            self._parked = {key: {n: t for n, t in parts.items() if n not in here} for key, parts in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors by parameter name and plain numbers; `torch.load(weights_only=True)` reads it."""
        return {"steps": self.steps, "memory": self._full_memory()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace this rank's state.

        Raises:
            ValueError: a tensor whose shape is not its parameter's.
        """
        self.steps = state["steps"]
        self._load_memory(state["memory"])

"""What DDP sends: gradients of dense steps, initial weights if the ranks' differ, and buffers before they are read.

A dense step keeps DDP's buckets, which are averaged while backward continues: by an all-reduce or, in few bits, by
`FewBitBuckets`. In a compressed step the `GradientAverager` runs after backward or, if several optimizers train in
manual optimization, before an optimizer's step. If the decision is known before the forward pass (`DDPHook.forward`),
DDP is skipped, so that backward copies no gradients into its buckets. Otherwise the hook returns the local gradient.
"""

# No postponed annotations in this file: DDP checks the hook's annotations and needs the types themselves.
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import Decision, GradientAverager
from lightning_gradcomp.averaging.exchange import to_wire
from lightning_gradcomp.averaging.few_bits import first_blocks
from lightning_gradcomp.averaging.replicas import identical, initial_tensors, replicated
from lightning_gradcomp.compressors import Compressor, LossyCompressor
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.few_bit_buckets import FewBitBuckets
from lightning_gradcomp.plugin.manual_steps import ManualSteps, Turn


class DDPHook:
    """The communication hook of one DDP module.

    Run the forward pass inside `forward`, then `before_backward`, backward and `after_backward`.

    DDP's `require_backward_grad_sync` (False in `no_sync()`) decides if a backward synchronizes. The hook can't tell,
    because it does not fire if DDP knows none of the trainable parameters. DDP knows those that required a gradient
    when it wrapped the model; the averager handles the rest.

    `manual` decides when gradients are averaged in manual optimization. In automatic optimization it is None: all of
    them after backward.
    """

    def __init__(self, ddp: DistributedDataParallel, manual: ManualSteps | None = None) -> None:
        # Registered directly, because Lightning registers hooks only on CUDA.
        ddp.register_comm_hook(None, self._hook)
        ddp._comm_hooks.pop()  # DDP has registered it; a copy of the module, which has no hook, would copy all of this
        self._ddp, self._manual = ddp, manual
        self._known_to_ddp = {id(p) for p in self._trainable}
        self._known = {id(p) for _, p in self._named}
        self._by_ddp, self._wire, self._grad_scale = True, "fp32", 1.0
        self._step = 0
        self._few_bits: FewBitBuckets | None = None
        """Averages buckets, once a step's format is one of few bits."""
        self._ddp_skipped = False
        """True if DDP was told not to synchronize this forward pass."""
        self._gradients_ready: float | None = None
        self.accumulating = False
        """True if the last backward left local gradients for a later one to add to."""
        self._averaged_at: int | None = None
        """In automatic optimization, the averager's steps when gradients were last averaged."""

    def release(self) -> None:
        """Release the DDP module, which holds this hook: Python's garbage collector can't see the cycle through C++."""
        del self._ddp
        if self._few_bits:
            self._few_bits.close()

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._gradients_ready = time.perf_counter()
        if not self._by_ddp:
            return noop_hook(None, bucket)
        if self._wire == "fp32":
            return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
        if self._wire in FORMATS and self._few_bits:
            return self._few_bits.average(bucket, self._step)
        sent = to_wire(bucket.buffer(), dist.get_world_size(), self._wire, saturate=self._grad_scale == 1)
        arrived = dist.all_reduce(sent, async_op=True).get_future()
        return arrived.then(lambda future: bucket.buffer().copy_(future.value()[0]))

    @contextmanager
    def forward(self, decision: Decision) -> Iterator[None]:
        """Wrap the forward pass. In automatic optimization, DDP does not prepare to average a compressed step.

        With static_graph=True it always prepares, because it must see its first backward passes.
        """
        ddp = self._ddp
        self._ddp_skipped = not (self._manual or ddp.static_graph or self._can_be_by_ddp(decision))
        if not self._ddp_skipped:
            yield
            return
        synchronizes, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, False
        try:
            yield
        finally:
            ddp.require_backward_grad_sync = synchronizes
            ddp.require_forward_param_sync = synchronizes  # as after any forward pass: the next one sends buffers

    def before_backward(self, averager: GradientAverager, decision: Decision, grad_scale: float = 1.0) -> None:
        """Decide whether DDP or the averager averages the gradients of the next backward.

        `grad_scale` is the loss scale that the gradients will have.
        """
        if self._ddp._join_config.enable and isinstance(averager.compressor, LossyCompressor):
            allowed = "the same number of batches on every rank: one that has ended can't average compressed gradients"
            raise refusal(f"DDP's join() with {type(averager.compressor).__name__}", "a backward inside it", allowed)
        if self._ddp._join_config.enable and not self._ddp._divide_by_initial_world_size:
            what, allowed = "DDP's join(divide_by_initial_world_size)", "True: a communication hook can't do otherwise"
            raise refusal(what, False, allowed)
        if self._ddp.require_backward_grad_sync:
            self._check_parameters()
        if not self._manual:
            self._check_averages_were_used(averager)
        self._grad_scale, self._step = grad_scale, averager.steps
        self._wire = decision.wire if averager.world > 1 else "fp32"
        if self._wire in FORMATS and self._few_bits is None:
            form, named = FORMATS[self._wire], self._ddp.module.named_parameters()
            first = first_blocks(form, averager.gradients.chosen)
            large = {id(p): first[plain_name(name)] for name, p in named if plain_name(name) in first}
            self._few_bits = FewBitBuckets(form, large, averager.gradients.device, averager.ranks.per_worker)
        by_ddp = not self._ddp_skipped and self._can_be_by_ddp(decision)
        self._by_ddp = by_ddp and not (self._manual and self._leaves_some_for(averager, self._manual))
        self._gradients_ready = None

    def _can_be_by_ddp(self, decision: Decision) -> bool:
        """True if DDP can average this step: it is dense, and DDP knows its parameters."""
        return decision.is_plain and all(id(p) in self._known_to_ddp for p in self._trainable)

    @property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """The model's parameters and their names, without those that DDP ignores."""
        return replicated(self._ddp.module)

    @property
    def _trainable(self) -> list[nn.Parameter]:
        return [p for _, p in self._named if p.requires_grad]

    def _check_parameters(self) -> None:
        named = self._named
        if added := [name for name, p in named if p.requires_grad and id(p) not in self._known]:
            allowed = "parameters that the model had when DDP wrapped it; freeze those that train later"
            raise refusal("parameters that train", f"{added[0]!r}, which was added later", allowed)
        knows = [p.requires_grad for _, p in named if id(p) in self._known_to_ddp]
        if any(knows) and not all(knows) and not self._ddp.find_unused_parameters and not self._ddp.static_graph:
            [first, *_] = [name for name, p in named if id(p) in self._known_to_ddp and not p.requires_grad]
            allowed = "find_unused_parameters=True for the strategy: DDP waits for the gradient of each parameter"
            raise refusal("a layer that was frozen while training", first, allowed)

    def _check_averages_were_used(self, averager: GradientAverager) -> None:
        if self._averaged_at == averager.steps and isinstance(averager.compressor, LossyCompressor):
            name = type(averager.compressor).__name__
            if any(p.grad is not None and bool(p.grad.any()) for p in averager.gradients.parameters):
                what = f"backward calls with {name} between two optimizer steps"
                raise refusal(what, "2", "1: add up the losses, or wrap all but the last call in no_sync()")

    def _leaves_some_for(self, averager: GradientAverager, manual: ManualSteps) -> bool:
        """True if a trainable parameter has a residual, or a local gradient from an earlier backward."""
        named = [(plain_name(name), p) for name, p in self._named if p.requires_grad]
        if not averager.names_with_unsent.isdisjoint(name for name, _ in named):
            return True
        left = [p.grad for _, p in named if p.grad is not None and manual.pending.get(id(p), 0.0) is None]
        return any(bool(grad.any()) for grad in left)

    def after_backward(self, averager: GradientAverager) -> Turn | None:
        """What to average now. None if gradients accumulate, or if several optimizers' steps will average them."""
        seconds = None if self._gradients_ready is None else time.perf_counter() - self._gradients_ready
        self.accumulating = seconds is None and not self._ddp.require_backward_grad_sync
        if self.accumulating:
            return None
        ddp_seconds = seconds if self._by_ddp else None
        if self._manual:
            return self._manual.after_backward(averager, self._trainable, ddp_seconds=ddp_seconds)
        self._averaged_at = averager.steps
        return Turn(ddp_seconds=ddp_seconds)


@contextmanager
def sent_if_they_differ(model: nn.Module, ddp_options: dict[str, Any]) -> Iterator[None]:
    """Inside, `DistributedDataParallel(model, **ddp_options)` sends rank 0's weights and buffers only if ranks differ.

    A user's `init_sync` takes precedence. Collective.
    """
    if "init_sync" in ddp_options:
        yield
        return
    tensors = initial_tensors(model)
    ddp_options["init_sync"] = bool(tensors) and not identical(tensors)  # without parameters DDP raises an error
    try:
        yield
    finally:
        del ddp_options["init_sync"]


def spare_buffers(ddp: DistributedDataParallel, compressor: Compressor) -> None:
    """Keep DDP from sending batch norms' buffers before every forward pass, which costs a round trip each time.

    Batch norm does not read them in training. `share_buffers` must send them before they are read. If other modules
    have buffers too, nothing changes. SyncBatchNorm, which does its own exchanges, counts as a batch norm.
    """
    owners = [module for module in ddp.module.modules() if next(module.buffers(recurse=False), None) is not None]
    if isinstance(compressor, LossyCompressor) and all(isinstance(module, _BatchNorm) for module in owners):
        ddp.broadcast_buffers = False

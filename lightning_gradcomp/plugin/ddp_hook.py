"""DDP's communication hook: dense steps are averaged by DDP, compressed steps by the `GradientAverager`.

A dense step keeps DDP's bucketed all-reduce, overlapped with backward. In a compressed step the averager runs after
backward, or, in manual optimization, before the optimizer step. DDP does nothing then, where the step is known before
the forward pass (`forward`), so that backward copies no gradients into its buckets; elsewhere the hook returns the
local gradient.
"""

# No postponed annotations in this file: DDP reads the hook's, and needs the type itself.
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import Decision, GradientAverager
from lightning_gradcomp.averaging.exchange import to_wire
from lightning_gradcomp.compressors import LossyCompressor
from lightning_gradcomp.errors import refusal


class DDPHook:
    """The hook of one DDP module. Call forward in `forward`, `before_backward`, backward, `after_backward`; then,
    around each optimizer step, `before_optimizer_step` and `after_optimizer_step`.

    Whether a backward synchronises is DDP's `require_backward_grad_sync` (False in `no_sync()`). It is not read off
    from DDP's hook, which does not fire where DDP knows none of the parameters that train: it knows those that required
    a gradient when it wrapped the model. What DDP can't average, the averager does.

    Args:
        ddp: the wrapped model.
        at_optimizer_step: when compressed steps are averaged. False: after backward, all gradients; for automatic
            optimization. True: before an optimizer step, the gradients of that optimizer's parameters. Gradients that
            `zero_grad()` discards, as a GAN does with those of the other network, are then not accumulated.
    """

    def __init__(self, ddp: DistributedDataParallel, *, at_optimizer_step: bool = False) -> None:
        # Registered directly: Lightning would do it on CUDA only.
        ddp.register_comm_hook(None, self._hook)
        self._ddp, self._at_optimizer_step = ddp, at_optimizer_step
        self._known_to_ddp = {id(p) for p in ddp.parameters() if p.requires_grad}
        self._known = {id(p) for p in ddp.parameters()}
        self._by_ddp, self._wire, self._grad_scale = False, torch.float32, 1.0
        self._unprepared = False
        """Whether DDP was not told, before the forward pass, that it will average."""
        self._gradients_ready: float | None = None
        self._seconds = 0.0
        self.accumulating = False
        """Whether the last backward left local gradients, to which a later one adds."""
        self._unused_average = False
        self._pending: dict[int, bool] = {}
        """With `at_optimizer_step`: id of a parameter whose gradient is not used yet -> whether DDP averaged it."""
        self._compressed: set[int] = set()
        """With `at_optimizer_step`: ids of the parameters whose last step was compressed."""

    def release(self) -> None:
        """Let go of the DDP module, which keeps this hook: a cycle through C++, which Python's collector can't see."""
        del self._ddp

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._gradients_ready = time.perf_counter()
        if not self._by_ddp:
            return noop_hook(None, bucket)
        if self._wire == torch.float32:
            return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
        sent = to_wire(bucket.buffer(), dist.get_world_size(), self._wire, saturate=self._grad_scale == 1)
        arrived = dist.all_reduce(sent, async_op=True).get_future()
        return arrived.then(lambda future: bucket.buffer().copy_(future.value()[0]))

    @contextmanager
    def forward(self, decision: Decision) -> Iterator[None]:
        """For the forward pass of this step. In automatic optimization, DDP prepares no averages for a compressed one.

        With static_graph=True it has to see its first backward passes, and goes on as it does.
        """
        ddp = self._ddp
        self._unprepared = not (self._at_optimizer_step or ddp.static_graph or self._can_be_by_ddp(decision))
        if not self._unprepared:
            yield
            return
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = False
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def before_backward(self, averager: GradientAverager, precision: object) -> None:
        """Begin the step, and decide who averages the gradients of the coming backward.

        The gradients hold the loss scale of `precision`'s scaler.

        Raises:
            ValueError: a parameter that was added after DDP wrapped the model; a frozen one that DDP waits for; or, in
                automatic optimization, averages that no optimizer has used and that are about to be added to.
        """
        trainable = [p for p in self._ddp.parameters() if p.requires_grad]
        if self._ddp.require_backward_grad_sync:
            self._check_parameters(trainable)
        if not self._at_optimizer_step:
            self._check_averages_were_used(averager)
        scaler = getattr(precision, "scaler", None)
        self._wire, self._grad_scale = averager.compressor.wire_dtype, scaler.get_scale() if scaler else 1.0
        self._by_ddp = self._can_be_by_ddp(averager.begin_step()) and not self._unprepared
        self._gradients_ready = None

    def _can_be_by_ddp(self, decision: Decision) -> bool:
        """True if DDP can make the averages of this step: a dense step, of parameters that DDP knows."""
        trainable = [p for p in self._ddp.parameters() if p.requires_grad]
        return (
            decision.by_ddp
            and all(id(p) in self._known_to_ddp for p in trainable)
            and self._nothing_left_for_averager(trainable)
        )

    def _check_parameters(self, trainable: list[nn.Parameter]) -> None:
        if any(id(p) not in self._known for p in trainable):
            [first, *_] = [name for name, p in self._ddp.module.named_parameters() if id(p) not in self._known]
            allowed = "parameters of the model as it was wrapped in DDP; freeze those that train later"
            raise refusal("parameters that train", f"{first!r}, which was added later", allowed)
        knows = [p.requires_grad for p in self._ddp.parameters() if id(p) in self._known_to_ddp]
        if any(knows) and not all(knows) and not self._ddp.find_unused_parameters and not self._ddp.static_graph:
            named = self._ddp.module.named_parameters()
            [first, *_] = [name for name, p in named if id(p) in self._known_to_ddp and not p.requires_grad]
            allowed = "find_unused_parameters=True for the strategy: DDP waits for the gradient of each parameter"
            raise refusal("a layer that was frozen while training", first, allowed)

    def _check_averages_were_used(self, averager: GradientAverager) -> None:
        if self._unused_average and isinstance(averager.compressor, LossyCompressor):
            name = type(averager.compressor).__name__
            if any(p.grad is not None and bool(p.grad.any()) for p in averager.gradients.parameters):
                what = f"backward calls with {name} between two optimizer steps"
                raise refusal(what, "2", "1: add the losses up, or wrap all but the last call in no_sync()")
        self._unused_average = False

    def _nothing_left_for_averager(self, trainable: list[nn.Parameter]) -> bool:
        """Whether no parameter that trains has a residual to hand back, or a local gradient of an earlier backward."""
        if not self._at_optimizer_step:
            return True
        if any(id(p) in self._compressed for p in trainable):
            return False
        left = [p for p in trainable if self._pending.get(id(p)) is False and p.grad is not None]
        return not any(bool(p.grad.any()) for p in left if p.grad is not None)

    def after_backward(self, averager: GradientAverager) -> bool:
        """Average, unless gradients accumulate, DDP has done it, or the optimizer step does.

        Returns:
            Whether the averager did it here.
        """
        fired = self._gradients_ready is not None
        self.accumulating = not (fired or self._ddp.require_backward_grad_sync)
        if self.accumulating:
            return False
        averaged = self._by_ddp and fired
        if self._gradients_ready is not None:
            self._seconds = time.perf_counter() - self._gradients_ready
        if self._at_optimizer_step:
            self._pending |= {id(p): averaged for p in self._ddp.parameters() if p.requires_grad}
            return False
        self._unused_average = True
        return self._average(averager, averaged)

    def _average(
        self, averager: GradientAverager, averaged: bool, optimizer: torch.optim.Optimizer | None = None
    ) -> bool:
        if averaged:
            averager.after_dense_step(grad_scale=self._grad_scale, seconds=self._seconds, optimizer=optimizer)
        else:
            averager.average(grad_scale=self._grad_scale, optimizer=optimizer)
        return not averaged

    def pending(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The parameters of `optimizer` whose gradients `before_optimizer_step` has yet to average, or to count."""
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._pending]

    def before_optimizer_step(self, averager: GradientAverager, optimizer: torch.optim.Optimizer) -> bool:
        """With `at_optimizer_step`: average the gradients of `optimizer`'s parameters, and of no others. Collective.

        Returns:
            Whether the averager did it here.
        """
        ids = {id(p) for p in self.pending(optimizer)}
        if not ids:
            return False
        by_ddp = [self._pending.pop(i) for i in ids]
        by_averager = self._average(averager, all(by_ddp), optimizer)
        # In a dense step that comes next, the residual of these parameters is handed back by the averager.
        if averager.decision.by_ddp:
            self._compressed -= ids
        else:
            self._compressed |= ids
        return by_averager

    def after_optimizer_step(self) -> None:
        """An optimizer has used the gradients."""
        self._unused_average = False

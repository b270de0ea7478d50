"""DDP's communication hook as a switch: DDP averages dense steps, the averager compressed ones.

Dense steps keep DDP's bucketed all-reduce, overlapped with backward, which is the fastest way to send everything. In a
compressed step the hook hands the local gradient back, and the averager takes over after backward.
"""

# No postponed annotations in this file: DDP reads the hook's, and wants the type itself.
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.exchange import share
from lightning_gradcomp.compressors import Lossy
from lightning_gradcomp.errors import refusal


class DDPSwitch:
    """The hook of one DDP module. Around each backward call `before_backward`, then `after_backward`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Registered directly: Lightning would do it on CUDA only.
        ddp.register_comm_hook(None, self._hook)
        self._ddp = ddp
        self._known_to_ddp = {id(parameter) for parameter in ddp.parameters() if parameter.requires_grad}
        self._by_ddp, self._wire, self._grad_scale = False, torch.float32, 1.0
        self._gradients_ready: float | None = None
        self.accumulating = False
        """Whether the last backward left local gradients, to which a later one adds."""
        self._unspent = False

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._gradients_ready = time.perf_counter()
        if not self._by_ddp:
            return noop_hook(None, bucket)
        if self._wire == torch.float32:
            return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
        sent = share(bucket.buffer(), dist.get_world_size(), self._wire, saturate=self._grad_scale == 1)
        arrived = dist.all_reduce(sent, async_op=True).get_future()
        return arrived.then(lambda future: bucket.buffer().copy_(future.value()[0]))

    def before_backward(self, averager: GradientAverager, precision: object) -> None:
        """Decide who averages the gradients of the coming backward, which hold the loss scale of `precision`'s scaler.

        A parameter that was frozen when DDP wrapped the model is unknown to it for good, and would drift apart.

        Raises:
            ValueError: gradients that are averages already, and that no optimizer has used, are about to be added to.
        """
        if self._unspent and isinstance(averager.compressor, Lossy):
            if any(p.grad is not None and bool(p.grad.any()) for p in self._ddp.parameters()):
                what = f"backward calls with {type(averager.compressor).__name__} between two optimizer steps"
                raise refusal(what, "2", "1: add the losses up, or wrap all but the last call in no_sync()")
            self._unspent = False
        scaler = getattr(precision, "scaler", None)
        self._wire, self._grad_scale = averager.compressor.wire_dtype, scaler.get_scale() if scaler else 1.0
        self._by_ddp = averager.dense_step and all(
            id(parameter) in self._known_to_ddp for parameter in self._ddp.parameters() if parameter.requires_grad
        )
        self._gradients_ready = None

    def spent(self) -> None:
        """An optimizer has used the gradients."""
        self._unspent = False

    def after_backward(self, averager: GradientAverager) -> bool:
        """Average, unless DDP has done it, or does not synchronise this backward because gradients accumulate.

        Returns:
            Whether it was done here.
        """
        self.accumulating = self._gradients_ready is None
        if self._gradients_ready is None:
            if self._ddp.static_graph and self._ddp.require_backward_grad_sync:
                raise RuntimeError("DDP(static_graph=True) exchanged nothing: manual optimization needs lightning 2.6")
            return False
        self._unspent = True
        if self._by_ddp:
            seconds = time.perf_counter() - self._gradients_ready
            averager.after_dense_step(grad_scale=self._grad_scale, seconds=seconds)
        else:
            averager.average(grad_scale=self._grad_scale)
        return not self._by_ddp

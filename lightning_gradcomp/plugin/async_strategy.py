"""AsyncStrategy: dist_async in Lightning. Each rank trains with all servers, and runs one of them in a thread.

A step waits only for ranks that are too far behind. The servers hold the weights. Before Lightning reads them, all
ranks stop pushing and pull the same weights.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import broadcast_unless_identical, initial_tensors
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.base import build
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.sync import Buffers, sync_buffers_and_moments, sync_copies, tensors_of, untrained
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.partition import check_pull
from lightning_gradcomp.parameter_server.server import ParameterServer, check_compressor, check_staleness
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.base_strategy import UnwrappedStrategy, averages_of
from lightning_gradcomp.plugin.validation import check_checkpoint_state

KEY = "lightning_gradcomp_async"
"""The ranks' states in a checkpoint."""
NO_LIMIT = timedelta(days=365)
"""How long a server waits for its rank's next push. A validation may take long, and a lost rank's connection closes."""


class AsyncStrategy(UnwrappedStrategy):
    """dist_async: asynchronous training with parameter servers and bounded staleness.

        Trainer(strategy=AsyncStrategy("dgc", staleness=4), devices=4)

    The strategy divides learning rates by the number of ranks. A push then weighs as much as one rank's gradient in a
    mean over all ranks, so hyper-parameters tuned with DDP are nearly right.

    Args:
        compressor: compresses the pushes. DGC needs SGD; GradientDropping, OneBit and TwoBit take any optimizer but
            Adam and AdamW; `"none"`, `"fp16"`, `"bf16"`, `"int8"`, `"eden"` and TernGrad take any. There is no warm-up:
            every push is compressed.
        staleness: S, how many steps a rank may be ahead of the slowest before it waits. `math.inf`: it never waits.
        pull: format in which the servers send weights back: `"fp32"`, `"bf16"` or `"int8"`. Biases and norms travel in
            fp32. Servers keep all weights in fp32.
        checkpoint_state: where a checkpoint keeps each rank's residual, as in `CompressedDDPStrategy` but without
            `"mean"`.
        timeout: how long a rank waits for the others before it raises an error.
        options: arguments with which `DDPStrategy` starts and connects processes.

    Raises:
        ValueError: before training starts, if an option is not supported, or for several optimizers, sync_batchnorm or
            16-mixed.
    """

    one_optimizer = "1, which servers step"

    def __init__(
        self,
        compressor: Compressor | str = "none",
        staleness: float = 4,
        pull: str = "fp32",
        checkpoint_state: str = "auto",
        timeout: timedelta = TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._check_ddp_options(options)
        check_staleness(staleness)
        check_pull(pull)
        check_checkpoint_state(checkpoint_state)
        if checkpoint_state == "mean":
            raise refusal("AsyncStrategy.checkpoint_state", checkpoint_state, "'auto', 'gather', 'sidecar' or 'drop'")
        self.compressor, self.staleness, self.pull = build(compressor), staleness, pull
        self.checkpoint_state = checkpoint_state
        self.server: ParameterServer | None = None
        """Set during a fit."""

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        super().check(trainer, module)
        check_compressor(self.compressor)
        if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
            raise refusal("precision with AsyncStrategy", "16-mixed", "32-true or bf16-mixed: there is no loss scale")
        if not module.automatic_optimization:
            raise refusal("automatic_optimization with AsyncStrategy", False, "True")

    def make_averager(self, trainer: Trainer) -> AsyncAverager:
        """Start this rank's server, and connect to all servers."""
        self.averager = self.server = None
        module, [optimizer] = self.pl_module, self.optimizers
        ranks = Ranks(dist.group.WORLD)
        broadcast_unless_identical(initial_tensors(module), ranks)
        secret = self.broadcast(secrets.token_hex())
        self.server = ParameterServer(
            module,
            optimizer,
            self.compressor,
            secret=secret,
            host=_own_address(trainer.num_nodes),
            partition=self.global_rank,
            servers=self.world_size,
            staleness=self.staleness,
            pull=self.pull,
            timeout=NO_LIMIT,
        )
        self.server.start()
        addresses: list[Any] = [None] * self.world_size
        dist.all_gather_object(addresses, self.server.address)
        averager = AsyncAverager(
            module,
            optimizer,
            self.compressor,
            servers=addresses,
            secret=secret,
            pull=self.pull,
            world=self.world_size,
            rank=self.global_rank,
            timeout=self._timeout,  # type: ignore[arg-type]
        )
        self._ranks, self._buffers, self._pulled = ranks, Buffers(module), 0
        self.barrier()
        return averager

    def describe(self) -> str:
        name = type(self.averager.compressor).__name__
        ahead = "any number of steps" if self.staleness == math.inf else f"{self.staleness:g} steps"
        return (
            f"dist_async: {self.world_size} servers on the ranks, {name}; a rank may be {ahead} ahead of the slowest."
        )

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Like `Strategy.optimizer_step`, but pushes the gradient to the servers and pulls the weights."""
        with self.explained("pushing and pulling"):
            pushing: Any = _Pushing(optimizer, self.averager)
            result = super().optimizer_step(pushing, closure, *args, **kwargs)
        sigterm.stop_after_batch(self.averager, self.pl_module.trainer)
        if self._ends:
            self.agree()  # before callbacks read or replace the weights
        return result

    def agree(self) -> None:
        """Pull the servers' weights on all ranks. Average the buffers, frozen parameters and moving averages.

        Without a step since the last pull, the weights stay as they are, because a callback may have replaced them.
        After an interruption, this rank keeps the weights that it pulled last.
        """
        if self.averager is None or not self.averager.connected or self._interrupted:
            return
        with self.explained("pulling the weights"):
            self.barrier()  # all ranks have stopped pushing
            if self.averager.steps != self._pulled:
                self._pull()
            sync_buffers_and_moments(self._ranks, self._buffers, [], self.averager.steps, moments_valid=True)
            averages = averages_of(self.pl_module.trainer)
            copies = [*untrained(self.pl_module, self.averager.gradients.parameters), *tensors_of(averages)]
            sync_copies(self._ranks, copies, self.root_device)
            self.barrier()

    def _pull(self) -> None:
        self.averager.pull()
        self._pulled = self.averager.steps

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state, with the servers' states. Collective; after an interruption, without them."""
        if self.server is not None and self.averager is not None and not self._interrupted:
            everyones: list[Any] = [None] * self.world_size
            dist.all_gather_object(everyones, self.server.partition.optimizer_state())
            by_name = self.averager.by_name
            for states in everyones:
                for name, state in states.items():
                    optimizer.state[by_name[name]] = state
        return super().optimizer_state(optimizer)

    def put_states(self, checkpoint: dict[str, Any], path: Any, with_states: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if with_states:
            checkpoint[KEY] = state
            self.rank_states.put_into(state, path, self.averager, accumulating=False)
        return state

    def restore_states(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the restored weights, and the optimizer's state, into the servers. Collective."""
        assert self.server is not None
        [optimizer], by_name = self.optimizers, self.averager.by_name
        self.server.partition.load_optimizer_state(
            {name: optimizer.state[p] for name, p in by_name.items() if p in optimizer.state}
        )
        if (state := checkpoint.get(KEY)) is not None:
            self.rank_states.restore(state, self._loaded_from, self.averager)
            self.averager.steps = self._steps
        self.server.partition.load_weights(by_name)
        with self.explained("loading a checkpoint"):
            self.barrier()  # all servers have them
            self._pull()

    def teardown(self) -> None:
        if self.averager is not None:
            self.averager.close()
        if self.server is not None:
            self.server.stop()
        super().teardown()


class _Pushing:
    """An optimizer whose step pushes the gradients and pulls the weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, averager: AsyncAverager) -> None:
        self._optimizer, self._averager = optimizer, averager

    def step(self, closure: Callable[[], Any]) -> Any:
        """Push and pull; call the optimizer's own step without gradients, for schedulers and hooks that need it."""
        result = closure()
        self._averager.step()
        for parameter in self._averager.gradients.parameters:
            parameter.grad = None
        self._optimizer.step()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _own_address(nodes: int) -> str:
    """Loopback on one node; otherwise the address of the interface by which this node reaches MASTER_ADDR."""
    if nodes == 1:
        return "127.0.0.1"
    family, kind, *_, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return probe.getsockname()[0]

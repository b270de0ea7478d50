"""AsyncStrategy: dist_async in Lightning. Every rank trains with the servers, one of which is a thread of each rank.

DDP does not wrap the model, and no rank waits for another in a step, but for those that are too far behind. The weights
are the servers'; wherever Lightning may look at them, all ranks have stopped pushing, and pull the same.
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
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import broadcast_unless_identical
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.sync import Buffers, sync_buffers_and_moments
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.server import ParameterServer, check_compressor, check_staleness
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.base_strategy import BaseStrategy
from lightning_gradcomp.plugin.validation import check_callbacks, check_checkpoint_state, check_model
from lightning_gradcomp.registry import build

KEY = "lightning_gradcomp_async"
"""Where a checkpoint has what the workers remember."""
NO_LIMIT = timedelta(days=365)
"""How long a server waits for its rank's next push: a validation may be long, and a lost rank closes its connection."""


class AsyncStrategy(BaseStrategy):
    """dist_async: asynchronous training with parameter servers and bounded staleness.

        Trainer(strategy=AsyncStrategy("dgc", staleness=4), devices=4)

    Learning rates are divided by the number of ranks: a push then counts as much as a rank's gradient in the mean of
    all, and options found with DDP are nearly right.

    Args:
        compressor: compresses the pushes. DGC, GradientDropping, OneBit and TwoBit need SGD; `"none"`, `"fp16"` and
            `"bf16"` take any optimizer. There is no warm-up: every push is compressed.
        staleness: S, how many steps a rank may be ahead of the slowest before it waits. `math.inf`: it never waits.
        max_staleness: servers drop a push whose weights are more than this many pushes old; its rank keeps the update
            for a later push. `None`: no push is dropped.
        rate_by_staleness: divide the learning rate of a push by its staleness if that is above 1.
        pull: compresses what the servers send back. `None`: whole weights in fp32.
        checkpoint_state: where a checkpoint keeps each rank's residual, as in `CompressedDDPStrategy` but without
            `"mean"`.
        timeout: how long a rank waits for the others before it raises an error.
        options: arguments with which `DDPStrategy` starts and connects processes.

    Raises:
        ValueError: an option that can't be honoured, several optimizers, sync_batchnorm, 16-mixed; before training
            starts.
    """

    def __init__(
        self,
        compressor: Compressor | str = "none",
        staleness: float = 4,
        max_staleness: int | None = None,
        rate_by_staleness: bool = False,
        pull: Compressor | str | None = None,
        checkpoint_state: str = "auto",
        timeout: timedelta = TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(timeout=timeout, **options)
        if options.get("ddp_comm_hook") is not None or self._ddp_kwargs:
            got = ", ".join([*self._ddp_kwargs, *(["ddp_comm_hook"] if options.get("ddp_comm_hook") else [])])
            raise refusal("AsyncStrategy(...)", got, "no options of DDP, which is not used")
        check_staleness(staleness, max_staleness)
        check_checkpoint_state(checkpoint_state)
        if checkpoint_state == "mean":
            raise refusal("AsyncStrategy.checkpoint_state", checkpoint_state, "'auto', 'gather', 'sidecar' or 'drop'")
        build(compressor), None if pull is None else build(pull)  # refuse
        self.compressor, self.pull, self.checkpoint_state = compressor, pull, checkpoint_state
        self.rule = {
            "staleness": staleness,
            "max_staleness": max_staleness,
            "rate_by_staleness": rate_by_staleness,
            "pull": pull,
        }
        """Options of `ParameterServer`."""
        self.averager: AsyncAverager | None = None
        self.server: ParameterServer | None = None
        """Set while fitting."""

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what can't be honoured, before other processes are started."""
        check_callbacks(self, trainer)
        check_compressor(build(self.compressor))
        if self.pull is not None:
            check_compressor(build(self.pull))
        check_model(build(self.compressor), module)
        self._check_sidecars()
        if self._layer_sync is not None:
            raise refusal("sync_batchnorm with AsyncStrategy", True, "False: it waits for the network in each forward")
        if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
            raise refusal("precision with AsyncStrategy", "16-mixed", "32-true or bf16-mixed: there is no loss scale")
        if not module.automatic_optimization:
            raise refusal("automatic_optimization with AsyncStrategy", False, "True")

    def configure_ddp(self) -> None:
        """Nothing: DDP does not wrap the model."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return  # with what an earlier fit has left, which a checkpoint may still be made of
        self.averager = self.server = None
        assert self.lightning_module is not None
        if len(self.optimizers) > 1:
            raise refusal("optimizers with AsyncStrategy", len(self.optimizers), "1, which servers step")
        module, [optimizer] = self.lightning_module, self.optimizers
        timeout = timedelta(seconds=self._timeout.total_seconds())  # type: ignore[union-attr]
        with self.explained("starting the servers"):
            ranks = Ranks(dist.group.WORLD)
            broadcast_unless_identical([*module.parameters(), *module.buffers()], ranks)
            secret = self.broadcast(secrets.token_hex())
            self.server = ParameterServer(
                module,
                optimizer,
                self.compressor,
                secret=secret,
                host=_own_address(trainer.num_nodes),
                partition=self.global_rank,
                servers=self.world_size,
                timeout=NO_LIMIT,
                **self.rule,
            )
            self.server.start()
            addresses: list[Any] = [None] * self.world_size
            dist.all_gather_object(addresses, self.server.address)
            self.averager = AsyncAverager(
                module,
                optimizer,
                self.compressor,
                servers=addresses,
                secret=secret,
                pull=self.pull,
                world=self.world_size,
                timeout=timeout,
            )
            self._buffers, self.averager.ranks, self._pulled = Buffers(module), ranks, 0
            self.barrier()
        sigterm.set_handler(trainer)
        rank_zero_info(self._describe())

    def _describe(self) -> str:
        assert self.averager is not None
        name, bound = type(self.averager.compressor).__name__, self.rule["staleness"]
        ahead = "any number of steps" if bound == math.inf else f"{bound} steps"
        return (
            f"dist_async: {self.world_size} servers on the ranks, {name}; a rank may be {ahead} ahead of the slowest."
        )

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Strategy.optimizer_step`, but the gradient goes to the servers."""
        assert self.averager is not None and self.lightning_module is not None
        with self.explained("pushing and pulling"):
            pushing: Any = _Pushing(optimizer, self.averager)
            result = super().optimizer_step(pushing, closure, model, **kwargs)
        trainer = self.lightning_module.trainer
        sigterm.stop_after_batch(self.averager, trainer)
        if trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps:
            self.synchronise()  # before callbacks look at the weights, or replace them
        return result

    # Wherever the weights are looked at

    def synchronise(self) -> None:
        """Let all ranks hold the servers' weights, and the mean of the buffers. Collective. After a fit they do.

        Without a step since the last time the weights stay as they are: a callback may have replaced them.
        """
        if self.averager is not None and self.averager.connected:
            with self.explained("pulling the weights"):
                self.barrier()  # nobody pushes any more
                if self.averager.steps != self._pulled:
                    self._pull()
                sync_buffers_and_moments(
                    self.averager.ranks, self._buffers, None, self.averager.steps, moments_valid=True
                )
                self.barrier()

    def _pull(self) -> None:
        assert self.averager is not None
        self.averager.pull()
        self._pulled = self.averager.steps

    on_validation_start = on_test_start = on_predict_start = synchronise

    def on_train_end(self) -> None:
        super().on_train_end()
        self.synchronise()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The servers' weights. Collective; after an interruption, what this rank pulled last."""
        if not self._interrupted:
            self.synchronise()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """With what the servers' optimizers hold. Collective; after an interruption without it."""
        if self.server is not None and self.averager is not None and not self._interrupted:
            everyones: list[Any] = [None] * self.world_size
            dist.all_gather_object(everyones, self.server.partition.optimizer_state())
            gradients = self.averager.gradients
            by_name = dict(zip(gradients.names, gradients.parameters, strict=True))
            for states in everyones:
                for name, state in states.items():
                    optimizer.state[by_name[name]] = state
        return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Also of a checkpoint that another strategy has written, or a world of another size. The servers take over the
        module's weights, which have been restored: they may be of earlier steps than the servers'. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        assert self.averager is not None and self.server is not None
        [optimizer], gradients = self.optimizers, self.averager.gradients
        by_name = dict(zip(gradients.names, gradients.parameters, strict=True))
        self.server.partition.load_optimizer_state(
            {name: optimizer.state[p] for name, p in by_name.items() if p in optimizer.state}
        )
        if KEY in checkpoint:
            self.rank_states.restore(checkpoint[KEY], self._loaded_from, self.averager)  # type: ignore[arg-type]
        self.averager.steps = self._steps
        self.server.partition.load_weights(by_name)
        with self.explained("loading a checkpoint"):
            self.barrier()  # all servers have
            self._pull()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As DDP's, with what the workers remember; a checkpoint of weights alone has none of it."""
        filepath, with_states = self._meet_to_save(checkpoint, filepath)
        if with_states:
            with self.explained("saving a checkpoint"):
                checkpoint[KEY] = {}
                self.rank_states.put_into(checkpoint[KEY], filepath, self.averager, accumulating=False)  # type: ignore[arg-type]
        super().save_checkpoint(checkpoint, filepath, storage_options)
        with self.explained("saving a checkpoint"):
            self.rank_states.after_saving(checkpoint.get(KEY, {}), filepath)

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
        """The optimizer's own step then finds no gradient; it is made for schedulers and hooks that wait for it."""
        result = closure()
        self._averager.step()
        for parameter in self._averager.gradients.parameters:
            parameter.grad = None
        self._optimizer.step()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _own_address(nodes: int) -> str:
    """Loopback on one node; otherwise of the interface by which this node reaches MASTER_ADDR."""
    if nodes == 1:
        return "127.0.0.1"
    family, kind, *_, place = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return probe.getsockname()[0]

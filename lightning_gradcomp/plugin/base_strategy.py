"""The template of the Trainer strategies. Each strategy implements only what differs.

Its hooks, in the order of a fit: `check`, `make_averager`, `describe`, `agree`, `put_states` and `restore_states`.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.faults import (
    ExchangeFailed,
    explained,
    explanation,
    is_lost_peer,
    others_end,
    post_reason,
)
from lightning_gradcomp.averaging.trainable import has_stepped
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, of_rank_zero, read, with_suffix
from lightning_gradcomp.plugin.launchers import MultiProcessingLauncher, SubprocessLauncher
from lightning_gradcomp.plugin.rank_states import KEY, RankStates, all_ranks_present, interrupted
from lightning_gradcomp.plugin.validation import check_batches, check_callbacks, check_model

log = logging.getLogger(__name__)
RESTARTABLE = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --max-restarts=3"
)
"""The start of a command whose restarted ranks find each other."""
WAITING_SECONDS = 10.0
"""Seconds after which a save that waits for other ranks logs it."""
WAITING = (
    "trainer.save_checkpoint waits for other ranks. Every rank must call it: if one does not, this ends in an error."
)
OF_THIS_PROCESS = {"averager", "server", "_hook", "_ranks", "_direction_warnings", "_watches"}
"""Attributes of strategies that hold a process group, a thread, a connection or a hook."""


Averager = GradientAverager | DelayedAverager | AsyncAverager


def _tell(exception: BaseException) -> None:
    """Tell the other ranks which exception this one raised."""
    post_reason(f"raised {type(exception).__name__}: {exception}")


def warn_of_stale_addresses() -> None:
    """Warn if torchrun may restart ranks whose store still has the addresses of dead ranks.

    With `RESTARTABLE` each attempt has its own store. The default rendezvous ignores the variable.

    Source: https://github.com/pytorch/pytorch/issues/135712; seen in three of four restarts with torch 2.15 and gloo.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        rank_zero_warn(
            "torchrun --max-restarts: restarted ranks may try to reach dead ones and fail to connect. "
            f"Start them with {RESTARTABLE}, with the first node's address."
        )


def averages_of(trainer: Trainer) -> list[AveragedModel]:
    """The moving averages of the model that callbacks keep, such as Lightning's WeightAveraging."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [kept for each in callbacks for kept in vars(each).values() if isinstance(kept, AveragedModel)]


class BaseStrategy(ParallelStrategy):
    """A Lightning strategy with an averager. It checks options before the launch, raises errors that name rank, step
    and phase, and ends all ranks together on a SIGTERM."""

    compressor: Compressor
    averager: Any = None
    """An `Averager`. Set at the start of a fit, and kept after it for checkpoints."""
    _start_method: Any = "popen"
    no_sync_batchnorm = ""
    """The reason why the strategy can't convert batch norms; empty if it can."""
    _watches: Sequence[Any] = ()
    """Handles of the hooks that `watch_steps` registered."""
    _in_step = False
    """True inside `optimizer_step`."""
    one_optimizer = ""
    """If the strategy allows only one optimizer: "1", with the reason."""

    @property
    def pl_module(self) -> LightningModule:
        """The Trainer's module, which must be set."""
        assert self.lightning_module is not None
        return self.lightning_module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: compressors register the names. The inherited method would override Lightning's own names."""

    # Hooks of the template

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise ValueError for unsupported options, before other processes start."""
        check_callbacks(self, trainer)
        check_model(self.compressor, module)
        if self.no_sync_batchnorm and self._layer_sync is not None:
            raise refusal(f"sync_batchnorm with {type(self).__name__}", True, f"False: {self.no_sync_batchnorm}")

    @abstractmethod
    def make_averager(self, trainer: Trainer) -> Averager:
        """Make the averager of a fit, after model and optimizers are set up. Collective."""

    def describe(self) -> str:
        """Describe the fit in one line for the log."""
        return self.averager.describe()

    def agree(self) -> None:
        """Make weights and buffers the same on all ranks, before Lightning reads them. Collective."""

    # Before and around a fit

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            launched = self.cluster_environment, self.num_processes, self.num_nodes  # type: ignore[attr-defined]
            self._launcher = SubprocessLauncher(self.check, *launched)
        else:
            self._launcher = MultiProcessingLauncher(self.check, self, start_method=self._start_method)

    def setup(self, trainer: Trainer) -> None:
        with self.explained("setting up the model"):
            super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return  # keep an earlier fit's averager: a checkpoint may still save it
        if self.one_optimizer and len(self.optimizers) > 1:
            raise refusal(f"optimizers with {type(self).__name__}", len(self.optimizers), self.one_optimizer)
        with self.explained("setting up the averages"):
            self.averager = self.make_averager(trainer)
        self.averager.steps = trainer.global_step  # a later fit continues the count
        sigterm.set_handler(trainer)
        rank_zero_info(self.describe())

    def on_train_start(self) -> None:
        super().on_train_start()
        with self.explained("at the start of training"):
            check_batches(self.pl_module.trainer, self.root_device)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.agree()

    def on_validation_start(self) -> None:
        self.agree()

    def on_test_start(self) -> None:
        self.agree()

    def on_predict_start(self) -> None:
        self.agree()

    def watch_steps(self, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> None:
        """Call `before(optimizer, ...)` and `after(optimizer, ...)` around each step of the optimizers, also if the
        module steps torch's own, until the teardown."""
        # A wrapper of another optimizer may lack torch's hooks.
        hooked = [each for each in self.optimizers if hasattr(each, "_optimizer_step_post_hooks")]
        guards = [each.register_step_pre_hook(before) for each in hooked if before is not None]
        self._watches = [*guards, *(each.register_step_post_hook(after) for each in hooked if after is not None)]

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._in_step = True
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        finally:
            self._in_step = False

    def teardown(self) -> None:
        for watch in self._watches or ():  # None in a copy
            watch.remove()
        self._watches = ()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            sigterm.restore_handler(self.lightning_module._trainer)
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, without what belongs to this process, such as process groups."""
        return {name: None if name in OF_THIS_PROCESS else value for name, value in super().__getstate__().items()}

    # Errors that name rank, step and phase

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """Inside, a failed exchange raises an error that names rank, step and `doing`."""
        return explained(self._steps, doing)

    @property
    def _steps(self) -> int:
        module = self.lightning_module
        trainer = module._trainer if module is not None else None  # `module.trainer` raises if there is none
        return trainer.global_step if trainer is not None else 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("forward"):  # DDP sends buffers before it
            return super().training_step(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.explained("at a barrier"):
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a broadcast"):
            return super().broadcast(*args, **kwargs)  # type: ignore[misc]

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a reduction"):
            return super().reduce(*args, **kwargs)  # type: ignore[misc]

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a gather"):
            return super().all_gather(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if is_lost_peer(exception) and not isinstance(exception, ExchangeFailed):
            # A collective of the user's, or of Lightning's outside the strategy, such as a metric's.
            doing = "in an exchange that is not the strategy's"
            exception.args = (explanation(exception, self._steps, doing), *exception.args[1:])
        elif not isinstance(exception, ExchangeFailed):
            _tell(exception)
            return
        if isinstance(self._launcher, SubprocessLauncher) and self._launcher.procs:
            time.sleep(1.0)  # gives the others time to log their reasons
            self._launcher.kill(signal.SIGKILL)  # a hanging rank would outlive this process and keep its GPU


class DDPBase(BaseStrategy, DDPStrategy):
    """A `DDPStrategy` whose checkpoints are one file with the states of all ranks, or a file with sidecars beside it.
    Loading runs no code from checkpoints."""

    checkpoint_state: str
    """How a checkpoint saves the states of all ranks: one of `CHECKPOINT_STATES`."""

    @abstractmethod
    def put_states(self, checkpoint: dict[str, Any], path: Any, with_states: bool) -> dict[str, Any]:
        """Add this strategy's state to a checkpoint, and return the dict that holds the ranks' states.

        With `with_states`, all ranks are present to add theirs. The call is then collective.
        """

    @abstractmethod
    def restore_states(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what `put_states` added. The checkpoint may be another strategy's, or from a different world size."""

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        super().check(trainer, module)
        if self.checkpoint_state == "sidecar" and not self.rank_states.sidecars.possible:
            what = f"checkpoint_state with {type(self.checkpoint_io).__name__}, which writes in the background"
            raise refusal(what, "sidecar", "auto, gather, mean or drop")

    @property
    def _chosen_ddp_options(self) -> dict[str, Any]:
        """DDP's options that differ from its defaults, all of which LightningCLI passes."""
        known = inspect.signature(DistributedDataParallel).parameters
        options = self._ddp_kwargs.items()
        return {name: value for name, value in options if name not in known or value != known[name].default}

    def setup_distributed(self) -> None:
        super().setup_distributed()
        warn_of_stale_addresses()

    @cached_property
    def rank_states(self) -> RankStates:
        """Saves and restores the states of all ranks in checkpoints."""
        return RankStates(self.checkpoint_state, Sidecars(self.checkpoint_io), self.num_nodes)

    @property
    def _interrupted(self) -> bool:
        """True if this rank can't rely on the others."""
        return self.lightning_module is None or interrupted(self.lightning_module)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Like DDP's. After an interruption, when callbacks may save, it waits only if every rank was interrupted.

        Ranks that were not interrupted wait for this one in an exchange. They learn what happened when it ends.
        """
        error, module = sys.exc_info()[1], self.lightning_module
        if error is None or module is None or module._trainer is None or not interrupted(module):
            super().barrier(*args, **kwargs)
        elif not (isinstance(error, ExchangeFailed) or is_lost_peer(error)):
            _tell(error)
            if others_end():
                with suppress(ExchangeFailed):
                    super().barrier(*args, **kwargs)

    def on_train_end(self) -> None:
        with self.explained("at the end of training"):
            self.rank_states.remove_on_every_disk()
        super().on_train_end()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Like DDP's, plus the states of the ranks, unless the checkpoint holds no optimizer's state."""
        filepath, with_states = self._meet_to_save(checkpoint, filepath)
        with self.explained("saving a checkpoint"):
            holder = self.put_states(checkpoint, filepath, with_states)
        self._write(checkpoint, filepath, storage_options)
        with self.explained("saving a checkpoint"):
            self.rank_states.after_saving([holder[KEY]] if KEY in holder else [], filepath)

    def _meet_to_save(self, checkpoint: dict[str, Any], filepath: Any) -> tuple[Any, bool]:
        """Return rank 0's `filepath`, and True if all ranks add their states to the checkpoint, as rank 0 decides.

        Collective under `Trainer.save_checkpoint`, which every rank calls, as with DDP. The strategy's own
        `save_checkpoint` does not wait for other ranks, because rank 0 may call it alone, as with DDP.
        """
        whole = has_optimizer_states(checkpoint)
        if self.averager is None:
            return filepath, False
        if self._interrupted:
            return filepath, whole and all_ranks_present(self.lightning_module)
        if self.world_size > 1 and not _called_by_trainer():
            if whole:
                rank_zero_warn(
                    "strategy.save_checkpoint does not wait for other ranks, so this checkpoint lacks their "
                    "residuals. Call trainer.save_checkpoint on every rank to save them too."
                )
            return filepath, False
        waiting = threading.Timer(WAITING_SECONDS, log.warning, (WAITING,))
        waiting.daemon = True
        waiting.start()
        try:
            with self.explained("saving a checkpoint"):
                sigterm.meet(self.root_device, saving=True)
                return of_rank_zero((filepath, whole))
        finally:
            waiting.cancel()
            waiting.join()  # no thread outlives the save

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        """Like DDP's `save_checkpoint`, but first writes a local file under another name.

        Lightning moves a temporary file over an earlier checkpoint. If the two are on different filesystems, a full
        disk would leave a truncated checkpoint.
        """
        own_io = type(self.checkpoint_io) is not TorchCheckpointIO  # it may record the path, so pass the real one
        if own_io or not isinstance(get_filesystem(filepath), LocalFileSystem):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = LocalFileSystem._strip_protocol(str(filepath))
        partial = os.path.join(os.path.dirname(path), with_suffix(os.path.basename(path), ".partial"))
        try:
            super().save_checkpoint(checkpoint, partial, storage_options)
            if self.is_global_zero and os.path.isfile(partial):
                os.replace(partial, path)
        except BaseException:
            if self.is_global_zero:
                with suppress(OSError):
                    os.remove(partial)
            raise

    def remove_checkpoint(self, filepath: Any) -> None:
        """Like DDP's, but also removes the sidecars."""
        super().remove_checkpoint(filepath)
        self.rank_states.after_removing(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Like `Strategy.load_checkpoint`, but runs no code from the file unless weights_only=False is given."""
        self._loaded_from = checkpoint_path
        what, allowed, key = "checkpoint", "a complete file that Lightning saved", "pytorch-lightning_version"
        if args:
            kwargs["weights_only"] = args[0]
        return read(super().load_checkpoint, checkpoint_path, what, key, allowed, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Like `Strategy.load_optimizer_state_dict`, plus the states of the ranks if there is an optimizer's."""
        super().load_optimizer_state_dict(checkpoint)
        self.averager.steps = self._steps
        self.restore_states(checkpoint if has_optimizer_states(checkpoint) else {})


def has_optimizer_states(checkpoint: Mapping[str, Any]) -> bool:
    """False for a checkpoint of weights, and if a hook has removed or emptied the list of the optimizers' states.

    The states of the ranks belong to the optimizers': without these, training starts with empty residuals too.
    """
    return bool(checkpoint.get("optimizer_states"))


def _called_by_trainer() -> bool:
    """True inside `Trainer.save_checkpoint`, which every rank must call."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "save_checkpoint" and isinstance(frame.f_locals.get("self"), Trainer):
            return True
        frame = frame.f_back
    return False


class UnwrappedStrategy(DDPBase):
    """A strategy that starts and connects processes as `DDPStrategy` does, but does not wrap the model in DDP.

    Each rank steps its own weights; `agree` makes them the same.
    """

    no_sync_batchnorm = "it waits for the network in each forward pass"

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Like DDP's."""
        super().setup_optimizers(trainer)
        if not has_stepped(self.pl_module, self.optimizers):
            allowed = "at least one, because its steps are averaged"
            raise refusal(f"configure_optimizers with {type(self).__name__}", "no optimizer of the model", allowed)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.watch_steps(before=self._check_stepping)

    def _check_stepping(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """Raise ValueError before a step of which the strategy does not know, because nothing would average it."""
        if not self._in_step:
            allowed = "one from self.optimizers(), or that of the hook optimizer_step: their steps are averaged"
            raise refusal(f"optimizer with {type(self).__name__}", f"torch's own {type(optimizer).__name__}", allowed)

    def _check_ddp_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for an option that only DDP uses."""
        averaging = [name for name in ("ddp_comm_hook", "model_averaging_period") if options.get(name) is not None]
        if used := [*self._chosen_ddp_options, *averaging]:
            raise refusal(f"{type(self).__name__}(...)", ", ".join(used), "no DDP options, because DDP is not used")

    def configure_ddp(self) -> None:
        """DDP does not wrap the model. Give it DDP's `no_sync`, which has nothing to do: backward does not average."""
        if not hasattr(self.pl_module, "no_sync"):
            vars(self.pl_module)["no_sync"] = nullcontext

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("no_sync", None)
        super().teardown()

    @property
    def _ends(self) -> bool:
        """True in the last step of an epoch or of the fit, after which callbacks may read the weights."""
        trainer = self.pl_module.trainer
        steps = trainer.global_step + self.pl_module.automatic_optimization  # manual steps are already counted
        return trainer.is_last_batch or 0 < trainer.max_steps <= steps

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that all ranks agree on. Collective, unless the fit was interrupted."""
        self.agree()
        return super().lightning_module_state_dict()

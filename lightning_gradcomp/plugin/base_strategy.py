"""What the Trainer strategies share: checks before the launch, explained exchanges, safe checkpoints."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gradcomp.averaging.faults import (
    ExchangeFailed,
    explained,
    explanation,
    is_lost_peer,
    others_end,
    post_reason,
)
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, of_rank_zero, read, with_suffix
from lightning_gradcomp.plugin.launchers import MultiProcessingLauncher, SubprocessLauncher
from lightning_gradcomp.plugin.meeting import meet
from lightning_gradcomp.plugin.rank_states import RankStates, all_ranks_present, interrupted
from lightning_gradcomp.plugin.validation import check_batches

log = logging.getLogger(__name__)
WAITING_SECONDS = 10.0
"""Seconds that a save waits for other ranks without a word."""
WAITING = (
    "trainer.save_checkpoint waits for other ranks. Every rank has to call it: if one has not, this ends in an error."
)
OF_THIS_PROCESS = {"averager", "server", "_hook"}
"""Attributes of strategies that hold a process group, a thread or a connection."""


def _tell(exception: BaseException) -> None:
    """Tell the other ranks what this one has raised."""
    post_reason(f"raised {type(exception).__name__}: {exception}")


def _called_by_trainer() -> bool:
    """Whether `Trainer.save_checkpoint` is under way, which every rank has to call."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "save_checkpoint" and isinstance(frame.f_locals.get("self"), Trainer):
            return True
        frame = frame.f_back
    return False


def warn_of_stale_addresses() -> None:
    """Where torchrun restarts processes but keeps their store, they may find the addresses of those that have died.

    Source: https://github.com/pytorch/pytorch/issues/135712; seen with torch 2.15 and gloo in three of four restarts.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        rank_zero_warn(
            "torchrun --max-restarts: restarted ranks may look for the old ones and fail to connect. "
            "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts."
        )


class ExplainedStrategy(ParallelStrategy):
    """Names rank, step and phase where an exchange fails."""

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """Name what fails inside."""
        return explained(self._steps, doing)

    @property
    def _steps(self) -> int:
        module = self.lightning_module
        trainer = module._trainer if module is not None else None  # `module.trainer` raises where there is none
        return trainer.global_step if trainer is not None else 0

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: names come from the registry of compressors. (Inherited, it would claim torch's own again.)"""

    def setup(self, trainer: Trainer) -> None:
        with self.explained("setting up the model"):
            super().setup(trainer)

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        with self.explained("at the start of training"):
            check_batches(self.lightning_module.trainer, self.root_device)

    def teardown(self) -> None:
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            sigterm.restore_handler(self.lightning_module._trainer)
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """For copies, such as a saved Trainer's: without what belongs to this process, such as process groups."""
        return {name: None if name in OF_THIS_PROCESS else value for name, value in super().__getstate__().items()}

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
            time.sleep(1.0)  # for the others to log their reasons
            self._launcher.kill(signal.SIGKILL)  # one that hangs would outlive this process, and keep its GPU


class BaseStrategy(ExplainedStrategy, DDPStrategy):
    """DDPStrategy that checks a fit before it starts processes, names rank, step and phase where an exchange fails, and
    runs no code from checkpoints."""

    averager: Any
    checkpoint_state: str
    """What becomes of the states of all ranks in a checkpoint: one of `CHECKPOINT_STATES`."""

    @cached_property
    def rank_states(self) -> RankStates:
        """The states of all ranks, in checkpoints."""
        return RankStates(self.checkpoint_state, Sidecars(self.checkpoint_io), self.num_nodes)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As DDP's. After an interruption, in which callbacks may save, it holds only if every rank was interrupted.
        Those that were not wait for this one in an exchange, and learn from its end what has happened."""
        error, module = sys.exc_info()[1], self.lightning_module
        if error is None or module is None or module._trainer is None or not interrupted(module):
            super().barrier(*args, **kwargs)
        elif not (isinstance(error, ExchangeFailed) or is_lost_peer(error)):
            _tell(error)
            if others_end():
                with suppress(ExchangeFailed):
                    super().barrier(*args, **kwargs)

    def _meet_to_save(self, checkpoint: dict[str, Any], filepath: Any) -> tuple[Any, bool]:
        """Rank 0's `filepath`, and whether all ranks put their states into the checkpoint, which rank 0 decides.

        Collective under `Trainer.save_checkpoint`, which every rank calls, as under DDP. This strategy's own
        `save_checkpoint` is another thing: under DDP rank 0 may call it alone, so it meets nobody.
        """
        whole = "optimizer_states" in checkpoint
        if self.averager is None:
            return filepath, False
        if self._interrupted:
            return filepath, whole and all_ranks_present(self.lightning_module)
        if self.world_size > 1 and not _called_by_trainer():
            if whole:
                rank_zero_warn(
                    "strategy.save_checkpoint does not wait for other ranks: this checkpoint is without what they "
                    "have not sent yet. trainer.save_checkpoint, called on every rank, saves that too."
                )
            return filepath, False
        waiting = threading.Timer(WAITING_SECONDS, log.warning, (WAITING,))
        waiting.daemon = True
        waiting.start()
        try:
            with self.explained("saving a checkpoint"):
                meet(self.root_device, saving=True)
                return of_rank_zero((filepath, whole))
        finally:
            waiting.cancel()
            waiting.join()  # no thread of a save outlives it

    @property
    def _interrupted(self) -> bool:
        """Whether this rank can't count on the others."""
        return self.lightning_module is None or interrupted(self.lightning_module)

    def on_train_end(self) -> None:
        super().on_train_end()
        with self.explained("at the end of training"):
            self.rank_states.remove_on_every_disk()

    def remove_checkpoint(self, filepath: Any) -> None:
        """As DDP's, with the files beside it."""
        super().remove_checkpoint(filepath)
        self.rank_states.after_removing(filepath)

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            launched = (self.cluster_environment, self.num_processes, self.num_nodes)
            self._launcher = SubprocessLauncher(self.check, *launched)
        else:
            self._launcher = MultiProcessingLauncher(self.check, self, start_method=self._start_method)

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what can't be honoured, before other processes are started."""
        raise NotImplementedError

    def _check_sidecars(self) -> None:
        """ValueError for sidecars where checkpoints are written in the background."""
        if self.checkpoint_state == "sidecar" and not self.rank_states.sidecars.possible:
            what = f"checkpoint_state with {type(self.checkpoint_io).__name__}, which writes in the background"
            raise refusal(what, "sidecar", "auto, gather, mean or drop")

    def setup_distributed(self) -> None:
        super().setup_distributed()
        warn_of_stale_addresses()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `Strategy.load_checkpoint`, but no code in the file is run, unless weights_only=False is given.

        Raises:
            ValueError: a file that is not a whole checkpoint; also a FileNotFoundError where there is none.
        """
        self._loaded_from = checkpoint_path
        what, allowed = "checkpoint", "a file that Lightning saved, whole"
        if args:
            kwargs["weights_only"] = args[0]
        return read(super().load_checkpoint, checkpoint_path, what, "state_dict", allowed, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As DDP's. A local file is written under another name first: Lightning moves a temporary file over an earlier
        checkpoint, which a full disk would leave in pieces where the two are on different filesystems."""
        own_io = type(self.checkpoint_io) is not TorchCheckpointIO  # it is told the real path: it may read or note it
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

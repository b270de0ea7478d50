"""Wherever Lightning's DDP strategy talks to the other ranks, a failure names rank, step and phase."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gradcomp.averaging.faults import PATIENCE, ExchangeFailed, explained, leave_word
from lightning_gradcomp.plugin.launch import SubprocessLauncher


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


class DDPWithNamedFaults(DDPStrategy):
    """DDPStrategy whose errors say what was going on; and a rank that fails by itself leaves word of the reason."""

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """Name what fails inside."""
        module = self.lightning_module
        trainer = module._trainer if module is not None else None  # `module.trainer` raises where there is none
        return explained(trainer.global_step if trainer is not None else 0, doing)

    def setup_distributed(self) -> None:
        super().setup_distributed()
        warn_of_stale_addresses()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("forward"):  # DDP sends buffers before it
            return super().training_step(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.explained("at a barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a broadcast"):
            return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a reduction"):
            return super().reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a gather"):
            return super().all_gather(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not isinstance(exception, ExchangeFailed):
            leave_word(f"raised {type(exception).__name__}: {exception}")
        elif isinstance(self._launcher, SubprocessLauncher):
            time.sleep(PATIENCE)  # for the others to say what they have to say
            self._launcher.kill(signal.SIGKILL)  # one that hangs would outlive this process, and keep its GPU

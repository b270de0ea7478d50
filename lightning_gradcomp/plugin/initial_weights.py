"""The weights with which all ranks begin: rank 0's, sent only where another rank's are not the same already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_gradcomp.averaging.replicas import identical


@contextmanager
def sent_if_they_differ(model: nn.Module, ddp_options: dict[str, Any]) -> Iterator[None]:
    """Inside, `DistributedDataParallel(model, **ddp_options)` sends weights and buffers only if ranks hold others.

    A user's own `init_sync` stays. A collective call.
    """
    if "init_sync" in ddp_options:
        yield
        return
    ddp_options["init_sync"] = not identical([*model.parameters(), *model.buffers()])
    try:
        yield
    finally:
        del ddp_options["init_sync"]

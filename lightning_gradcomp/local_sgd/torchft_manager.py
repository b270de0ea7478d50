"""torchft's manager for a single-rank replica. Import it only if needed: torchft is an optional dependency."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft import Manager
from torchft.checkpointing.http_transport import HTTPTransport


class StateTransport(HTTPTransport):
    """Sends this rank's state to a joining rank.

    torchft's own transport announces this machine's host name, which other machines may not be able to resolve.

    Args:
        host: name or address at which the others reach this rank.
        timeout: how long sending the state may take.
    """

    def __init__(self, host: str, timeout: timedelta) -> None:
        self._host = host
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        """Base URL of the states, to which torchft appends the round number."""
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"


def start_manager(
    lighthouse: str, host: str, *, round_timeout: timedelta, **options: Any
) -> tuple[Manager, dist.TCPStore]:
    """Start the manager. Returns it and its store, which must live as long.

    Args:
        lighthouse: the lighthouse's address, http://HOST:PORT.
        host: name or address at which the others reach this rank.
        round_timeout: how long a rank waits for the others, and for the state from one of them.
        options: other options of `torchft.Manager`.
    """
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    where = {"store_addr": host, "store_port": store.port, "hostname": host, "lighthouse_addr": lighthouse}
    patience = {"timeout": round_timeout, "quorum_timeout": round_timeout}
    transport = StateTransport(host, round_timeout)
    own = {"rank": 0, "world_size": 1, "use_async_quorum": False, "checkpoint_transport": transport}
    return Manager(**own, **where, **patience, **options), store

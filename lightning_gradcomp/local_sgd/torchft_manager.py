"""torchft's manager of a rank that is a replica by itself. Imported where it is needed: torchft is an extra."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft import Manager
from torchft.checkpointing.http_transport import HTTPTransport


class StateTransport(HTTPTransport):
    """Sends a rank that comes new the state of this one, from the address by which others know this one.

    torchft's own gives the name that this machine has for itself, which the others may not be able to resolve.

    Args:
        host: this rank's name or address, by which the others reach it.
        timeout: how long sending the state may take.
    """

    def __init__(self, host: str, timeout: timedelta) -> None:
        self._host = host
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        """Where the states are: the number of the round comes after it."""
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"


def start_manager(
    lighthouse: str, host: str, *, round_timeout: timedelta, **options: Any
) -> tuple[Manager, dist.TCPStore]:
    """The manager, and the store that must live as long.

    Args:
        lighthouse: its address, http://HOST:PORT.
        host: this rank's name or address, by which the others reach it.
        round_timeout: how long a rank waits for the others, and for the state of one of them.
        options: further ones of `torchft.Manager`.
    """
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    where = {"store_addr": host, "store_port": store.port, "hostname": host, "lighthouse_addr": lighthouse}
    patience = {"timeout": round_timeout, "quorum_timeout": round_timeout}
    transport = StateTransport(host, round_timeout)
    own = {"rank": 0, "world_size": 1, "use_async_quorum": False, "checkpoint_transport": transport}
    return Manager(**own, **where, **patience, **options), store

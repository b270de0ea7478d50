"""One-way packet delay between network namespaces, by a TUN device in each, for kernels without netem.

What a node sends into its TUN device arrives here as IP packets. Each is written into the destination's device when it
is due. Large packets (the device's MTU) keep this loop from being the bottleneck, but it still takes processor time, so
use delays only to study delays.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 65_000
CLONE_NEWNET = 0x40000000


def open_tun(namespace: str, device: str) -> int:
    """Create a TUN device in `namespace` and return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        finally:
            libc.setns(here.fileno(), CLONE_NEWNET)
    return tun


class Forwarder(threading.Thread):
    """Forwards packets between devices, each `seconds` after it was sent, until `stop` is set.

    Args:
        devices: IPv4 address -> file descriptor of its TUN device.
    """

    def __init__(self, devices: dict[str, int], seconds: float) -> None:
        super().__init__(daemon=True)
        self.devices = {socket.inet_aton(address): tun for address, tun in devices.items()}
        self.seconds = seconds
        self.stop = threading.Event()

    def run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        with selectors.DefaultSelector() as selector:
            for tun in self.devices.values():
                selector.register(tun, selectors.EVENT_READ)
            while not self.stop.is_set():
                due = waiting[0][0] - time.monotonic() if waiting else 0.1
                for key, _ in selector.select(max(0.0, min(due, 0.1))):
                    with suppress(BlockingIOError):
                        while True:
                            packet = os.read(key.fd, MTU + 64)
                            if packet[0] >> 4 == 4 and packet[16:20] in self.devices:  # ignore IPv6 neighbour discovery
                                number += 1  # keeps the order of packets that are due at the same time
                                to = self.devices[packet[16:20]]
                                heapq.heappush(waiting, (time.monotonic() + self.seconds, number, to, packet))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, to, packet = heapq.heappop(waiting)
                    with suppress(BlockingIOError):  # a full device drops, as a link would
                        os.write(to, packet)

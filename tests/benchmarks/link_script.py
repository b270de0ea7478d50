"""Rank 1 sends rank 0 a megabyte, then asks ten times for a byte; prints the seconds of both.

`fail`: rank 1 does, when it has printed the name of its namespace.
"""

import os
import socket
import subprocess
import sys
import time

MEGABYTE = 1_000_000
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        peer, _ = server.accept()
        received = 0
        while received < MEGABYTE:
            received += len(peer.recv(1 << 16))
        peer.sendall(b"!")
        while peer.recv(1):
            peer.sendall(b"!")
elif "fail" in sys.argv:
    subprocess.run(["ip", "netns", "identify", str(os.getpid())], check=True)
    sys.exit(3)
else:
    for _ in range(100):
        try:
            peer = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.05)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin = time.perf_counter()
    peer.sendall(bytes(MEGABYTE))
    peer.recv(1)
    megabyte = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(10):
        peer.sendall(b"?")
        peer.recv(1)
    print(megabyte, (time.perf_counter() - begin) / 10, flush=True)

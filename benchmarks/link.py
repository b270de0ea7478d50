"""Runs a command on emulated nodes of this machine, connected by a link of a given rate and delay. Linux, root.

    python -m benchmarks.link --nodes 2 --rate-mbit 1000 --delay-ms 20 -- python train.py

Every node is a network namespace with one interface, `eth0`. Each of its processes (one, or --ranks-per-node) is pinned
to a share of the cores and gets the variables that torchrun sets. The kernel's token bucket (tc-tbf) limits the rate at
which a node sends and, if no delay is emulated, receives. Delays come from netem, or from a TUN device if the kernel
has no netem. At the end, the script prints what each node sent, including headers. Where links can't be emulated
(that needs root, `ip` and `tc`), it says so, and the processes communicate over loopback at full speed. So they do with
--rate-mbit 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.delay import MTU, Forwarder, open_tun

PORT = 29_500
QUEUE = "400ms"
"""How long packets may wait for tokens: long enough that TCP finds the rate without losses."""


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def shape(namespace: str, device: str, rate_mbit: float) -> None:
    """Limit the rate at which `device` sends."""
    burst = max(2 * MTU, round(rate_mbit * 1e6 / 8 / 1000))  # a millisecond's worth, and never less than a packet
    words = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate_mbit}mbit"]
    ip("netns", "exec", namespace, *words, "burst", str(burst), "latency", QUEUE)


def has_netem(namespace: str) -> bool:
    """True if the kernel can delay packets."""
    words = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return not subprocess.run(["ip", "netns", "exec", namespace, *words], capture_output=True).returncode


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


@contextmanager
def nodes(count: int, rate_mbit: float | None, delay_ms: float) -> Iterator[list[str]]:
    """The namespaces of `count` nodes, connected by a switch or by a forwarder with delay."""
    name = f"link{os.getpid()}"
    switch, names = f"{name}s", [f"{name}n{node}" for node in range(count)]
    with ExitStack() as undo:
        for namespace in (switch, *names):
            ip("netns", "add", namespace)
            undo.callback(ip, "netns", "del", namespace, check=False)
            ip("-n", namespace, "link", "set", "lo", "up")
        by_tun = delay_ms > 0 and not has_netem(switch)
        if by_tun:
            devices = {}
            for node, namespace in enumerate(names):
                devices[address(node)] = tun = open_tun(namespace, "eth0")
                undo.callback(os.close, tun)
                ip("-n", namespace, "link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "10000")
            forwarder = Forwarder(devices, delay_ms / 1000)
            forwarder.start()
            undo.callback(forwarder.join)
            undo.callback(forwarder.stop.set)
        else:
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
            ip("-n", switch, "link", "set", "br0", "up")
            for node, namespace in enumerate(names):
                port = f"port{node}"
                ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
                ip("-n", switch, "link", "set", port, "master", "br0", "up")
                if delay_ms:
                    words = ["tc", "qdisc", "add", "dev", port, "root", "netem", "delay", f"{delay_ms}ms"]
                    ip("netns", "exec", switch, *words, "limit", "100000")
                elif rate_mbit:
                    shape(switch, port, rate_mbit)
        for node, namespace in enumerate(names):
            ip("-n", namespace, "address", "add", f"{address(node)}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            if rate_mbit:
                shape(namespace, "eth0", rate_mbit)
        yield names


def possible() -> bool:
    """True if this machine can emulate links: root of a container often can't."""
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with nodes(1, 1000, 0):
            return True
    except RuntimeError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sent(namespace: str) -> int:
    """Bytes that a node has sent, including headers."""
    [link] = json.loads(ip("-n", namespace, "-s", "-j", "link", "show", "dev", "eth0"))
    return link["stats64"]["tx"]["bytes"]


def start(
    command: list[str], rank: int, per_node: int, world: int, port: int, namespace: str | None
) -> subprocess.Popen:
    """Start the command as `rank`, one of `per_node` on its node, on its share of the cores.

    Args:
        port: where rank 0 listens.
        namespace: the node's; None: all nodes are this machine.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = {core for place, core in enumerate(cores) if place % world == rank} or {cores[rank % len(cores)]}
    node, local_rank = divmod(rank, per_node)
    where = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    if namespace is None:
        where = {"MASTER_ADDR": "127.0.0.1"}
    local = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_RANK": str(node)}
    environment = {
        **os.environ, **where, **local, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port),
        "NODE_RANK": str(node), "OMP_NUM_THREADS": str(len(share)), "TORCHELASTIC_RUN_ID": "link",
    }  # fmt: skip
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    return subprocess.Popen(
        [*prefix, *command],
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, share),
        start_new_session=True,
    )


def wait(processes: list[subprocess.Popen]) -> int:
    """Wait for the first non-zero exit code, then end the others. Returns it, or 0."""
    waiting, code = list(processes), 0
    try:
        while waiting and not code:
            for process in list(waiting):
                try:
                    code = code or process.wait(timeout=0.2)
                    waiting.remove(process)
                except subprocess.TimeoutExpired:
                    continue
    finally:
        for process in waiting:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code


def local(ranks: int) -> list[str]:
    """Arguments of `python -m` that start ranks on this machine, without a link."""
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def emulated(ranks: int, per_node: int = 1, rate_mbit: float | None = None, delay_ms: float = 0.0) -> list[str]:
    """Arguments of `python -m` that start ranks on emulated nodes."""
    words = [f"--nodes={ranks // per_node}", f"--ranks-per-node={per_node}", f"--delay-ms={delay_ms}"]
    words += [] if rate_mbit is None else [f"--rate-mbit={rate_mbit}"]
    return ["benchmarks.link", *words, "--", sys.executable]


def result(launcher: Sequence[str], module: str, *words: str) -> tuple[Any, str]:
    """Run `python -m MODULE WORDS --place FILE`. Returns what rank 0 writes to FILE as JSON, and what the ranks print.

    Args:
        launcher: `local` or `emulated`.

    Raises:
        CalledProcessError: if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "result.json")
        command = [sys.executable, "-m", *launcher, "-m", module, *words, "--place", str(place)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
        return json.loads(place.read_text()), done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rate-mbit", type=float, help="rate of each node's link; 0: loopback; default: unlimited")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    per_node, world = arguments.ranks_per_node, arguments.nodes * arguments.ranks_per_node
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its ranks end and its nodes are removed
    if arguments.rate_mbit == 0 or not possible():
        if arguments.rate_mbit != 0:
            print("benchmarks.link: can't emulate a link (needs Linux, root, ip and tc); running on loopback")
        port = free_port()
        return wait([start(arguments.command, rank, per_node, world, port, None) for rank in range(world)])
    with nodes(arguments.nodes, arguments.rate_mbit, arguments.delay_ms) as names:
        hosts = [name for name in names for _ in range(per_node)]
        processes = [start(arguments.command, rank, per_node, world, PORT, name) for rank, name in enumerate(hosts)]
        code = wait(processes)
        for node, name in enumerate(names):
            print(f"node {node} sent {sent(name):,} bytes")
    return code


if __name__ == "__main__":
    sys.exit(main())

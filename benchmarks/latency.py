"""What a training step costs over a link with a delay, by method: computation alone, DDP, local SGD, delayed averages.

    sudo python -m benchmarks.link --nodes 2 --rate-mbit 1000 --delay-ms 25 -- python -m benchmarks.latency

Methods: "compute", "ddp", "local" (K steps, then an average that is waited for), "dga" (an average K steps late),
"auto" (K and D chosen from what is measured); the latter three also with a compressor, after a colon ("dga:onebit");
"sparseloco" (K steps, then a compressed round that is waited for) and "sparseloco-late" (the same K steps late);
torchft's DiLoCo: "diloco" (K steps, then an uncompressed round that is waited for) and "diloco-late" (K - 1 late).
Methods take turns; in each, a round of K steps warms up, and `--rounds` further ones are timed. A figure is the mean
over the steps of a turn, since a wait falls on one step of many, of the slower rank; the median over turns. One thread
a process.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.methods import OPTIMIZERS, compressor, forward_backward, network, sgd
from lightning_gradcomp import SPARSELOCO, DelayedAverager


def small() -> nn.Module:
    """A net of 85,000 parameters, for questions about delay alone: its 340 kB need no rate to speak of."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 204), nn.ReLU(),
        nn.Linear(204, 10),
    )  # fmt: skip


class TorchftDiLoCo:
    """torchft's `DiLoCo` with its lighthouse on rank 0, and each rank a replica; made by all ranks together.

    Args:
        model, optimizer: of the local steps.
        period: K.
        late: steps behind which the exchange is hidden.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, period: int, late: int) -> None:
        from torchft import ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        from lightning_gradcomp.local_sgd.torchft_manager import start_manager

        here, world, timeout = own_address(), dist.get_world_size(), timedelta(minutes=10)
        addresses = [""]
        if dist.get_rank() == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=world)
            addresses = [f"http://{here}:{self._lighthouse.address().rpartition(':')[2]}"]
        dist.broadcast_object_list(addresses)
        manager, self._store = start_manager(
            addresses[0],
            here,
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=world,
            round_timeout=timeout,
            replica_id=f"rank{dist.get_rank()}",
            init_sync=False,
        )
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = DiLoCo(manager, [model], optimizer, outer, period, pin_memory=False, fragment_sync_delay=late)
        diloco.__enter__()  # from here on the optimizer's steps are counted, and the last of a round exchanges


def own_address() -> str:
    """Of the interface that leads to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return probe.getsockname()[0]


class Method:
    """One method's copy of the model.

    Args:
        name: as above.
        model: trained from here on.
        period: K.
        optimizer: SGD, where none is given.
    """

    def __init__(
        self, name: str, model: nn.Module, period: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model = DistributedDataParallel(model) if name == "ddp" else model
        self.optimizer = optimizer or sgd(model)
        kind, _, codec = name.partition(":")
        self.averager: DelayedAverager | None = None
        self._period = None if name == "ddp" else period
        if kind in ("diloco", "diloco-late"):
            self.diloco = TorchftDiLoCo(model, self.optimizer, period, period - 1 if kind == "diloco-late" else 0)
        if kind in ("sparseloco", "sparseloco-late"):
            pace = {"period": period, "delay": period if kind == "sparseloco-late" else 0}
            self.averager = DelayedAverager(model, self.optimizer, **{**SPARSELOCO, **pace})
        if kind in ("local", "dga", "auto"):
            delay = {"local": 0, "dga": period, "auto": "auto"}[kind]
            method = compressor(codec) if codec else "none"
            self.averager = DelayedAverager(model, self.optimizer, method, period=period, delay=delay)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """One optimizer step."""
        forward_backward(self.model, images, labels)
        if self.averager:
            self.averager.step()
        else:
            self.optimizer.step()

    @property
    def period(self) -> int | None:
        """Steps of a round, or of as many as one has; None for DDP, whose steps may take minutes."""
        return self.averager.period if self.averager else self._period

    @property
    def sent(self) -> tuple[int, int]:
        """Steps and bytes so far."""
        return (self.averager.steps, self.averager.spent.bytes_sent) if self.averager else (0, 0)


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Method -> milliseconds of a step, spread over the turns, ratio to computation, bytes of a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, generator=generator)
    labels = torch.randint(0, 10, (arguments.batch,), generator=generator)
    methods = {}
    for name in arguments.methods.split(","):
        torch.manual_seed(0)
        model = small() if arguments.model == "small" else network(arguments.model)
        methods[name] = Method(name, model, arguments.period, OPTIMIZERS[arguments.optimizer](model))
        while (averager := methods[name].averager) and averager.round_schedule.measuring:
            methods[name].step(images, labels)
    turns: dict[str, list[float]] = {name: [] for name in methods}
    before = {name: method.sent for name, method in methods.items()}
    for turn in range(arguments.turns):
        for name, method in methods.items():
            period = method.period or arguments.ddp_steps
            for _ in range(period):
                method.step(images, labels)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(arguments.rounds * period):
                method.step(images, labels)
            slower = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            turns[name].append(1e3 * slower.item() / (arguments.rounds * period))
        if rank == 0:
            print(f"turn {turn + 1} of {arguments.turns}", flush=True)
    results = {}
    for name, found in turns.items():
        results[name] = {"ms": median(found), "lowest_turn_ms": min(found), "highest_turn_ms": max(found)}
        results[name]["ratio_to_compute"] = median(found) / median(turns.get("compute", [float("nan")]))
        if averager := methods[name].averager:
            (steps, sent), (steps_before, sent_before) = methods[name].sent, before[name]
            results[name] |= {"bytes_a_step": (sent - sent_before) / (steps - steps_before)}
            results[name] |= {"period": averager.period, "delay": averager.delay, "late": averager.spent.late_rounds}
        elif name != "compute":
            dense = 8 * (world - 1) / world * sum(p.numel() for p in model.parameters())
            results[name]["bytes_a_step"] = dense / (methods[name].period or 1)
    return results


def rows(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """For the table."""
    lines = []
    for name, r in results.items():
        spread = f"{r['ms']:.1f} ({r['lowest_turn_ms']:.1f} to {r['highest_turn_ms']:.1f})"
        pace = f"{r['period']}, {r['delay']}" if "period" in r else ""
        sent = f"{r['bytes_a_step']:,.0f}" if "bytes_a_step" in r else ""
        lines.append([name, spread, f"{r['ratio_to_compute']:.2f}x", pace, sent])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="compute,ddp,local,dga")
    parser.add_argument("--model", default="small", help="small, or as benchmarks.step_time has it")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--period", type=int, default=8, help="K; of auto, the least")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="that are timed in a turn")
    parser.add_argument("--ddp-steps", type=int, default=3, help="what is a round to DDP")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of the link, for the record")
    parser.add_argument("--out", type=Path, help="a folder for latency.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = measure(arguments)
    if dist.get_rank() == 0:
        conditions = {**vars(arguments), "N": dist.get_world_size()}
        print(f"\n{arguments.model}, batch {arguments.batch}, N={conditions['N']}, ", end="")
        print(f"{arguments.delay_ms:g} ms one way, {report.machine()}")
        head = ["method", "ms a step (lowest to highest turn)", "to computation", "K, D", "bytes sent a step"]
        print(report.table(head, rows(results)))
        report.write(arguments.out, "latency", results, conditions, lambda axes: None)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the last rounds are still being exchanged, which may take minutes


if __name__ == "__main__":
    main()

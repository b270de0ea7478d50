"""dist_async with workers of unequal speed, and with one that is lost: steps a second of each worker.

    python -m benchmarks.async_server --compute-ms 20

Servers and workers are threads of one process, over loopback connections. A step's computation is a pause, so that the
cores are not what is waited for; a slow worker's takes four times as long. "lock step" is staleness 0, which waits as
synchronous training does.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from datetime import timedelta

import torch
from torch import nn

import lightning_gradcomp as lgc

BOUNDS = {"any": math.inf, "16": 16, "4": 4, "lock step": 0}


class Job:
    """A server, and what its workers do.

    Args:
        staleness: the bound.
        seconds: how long it runs.
        compute: seconds of a step's computation.
        timeout: after so much silence a worker counts as gone.
    """

    def __init__(self, staleness: float, seconds: float, compute: float, timeout: float = 60.0) -> None:
        model, self.compute, self.seconds = network(), compute, seconds
        self.server = lgc.ParameterServer(
            model, sgd(model), compressor(), secret="word", staleness=staleness, timeout=timedelta(seconds=timeout)
        )
        self.server.start()
        self.begin = time.perf_counter()
        self.pushed: dict[int, list[float]] = {}

    def work(self, number: int, slowness: float, until: float) -> None:
        """One worker, from its connection to second `until`; then it says nothing any more."""
        model = network()
        averager = lgc.AsyncAverager(model, sgd(model), compressor(), servers=[self.server.address], secret="word")
        times = self.pushed.setdefault(number, [])
        generator = torch.Generator().manual_seed(number)
        while (now := time.perf_counter() - self.begin) < until:
            time.sleep(self.compute * slowness)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            averager.step()
            times.append(time.perf_counter() - self.begin)
        if until >= self.seconds:
            averager.close()
        else:
            time.sleep(max(0.0, self.seconds - now))

    def run(self, workers: list[tuple[float, float]]) -> list[float]:
        """Steps a second of each worker, from (slowness, until)."""
        threads = [
            threading.Thread(target=self.work, args=(number, *how), daemon=True) for number, how in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.server.stop()
        return [len(self.pushed[number]) / self.seconds for number in range(len(workers))]


def network() -> nn.Module:
    """20,000 parameters."""
    return nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The workers' optimizer."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def compressor() -> lgc.Compressor:
    """DGC with its defaults."""
    return lgc.DGC()


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    compute, seconds = given.compute_ms / 1e3, given.seconds
    print("| staleness | 4 equal workers: steps/s each | one four times slower: steps/s of the fast, of the slow |")
    print("| --- | --- | --- |")
    for name, bound in BOUNDS.items():
        equal = Job(bound, seconds, compute).run(4 * [(1.0, seconds)])
        mixed = Job(bound, seconds, compute).run([*3 * [(1.0, seconds)], (4.0, seconds)])
        fast = sum(mixed[:3]) / 3
        print(f"| {name} | {sum(equal) / 4:.1f} | {fast:.1f} ({100 * fast * 4 / sum(equal):.0f} %), {mixed[3]:.1f} |")
    print("\n| staleness | one of 4 falls silent after a quarter: longest pause of the others, s | their steps/s |")
    print("| --- | --- | --- |")
    for name, bound in (("any", math.inf), ("4", 4)):
        job = Job(bound, seconds, compute, timeout=2.0)
        rates = job.run([*3 * [(1.0, seconds)], (1.0, seconds / 4)])
        pause = max(b - a for a, b in zip(job.pushed[0], job.pushed[0][1:], strict=False))
        print(f"| {name} (a silence of 2 s counts as gone) | {pause:.2f} | {sum(rates[:3]) / 3:.1f} |")


if __name__ == "__main__":
    main()

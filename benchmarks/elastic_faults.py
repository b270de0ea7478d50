"""What ranks that die, stop or come back cost the others with `ElasticAverager`: seconds, and goodput.

    python -m benchmarks.elastic_faults --out runs/faults

Four processes train the small Swin on the handwritten digits with SparseLoCo's rounds. One is killed amid a round, one
is stopped (SIGSTOP) for good, and one starts in place of the killed one later. The stopped one stops amid its steps, or
(`--stop-in exchange`) when the others have begun to exchange with it. Goodput: steps that counted in an average, over
the steps that the living ranks could have made at their median pace. Accuracy is that of the weights that the ranks
agree on at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from math import inf, nan
from pathlib import Path
from statistics import median

from benchmarks import report


def rank(arguments: argparse.Namespace) -> None:
    """A process of the world: trains until the time is up, and writes what happened as lines of JSON."""
    import torch

    from lightning_gradcomp import SPARSELOCO, ElasticAverager
    from lightning_gradcomp.app.data.digits import digits
    from lightning_gradcomp.app.models.swin import swin_mini

    class Stopping(ElasticAverager):
        def _exchange(self) -> None:  # all ranks of the round know each other, and the others wait for this one's bytes
            if arguments.stop_in == "exchange":
                stop_if_due(arguments.stop_at)
            super()._exchange()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = swin_mini(channels=1, classes=10, size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {**SPARSELOCO, "period": arguments.period, "timeout": timedelta(seconds=arguments.timeout)}
    averager = Stopping(model, optimizer, lighthouse=arguments.lighthouse, host="127.0.0.1", **options)
    generator = torch.Generator().manual_seed(os.getpid())
    (images, labels), (val_images, val_labels) = (part.tensors for part in digits())
    with open(arguments.out, "w", buffering=1) as lines:
        pending = counted = 0
        while not counted or time.time() < arguments.until:  # ranks end with a round, and so together
            if arguments.stop_in == "steps":
                stop_if_due(arguments.stop_at)
            batch = torch.randint(len(images), (16,), generator=generator)
            begin, rounds = time.time(), averager.rounds
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            computed = time.time()
            averager.step()
            pending += 1
            counted = pending if averager.rounds > rounds else 0
            pending -= counted
            line = {"at": begin, "compute": computed - begin, "wait": time.time() - computed, "counted": counted}
            print(json.dumps({**line, "world": averager.world}), file=lines)
    with averager.agreed_weights(), torch.no_grad():
        right = (model.eval()(val_images).argmax(1) == val_labels).float().mean()
    arguments.out.with_suffix(".accuracy").write_text(f"{100 * right:.2f}")
    averager.shutdown()
    os._exit(0)


def stop_if_due(at: float) -> None:
    """Stop this process for good when the time has come."""
    if time.time() > at:
        os.kill(os.getpid(), signal.SIGSTOP)


def world(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Start the lighthouse and the ranks, make the faults; name of a rank -> its figures."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=5000)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()

    def start(name: str) -> subprocess.Popen[bytes]:
        options = ["--lighthouse", address, "--until", str(begin + arguments.seconds)]
        options += ["--period", str(arguments.period), "--timeout", str(arguments.timeout)]
        if name == "is stopped":
            options += ["--stop-at", str(begin + 0.5 * arguments.seconds), "--stop-in", arguments.stop_in]
        out = ["--out", str(arguments.out / f"{name}.jsonl")]
        command = [sys.executable, "-m", "benchmarks.elastic_faults", *options, *out]
        with open(arguments.out / f"{name}.log", "w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    ranks = {name: start(name) for name in ("stays", "stays too", "is killed", "is stopped")}
    try:
        time.sleep(0.25 * arguments.seconds)
        ranks["is killed"].kill()
        time.sleep(0.45 * arguments.seconds)
        ranks["comes back"] = start("comes back")
        for name in ("stays", "stays too", "comes back"):
            ranks[name].wait(arguments.seconds)
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()
        server.shutdown()
    return {name: figures(arguments.out / f"{name}.jsonl", arguments.period) for name in ranks}


def figures(file: Path, period: int) -> dict[str, float]:
    """Of one rank: steps, those that counted, seconds, and what it could have done in them."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    seconds = lines[-1]["at"] + lines[-1]["compute"] + lines[-1]["wait"] - lines[0]["at"]
    rounds = [
        sum(line["compute"] + line["wait"] for line in lines[i : i + period]) for i in range(0, len(lines), period)
    ]
    possible = period * seconds / median(rounds)
    counted = sum(line["counted"] for line in lines)
    accuracy = file.with_suffix(".accuracy")
    longest = sorted((line["wait"] for line in lines), reverse=True)[:3]
    return {
        "steps": len(lines),
        "counted": counted,
        "seconds": seconds,
        "goodput_percent": 100 * counted / possible,
        "accuracy_percent": float(accuracy.read_text()) if accuracy.exists() else nan,
        "median_round_s": median(rounds),
        **{f"longest_wait_{number}_s": wait for number, wait in enumerate(longest, 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for what the ranks write")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--period", type=int, default=15, help="K")
    parser.add_argument("--timeout", type=float, default=10, help="the averager's, in seconds")
    parser.add_argument("--stop-in", choices=("steps", "exchange"), default="steps", help="where the stopped one stops")
    parser.add_argument("--lighthouse", help="for the ranks, which this script starts itself")
    parser.add_argument("--until", type=float, help="for the ranks: when to end")
    parser.add_argument("--stop-at", type=float, default=inf, help="for the rank that stops: when")
    arguments = parser.parse_args()
    if arguments.lighthouse:
        rank(arguments)
        return
    found = world(arguments)
    head = ["rank", *next(iter(found.values()))]
    print(report.table(head, [[name, *(f"{value:.4g}" for value in each.values())] for name, each in found.items()]))
    print(report.machine())


if __name__ == "__main__":
    main()

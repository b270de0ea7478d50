"""One rank of a world that comes and goes. Writes a line of JSON after each round.

usage: elastic_script.py LIGHTHOUSE NUMBER ROUNDS DIES_AT WAITS_FOR_FILE
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from zlib import crc32

import torch

from lightning_gradcomp import ElasticAverager, GradientDropping
from tests.averaging.workers import Table, backward, bowl_loss, weights

socket.gethostname = lambda: "unknown.invalid"  # to the other ranks; `host` is what they can reach
lighthouse, number, rounds, dies_at = sys.argv[1], *map(int, sys.argv[2:5])
begin = Path(sys.argv[5])
(begin.parent / f"ready{number}").touch()
while not begin.exists():
    time.sleep(0.01)
model = Table()
model.small = torch.nn.Parameter(torch.full((3, 3), float(number)), requires_grad=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
compressor = GradientDropping(sparsity=0.8, scope="tensor", min_elements=64, warmup_epochs=0)
averager = ElasticAverager(
    model, optimizer, compressor, lighthouse=lighthouse, period=4, error_decay=1.0, name=f"rank {number}",
    host="127.0.0.1", timeout=timedelta(seconds=5), round_timeout=timedelta(seconds=30),
)  # fmt: skip
probe = torch.randn(weights(model).numel(), generator=torch.Generator().manual_seed(0)).double()
trained = torch.empty(0)


def agreed():
    with averager.agreed_weights():
        return weights(model).double()


def unsent():
    """What this rank has not sent, as a change of the weights."""
    memory = averager.state_dict()["rounds"]["memory"].get("residual", {})
    parts = [memory.get(name, torch.zeros_like(p)).reshape(-1) for name, p in model.named_parameters()]
    return -torch.cat(parts).double()  # averages are of gradients, which are the negative of it


def remember(*_):
    global trained
    trained = weights(model).double()


optimizer.register_step_post_hook(remember)
while averager.rounds < rounds:
    before, start, left = averager.rounds, agreed(), unsent()
    for step in range(4):
        time.sleep(0.03)
        if averager.rounds == dies_at and step == 2:
            os._exit(1)
        backward(model, optimizer, number, averager.steps, bowl_loss)
        averager.step()
    applied = averager.rounds > before
    line = {
        "round": averager.rounds,
        "applied": applied,
        "world": averager.world,
        "weights": crc32(weights(model).numpy()),
        "update": float(probe @ (trained - start)),
        "kept": float(probe @ (unsent() - left)),
        "moved": float(probe @ (agreed() - start)) * averager.world,
    }
    with begin.with_name(f"out{number}").open("a") as file:
        file.write(json.dumps(line) + "\n")
averager.shutdown()
os._exit(0)  # torchft's threads may outlive the interpreter

"""A server or a worker in a process of its own.

usage: worker_script.py LINES server | worker_script.py LINES worker ADDRESS FAULT

FAULT: "none", "raise", or "stop": the worker does it before its fourth push. Every push adds a line to the file LINES;
a server writes its address there.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.server import ParameterServer
from tests.parameter_server.conftest import SECRET, TIMEOUT, dgc, loss, net, sgd

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = net()
    optimizer = sgd(model)
    lines = Path(sys.argv[1])
    if sys.argv[2] == "server":
        server = ParameterServer(model, optimizer, dgc(), secret=SECRET, timeout=TIMEOUT)
        server.start()
        lines.write_text(f"{server.address}\n")
        time.sleep(100)
    address, fault = sys.argv[3:]
    averager = AsyncAverager(model, optimizer, dgc(), servers=[address], secret=SECRET, timeout=TIMEOUT)
    for step in range(1000):
        model.zero_grad()
        loss(model, 7, step).backward()
        if step == 3 and fault == "raise":
            raise ArithmeticError("a mistake")
        if step == 3 and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        averager.step()
        with lines.open("a") as file:
            file.write(f"pushed {step}\n")
        time.sleep(0.01)

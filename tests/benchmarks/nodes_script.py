"""One of four ranks on two nodes: ten steps of gradient dropping, with the ranks of a node as one worker, then alone.

For each of the two, "dense" and "compressed", prints what a rank sent between workers in a step, the most bytes that
crossed a node's link in all ten, and a number that tells whether all replicas are equal.
"""

import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

# The package's front door imports Lightning, which takes four ranks on two cores half a minute. Behind it they needn't.
PACKAGE = ModuleType("lightning_gradcomp")
PACKAGE.__path__ = [str(Path(__file__).resolve().parents[2] / "lightning_gradcomp")]
sys.modules[PACKAGE.__name__] = PACKAGE

from lightning_gradcomp.averaging import GradientAverager  # noqa: E402
from lightning_gradcomp.averaging.ranks import gather  # noqa: E402
from lightning_gradcomp.compressors import GradientDropping  # noqa: E402

LINK = Path("/sys/class/net/eth0/statistics/tx_bytes")


def most_sent():
    """By any node since it is there, once every rank has come here."""
    dist.barrier()
    sent = torch.tensor(int(LINK.read_text()))
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    return sent.item()


dist.init_process_group("gloo")
torch.set_num_threads(1)
for inside in ("dense", "compressed"):
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = GradientDropping(sparsity=0.9, warmup_epochs=0)
    before = most_sent()
    averager = GradientAverager(model, method, optimizer=optimizer, inside=inside)
    torch.manual_seed(dist.get_rank())
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        averager.step()
    crossed = most_sent() - before
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = gather(dist.group.WORLD, own)
    if dist.get_rank() == 0:
        equal = int((everyones == own).all())
        print(inside, averager.stats.bytes_sent, crossed, equal, flush=True)
dist.barrier()
dist.destroy_process_group()

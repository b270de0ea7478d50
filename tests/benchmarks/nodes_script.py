"""One of four ranks on two nodes: ten steps of gradient dropping, with the ranks of a node as one worker or each alone.

    nodes_script.py dense|compressed

Prints what a rank sent between workers in a step, and a number that tells whether all replicas are equal.
"""

import sys

import torch
import torch.distributed as dist

import lightning_gradcomp as lgc

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(1000, 500)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
method = lgc.GradientDropping(sparsity=0.9, warmup_epochs=0)
averager = lgc.GradientAverager(model, method, optimizer=optimizer, inside=sys.argv[1])
torch.manual_seed(dist.get_rank())
for _ in range(10):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    averager.step()
own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
everyones = own.new_empty(dist.get_world_size() * own.numel())
dist.all_gather_into_tensor(everyones, own)
if dist.get_rank() == 0:
    print(averager.stats.bytes_sent, int((everyones.view(-1, own.numel()) == own).all()), flush=True)
dist.barrier()
dist.destroy_process_group()

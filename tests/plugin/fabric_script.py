"""A Fabric training script. Prints the last sparsity, bytes and how far the ranks are apart."""

import lightning as L
import torch
from torch import nn

import lightning_gradcomp as lgc

if __name__ == "__main__":
    strategy = lgc.CompressedFabricStrategy("dgc", topology="all_gather")
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(fabric.global_rank)
    losses = []
    for epoch in range(7):
        fabric.strategy.set_epoch(epoch)
        for step in range(10):
            images = torch.randn(16, 64)
            labels = (images.mean(1) * 20 + 5).long().clamp(0, 9)
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                loss = nn.functional.cross_entropy(model(images), labels)
                fabric.backward(loss)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                assert optimizer.param_groups[0]["momentum"] == 0.9
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    apart = (fabric.all_gather(weights) - weights).abs().max().item()
    stats = fabric.strategy.averager.stats
    if fabric.global_rank == 0:
        averager = fabric.strategy.averager
        print(f"sparsity={stats.sparsity:.3f} steps={averager.steps} apart={apart} sent={stats.bytes_sent}")
        print(f"learned={sum(losses[-5:]) < sum(losses[:5])}")

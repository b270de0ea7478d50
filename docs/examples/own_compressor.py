"""A compressor of your own: the sign of each element, with error feedback. Plain PyTorch, scikit-learn's digits.

torchrun --nproc-per-node=2 docs/examples/own_compressor.py [epochs]
"""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import lightning_gradcomp as lgc


@lgc.register("scaled_sign")
@dataclass(kw_only=True)
class ScaledSign(lgc.TensorCodec):
    """The sign of each element times its tensor's mean magnitude (Karimireddy et al. 2019, arXiv 1901.09847)."""

    def encode(self, x):
        return lgc.pack_bits(x >= 0), x.abs().mean()

    def decode(self, parts, n):
        bits, mean = parts
        return (2.0 * lgc.unpack_bits(bits, n) - 1) * mean


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, rank, world = (pixels / 16).float(), dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averager = lgc.GradientAverager(model, "scaled_sign", optimizer=optimizer)  # a Trainer: strategy="scaled_sign"
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 8):
        for chosen in torch.randperm(1437)[: 1437 // world * world].view(world, -1)[rank].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            averager.step()
    if rank == 0:
        accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean()
        print(f"accuracy {accuracy:.1%}, ratio of the last step {averager.stats.ratio:.0f}")
    dist.destroy_process_group()

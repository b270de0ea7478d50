"""What "auto" means on this machine."""

from __future__ import annotations

import torch

from lightning_gradcomp.app import ranks
from lightning_gradcomp.app.options.training import Trainer


def resolve(options: Trainer) -> tuple[str, int, int]:
    """(accelerator, devices a node, nodes): "cuda" or "cpu", and how many processes there will be."""
    accelerator = options.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    default = torch.cuda.device_count() if accelerator == "cuda" else 2  # 2: the least that exchanges anything
    devices, nodes = ranks.started() or (default, 1)
    if options.devices != "auto":
        devices = options.devices
    if options.num_nodes != "auto":
        nodes = options.num_nodes
    return accelerator, devices, nodes

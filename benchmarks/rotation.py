"""docs/data/rotation.csv: the entries of a gradient before and after EDEN's rotation, in root mean squares of a block.

    python -m benchmarks.rotation    # a few seconds

The gradient is that of the digits' ResNet-18 at step 20, of all tensors whose rows are whole blocks.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader

from benchmarks import report, summaries
from benchmarks.many_ranks import untrained
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.compressors.kernels.eden import BLOCK

CSV = report.DATA / "rotation.csv"
EDGES = np.arange(-6.1, 6.11, 0.2)
STEP = 20


def gradient() -> list[torch.Tensor]:
    """The gradients of step `STEP` of all tensors whose rows are whole blocks."""
    task, data = untrained(summaries.composed("recipe=digits", "compressor=none"))
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)
    loader = DataLoader(data.train, batch_size=data.batch_size, sampler=data.sampler(0, 1, 0))
    for images, labels in itertools.islice(loader, STEP):
        optimizer.step()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(task.model(images), labels).backward()
    return [p.grad for p in task.parameters() if p.dim() > 1 and p[0].numel() % BLOCK == 0]


def histogram(blocks: torch.Tensor) -> np.ndarray:
    """The density of entries in root mean squares of their block, for blocks [b, BLOCK] that are not zero."""
    rms = blocks.square().mean(1, keepdim=True).sqrt()
    found = (blocks / rms)[rms.squeeze(1) > 0].flatten().numpy()
    return np.histogram(found, EDGES)[0] / len(found) / np.diff(EDGES)


def main() -> None:
    torch.set_num_threads(1)  # sums in one order, whatever the machine's cores
    form, before, after = FORMATS["eden2"], [], []
    for each in gradient():
        out = torch.empty(each.numel())
        form.put([each], [out], (0, 0))
        before.append(each.reshape(-1, BLOCK))
        after.append(out.view(-1, BLOCK))
    columns = {"before": histogram(torch.cat(before)), "after": histogram(torch.cat(after))}
    table = pd.DataFrame({"from": EDGES[:-1].round(1), **{name: found.round(4) for name, found in columns.items()}})
    table.to_csv(CSV, index=False, lineterminator="\n")
    print(table.to_string())


if __name__ == "__main__":
    main()

"""Two-phase averaging of several workers in one process, as DoubleSqueeze has it (Tang et al. 2019, Algorithm 1)."""

import torch

from lightning_gradcomp.compressors.local_gradient import Incoming
from lightning_gradcomp.compressors.layout import Layout


class Workers:
    """Every worker's memory, and every owner's, of tensors laid end to end; `step` takes all workers' gradients.

    Args:
        compressor: a codec; encodes each owner's rows by themselves.
        shapes: name -> shape of what is compressed.
        cuts: places between owners, in rows from the first tensor's first to the last's last: N - 1 numbers.
        rules: how SGD treats each tensor.
        dense_pull: owners send their means as they are.
    """

    def __init__(self, compressor, shapes, cuts, rules, *, dense_pull=False):
        self.compressor, self.rules, self.dense_pull = compressor, rules, dense_pull
        self.layout = Layout(tuple(shapes), tuple(shapes.values()))
        rows = [(name, shape[1:]) for name, shape in shapes.items() for _ in range(shape[0])]
        self.owned = []
        for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            names = dict.fromkeys(name for name, _ in rows[begin:end])
            layout = Layout(
                tuple(names),
                tuple((sum(own == name for own, _ in rows[begin:end]), *shapes[name][1:]) for name in names),
            )
            start = sum(torch.Size(row).numel() for _, row in rows[:begin])
            self.owned.append((start, layout))
        self.memories = [compressor.memory(self.layout, torch.device("cpu"), rank) for rank in range(len(self.owned))]
        self.residual = torch.zeros(self.layout.n)

    def step(self, gradients, density):
        """The average of flat gradients, one a worker."""
        world = len(self.owned)
        owed = [
            memory.compensate(Incoming.of(g.clone(), self.layout), self.rules, set(self.layout.names)).clone()
            for memory, g in zip(self.memories, gradients, strict=True)
        ]
        average = torch.zeros(self.layout.n)
        for start, layout in self.owned:
            if not layout.n:
                continue
            part = slice(start, start + layout.n)
            mean = torch.zeros(layout.n)
            for memory, flat in zip(self.memories, owed, strict=True):
                _, sent = self.compressor.encode(flat[part], layout, density)
                sent.add_to(mean)
                sent.take_from(self.pending(memory)[part])
                if hasattr(memory, "coming_momentum") and memory.masking:
                    sent.zero(memory.coming_momentum[part])
            mean = mean / world + self.residual[part]
            if self.dense_pull:
                average[part] = mean
                continue
            _, sent = self.compressor.encode(mean, layout, density)
            sent.add_to(average[part])
            sent.take_from(mean)
            self.residual[part] = mean
        for memory in self.memories:
            memory.commit(set(self.layout.names))
        return average

    @staticmethod
    def pending(memory):
        """What the memory will hold of what is not sent."""
        return memory._v if hasattr(memory, "_v") else memory._residual

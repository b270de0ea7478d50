"""topology="two_phase" and "server" in one process: every worker's state, and every partition's mean and residual."""

import torch

from lightning_gradcomp.compressors.decoded import Dense, Sparse
from lightning_gradcomp.compressors.kernels.rng import Draws
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.tensor_codec import TensorCodec
from lightning_gradcomp.compressors.terngrad import scaler_of

CPU = torch.device("cpu")


class Workers:
    """`step` takes the gradients of all workers, of tensors laid end to end.

    Args:
        compressor: encodes the rows of each partition by themselves.
        shapes: name -> shape of what is compressed.
        cuts: rows at which partitions begin, counted over all tensors: one fewer than there are workers.
        momentum: of the optimizer, for a compressor that owns it.
        dense_pull: means go back uncompressed.
    """

    def __init__(self, compressor, shapes, cuts, momentum=0.0, *, dense_pull=False):
        self.compressor, self.dense_pull, self.steps = compressor, dense_pull, 0
        self.layout = Layout(tuple(shapes), tuple(shapes.values()))
        rows = [(name, shape[1:]) for name, shape in shapes.items() for _ in range(shape[0])]
        self.partitions = []
        for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            counts = {name: sum(own == name for own, _ in rows[begin:end]) for name in shapes}
            held = {name: (count, *shapes[name][1:]) for name, count in counts.items() if count}
            start = sum(torch.Size(row).numel() for _, row in rows[:begin])
            self.partitions.append((start, Layout(tuple(held), tuple(held.values()))))
        self.states = []
        for _ in self.partitions:
            weights = [torch.zeros(shape, requires_grad=True) for shape in shapes.values()]
            self.states.append(compressor.state_for(None).start(self.layout, CPU))
            self.states[-1].attach(torch.optim.SGD(weights, lr=1.0, momentum=momentum), weights)
        self.residual = torch.zeros(self.layout.n)
        self.accumulates = compressor.state_for(None).kind is not None

    def step(self, gradients):
        """The average of flat gradients, one a worker."""
        outs = [gradient.clone() for gradient in gradients]
        for state, out in zip(self.states, outs, strict=True):
            state.compensate(out)
        owed, average = [out.clone() for out in outs], torch.zeros(self.layout.n)
        draws = [Draws(getattr(self.compressor, "seed", 0), worker, self.steps) for worker in range(len(outs))]
        sent = [
            [
                (start, self.decoded(flat[start : start + partition.n], partition, own, scalers))
                for start, partition in self.partitions
            ]
            for flat, own, scalers in zip(owed, draws, self.scalers(owed), strict=True)
        ]
        for owner, (start, partition) in enumerate(self.partitions):
            part, mean = slice(start, start + partition.n), torch.zeros(partition.n)
            for parts in sent:
                parts[owner][1].add_to(mean)
            mean = mean / len(outs) + self.residual[part]
            if self.dense_pull:
                average[part] = mean
            elif partition.n:
                decoded = self.decoded(mean, partition, draws[owner])
                decoded.add_to(average[part])
                if not self.accumulates:
                    continue
                if isinstance(decoded, Sparse):  # what is left out of the mean stays with those who sent it
                    applied = decoded.indices
                    self.residual[start + applied] = mean[applied] - decoded.values
                    for parts in sent:
                        parts[owner] = start, chosen(parts[owner][1], set(applied.tolist()))
                else:
                    decoded.subtract_from(mean)
                    self.residual[part] = mean
        for state, parts, out in zip(self.states, sent, outs, strict=True):
            state.subtract(together(parts))
            state.commit(set(self.layout.names), out)
        self.steps += 1
        return average

    def scalers(self, flats):
        """For each worker: tensors' numbers, where it clips each, and the scalers that all agreed on; None if not."""
        if not getattr(self.compressor, "share_scaler", False):
            return [None for _ in flats]
        bounds, c = self.layout.bounds, self.compressor.clip_sigma
        limits = [torch.cat([scaler_of(flat[a:b], c) for a, b in bounds]) for flat in flats]
        numbers = {name: number for number, name in enumerate(self.layout.names)}
        return [(numbers, own, torch.stack(limits).amax(0)) for own in limits]

    def decoded(self, flat, layout, draws, scalers=None):
        """What the others decode of `flat`; an owner's mean has scalers of its own."""
        if not isinstance(self.compressor, TensorCodec):
            return self.compressor.pack(flat, layout)[1]
        values = torch.empty(layout.n)
        for name, shape, (start, stop) in zip(layout.names, layout.shapes, layout.bounds, strict=True):
            codec = self.compressor.for_tensor(name, shape)
            if codec.random:
                codec.draws = draws.of(name)
                codec._scalers = (scalers[0][name], *scalers[1:]) if scalers else None
            parts = codec.encode(flat[start:stop])
            values[start:stop] = codec.decode([parts] if isinstance(parts, torch.Tensor) else parts, stop - start)
        return Dense(values)


def chosen(sent, places):
    """The entries of a sparse payload at some places."""
    kept = [i for i, place in enumerate(sent.indices.tolist()) if place in places]
    return Sparse(sent.indices[kept], sent.values[kept])


def together(parts):
    """The decoded partitions, (start, decoded) each, as one."""
    if isinstance(parts[0][1], Sparse):
        indices = torch.cat([decoded.indices + start for start, decoded in parts])
        return Sparse(indices, torch.cat([decoded.values for _, decoded in parts]))
    return Dense(torch.cat([decoded.values for _, decoded in parts]))

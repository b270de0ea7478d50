"""Two-phase averaging of several workers in one process, as DoubleSqueeze has it (Tang et al. 2019, Algorithm 1)."""

import torch

from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from tests.compressors.one_worker import CPU, payload_codec


class Workers:
    """Every worker's state, and every owner's residual, of tensors laid end to end; `step` takes all gradients.

    Args:
        compressor: one that sends payloads; it encodes each owner's rows by themselves.
        shapes: name -> shape of what is compressed.
        cuts: places between owners, in rows from the first tensor's first to the last's last: N - 1 numbers.
        momentum: of SGD, for a compressor that owns the momentum.
        dense_pull: owners send their means as they are.
    """

    def __init__(self, compressor, shapes, cuts, momentum=0.0, *, dense_pull=False):
        self.compressor, self.dense_pull, self.steps = compressor, dense_pull, 0
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
            self.owned.append((slice(start, start + layout.n), layout))
        parameters = [torch.zeros(shape) for shape in shapes.values()]
        self.states = [compressor.state(self.layout, CPU) for _ in self.owned]
        for state in self.states:
            state.attach(torch.optim.SGD(parameters, lr=1.0, momentum=momentum), parameters)
        self.residual = torch.zeros(self.layout.n)

    def step(self, gradients):
        """The average of flat gradients, one a worker."""
        codecs = [payload_codec(self.compressor, self.layout, worker, self.steps) for worker in range(len(gradients))]
        sums = torch.zeros(self.layout.n)
        for codec, state, gradient in zip(codecs, self.states, gradients, strict=True):
            flat = torch.empty(self.layout.n)
            state.compensate(LocalGradient.of(gradient.clone(), self.layout), flat)
            sent = [(part, codec.encode(flat[part], own)[1]) for part, own in self.owned if own.n]
            for part, decoded in sent:
                decoded.add_to(sums[part])
            state.subtract(_Shards(sent))
            state.commit(set(self.layout.names), flat)
        means, average = sums / len(gradients) + self.residual, torch.zeros(self.layout.n)
        self.residual = torch.zeros(self.layout.n)
        for codec, (part, own) in zip(codecs, self.owned, strict=True):
            if self.dense_pull:
                average[part] = means[part]
            elif own.n:
                _, sent = codec.encode(means[part], own)
                sent.add_to(average[part])
                self.residual[part] = means[part]
                sent.subtract_from(self.residual[part])
        self.steps += 1
        return average


class _Shards:
    """The decoded payloads of shards, as a state takes them."""

    def __init__(self, parts):
        self.parts = parts

    def subtract_from(self, flat):
        for part, decoded in self.parts:
            decoded.subtract_from(flat[part])

    def zero(self, flat):
        for part, decoded in self.parts:
            decoded.zero(flat[part])

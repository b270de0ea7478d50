"""What a model has besides its weights, and an optimizer besides its rule, brought together when ranks are drained.

Between drains every rank's batch norm follows its own data, and its optimizer its own gradients. What can be averaged
is, weighted by samples; what can't (counters, masks with infinities) is rank 0's.
"""

from __future__ import annotations

from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.ranks import Ranks, add
from lightning_gradcomp.averaging.roll_call import share_of


def broadcast(tensors: list[torch.Tensor], ranks: Ranks) -> None:
    """Rank 0's `tensors` for all, in place, in one message."""
    if tensors:
        message = _bytes_of(tensors)
        dist.broadcast(message, group=ranks.group, group_src=0)
        _write_bytes(tensors, message)


def _bytes_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of all `tensors`, end to end: uint8."""
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def _write_bytes(tensors: list[torch.Tensor], message: torch.Tensor) -> None:
    for tensor, part in zip(tensors, message.split([tensor.nbytes for tensor in tensors]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def means(ranks: Ranks, parts: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor | None], int]:
    """The means of flat tensors over all ranks' samples, in one sum. Collective.

    Args:
        ranks: all have as many parts, of the same lengths.
        parts: (fp32 [n], samples of this rank); one with NaN or infinities counts as without samples.

    Returns:
        The means, None where no rank has samples; bytes that this rank has sent.
    """
    counts = [n if bool(flat.isfinite().all()) else 0 for flat, n in parts]
    own = torch.tensor(counts, device=parts[0][0].device)
    table = ranks.gather(own.view(torch.uint8)).view(torch.int64).view(ranks.world, -1)
    everyones = table.T.tolist()
    shares = [share_of(n, all_n) / ranks.world for n, all_n in zip(counts, everyones, strict=True)]
    pairs = zip(parts, shares, strict=True)
    message = torch.cat([flat * share if share else torch.zeros_like(flat) for (flat, _), share in pairs])
    add(ranks.group, message)
    found = zip(message.split([len(flat) for flat, _ in parts]), everyones, strict=True)
    sent = ranks.gather_traffic(own.nbytes) + ranks.add_traffic(message.nbytes, message.device)
    return [mean if any(all_n) else None for mean, all_n in found], sent


class Buffers:
    """The buffers that a model's checkpoints hold; all ranks hold the same now.

    What moved since is averaged, not the value: a buffer which never moves keeps its bits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        now = self._now()
        self._averaged = [n for n, b in now.items() if b.is_floating_point() and bool(b.isfinite().all())]
        self._start = {name: now[name].clone() for name in self._averaged}

    def _now(self) -> dict[str, torch.Tensor]:
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def copied(self) -> list[torch.Tensor]:
        """Those that can't be averaged."""
        return [buffer for name, buffer in self._now().items() if name not in self._averaged]

    def moved(self) -> torch.Tensor:
        """What was added to the others, flat."""
        now = self._now()
        return _flat([now[name].float() - self._start[name].float() for name in self._averaged], self.model)

    def write(self, moves: torch.Tensor) -> None:
        """Let them have moved by this."""
        now = self._now()
        sizes = [self._start[name].numel() for name in self._averaged]
        for name, move in zip(self._averaged, moves.split(sizes), strict=True):
            now[name].copy_(self._start[name] + move.view(now[name].shape))
            self._start[name] = now[name].clone()


class Moments:
    """What an optimizer holds in the shape of its parameters: momentum, Adam's moments."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._values = {
            (number, kind): value
            for number, parameter in enumerate(parameters)
            for kind, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }

    def fingerprint(self) -> list[int]:
        """How many numbers there are, and of which kinds."""
        return [sum(value.numel() for value in self._values.values()), crc32(repr(list(self._values)).encode())]

    def flat(self, model: nn.Module) -> torch.Tensor:
        """All values."""
        return _flat([value.float() for value in self._values.values()], model)

    def write(self, flat: torch.Tensor) -> None:
        """The inverse of `flat`."""
        parts = flat.split([value.numel() for value in self._values.values()])
        for value, part in zip(self._values.values(), parts, strict=True):
            value.copy_(part.view(value.shape))


def _flat(tensors: list[torch.Tensor], model: nn.Module) -> torch.Tensor:
    """End to end, fp32; also where there are none."""
    none = torch.zeros(0, device=next(model.parameters()).device)
    return torch.cat([none, *(tensor.reshape(-1) for tensor in tensors)])


@torch.no_grad()
def bring_together(
    ranks: Ranks, buffers: Buffers, optimizer: torch.optim.Optimizer, samples: int, *, sound: bool
) -> int:
    """Let all ranks hold the same buffers, and the same moments. Collective.

    Ranks whose optimizers hold other moments than those of the rank that holds most keep theirs, and don't count.

    Args:
        ranks: all of them.
        buffers: of the model.
        optimizer: whose moments.
        samples: of this rank since the last time.
        sound: whether this rank's moments count.

    Returns:
        Bytes that this rank has sent.
    """
    moments = Moments(optimizer)
    own = torch.tensor(moments.fingerprint(), device=next(buffers.model.parameters()).device)
    prints = ranks.gather(own.view(torch.uint8)).view(torch.int64).view(ranks.world, -1).tolist()
    most = max(prints, key=lambda one: one[0])
    alike = prints[ranks.rank] == most
    states = moments.flat(buffers.model) if alike else own.new_zeros(most[0], dtype=torch.float32)
    (moved, mean), sent = means(ranks, [(buffers.moved(), samples), (states, samples if sound and alike else 0)])
    if moved is not None:
        buffers.write(moved)
    if mean is not None and alike:
        moments.write(mean)
    broadcast(buffers.copied(), ranks)
    return ranks.gather_traffic(own.nbytes) + sent


def reset_lost(optimizer: torch.optim.Optimizer) -> None:
    """Zero what is not finite in the optimizer's state: one NaN in a momentum would spoil every later step."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.nan_to_num_(0.0, 0.0, 0.0)

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


class Together:
    """The buffers that a model's checkpoints hold, and its optimizer's moments.

    Of a buffer what moved since the last `meet` is averaged, not the value: one which never moves keeps its bits.

    Args:
        model: all ranks hold the same buffers now.
        optimizer: its state of the shape of a parameter is averaged: momentum, Adam's moments.
        ranks: who meets.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        buffers = self._buffers()
        self._averaged = [n for n, b in buffers.items() if b.is_floating_point() and bool(b.isfinite().all())]
        self._copied = [name for name in buffers if name not in self._averaged]
        self._start = {name: buffers[name].clone() for name in self._averaged}

    def _buffers(self) -> dict[str, torch.Tensor]:
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def _moments(self) -> dict[tuple[int, str], torch.Tensor]:
        """(number of the parameter in the optimizer, kind) -> state of its shape."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {
            (number, kind): value
            for number, parameter in enumerate(parameters)
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }

    @torch.no_grad()
    def meet(self, samples: int, *, sound: bool) -> int:
        """Bring everything together. Collective.

        Ranks whose optimizers hold other states than that of the rank which holds most keep theirs.

        Args:
            samples: of this rank since the last call.
            sound: whether this rank's moments count.

        Returns:
            Bytes that this rank has sent.
        """
        buffers, moments = self._buffers(), self._moments()
        moved = [(buffers[name].float() - self._start[name].float()).reshape(-1) for name in self._averaged]
        device = next(self.model.parameters()).device
        moves = torch.cat([torch.zeros(0, device=device), *moved])
        states = torch.cat([torch.zeros(0, device=device), *(m.float().reshape(-1) for m in moments.values())])
        kinds = crc32(repr(list(moments)).encode())
        calm, sound = bool(moves.isfinite().all()), sound and bool(states.isfinite().all())
        own = torch.tensor([samples * calm, samples * sound, states.numel(), kinds], device=device)
        everyone = self.ranks.gather(own.view(torch.uint8)).view(torch.int64).view(self.ranks.world, -1).tolist()
        most = max(everyone, key=lambda row: row[2])
        taking_part = own[2:].tolist() == most[2:]
        weights = [row[1] * (row[2:] == most[2:]) for row in everyone]
        if not sound or not taking_part:
            states = torch.zeros(most[2], device=device)
        parts = [
            (moves if calm else torch.zeros_like(moves)) * share_of(samples * calm, [row[0] for row in everyone]),
            states * share_of(weights[self.ranks.rank], weights),
        ]
        exact = _bytes_of([buffers[name] for name in self._copied]) if self._copied else torch.zeros(0, device=device)
        # rank 0's bytes and the others' nothing add up to rank 0's bytes
        message = torch.cat([*parts, exact.float() * (self.ranks.rank == 0) * self.ranks.world]) / self.ranks.world
        add(self.ranks.group, message)
        moves, states, exact = message.split([len(moves), len(states), len(exact)])
        sizes = [len(part) for part in moved]
        for name, move in zip(self._averaged, moves.split(sizes), strict=True):
            if any(row[0] for row in everyone):
                buffers[name].copy_(self._start[name] + move.view(buffers[name].shape))
            self._start[name] = buffers[name].clone()
        _write_bytes([buffers[name] for name in self._copied], exact.round().to(torch.uint8))
        if taking_part and any(weights):
            flats = states.split([moment.numel() for moment in moments.values()])
            for moment, flat in zip(moments.values(), flats, strict=True):
                moment.copy_(flat.view(moment.shape))
        return self.ranks.gather_traffic(own.nbytes) + self.ranks.add_traffic(message.nbytes)


def reset_lost(optimizer: torch.optim.Optimizer) -> None:
    """Zero what is not finite in the optimizer's state: one NaN in a momentum would spoil every later step."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.nan_to_num_(0.0, 0.0, 0.0)

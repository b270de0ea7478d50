"""Uniform random numbers from a rank's own generator, never the global one.

On a CPU torch takes 4 ns for each, which is more than all other arithmetic of a compressor together; 16 bits of numpy's
SFC64 take 1 ns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np

from lightning_gradcomp.compressors.incoming import Incoming
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.memory import Momentum, Residual
from lightning_gradcomp.compressors.sent import Sent
from lightning_gradcomp.lazy import torch


class HostGenerator:
    """For a CPU: the middles of 65,536 equal steps."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.SFC64(seed)

    def uniform(self, n: int, begin: float) -> torch.Tensor:
        """fp32 [n], uniform in (begin, begin + 1)."""
        steps = self._bits.random_raw(-(-n // 4)).view(np.uint16)[:n].astype(np.float32)
        return torch.from_numpy(steps).mul_(2**-16).add_(begin + 2**-17)

    def get_state(self) -> torch.Tensor:
        """uint8 [32]."""
        return torch.from_numpy(self._bits.state["state"]["state"].copy()).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Go on where `get_state` was called."""
        whole = self._bits.state
        whole["state"]["state"] = np.frombuffer(state.numpy().tobytes(), np.uint64)
        self._bits.state = whole


class DeviceGenerator:
    """For a GPU: torch's."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, n: int, begin: float) -> torch.Tensor:
        """fp32 [n], uniform in [begin, begin + 1); `begin` is 0 or 1, for which that holds after rounding too."""
        draws = torch.rand(n, generator=self._generator, device=self._generator.device)
        return draws.clamp_(max=1 - 2**-23).add_(begin)

    def get_state(self) -> torch.Tensor:
        """uint8 on the CPU."""
        return self._generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Go on where `get_state` was called."""
        self._generator.set_state(state)


Generator = HostGenerator | DeviceGenerator


def generator(seed: int, device: torch.device) -> Generator:
    """The one for `device`; tensors on "meta", whose bytes are only counted, have none."""
    return HostGenerator(seed) if device.type in ("cpu", "meta") else DeviceGenerator(seed, device)


class Drawing(Residual):
    """This rank's generator of random numbers, never the global one; and a residual where that is wanted."""

    def __init__(self, layout: Layout, device: torch.device, seed: int, error_feedback: bool) -> None:
        super().__init__(layout if error_feedback else Layout((), ()), device)
        self.generator = generator(seed, device)
        self.error_feedback = error_feedback
        self._after = self.generator.get_state()

    @property
    def unsent(self) -> torch.Tensor | None:
        """The residual, where there is one."""
        return self.residual if self.error_feedback else None

    def compensate(
        self, g: Incoming, rules: list[Momentum], moving: set[str], weights: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        return super().compensate(g, rules, moving) if self.error_feedback else g.whole()

    def draw(self, draws: Callable[[Generator], torch.Tensor]) -> torch.Tensor:
        """What `draws` makes of the generator, which moves on when the step is committed."""
        before = self.generator.get_state()
        drawn = draws(self.generator)
        self._after = self.generator.get_state()
        self.generator.set_state(before)
        return drawn

    def forget(self, sent: Sent) -> None:
        if self.error_feedback:
            super().forget(sent)

    def absorb(self, flat: torch.Tensor) -> None:
        if self.error_feedback:
            super().absorb(flat)

    def commit(self, moved: Set[str] = frozenset()) -> None:
        super().commit(moved)
        self.generator.set_state(self._after)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {**super().state_dict(), "generator": {"": self.generator.get_state()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        super().load_state_dict(state)
        if "generator" in state:  # not where the number of ranks has changed
            self.generator.set_state(state["generator"][""])

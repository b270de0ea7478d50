"""What a rank remembers between compressed steps: of compressed and uncompressed gradients, and as an owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_gradcomp.averaging.elastic import OWNED, all_floating
from lightning_gradcomp.averaging.exact_owners import ExactOwners
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ownership import Ownership
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.two_phase import Owners
from lightning_gradcomp.compressors.base import Codec, Lossy
from lightning_gradcomp.compressors.memory import Memory, Residual, move
from lightning_gradcomp.compressors.terngrad import TernGrad
from lightning_gradcomp.routes import Route

State = dict[str, dict[str, torch.Tensor]]


class Books:
    """The memories of one model on one rank; everything is keyed by parameter name.

    Args:
        compressor: what is remembered.
        gradients: the model's, laid out flat.
        ranks: who exchanges.
        route: how messages travel, and where memories lie. With "auto", they travel as `travel` says.
    """

    def __init__(self, compressor: Lossy, gradients: Gradients, ranks: Ranks, route: Route) -> None:
        self._compressor, self._ranks = compressor, ranks
        self.topology = "all_gather" if route.topology == "auto" else route.topology
        """How the coming step's messages travel."""
        self._parked: State = {}  # of parameters that are frozen just now
        self.shared_by = ranks.per_worker
        """Ranks that remember the same: those of a worker, but after loading perhaps not until the next step."""
        self._away = route.residual_device == "cpu" and gradients.flat.device.type != "cpu"
        self._take(gradients)

    def _take(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.memory, self.dense_memory, self.owners = self._blank()
        self.put_away()

    def _blank(self) -> tuple[Memory, Memory, Ownership | None]:
        gradients, device = self._gradients, self._gradients.flat.device
        dense = Memory if self._compressor.dense_values == "fp32" else Residual
        memory = self._compressor.memory(gradients.layout, device, self._ranks.worker)
        return memory, dense(gradients.dense_layout, device), self.owners_of(self.topology, device)

    def owners_of(self, topology: str, device: torch.device) -> Ownership | None:
        """Who owns what with `topology`; nobody does where payloads go to everyone."""
        if topology == "all_gather":
            return None
        layout, dense, dense_pull = self._gradients.layout, self._gradients.dense_layout.n, topology == "server"
        if isinstance(self._compressor, TernGrad):
            return ExactOwners(self._compressor, layout, dense, self._ranks, dense_pull=dense_pull)
        assert isinstance(self._compressor, Codec)  # others are refused
        return Owners(self._compressor, layout, dense, self._ranks, device, dense_pull=dense_pull)

    @property
    def remembering(self) -> Owners | None:
        """The owners, where they may remember something."""
        return self.owners if isinstance(self.owners, Owners) and self.owners.used else None

    @property
    def _all(self) -> list[Memory | Ownership]:
        return [self.memory, self.dense_memory, *([self.owners] if self.owners else [])]

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered."""
        return self.memory.empty and self.dense_memory.empty and not self.remembering

    def clear(self) -> None:
        """Forget everything, once it has been handed back."""
        for books in self._all:
            books.clear()

    def fetch(self) -> None:
        """Before a step: have everything where the gradients are, and the same on all ranks of a worker."""
        for books in self._all if self._away else []:
            move(books, self._gradients.flat.device, scratch=True)
        if self.shared_by != self._ranks.per_worker:
            for books in (self.memory, self.dense_memory):
                for name in books.kept:
                    self._ranks.join(getattr(books, name), [])
            self.shared_by = self._ranks.per_worker

    def put_away(self) -> None:
        """After a step: have everything in CPU memory, where that is wanted."""
        for books in self._all if self._away else []:
            move(books, torch.device("cpu"), scratch=False)

    def travel(self, topology: str) -> None:
        """Let messages travel so from now on. What owners remember goes back into what workers remember."""
        if topology != self.topology:
            self._disown()
            self.topology = topology
            self.owners = self.owners_of(topology, self._gradients.flat.device)
            self.put_away()

    def _disown(self) -> None:
        if owners := self.remembering:
            self.memory.absorb(owners.spread().mul_(self._ranks.workers))
            owners.clear()

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients; the state follows by name.

        Owners will own other stretches, so what they remember goes back too.
        """
        self._disown()
        state = self.state_dict()
        self._take(gradients)
        self.load_state_dict(state, shared_by=self.shared_by)

    def state_dict(self) -> State:
        """Kind -> parameter name -> tensor, frozen parameters included."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense_memory.state_dict().items()}
        kinds = {**self.memory.state_dict(), **dense}
        if owners := self.remembering:
            kinds[OWNED] = owners.state_dict()
        return {kind: {**self._parked.get(kind, {}), **parts} for kind, parts in kinds.items()}

    def load_state_dict(
        self,
        state: Mapping[str, Mapping[str, torch.Tensor]],
        owners: int = 1,
        trained: Sequence[str] = (),
        shared_by: int = 1,
    ) -> None:
        """Replace everything; what belongs to a frozen parameter is kept until it trains again.

        Args:
            state: kind -> parameter name -> tensor.
            owners: among how many owners the kind `OWNED` is divided. Where that has changed, or there are none here,
                the ranks remember what the owners did.
            trained: names of the parameters that they divided.
            shared_by: how many ranks in a row remember the same.

        Raises:
            ValueError: a tensor whose shape is not its parameter's.
        """
        if shared_by != self._ranks.per_worker:  # a generator is a rank's own, or its node's
            state = {kind: parts for kind, parts in state.items() if all_floating(parts)}
        memory, dense_memory, own = self._blank()  # so that an error leaves those of before as they were
        memory.load_state_dict(state)
        dense = {kind.removeprefix("dense_"): parts for kind, parts in state.items() if kind.startswith("dense_")}
        dense_memory.load_state_dict({"residual": {}, **dense})
        divided_alike = owners == self._ranks.workers and tuple(trained) == self._gradients.layout.names
        if OWNED in state and isinstance(own, Owners) and divided_alike:
            own.load_state_dict(state[OWNED])
        elif OWNED in state:
            memory.absorb(self._gradients.layout.join(state[OWNED], self._gradients.flat.device).mul_(owners))
        self.memory, self.dense_memory, self.owners, self.shared_by = memory, dense_memory, own, shared_by
        self.put_away()
        frozen = self._gradients.frozen
        self._parked = {kind: {n: t for n, t in parts.items() if n in frozen} for kind, parts in state.items()}
        for name, part in self._parked.pop(OWNED, {}).items():  # who will own it when it trains again, nobody knows
            [kind] = self._parked.keys() & {"residual", "velocity"}
            self._parked[kind][name] = self._parked[kind].get(name, 0) + part * owners

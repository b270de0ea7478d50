"""What a worker remembers between compressed steps: of compressed and uncompressed gradients, and of its shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from lightning_gradcomp.averaging.checkpoint_state import SHARD, all_floating
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.sharded import ShardResidual
from lightning_gradcomp.averaging.topology import SHARDED, Topology
from lightning_gradcomp.averaging.workers import Ranks
from lightning_gradcomp.compressors.base import Lossy
from lightning_gradcomp.compressors.state import Residual, State, StateDict


class WorkerState:
    """The states of one model on one rank; everything is keyed by parameter name.

    Args:
        compressor: what is remembered.
        gradients: the model's, laid out flat.
        ranks: who exchanges.
        topology: how messages travel, and where states are kept. With "auto", they travel as `use_topology` says.
        optimizer: for a compressor that owns the momentum.
    """

    def __init__(
        self,
        compressor: Lossy,
        gradients: Gradients,
        ranks: Ranks,
        topology: Topology,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._compressor, self._ranks, self._optimizer = compressor, ranks, optimizer
        self._auto = topology.name == "auto"
        self.topology = "all_gather" if self._auto else topology.name
        """How the coming step's messages travel."""
        self._frozen: StateDict = {}
        """Of parameters that don't train just now."""
        self.shared_by = ranks.per_worker
        """Ranks that remember the same: those of a worker, but after loading perhaps not until the next step."""
        self._offloads = topology.residual_device == "cpu" and gradients.device.type != "cpu"
        self._attach(gradients)

    def _attach(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.compressed, self.dense, self.shard = self._blank()
        self.offload()

    def _blank(self) -> tuple[State, State, ShardResidual | None]:
        gradients = self._gradients
        dense = State if self._compressor.dense_values == "fp32" else Residual
        compressed = self._compressor.state(gradients.layout, gradients.device, self._optimizer)
        compressed.attach(self._optimizer, gradients.compressed)
        return compressed, dense(gradients.dense_layout, gradients.device), self._blank_shard(self.topology)

    def _blank_shard(self, topology: str) -> ShardResidual | None:
        if topology not in SHARDED:
            return None
        return ShardResidual(self._gradients.layout, self._ranks, self._gradients.device)

    @property
    def _all(self) -> list[State | ShardResidual]:
        return [self.compressed, self.dense, *([self.shard] if self.shard else [])]

    @property
    def remembering_shard(self) -> ShardResidual | None:
        """The shard's residual, where owners may remember something."""
        return self.shard if self.shard and self.shard.used else None

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered."""
        return self.compressed.empty and self.dense.empty and not self.remembering_shard

    @property
    def started(self) -> set[str]:
        """Parameters of which something is remembered."""
        return self.compressed.started | self.dense.started

    def clear(self, names: Set[str]) -> None:
        """Forget everything of these parameters, after all of it was sent."""
        for state in self._all:
            state.clear(names)

    def onload(self) -> None:
        """Before a step: move everything to the gradients' device, and make it the same on all ranks of a worker."""
        for state in self._all if self._offloads else []:
            state.move(self._gradients.device)
        if self.shared_by != self._ranks.per_worker:
            for state in (self.compressed, self.dense):
                if remembered := state.remembered:
                    self._ranks.average_inside(remembered, [])
            self.shared_by = self._ranks.per_worker

    def offload(self) -> None:
        """After a step: move everything to CPU memory, with residual_device="cpu"."""
        for state in self._all if self._offloads else []:
            state.move(torch.device("cpu"))

    def use_topology(self, topology: str) -> None:
        """How messages travel from now on. The workers take over what shards' owners remember."""
        if topology != self.topology:
            self._dissolve_shards()
            self.topology = topology
            self.shard = self._blank_shard(topology)
            self.offload()

    def commit_shard(self, moved: Set[str]) -> None:
        """Make the step count. What another compressor's owners remembered is taken over where this one's don't."""
        if self.shard and not self.shard.commit(moved):
            self._dissolve_shards()

    def _dissolve_shards(self) -> None:
        if shard := self.remembering_shard:
            self.compressed.absorb(shard.whole().mul_(self._ranks.workers))
            shard.clear(set(self._gradients.layout.names))

    def use_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Another optimizer steps the parameters from now on."""
        self._optimizer = optimizer
        self.compressed.attach(optimizer, self._gradients.compressed)

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients. State follows by name."""
        self._dissolve_shards()
        state = self.state_dict()
        self.compressed.release()
        self._attach(gradients)
        self.load_state_dict(state, shared_by=self.shared_by)

    def state_dict(self) -> StateDict:
        """Kind -> parameter name -> tensor, frozen parameters included."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense.state_dict().items()}
        kinds = {**self.compressed.state_dict(), **dense}
        if shard := self.remembering_shard:
            kinds[SHARD] = shard.state_dict()
        return {kind: {**self._frozen.get(kind, {}), **parts} for kind, parts in kinds.items()}

    def load_state_dict(
        self,
        state: Mapping[str, Mapping[str, torch.Tensor]],
        workers: int = 1,
        trained: Sequence[str] = (),
        shared_by: int = 1,
    ) -> None:
        """Replace everything; what belongs to a frozen parameter is kept until it trains again.

        Args:
            state: kind -> parameter name -> tensor.
            workers: among how many owners the kind `SHARD` is divided. Where that has changed, or there are no shards
                here, the workers take over what the owners remembered.
            trained: names of the parameters that were divided.
            shared_by: how many ranks in a row remember the same.

        Raises:
            ValueError: a tensor whose shape is not its parameter's.
        """
        if shared_by != self._ranks.per_worker:
            state = {kind: parts for kind, parts in state.items() if all_floating(parts)}
        compressed, dense, shard = self._blank()  # an error leaves those of before as they were
        compressed.load_state_dict(state)
        of_dense = {kind.removeprefix("dense_"): parts for kind, parts in state.items() if kind.startswith("dense_")}
        dense.load_state_dict({"residual": {}, **of_dense})
        divided_alike = workers == self._ranks.workers and tuple(trained) == self._gradients.layout.names
        topology = "two_phase" if self._auto and SHARD in state and divided_alike else self.topology
        if SHARD in state and divided_alike and (shard := self._blank_shard(topology)):
            shard.load_state_dict(state[SHARD])
        elif SHARD in state:
            compressed.absorb(self._gradients.layout.join(state[SHARD], self._gradients.device).mul_(workers))
        self.compressed, self.dense, self.shard, self.shared_by = compressed, dense, shard, shared_by
        self.topology = topology
        self.offload()
        frozen = self._gradients.frozen
        self._frozen = {kind: {n: t for n, t in parts.items() if n in frozen} for kind, parts in state.items()}
        for name, part in self._frozen.pop(SHARD, {}).items():  # it may have another owner when it trains again
            [kind] = self._frozen.keys() & {"residual", "velocity", "unsent_step"}
            self._frozen[kind][name] = self._frozen[kind].get(name, 0) + part * workers

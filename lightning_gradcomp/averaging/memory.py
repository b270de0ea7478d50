"""What a worker remembers between compressed steps: of compressed and uncompressed gradients, and of its partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from lightning_gradcomp.averaging.checkpoint_state import PARTITION, all_floating
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.topology import PARTITIONED, Topology
from lightning_gradcomp.averaging.two_phase import PartitionResidual
from lightning_gradcomp.compressors.base import LossyCompressor
from lightning_gradcomp.compressors.state import Residual, State, StateDict


class Memory:
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
        compressor: LossyCompressor,
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
        self.compressed, self.dense, self.partition = self._blank()
        self.offload()

    def _blank(self) -> tuple[State, State, PartitionResidual | None]:
        gradients = self._gradients
        dense = State if self._compressor.dense_values == "fp32" else Residual
        compressed = self._compressor.state(gradients.layout, gradients.device, self._optimizer)
        compressed.attach(self._optimizer, gradients.compressed)
        return compressed, dense(gradients.dense_layout, gradients.device), self._blank_partition(self.topology)

    def _blank_partition(self, topology: str) -> PartitionResidual | None:
        if topology not in PARTITIONED:
            return None
        return PartitionResidual(self._gradients.layout, self._ranks, self._gradients.device)

    @property
    def _all(self) -> list[State | PartitionResidual]:
        return [self.compressed, self.dense, *([self.partition] if self.partition else [])]

    @property
    def partition_in_use(self) -> PartitionResidual | None:
        """The partition's residual, where owners may remember something."""
        return self.partition if self.partition and self.partition.used else None

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered."""
        return self.compressed.empty and self.dense.empty and not self.partition_in_use

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
        """How messages travel from now on. The workers take over what partitions' owners remember."""
        if topology != self.topology:
            self._dissolve_partitions()
            self.topology = topology
            self.partition = self._blank_partition(topology)
            self.offload()

    def commit_partition(self, moved: Set[str]) -> None:
        """Make the step count. What another compressor's owners remembered is taken over where this one's don't."""
        if self.partition and not self.partition.commit(moved):
            self._dissolve_partitions()

    def _dissolve_partitions(self) -> None:
        if partition := self.partition_in_use:
            self.compressed.absorb(partition.whole().mul_(self._ranks.workers))
            partition.clear(set(self._gradients.layout.names))

    def use_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Another optimizer steps the parameters from now on."""
        self._optimizer = optimizer
        self.compressed.attach(optimizer, self._gradients.compressed)

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients. State follows by name."""
        self._dissolve_partitions()
        state = self.state_dict()
        self.compressed.release()
        self._attach(gradients)
        self.load_state_dict(state, shared_by=self.shared_by)

    def state_dict(self) -> StateDict:
        """Kind -> parameter name -> tensor, frozen parameters included."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense.state_dict().items()}
        kinds = {**self.compressed.state_dict(), **dense}
        if partition := self.partition_in_use:
            kinds[PARTITION] = partition.state_dict()
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
            workers: number of owners among which the kind `PARTITION` is divided. Where it has changed, or there are none,
                the workers take over what the owners remembered.
            trained: names of the parameters that were divided.
            shared_by: how many ranks in a row remember the same.

        Raises:
            ValueError: a tensor whose shape is not its parameter's.
        """
        if shared_by != self._ranks.per_worker:
            state = {kind: parts for kind, parts in state.items() if all_floating(parts)}
        compressed, dense, partition = self._blank()  # an error leaves those of before as they were
        compressed.load_state_dict(state)
        of_dense = {kind.removeprefix("dense_"): parts for kind, parts in state.items() if kind.startswith("dense_")}
        dense.load_state_dict({"residual": {}, **of_dense})
        divided_alike = workers == self._ranks.workers and tuple(trained) == self._gradients.layout.names
        topology = "two_phase" if self._auto and PARTITION in state and divided_alike else self.topology
        if PARTITION in state and divided_alike and (partition := self._blank_partition(topology)):
            partition.load_state_dict(state[PARTITION])
        elif PARTITION in state:
            compressed.absorb(self._gradients.layout.join(state[PARTITION], self._gradients.device).mul_(workers))
        self.compressed, self.dense, self.partition, self.shared_by = compressed, dense, partition, shared_by
        self.topology = topology
        self.offload()
        frozen = self._gradients.frozen
        self._frozen = {kind: {n: t for n, t in parts.items() if n in frozen} for kind, parts in state.items()}
        for name, part in self._frozen.pop(PARTITION, {}).items():  # it may have another owner when it trains again
            [kind] = self._frozen.keys() & {"residual", "velocity", "unsent_step"}
            self._frozen[kind][name] = self._frozen[kind].get(name, 0) + part * workers

"""A rank's error feedback: for compressed and uncompressed gradients, and for the partition that it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn

from lightning_gradcomp.averaging.checkpoint_state import PARTITION, all_floating
from lightning_gradcomp.averaging.exchange import all_reduce_mean
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.topology import PARTITIONED, Topology
from lightning_gradcomp.averaging.two_phase import PartitionResidual
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.compressors.decoded import Decoded, Dense
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback, Gradient, StateDict


class Memory:
    """A model's error feedback on one rank. State is keyed by parameter name.

    `compensate` adds the residuals to the gradients, `subtract` removes what was sent, and `commit` makes the new
    residuals current. Until `commit` the state stays as it was.

    Args:
        compressor: decides what is accumulated.
        topology: how payloads travel. With "auto", `use_topology` decides.
        optimizer: the only optimizer, if it is known.
        by_servers: True for dist_async, where servers step the parameters, so the optimizer's state does not hold the
            moments. Pushes in 16 bits, which are rounded to the nearest, then have a residual.
    """

    def __init__(
        self,
        compressor: Compressor,
        gradients: Gradients,
        ranks: Ranks,
        topology: Topology,
        optimizer: torch.optim.Optimizer | None,
        *,
        by_servers: bool = False,
    ) -> None:
        self.compressor, self.ranks, self._optimizer, self._by_servers = compressor, ranks, optimizer, by_servers
        self._auto = topology.name == "auto"
        self.topology = "all_gather" if self._auto else topology.name
        """How the step's payloads travel."""
        self.clip_norm = compressor.clip_norm if isinstance(compressor, LossyCompressor) else None
        """`LossyCompressor.clip_norm` for the gradients of compressed steps."""
        self._left_out: StateDict = {}
        """State of the parameters that `gradients` leaves out, until it is laid out for them again."""
        self.shared_by = ranks.per_worker
        """Number of ranks with the same state: a worker's. After loading it may differ until the next step."""
        self._attach(gradients)

    def _attach(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.compressed, self.dense, self.partition = self._blank()
        self._norms: torch.Tensor | None = None

    def _blank(self) -> tuple[ErrorFeedback, ErrorFeedback, PartitionResidual | None]:
        gradients, compressor = self.gradients, self.compressor
        compressed = compressor.state_for(self._optimizer)
        rounds = isinstance(compressor, LossyCompressor) and compressor.dense_values != "fp32"
        if self._by_servers and compressor.wire in ("bf16", "fp16"):
            compressed, rounds = Gradient(), True
        dense = Gradient() if rounds else ErrorFeedback()
        compressed.start(gradients.layout, gradients.device)
        dense.start(gradients.dense_layout, gradients.device)
        compressed.attach(self._optimizer, gradients.compressed, shares_moments=not self._by_servers)
        return compressed, dense, self._blank_partition(self.topology)

    def _blank_partition(self, topology: str) -> PartitionResidual | None:
        if topology not in PARTITIONED:
            return None
        accumulates = self.compressor.state_for(self._optimizer).kind is not None
        return PartitionResidual(self.gradients.layout, self.ranks, self.gradients.device, accumulates=accumulates)

    @property
    def _partition_in_use(self) -> PartitionResidual | None:
        """The partition's residual, if owners may hold one."""
        return self.partition if self.partition and self.partition.used else None

    @property
    def has_unsent(self) -> bool:
        return not (self.compressed.empty and self.dense.empty) or self._partition_in_use is not None

    @property
    def started(self) -> set[str]:
        """Parameters with state."""
        return self.compressed.started | self.dense.started

    @property
    def names_with_unsent(self) -> set[str]:
        """`started`, and the parameters with state that are left out."""
        return self.started.union(*self._left_out.values())

    # A step

    def compensate(self) -> torch.Tensor:
        """Replace the gradients in the buffers by gradients plus residuals. True if all are finite: 0-d bool."""
        finite = self.compressed.compensate(self.gradients.compressed_flat)
        return finite & self.dense.compensate(self.gradients.dense_flat)

    def subtract(self, sent: Decoded, dense_sent: torch.Tensor, dense_mean: torch.Tensor | None = None) -> None:
        """Subtract what was sent.

        Args:
            sent: for the compressed parameters, as decoded by the others.
            dense_sent: for the uncompressed parameters, fp32 [d].
            dense_mean: its mean over the workers, for a state that compares the two norms. Collective.
        """
        self.compressed.subtract(sent)
        self.dense.subtract(Dense(dense_sent))
        self._norms = None
        if dense_mean is not None and self.compressed.accumulates_steps:
            squares = torch.stack([dense_sent.square().sum(), dense_mean.square().sum()])
            self._norms = self.ranks.over_shards(squares)

    def commit(self, stepped: Set[str]) -> None:
        """Make the new residuals current for the parameters that the optimizer stepped."""
        gradients = self.gradients
        gradients.compressed_flat = self.compressed.commit(stepped, gradients.compressed_flat)
        gradients.dense_flat = self.dense.commit(stepped, gradients.dense_flat)
        if self.partition and not self.partition.commit(stepped - self.compressed.withheld):
            self._dissolve_partitions()  # left by another compressor, which used them
        if self._norms is not None:
            self.compressed.observe(*self._norms)

    def add_partitions(self) -> None:
        """Add the owners' residuals to the buffer, so that everything is sent."""
        if partition := self._partition_in_use:
            self.gradients.compressed_flat.add_(partition.whole(), alpha=self.ranks.workers)

    def commit_all_sent(self, moments: Mapping[str, torch.Tensor], stepped: Set[str]) -> None:
        """Clear the state of the parameters that the optimizer stepped, after everything was sent.

        The optimizer continues with `moments`: torch's name -> mean over the ranks, fp32 [n].
        """
        self.compressed.hand_over(moments, stepped)
        stepped = stepped - self.compressed.withheld
        for state in (self.compressed, self.dense, self.partition):
            if state is not None:
                state.clear(stepped)

    def share_inside(self) -> None:
        """Average the state over the ranks of a worker if it was saved with other workers."""
        if self.shared_by != self.ranks.per_worker:
            for state in (self.compressed, self.dense):
                if flats := state.tensors:
                    self.ranks.average_inside(flats, [])
            self.shared_by = self.ranks.per_worker

    # Changes between steps

    def use_topology(self, topology: str) -> None:
        """Switch the topology. The workers take over the residuals of partitions."""
        if topology != self.topology:
            self._dissolve_partitions()
            self.topology = topology
            self.partition = self._blank_partition(topology)

    def _dissolve_partitions(self) -> None:
        if partition := self._partition_in_use:
            self.compressed.absorb(partition.whole().mul_(self.ranks.workers))
            partition.clear(set(self.gradients.layout.names))

    def use_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self.compressed.attach(optimizer, self.gradients.compressed)

    def lay_out(self, gradients: Gradients) -> None:
        """Continue with gradients of other parameters. State carries over by name."""
        self._dissolve_partitions()
        state = self.state_dict()
        self.compressed.release()
        self._attach(gradients)
        self.load_state_dict(state, shared_by=self.shared_by)

    # Checkpoints

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Parameter -> torch's name -> mean over ranks of the moments that error feedback keeps. Collective."""
        state, gradients = self.compressed, self.gradients
        own = {} if state.empty else state.optimizer_state
        if not own:
            return {}
        means, _ = all_reduce_mean(self.ranks, [flat.to(gradients.device) for flat in own.values()], [])
        named = list(zip(gradients.layout.names, gradients.compressed, strict=True))
        kept: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for name, p in named if name in state.started}
        for kind, mean in zip(own, means, strict=True):
            for (_, parameter), view in zip(named, gradients.layout.views(mean), strict=True):
                if parameter in kept:
                    kept[parameter][kind] = torch.empty_like(parameter, dtype=view.dtype).copy_(view)
        return kept

    def state_dict(self) -> StateDict:
        """Kind -> parameter name -> tensor, including the state of parameters that are left out."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense.state_dict().items()}
        kinds = {**self.compressed.state_dict(), **dense}
        if partition := self._partition_in_use:
            kinds[PARTITION] = partition.state_dict()
        return {kind: {**self._left_out.get(kind, {}), **parts} for kind, parts in kinds.items()}

    def load_state_dict(
        self,
        state: Mapping[str, Mapping[str, torch.Tensor]],
        workers: int = 1,
        trained: Sequence[str] = (),
        shared_by: int = 1,
    ) -> None:
        """Replace all state. The state of a parameter that is left out is kept until it is averaged again.

        Raises ValueError if a tensor's shape is not its parameter's.

        Args:
            state: kind -> parameter name -> tensor.
            workers: number of owners that share the kind `PARTITION`. If it has changed, or there are no owners, the
                workers take over the owners' residuals. Without error feedback, this kind is ignored.
            trained: names of the parameters that were partitioned.
            shared_by: number of consecutive ranks with the same state.
        """
        if shared_by != self.ranks.per_worker:
            state = {kind: parts for kind, parts in state.items() if all_floating(parts)}
        compressed, dense, partition = self._blank()  # after an error the current state stays
        if compressed.unsent is None:
            state = {kind: parts for kind, parts in state.items() if kind != PARTITION}
        compressed.load_state_dict(state)
        of_dense = {kind.removeprefix("dense_"): parts for kind, parts in state.items() if kind.startswith("dense_")}
        dense.load_state_dict({"residual": {}, **of_dense})
        divided_alike = workers == self.ranks.workers and tuple(trained) == self.gradients.layout.names
        topology = "two_phase" if self._auto and PARTITION in state and divided_alike else self.topology
        if PARTITION in state and divided_alike and (partition := self._blank_partition(topology)):
            partition.load_state_dict(state[PARTITION])
        elif PARTITION in state:
            compressed.absorb(self.gradients.layout.join(state[PARTITION], self.gradients.device).mul_(workers))
        self.compressed, self.dense, self.partition, self.shared_by = compressed, dense, partition, shared_by
        self.topology = topology
        names = self.gradients.left_out
        self._left_out = {kind: {n: t for n, t in parts.items() if n in names} for kind, parts in state.items()}
        for name, part in self._left_out.pop(PARTITION, {}).items():  # its owner may differ when it is averaged again
            residuals = self._left_out[str(compressed.kind)]
            residuals[name] = residuals.get(name, 0) + part * workers

"""How messages travel: the options, which of them go together, and MXNet's names for some combinations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gradcomp.compressors.base import Codec, Compressor, Lossy
from lightning_gradcomp.compressors.terngrad import TernGrad
from lightning_gradcomp.errors import refusal

TOPOLOGIES = ("auto", "all_gather", "two_phase", "server")
INSIDE = ("compressed", "dense")
RESIDUAL_DEVICES = ("device", "cpu")


@dataclass(frozen=True)
class Route:
    """How messages travel.

    Args:
        topology: "all_gather": every worker's payload goes to every worker. "two_phase": to the owners of stretches,
            which send the means on, compressed again. "server": the same with dense means. "auto": what a model of the
            link finds quickest, but dense where a trial finds that quicker.
        inside: "compressed": each rank is a worker. "dense": the ranks of a node average densely, and are one.
        residual_device: where that which was not sent lies between steps: on the gradients' "device", or in "cpu"
            memory.
    """

    topology: str = "all_gather"
    inside: str = "compressed"
    residual_device: str = "device"


KVSTORES: dict[str, Route] = {
    "device": Route("server", "compressed", "device"),
    "dist_sync": Route("server", "dense", "cpu"),
    "dist_sync_device": Route("server", "dense", "device"),
}
"""What MXNet's kvstore types come to."""


def route(topology: str, inside: str | None, residual_device: str | None, compressor: Compressor) -> Route:
    """The options as a `Route`; None is the default, or what a kvstore's name says.

    Raises:
        ValueError: a word that is not known, a kvstore's name beside what it stands for, or a topology that says
            nothing about how this compressor's messages travel.
    """
    options = {"inside": (inside, INSIDE), "residual_device": (residual_device, RESIDUAL_DEVICES)}
    for name, (got, allowed) in options.items():
        if got is not None and got not in allowed:
            raise refusal(name, got, _listed(allowed))
        if got is not None and topology in KVSTORES:
            raise refusal(f"{name} with topology={topology!r}", got, "none, since the kvstore's name says it")
    if topology == "dist_async":
        raise refusal("topology", topology, f"{_listed(KVSTORES)}: pushes that nobody waits for are not built")
    if topology not in (*TOPOLOGIES, *KVSTORES):
        raise refusal("topology", topology, _listed((*TOPOLOGIES, *KVSTORES)))
    chosen = KVSTORES.get(topology) or Route(topology, inside or "compressed", residual_device or "device")
    if chosen.topology not in topologies_for(compressor):
        what, why = type(compressor).__name__, "an owner can't decode a part of its message"
        if isinstance(compressor, TernGrad):
            what += "(share_scaler=False)"
            why = "only with one s for all ranks (share_scaler=True) do their digits add up"
        raise refusal(f"topology with {what}", topology, f"'auto' or 'all_gather': {why}")
    return chosen


def topologies_for(compressor: Compressor) -> tuple[str, ...]:
    """Those that carry this compressor's messages."""
    adds_up = isinstance(compressor, TernGrad) and compressor.share_scaler
    dense = not isinstance(compressor, Lossy)  # whatever the topology is
    owned = isinstance(compressor, Codec) or adds_up or dense
    return TOPOLOGIES if owned else ("auto", "all_gather")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))

"""The mesh (replicate, shard) of sharded models: number of replicas, and of shards per replica."""

from __future__ import annotations

from lightning_gradcomp.errors import refusal

MESH = ("replicate", "shard")
"""Names of the mesh's dimensions."""


def mesh_shape(replicate: int | str, shard: int | str, nodes: int, per_node: int) -> tuple[int, int]:
    """Return (replicas, shards per replica). The other size determines an "auto"; with two, each node is a replica."""
    world = nodes * per_node
    if isinstance(replicate, str) and isinstance(shard, str):
        return nodes, per_node
    if isinstance(replicate, str):
        replicate = max(world // int(shard), 1)
    elif isinstance(shard, str):
        shard = max(world // replicate, 1)
    if replicate * int(shard) != world:
        got = f"replicate={replicate} x shard={shard}"
        where = f"{nodes} node{'s' * (nodes > 1)} with {per_node} rank{'s' * (per_node > 1)} each"
        raise refusal(f"the mesh of {where}", got, f"a product of {world}")
    return replicate, int(shard)

"""Models that FSDP2 has sharded: their shards as plain tensors, the mesh, and distributed checkpoints."""

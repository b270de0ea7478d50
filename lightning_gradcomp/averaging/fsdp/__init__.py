"""Support for FSDP2's sharded models: shards as plain tensors, the mesh, and distributed checkpoints."""

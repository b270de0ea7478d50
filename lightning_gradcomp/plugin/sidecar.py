"""Files beside a checkpoint, one for each rank: `last.ckpt` has them in the folder `last.ckpt.ranks-<token>`.

The token is new for every save, and the checkpoint names the folder. A save that breaks off therefore leaves the
checkpoint of before with the folder of before; the old folder goes when the new checkpoint stands.
"""

from __future__ import annotations

import os
import posixpath
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.reading import read


class Sidecars:
    """Writes, reads and removes them, on any filesystem that fsspec knows.

    Args:
        io: the strategy's, which also writes the checkpoints.
    """

    def __init__(self, io: CheckpointIO) -> None:
        self.io = io

    @property
    def possible(self) -> bool:
        """Not where checkpoints are written in the background: when one stands, and its files count, nobody knows."""
        return not isinstance(self.io, _WrappingCheckpointIO)

    def write(self, state: dict[str, Any], checkpoint: str | Path) -> str:
        """Write this rank's file; the name of the folder, once all ranks have written theirs. A collective call."""
        token: list[Any] = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(token, src=0)
        folder, rank = f"{checkpoint}.ranks-{token[0]}", dist.get_rank()
        self.io.save_checkpoint({"token": token[0], "rank": rank, "state": state}, _file(folder, rank))
        dist.barrier()  # the checkpoint that names them comes after them
        return posixpath.basename(folder.replace(os.sep, "/"))

    def read(self, checkpoint: str | Path, name: str, rank: int) -> dict[str, Any]:
        """The state in the file of `rank` in the folder `name` beside `checkpoint`, or beside what that links to.

        Raises:
            ValueError: it is not there, can't be read, or belongs to another save.
        """
        fs, beside = get_filesystem(checkpoint), str(checkpoint)
        if isinstance(fs, LocalFileSystem):  # also as file://
            beside = os.path.realpath(str(fs._strip_protocol(beside)))
        path = _file(posixpath.join(posixpath.dirname(beside.replace(os.sep, "/")), name), rank)
        what, allowed = f"sidecar of rank {rank}", "the one saved with the checkpoint, or checkpoint_state='drop'"
        content = read(self.io.load_checkpoint, path, what, "token", allowed)
        if (content["token"], content["rank"]) != (name.rpartition("-")[2], rank):
            raise refusal(what, f"{path}, which belongs to another save", allowed)
        return content["state"]

    def remove_old(self, checkpoint: str | Path, keep: str | None) -> None:
        """On rank 0, remove the folders of `checkpoint` but `keep`."""
        if not self.possible or (dist.is_initialized() and dist.get_rank() != 0):
            return
        path = str(checkpoint).replace(os.sep, "/")
        fs = get_filesystem(checkpoint)
        fs.invalidate_cache()
        with suppress(FileNotFoundError):  # a CheckpointIO may write somewhere else
            for found in fs.ls(posixpath.dirname(path) or ".", detail=False):
                folder = posixpath.basename(found.rstrip("/"))
                if folder.startswith(f"{posixpath.basename(path)}.ranks-") and folder != keep:
                    fs.rm(found, recursive=True)


def _file(folder: str, rank: int) -> str:
    return posixpath.join(folder, f"rank-{rank}.ckpt")

"""Checkpoint files: reading them without running code, and sidecar files beside them, one per rank.

The sidecars of `last.ckpt` are in the folder `last.ckpt.ranks-<token>`. Every save has a new token, and the checkpoint
names the folder. The earlier checkpoint's folder is removed once the new checkpoint is complete, so that a failed save
leaves both intact.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import uuid
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_gradcomp.averaging.faults import explained
from lightning_gradcomp.errors import MissingFile, refusal

FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextmanager
def no_code(weights_only: bool | None = None) -> Iterator[None]:
    """Inside, `torch.load` reads only tensors and plain data, and runs no code, unless `weights_only` is False.

    Lightning's defaults depend on its version and on the file's location (2.5 and URLs: weights_only=False), and 2.5's
    CheckpointIO has no argument for it. torch's environment variable covers all of these.
    """
    if weights_only is False or FORCE_NOT in os.environ:
        yield
        return
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


def read(load: Callable[..., Any], path: Any, what: str, key: str, allowed: str, **options: Any) -> dict[str, Any]:
    """Return `load(path, **options)`, a dict with `key`. Runs no code from the file unless weights_only=False.

    Messages name the file `what`, and what is `allowed`. If it is missing, the error is also a FileNotFoundError.
    """
    try:
        with no_code(options.get("weights_only")):
            content = load(path, **options)
    except FileNotFoundError as error:
        raise MissingFile(str(refusal(what, f"{path}: {error}", allowed))) from error
    except OSError as error:
        raise refusal(what, f"{path}: {error}", allowed) from error
    except Exception as error:  # torch.load raises different errors for different kinds of damage
        if isinstance(error, UnpicklingError) and "weights" in str(error).lower():
            allowed += (
                f"; if you trust the file: weights_only=False (lightning 2.6), or {FORCE_NOT}=1 in the environment"
            )
        raise refusal(what, f"{path}, which can't be read ({_in_short(error)})", allowed) from error
    if not isinstance(content, dict) or key not in content:
        raise refusal(what, f"{path}, which holds something else", allowed)
    return content


def _in_short(error: Exception) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.partition(". ")[0]


TOKEN_LETTERS = 12
LETTERS = str.maketrans("0123456789", "ghijklmnop")
"""Replaces digits in tokens: Lightning reads the digits in "hpc_ckpt_1.ckpt.ranks-..." as a version number."""
NAME_BYTES = 255
"""Longest file name in bytes that common filesystems allow."""


def with_suffix(name: str, suffix: str) -> str:
    """`name` + `suffix`. If that is too long, the name is truncated, and a digest of all of it appended."""
    encoded, room = os.fsencode(name), NAME_BYTES - len(suffix)
    if len(encoded) > room:
        digest = hashlib.sha256(encoded).hexdigest()[:12].translate(LETTERS)
        name = f"{encoded[: room - 13].decode(errors='ignore')}-{digest}"
    return name + suffix


def of_rank_zero(value: Any) -> Any:
    """Rank 0's `value`, such as the path of a checkpoint, which rank 0 writes and sidecars are beside. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class Sidecars:
    """Writes, reads and removes sidecar files, on any filesystem that fsspec supports."""

    def __init__(self, io: CheckpointIO) -> None:
        self.io = io

    @property
    def possible(self) -> bool:
        """False if checkpoints are written in the background, because their completion is then unknown."""
        return not isinstance(self.io, _WrappingCheckpointIO)

    def write(self, state: dict[str, Any], checkpoint: str | Path, steps: int) -> str:
        """Write this rank's file, and return the folder's name once all ranks have written theirs. Collective."""
        with explained(steps, "saving a checkpoint"):
            token = of_rank_zero(uuid.uuid4().hex[:TOKEN_LETTERS].translate(LETTERS))
        parent, name = posixpath.split(str(checkpoint).replace(os.sep, "/"))
        name, rank = f"{_folders_of(name)}{token}", dist.get_rank()
        folder = posixpath.join(parent, name)
        self.io.save_checkpoint({"token": token, "rank": rank, "state": state}, _file(folder, rank))
        with explained(steps, "writing sidecar files"):
            dist.barrier()  # write sidecars before the checkpoint that names them
        return name

    def read(self, checkpoint: str | Path, name: str, rank: int) -> dict[str, Any]:
        """The state of `rank` from the folder `name` beside `checkpoint`, or beside the target of a link."""
        fs, beside = get_filesystem(checkpoint), str(checkpoint)
        if isinstance(fs, LocalFileSystem):  # including file:// URLs
            beside = os.path.realpath(str(fs._strip_protocol(beside)))
        path = _file(posixpath.join(posixpath.dirname(beside.replace(os.sep, "/")), name), rank)
        what, allowed = f"sidecar of rank {rank}", "the one saved with the checkpoint, or checkpoint_state='drop'"
        content = read(self.io.load_checkpoint, path, what, "token", allowed)
        if (content["token"], content["rank"]) != (name.rpartition("-")[2], rank):
            raise refusal(what, f"{path}, which belongs to another save", allowed)
        return content["state"]

    def remove_old(self, checkpoint: str | Path, keep: Set[str] = frozenset()) -> None:
        """Remove the folders of `checkpoint` except those in `keep`.

        On disk, every rank does, as nodes may have their own.
        """
        fs = get_filesystem(checkpoint)
        on_disk = isinstance(fs, LocalFileSystem)
        if not self.possible or (not on_disk and dist.is_initialized() and dist.get_rank() != 0):
            return
        path = str(checkpoint).replace(os.sep, "/")
        fs.invalidate_cache()
        with suppress(FileNotFoundError):  # a CheckpointIO may write elsewhere
            for found in map(str, fs.ls(posixpath.dirname(path) or ".", detail=False)):
                folder = posixpath.basename(found.rstrip("/"))
                if folder.startswith(_folders_of(posixpath.basename(path))) and folder not in keep:
                    if on_disk:
                        shutil.rmtree(found, ignore_errors=True)  # another rank may be doing the same
                    else:
                        fs.rm(found, recursive=True)


def _folders_of(name: str) -> str:
    """The common prefix of the folder names of the checkpoint `name`: all but the token."""
    return with_suffix(name, f".ranks-{'x' * TOKEN_LETTERS}")[:-TOKEN_LETTERS]


def _file(folder: str, rank: int) -> str:
    return posixpath.join(folder, f"rank-{rank}.ckpt")

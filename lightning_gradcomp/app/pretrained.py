"""Fine-tuning: weights of an earlier run to start from, and parameters that do not train."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_gradcomp.errors import refusal

PREFIX = "model."
"""Starts the names of the network's weights in a run's checkpoint."""


def load_weights(model: nn.Module, given: str) -> None:
    """Copy weights into `model`, except those of another shape, such as the last layer's for other classes.

    `given` is the folder of a run, which stands for its best checkpoint, or a checkpoint, or a file with a state dict.
    Runs no code from it. Prints the names of the parameters that keep their initial values.
    """
    what, path = "task.weights", Path(str(given)).expanduser()
    path = path / "checkpoints" / "best.ckpt" if path.is_dir() else path
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        allowed = "the folder of a run that has saved best.ckpt, a .ckpt file, or a file with a state dict"
        raise refusal(what, f"{given} ({str(error).splitlines()[0]})", allowed) from error
    if not isinstance(saved, dict):
        raise refusal(f"{what} {given}", type(saved).__name__, "a state dict, or a checkpoint that has one")
    if "state_dict" in saved:
        of_task = saved["state_dict"]
        saved = {name.removeprefix(PREFIX): of_task[name] for name in of_task if name.startswith(PREFIX)}
    own = model.state_dict()
    if differing := sorted(saved.keys() ^ own.keys()):
        names = ", ".join(differing[:3])
        raise refusal(f"{what} {given}", f"a file that differs in {names}", "weights of the same network")
    other = [name for name in own if saved[name].shape != own[name].shape]
    model.load_state_dict({name: own[name] if name in other else saved[name] for name in own})
    if other:
        rank_zero_info(f"task.weights: {', '.join(other)} have another shape there, and keep their initial values.")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop the parameters whose names match one of `patterns`, such as "blocks.[01].*", from training."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in parameters if fnmatchcase(name, str(pattern))]
        if not matching:
            raise refusal("task.frozen", pattern, f"a pattern of parameters' names, such as {next(iter(parameters))}")
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise refusal("task.frozen", list(patterns), "patterns that leave a parameter to train")

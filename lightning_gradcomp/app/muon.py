"""Muon for the hidden matrices of a network and AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) steps along the orthogonalized momentum of a matrix. Embeddings, the head, biases, norms and
convolution kernels need AdamW, and a LightningModule with automatic optimization has one optimizer. Here
`torch.optim.Muon` and `torch.optim.AdamW` take the steps. With `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025,
arXiv 2502.16982) Muon's steps are as large as AdamW's, so both use one learning rate and one weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.errors import refusal

LISTS = (nn.Sequential, nn.ModuleList)


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` as one optimizer. Needs torch 2.9.

        MuonAdamW([{"rule": "muon", "params": matrices}, {"rule": "adamw", "params": rest, "weight_decay": 0.0}])

    A group has the options of its rule, and the state has torch's names. Options: conf/optimizer/muon.yaml; for
    others of a rule, set them in the group.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        common = {"lr": lr, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self.rules: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "muon": partial(torch.optim.Muon, **common, **muon),
            "adamw": partial(torch.optim.AdamW, **common, betas=tuple(betas), eps=eps, fused=fused),
        }
        super().__init__(params, common)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rules": self.rules}  # torch's own state is a fixed list of names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with a rule, as to any torch optimizer."""
        if (rule := param_group.get("rule")) not in self.rules:
            raise refusal("the rule of a parameter group of MuonAdamW", rule, "'muon' or 'adamw'")
        [complete] = self.rules[rule]([param_group]).param_groups
        super().add_param_group(complete)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Parameters without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for rule, make in self.rules.items():
            if groups := [group for group in self.param_groups if group["rule"] == rule]:
                part = make([dict(group) for group in groups])
                part.param_groups, part.state = groups, self.state
                part.step()
        return loss


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a network: modules with layers in an `nn.Sequential` or `nn.ModuleList`, other than such lists.

    These are the transformer blocks of Swin and ViT and the residual blocks of ResNet. There may be none.
    """
    for child in network.children():
        if not isinstance(network, LISTS) or isinstance(child, LISTS):
            yield from blocks(child)
        elif list(child.children()) and list(child.parameters()):
            yield child


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The two-dimensional parameters named `...weight` in the model's `blocks`, without embeddings.

    The head and the input layers are outside of all blocks. Tables of positions have other names.
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    named = (pair for block in blocks(model) for pair in block.named_parameters())
    return {each for name, each in named if each.dim() == 2 and name.endswith("weight")} - embeddings


def with_rules(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Split parameter groups for `MuonAdamW`: `hidden_matrices(model)` get Muon, all others AdamW."""
    hidden = hidden_matrices(model)
    if not hidden:
        allowed = "blocks with linear layers in nn.Sequential or nn.ModuleList, as in a Transformer; else AdamW"
        raise refusal("model with MuonAdamW", f"{type(model).__name__}, whose blocks have no matrices", allowed)
    split = [
        {**group, "rule": rule, "params": [each for each in group["params"] if (each in hidden) == (rule == "muon")]}
        for group in groups
        for rule in ("muon", "adamw")
    ]
    return [group for group in split if group["params"]]

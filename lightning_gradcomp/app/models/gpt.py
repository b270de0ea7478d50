"""GPT-2 (Radford et al. 2019): a decoder-only Transformer, with learned or rotary positions."""

from __future__ import annotations

import math

import torch
from torch import nn

from lightning_gradcomp.errors import check_whole, refusal

STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2."""


class GPT(nn.Module):
    """Int64 tokens (batch, length) -> logits (batch, length, vocabulary), for lengths up to `context`.

    Norms come before attention and MLP, and after the last block. No dropout. Weights are initialised as in GPT-2:
    normally distributed with standard deviation 0.02, in the layers that add to the residual stream divided by
    √(2 · layers). Positions are learned, as in GPT-2, or "rope" (Su et al. 2021, arXiv 2104.09864).
    """

    def __init__(
        self, *, vocabulary: int, context: int, layers: int, width: int, heads: int, positions: str, tied: bool
    ) -> None:
        super().__init__()
        for option, got in (("layers", layers), ("width", width), ("heads", heads)):
            check_whole(f"model.{option}", got, 1)
        if positions not in ("learned", "rope"):
            raise refusal("model.positions", positions, "learned, rope")
        if width % heads or (positions == "rope" and width // heads % 2):
            pairs = ", with an even share each" if positions == "rope" else ""
            raise refusal("model.heads", heads, f"a divisor of model.width={width}{pairs}")
        rope = Rope(context, width // heads) if positions == "rope" else None
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width) if positions == "learned" else None
        self.blocks = nn.ModuleList(Block(width, heads, rope) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("attention.out", "mlp.out"))
                nn.init.normal_(module.weight, std=STD / math.sqrt(2 * layers) if adds else STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return nn.functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)


class Block(nn.Module):
    """Attention and MLP, each added to its input (batch, length, width)."""

    def __init__(self, width: int, heads: int, rope: Rope | None) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, rope)
        self.norm_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    """Causal self-attention: (batch, length, width) -> the same shape."""

    def __init__(self, width: int, heads: int, rope: Rope | None) -> None:
        super().__init__()
        self.heads, self.rope = heads, rope
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, length, share)
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.gelu(self.into(x), approximate="tanh"))


class Rope(nn.Module):
    """Rotates pairs of elements by angles in proportion to the position: (..., length, share) -> the same shape."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, context: int, share: int) -> None:
        super().__init__()
        frequencies = 10_000 ** (-torch.arange(0, share, 2) / share)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

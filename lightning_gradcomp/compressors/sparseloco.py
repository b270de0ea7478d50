"""SparseLoCo: local AdamW steps, of whose sum 1.6 % is sent in 2 bits, with error feedback that decays.

Source: Sarfi, Thérien, Lidin, Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025, arXiv
2508.15706. Two differences: a chunk in the paper is a block of 64 x 64 elements, here 4,096 consecutive ones. The
authors' code sends four levels between three standard deviations, here a sign and one of two magnitudes computed from
the data.
"""

from __future__ import annotations

from typing import Any

from lightning_gradcomp.compressors.gradient_dropping import GradientDropping

SPARSELOCO: dict[str, Any] = {
    "compressor": GradientDropping(
        sparsity=1 - 64 / 4096, scope="chunk", mean="senders", values="int2", dense_values="int8", warmup_epochs=0
    ),
    "period": 15,
    "delay": 0,
    "error_decay": 0.95,
}
"""Options of `DelayedAverager` and `DelayedStrategy`."""

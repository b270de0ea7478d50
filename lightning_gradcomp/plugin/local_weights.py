"""A batch's forward pass at local weights, in the Trainer strategies that average gradients.

Private Lightning name used here: the fit loop's `_skip_backward`, which is set for passes that update statistics alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_gradcomp.averaging import GradientAverager


def forward_at_local_weights(averager: GradientAverager, trainer: Trainer, forward: Callable[[], Any]) -> Any:
    """What `forward`, a training step in automatic optimization, returns at local weights.

    They stay for backward, and end here after an exception or an output without a loss.
    """
    if not trainer.fit_loop._skip_backward:
        averager.use_local_weights()
    try:
        output = forward()
    except BaseException:
        averager.use_shared_weights(check=False)
        raise
    if output is None or (isinstance(output, Mapping) and output.get("loss") is None):
        averager.use_shared_weights()  # there will be no backward
    return output

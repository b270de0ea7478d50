"""Messages of Lightning and torch that `gradcomp` hides; it shows all others."""

from __future__ import annotations

import logging
import warnings

LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
)
LOGGED = (
    "Initializing distributed: ",  # the strategy's own line says how many ranks there are
    f"{'-' * 100}\ndistributed_backend=",
    "Restored all states from ",  # follows "Restoring states from"
    "`Trainer(limit_val_batches=",
    "`Trainer.fit` stopped: ",
    "GPU available: ",  # the summary names the device
    "TPU available: ",
    "HPU available: ",
    "💡 Tip: For seamless cloud ",  # advertises other products
)
WARNED = (
    r".*LeafSpec\(?\)?.* is deprecated",  # inside Lightning 2.6 with torch 2.15, once an epoch
    r".*`torch\.distributed\.\w+` is deprecated",  # the oldest supported torch lacks the new names
    r"The '\w+' does not have many workers",  # the images are in memory
    r"Experiment logs directory .* exists and is not empty",  # it holds config.yaml
    r"You're resuming from a checkpoint that ended before the epoch ended",  # SharedImages skips images already seen
    r"The dirpath has changed from",  # a resumed run has its own folder
    r"Be aware that when using `ckpt_path`, callbacks",  # evaluate=true needs none of them
    r"GPU available but not used",  # trainer.accelerator=cpu
)


def hide_messages() -> None:
    """Hide `LOGGED` and `WARNED` from now on, in this process."""
    for message in WARNED:
        warnings.filterwarnings("ignore", message=message)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(LOGGED))

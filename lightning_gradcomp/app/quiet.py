"""Lines of Lightning and torch that tell a user of `gradcomp` nothing, each named exactly. All others are shown."""

from __future__ import annotations

import logging
import warnings

LOGGED = (
    "GPU available: ",  # the summary names the device
    "TPU available: ",
    "HPU available: ",
    "💡 Tip: For seamless cloud ",  # advertises litlogger and litmodels
)
WARNED = (
    r".*LeafSpec\(?\)?.* is deprecated",  # inside Lightning 2.6 with torch 2.15, once an epoch
    r"The '\w+' does not have many workers",  # the images are in memory already
    r"Experiment logs directory .* exists and is not empty",  # holds our config.yaml; at most a metrics.csv is replaced
    r"You're resuming from a checkpoint that ended before the epoch ended",  # SharedImages skips what was seen
    r"The dirpath has changed from",  # a resumed run writes into a folder of its own
    r"GPU available but not used",  # trainer.accelerator=cpu was asked for
)


def quiet() -> None:
    """Drop the known lines, in this process."""
    for message in WARNED:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(LOGGED))

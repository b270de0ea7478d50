"""SparseLoCo's option: the factor by which a rank multiplies, once a round, what compressed rounds have left out."""

from __future__ import annotations

from lightning_gradcomp.compressors.base import Compressor, Lossy
from lightning_gradcomp.compressors.state import Residual
from lightning_gradcomp.errors import is_number, refusal


def check_error_decay(error_decay: float | None, compressor: Compressor) -> None:
    """ValueError where what compressed rounds leave out can't be decayed."""
    if error_decay is None:
        return
    if not is_number(error_decay) or not 0 <= error_decay <= 1:
        raise refusal("error_decay", error_decay, "None, or a number from 0 to 1")
    if not isinstance(compressor, Lossy) or not issubclass(compressor.remembers(None), Residual):
        names = "gradient_dropping, onebit, twobit, powersgd, or another compressor with a residual"
        raise refusal("compressor with error_decay", type(compressor).__name__, names)

"""A resumed run is bitwise the run that drained where it was saved."""

import pytest

from lightning_gradcomp import Nesterov
from tests.averaging.methods import EVERY
from tests.averaging.workers import conv_net, image_loss
from tests.local_sgd.training import STATEFUL, check_resumes_bitwise, set_up


@pytest.mark.parametrize(
    "options",
    [
        {"period": 4, "delay": 3},
        {"period": 4, "delay": 4, "compressor": EVERY["gradient_dropping"]()},
        {"period": 4, "delay": 2, "compressor": EVERY["onebit"]()},
        {"period": 4, "delay": 2, "compressor": EVERY["powersgd"]()},
        {"period": 3, "delay": 0, "outer": Nesterov()},
        *({"period": 2, "delay": 0, "participation": 0.4, "optimizer": name} for name in STATEFUL),
    ],
    ids=str,
)
def test_a_resumed_run_is_bitwise_the_drained_run(options):
    """All ranks resume from rank 0's checkpoint."""
    how = {"optimizer": "adamw", **options}
    check_resumes_bitwise(3, lambda group: set_up(group, model=conv_net, **how), image_loss)

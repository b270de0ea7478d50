"""DGC is the paper's algorithm: for fifty steps its weights are those of a plain numpy implementation.

Both compute in fp32, with sums in rank order, but not with the same instructions, so weights may differ in the last
bits. Were an entry on the edge of the k largest chosen by one and not by the other, the difference would be a thousand
times larger than the tolerance. Curvatures and targets spread over decades keep neighbours in that order well apart,
and every step of the gradient is elementwise, so that no sum's order depends on the machine.
"""

import numpy as np
import pytest

from tests.averaging.workers import Table, averaged, bowl_gradient, bowl_loss, dgc, train
from tests.reference.dgc import PaperDGC
from tests.threads import run_ranks

SPARSE, END = 30, 50
LR, MOMENTUM = 0.02, 0.9
COMPRESSED = ["kernel", "matrix"]
CASES = {
    "plain": {},
    "nesterov": {"nesterov": True},
    "no masking": {"masking": False},
    "weight decay": {"weight_decay": 0.05},
    "clipping": {"clip_norm": 3.0},
    "everything": {"nesterov": True, "weight_decay": 0.05, "clip_norm": 3.0},
    "everything but masking": {"nesterov": True, "weight_decay": 0.05, "clip_norm": 3.0, "masking": False},
}


def ramp(epoch, step):
    """Dense, then sparser and sparser, and dense again at the end."""
    return 0.0 if step < 5 or step >= 45 else 0.75 if step < 12 else 0.9 if step < 20 else 0.97


def paper_weights(world, masking=True, **options):
    """The reference's weights while it is sparse, and at the end."""
    start = {name: p.detach().numpy() for name, p in Table().named_parameters()}
    reference = PaperDGC(start, COMPRESSED, world, lr=LR, momentum=MOMENTUM, masking=masking, **options)
    seen = []
    for step in range(END):
        reference.step([bowl_gradient(reference.weights, rank, step) for rank in range(world)], 1 - ramp(0, step))
        if step + 1 in (SPARSE, END):
            seen.append({name: weight.copy() for name, weight in reference.weights.items()})
    return seen


def averager_weights(world, masking=True, clip_norm=None, **options):
    """The same of the averager's first rank."""

    def work(rank, group):
        model, compressor = Table(), dgc(momentum_masking=masking, clip_norm=clip_norm)
        optimizer, averager = averaged(model, group, compressor, ramp, lr=LR, momentum=MOMENTUM, **options)
        seen = []
        for steps in (range(SPARSE), range(SPARSE, END)):
            train(model, optimizer, averager, rank, steps, bowl_loss)
            seen.append({name: p.detach().clone().numpy() for name, p in model.named_parameters()})
        return seen

    return run_ranks(world, work)[0]


THREE_RANKS = {f"3-{name}": (3, CASES[name]) for name in ("plain", "everything", "everything but masking")}
RUNS = {f"2-{name}": (2, case) for name, case in CASES.items()} | THREE_RANKS
"""Every option by itself on two ranks; on three, none and all of them."""


@pytest.mark.parametrize(("world", "case"), RUNS.values(), ids=RUNS)
def test_the_weights_are_the_papers(world, case):
    for ours, paper in zip(averager_weights(world, **case), paper_weights(world, **case), strict=True):
        for name, weight in paper.items():
            np.testing.assert_allclose(ours[name], weight, rtol=1e-5, atol=1e-5, err_msg=name)


def test_every_option_changes_the_papers_weights():
    """Else agreement on an option would say nothing."""
    plain, _ = paper_weights(2)
    for case in list(CASES.values())[1:]:
        changed, _ = paper_weights(2, **case)
        assert max(np.abs(changed[name] - plain[name]).max() for name in plain) > 1e-2

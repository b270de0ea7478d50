"""PowerSGD's products of all matrices at once give what matrix by matrix gives."""

from contextlib import nullcontext

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.compressors.layout import Layout
from tests.compressors.one_worker import normal

SHAPES = ((40, 3, 5, 5), (12, 130), (12, 30), (12, 30), (70, 33), (9, 9))
LAYOUT = Layout(tuple(map(str, range(len(SHAPES)))), SHAPES)
ZEROS = slice(75 * 7, 75 * 9)
"""Two rows of the first matrix."""


class Alone:
    """The `Collectives` of a single worker."""

    step = 0

    def __init__(self, device):
        self.device = device

    def phase(self, name):
        return nullcontext()

    def mean(self, flat):
        return flat.clone()

    def buffer(self):
        return torch.empty(LAYOUT.n, device=self.device)


def steps(compressor, device):
    """The mean, and a buffer of ones less what was sent, in each of two steps."""
    state, results = compressor.state_for(None), []
    state.start(LAYOUT, device)
    for step in range(2):
        flat = normal(LAYOUT.n) + 0.1 * normal(LAYOUT.n, step)
        flat[ZEROS] = 0
        flat[LAYOUT.bounds[3][0] : LAYOUT.bounds[3][1]] = 0  # in all steps: its query has to stay
        mean, sent = compressor.average(flat.to(device), LAYOUT, Alone(device), state)
        added, subtracted = (torch.ones(LAYOUT.n, device=device) for _ in range(2))
        mean.add_to(added)
        sent.subtract_from(subtracted)
        assert mean.finite()
        results.append((added.cpu(), subtracted.cpu()))
        state.commit(set(LAYOUT.names))
    return results, state


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 4}, {"rank": 5, "warm_start": False}], ids=str)
def test_means_and_what_is_sent(options, device, monkeypatch):
    compressor = lgc.PowerSGD(**options)
    ours, state = steps(compressor, device)
    for added, subtracted in ours:
        assert (added[ZEROS] == 1).all() and (subtracted[ZEROS] == 1).all()
    assert all(q.any() and q.isfinite().all() for q in state.queries)
    monkeypatch.delenv("GRADCOMP_TRITON")
    theirs, _ = steps(compressor, torch.device("cpu"))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-4)

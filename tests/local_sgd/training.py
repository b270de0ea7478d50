"""Ranks as threads that train a small model with a DelayedAverager."""

import copy
import io
import threading

import torch

from lightning_gradcomp import DelayedAverager
from tests import threads
from tests.averaging.workers import HAS_MUON, Table, backward, bowl_loss, muon_adamw


class Counting(torch.optim.Optimizer):
    """Keeps counts as plain numbers, in a parameter group too, and moments in 8 bits."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "taken": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["norm"] = state.get("norm", 0.0) + float(p.grad.norm())
                old = state["moment"].float() * state["scale"] if "moment" in state else torch.zeros_like(p)
                moment = 0.9 * old + p.grad
                state["scale"] = moment.abs().max() / 127 + 1e-12
                state["moment"] = (moment / state["scale"]).round().to(torch.int8)
                p.sub_(moment, alpha=group["lr"] / (state["count"] + group["taken"] + state["norm"]) ** 0.1)

    def load_state_dict(self, state_dict):
        moments = {index: each["moment"] for index, each in state_dict["state"].items()}
        super().load_state_dict(state_dict)  # converts them to the parameter's type
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if index in moments:
                self.state[p]["moment"] = moments[index].clone()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
if HAS_MUON:
    OPTIMIZERS["muon"] = muon_adamw
STATEFUL = {
    "adamw": OPTIMIZERS["adamw"],
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "counting": Counting,
}
"""Optimizers that keep more than moments of the parameters' shapes."""
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def join_exchanges():
    """Wait for the exchanges of all ranks that are running in background threads."""
    for thread in threading.enumerate():
        if thread.name == "exchange" and thread.is_alive():  # not one that another rank is about to start
            thread.join(10)


def run_ranks(world, work):
    """As `threads.run_ranks`; no exchange is running in the groups afterwards, which the next ranks use again."""
    results = threads.run_ranks(world, work)
    join_exchanges()
    return results


def set_up(group, optimizer="momentum", model=Table, **options):
    """A model, its optimizer and its averager."""
    model = model()
    made = {**OPTIMIZERS, **STATEFUL}[optimizer](model.parameters())
    return model, made, DelayedAverager(model, made, process_group=group, **options)


def train(model, optimizer, averager, rank, steps, loss=bowl_loss):
    """The given range of steps, or as many from step 0."""
    for step in steps if isinstance(steps, range) else range(steps):
        backward(model, optimizer, rank, step, loss)
        averager.step()


def stored(*parts):
    """The states of `parts`, saved and loaded with `weights_only=True`."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resumes_bitwise(world, set_up, loss=bowl_loss, *, own_states=False):
    """A run that resumes at step 10 is bitwise the run that drained there.

    Args:
        world: ranks.
        set_up: makes a model, its optimizer and its averager from a group.
        loss: of (model, rank, step).
        own_states: True if each rank has its averager's state, as with error_decay. All else is rank 0's on all ranks.
    """

    def everything(model):
        return torch.cat([tensor.float().reshape(-1) for tensor in model.state_dict().values()])

    def straight(rank, group):
        model, optimizer, averager = set_up(group)
        train(model, optimizer, averager, rank, 10, loss)
        state = averager.state_dict()  # drains, so it comes before the other states
        saved = [*stored(model, optimizer), state]
        train(model, optimizer, averager, rank, range(10, 21), loss)
        return saved, everything(model)

    results = run_ranks(world, straight)

    def resumed(rank, group):
        parts = model, optimizer, averager = set_up(group)
        train(model, optimizer, averager, rank, 5, loss)  # a state that loading has to replace
        saved = [*results[0][0][:2], results[rank if own_states else 0][0][2]]
        for part, state in zip(
            parts, copy.deepcopy(saved), strict=True
        ):  # an optimizer keeps the tensors that it loads
            part.load_state_dict(state)
        assert averager.steps == 10
        train(model, optimizer, averager, rank, range(10, 21), loss)
        return everything(model)

    for got, (_, expected) in zip(run_ranks(world, resumed), results, strict=True):
        assert torch.equal(got, expected)

"""With Adam and AdamW, whatever has error feedback accumulates the optimizer's steps: nothing of them is lost."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gradcomp import OneBit
from lightning_gradcomp.averaging import GradientAverager, mean_state
from lightning_gradcomp.compressors.error_feedback import Gradient
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.updates import AdamStep
from lightning_gradcomp.plugin.rank_states import mean_over_ranks
from tests.averaging.methods import REGISTERED, REMEMBERING
from tests.averaging.workers import (
    Table,
    all_equal,
    backward,
    bowl_loss,
    conv_net,
    dgc,
    filled,
    image_loss,
    prescribed_loss,
    train_ddp,
    weights,
)
from tests.compressors.one_worker import normal
from tests.reference import adam_step as reference
from tests.threads import run_ranks

STEPS = 20
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
OPTIMIZERS = {"adam": partial(torch.optim.Adam, **ADAM), "adamw": partial(torch.optim.AdamW, **ADAM)}
STEPPING = {
    label: make
    for label, make in REMEMBERING.items()
    if label in REGISTERED and ("," not in label or label.startswith("terngrad"))
}
"""Each method once, with options with which it has error feedback."""


def averager_of(model, group, compressor, optimizer=OPTIMIZERS["adamw"], schedule=None, **options):
    made = optimizer(model.parameters())
    averager = GradientAverager(model, compressor, optimizer=made, process_group=group, **options)
    averager.schedule = schedule or averager.schedule
    return made, averager


def run(model, optimizer, averager, rank, steps, loss=image_loss, scheduler=None):
    for step in steps if isinstance(steps, range) else range(steps):
        optimizer.zero_grad()
        with averager.local_weights():
            loss(model, rank, step).backward()
        averager.step()
        if scheduler:
            scheduler.step()


def everything_kept(averager):
    """Name -> fp64: what waits to be sent."""
    return {name: part.double() for name, part in averager.state_dict()["memory"]["unsent_step"].items()}


def two_groups(kind, model):
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return kind([{"params": first, "lr": 0.003, "weight_decay": 0.1}, {"params": second, "betas": (0.5, 0.9)}])


@pytest.mark.parametrize(("kind", "world"), [(torch.optim.Adam, 2), (torch.optim.AdamW, 3)])
def test_at_sparsity_0_the_weights_are_ddps(kind, world):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, total_steps=STEPS + 1, max_lr=0.01)

    def ddp(rank, group):
        model = conv_net()
        optimizer = two_groups(kind, model)
        train_ddp(model, optimizer, group, rank, STEPS, image_loss, scheduler(optimizer))
        return weights(model)

    def ours(rank, group):
        model = conv_net()
        optimizer, averager = averager_of(model, group, dgc(sparsity=0.0), lambda _: two_groups(kind, model))
        run(model, optimizer, averager, rank, STEPS, scheduler=scheduler(optimizer))
        return weights(model)

    got, expected = run_ranks(world, ours), run_ranks(world, ddp)
    assert all_equal(got)
    assert float((got[0] - expected[0]).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("make", "world"),
    [*((make, 3) for make in STEPPING.values()), (STEPPING["dgc"], 2)],
    ids=[*STEPPING, "dgc, two ranks"],
)
def test_applied_plus_mean_unsent_is_the_sum_of_adams_steps(make, world):
    """The steps are those of the reference in fp64; gradients do not depend on the weights."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averager_of(model, group, make(), partial(torch.optim.Adam, lr=0.01))
        run(model, optimizer, averager, rank, 30, prescribed_loss)
        return {name: p.detach().double() for name, p in model.named_parameters()}, everything_kept(averager)

    results = run_ranks(world, work)
    shared, kept = results[0]
    start = {name: p.detach().double().numpy() for name, p in Table().named_parameters()}
    alone = steps_of_the_reference(tuple(kept), world, 30)
    for name in kept:
        unsent = sum(each[name] for _, each in results) / world
        error = (shared[name] - unsent).numpy() - (start[name] - alone[name])
        assert np.abs(error).max() <= 1e-6
        assert float(unsent.abs().max()) > 1e-4


@cache
def steps_of_the_reference(compressed, world, steps):
    """Name -> the mean over ranks of all steps that Adam makes of `prescribed_loss` at lr 0.01."""
    model = Table()
    names = [name for name, _ in model.named_parameters()]

    def gradients(rank, step):
        model.zero_grad()
        prescribed_loss(model, rank, step).backward()
        return {name: p.grad.double().numpy() for name, p in model.named_parameters()}

    workers = [{name: reference.Worker(start.shape) for name, start in model.named_parameters()} for _ in range(world)]
    totals = dict.fromkeys(compressed, 0.0)
    for step in range(steps):
        everyones = [gradients(rank, step) for rank in range(world)]
        rest = [np.concatenate([g[n].reshape(-1) for n in names if n not in compressed]) for g in everyones]
        for own, other, worker in zip(everyones, rest, workers, strict=True):
            for name in compressed:
                totals[name] = totals[name] + worker[name].step(own[name], 0.01, 0.9, 0.999, 1e-8) / world
                worker[name].observe(other, np.mean(rest, axis=0), 0.999)
    return totals


@pytest.mark.parametrize("of_second_rank", [1.0, 1e-3])
def test_training_is_the_papers_algorithm(of_second_rank):
    """tests/reference/adam_step.py, with gradients that depend on weights. With a small ε the first step is a tie.

    One rank's uncompressed gradients may be much smaller than the mean, which the other ranks make.
    """
    n, k, steps, target = 64, 7, 30, np.linspace(-2, 2, 64)

    def gradient(w, rank, step):
        return (1 + rank) * (w - target) + np.sin(np.arange(n) + 3 * step + rank)

    def uncompressed(rank, step):
        return np.cos(np.arange(5) * (1 + rank) + step) * (of_second_rank if rank else 1)

    def loss(model, rank, step):
        w = model.parts.reshape(-1)
        shift = torch.from_numpy(np.sin(np.arange(n) + 3 * step + rank)).float()
        of_bias = (model.bias * torch.from_numpy(uncompressed(rank, step)).float()).sum()
        return (0.5 * (1 + rank) * (w - torch.from_numpy(target).float()) ** 2 + w * shift).sum() + of_bias

    def work(rank, group):
        model = nn.Module()
        model.parts, model.bias = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(5))
        compressor = dgc(sparsity=1 - k / n, values="fp32", min_elements=1)
        optimizer, averager = averager_of(model, group, compressor, partial(torch.optim.AdamW, eps=0.1, **ADAM))
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            averager.step()
        return model.parts.detach().reshape(-1)

    options = {"lr": ADAM["lr"], "betas": ADAM["betas"], "decay": ADAM["weight_decay"], "eps": 0.1}
    pair = [reference.Worker(n) for _ in range(2)]
    expected, applied, wanted = reference.train(np.zeros(n), pair, gradient, uncompressed, steps, k=k, **options)
    assert np.abs(applied + np.mean([worker.e for worker in pair], axis=0) - wanted).max() < 1e-12
    got = run_ranks(2, work)
    assert all_equal(got)
    np.testing.assert_allclose(got[0].numpy(), expected, atol=1e-5)


def test_nothing_is_lost_from_four_ranks_over_three_to_two():
    def first(rank, group):
        model = Table()
        made, averager = averager_of(model, group, dgc())
        run(model, made, averager, rank, 10, prescribed_loss)
        return weights(model), averager.state_dict()

    states = [state for _, state in run_ranks(4, first)]
    for world in (3, 2):
        mean = mean_state(states)

        def go_on(rank, group, mean=mean):
            model = Table()
            made, averager = averager_of(model, group, dgc())
            averager.load_state_dict(mean)
            loaded = everything_kept(averager)
            run(model, made, averager, rank, range(10, 12), prescribed_loss)
            return loaded, averager.state_dict()

        before = [state["memory"]["unsent_step"] for state in states]
        results = run_ranks(world, go_on)
        for name, part in results[0][0].items():
            expected = sum(each[name].double() for each in before) / len(before)
            assert float((part - expected).abs().max()) <= 1e-6
        states = [state for _, state in results]


def test_going_dense_applies_what_waits_and_gives_moments_back():
    """The mean of the reference's steps; then the optimizer has the moments' mean, the same on all ranks."""

    def work(rank, group):
        model, twin = Table(), Table()
        kind = partial(torch.optim.Adam, lr=0.01)
        optimizer, averager = averager_of(model, group, dgc(), kind, lambda epoch, step: 0.9 if step < 9 else 0.0)
        run(model, optimizer, averager, rank, 10, prescribed_loss)
        own = kind(twin.parameters())
        for step in range(10):
            backward(twin, own, rank, step, prescribed_loss)
            own.step()
        assert not averager.has_unsent
        held, alone = optimizer.state[model.kernel], own.state[twin.kernel]
        return model.kernel.detach(), held["exp_avg"].clone(), alone["exp_avg"], held["step"]

    (one, m, own_m, step), (other, other_m, other_own_m, _) = run_ranks(2, work)
    assert torch.equal(one, other)
    assert torch.equal(m, other_m)
    assert int(step) == 10
    expected = Table().kernel.detach().double().numpy() - steps_of_the_reference(("kernel", "matrix"), 2, 10)["kernel"]
    np.testing.assert_allclose(one.double().numpy(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(m, (own_m + other_own_m) / 2, rtol=1e-5, atol=1e-6)


def test_moments_of_dense_steps_are_taken_over():
    def work(rank, group, dense):
        model = Table()
        schedule = lambda epoch, step: 0.0 if step < dense else 1e-9  # noqa: E731
        made, averager = averager_of(model, group, dgc(values="fp32"), OPTIMIZERS["adam"], schedule)
        run(model, made, averager, 0, 12, bowl_loss)
        return weights(model)

    expected = run_ranks(2, partial(work, dense=12))[0]
    for dense in (0, 5):
        torch.testing.assert_close(run_ranks(2, partial(work, dense=dense))[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("to", [{"memory_format": torch.channels_last}, {"dtype": torch.bfloat16}, {}], ids=str)
def test_weights_are_local_inside_and_shared_outside(to):
    def work(rank, group):
        model = Table().to(**to)
        made, averager = averager_of(model, group, dgc())
        run(model, made, averager, rank, 5, prescribed_loss)
        shared = model.kernel.detach().clone()
        unsent = averager.state_dict()["memory"]["unsent_step"]["kernel"]
        with averager.local_weights():
            inside = model.kernel.detach().clone()
            assert model.kernel.stride() == shared.stride()
        assert torch.equal(model.kernel, shared)
        own, mean = averager.state_dict()["memory"]["squares"]["kernel"]
        assert 0.2 < mean / own < 1
        torch.testing.assert_close(inside, (shared - (mean / own).sqrt() * unsent).to(inside))
        return shared, inside

    (shared, inside), (other_shared, other_inside) = run_ranks(2, work)
    assert torch.equal(shared, other_shared)
    assert not torch.equal(inside, other_inside)


def test_a_grad_scaler_steps_where_every_tensor_is_compressed():
    """As with LoRA: there is no gradient left for it to look at."""

    def work(rank, group, enabled):
        model = nn.Sequential(nn.Linear(12, 25, bias=False), nn.Linear(25, 12, bias=False))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=enabled)
        made, averager = averager_of(filled(model), group, dgc())
        for step in range(4):
            made.zero_grad()
            scaler.scale(model(normal(12, seed=step + 10 * rank)).square().sum()).backward()
            averager.average(grad_scale=scaler.get_scale())
            scaler.unscale_(made)
            scaler.step(made)
            scaler.update()
        assert [len(group["params"]) for group in made.param_groups] == [2] and len(made.state) == 2
        return weights(model), scaler.get_scale()

    (scaled, scale), (plain, _) = (run_ranks(2, partial(work, enabled=enabled))[0] for enabled in (True, False))
    assert scale == 2048.0
    torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_moves_nothing(fused):
    """Not by weight decay either, which a fused optimizer would skip itself."""

    def work(rank, group):
        model = filled(nn.Linear(12, 25))
        made = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
        averager = GradientAverager(model, dgc(), optimizer=made, process_group=group)
        scaler, start = torch.amp.GradScaler("cpu", init_scale=1024.0), weights(model)
        scaler.scale(model(torch.full((2, 12), torch.inf if rank else 1.0)).sum()).backward()
        averager.average(grad_scale=scaler.get_scale())
        scaler.step(made)
        scaler.update()
        assert scaler.get_scale() == 512.0
        return torch.equal(weights(model), start)

    assert all(run_ranks(2, work))


@pytest.mark.parametrize("compressor", [dgc(), OneBit(min_elements=50, warmup_steps=0)], ids=["dgc", "onebit"])
def test_uncompressed_gradients_that_cancel_between_ranks(compressor):
    """A new head of zeros: in the first step only its bias has a gradient, of one sign on each rank."""

    def work(rank, group):
        model = filled(nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 2)))
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        made, averager = averager_of(model, group, compressor)
        for step in range(3):
            made.zero_grad()
            labels = torch.tensor([rank, rank, rank, 1 - rank])
            nn.functional.cross_entropy(model(normal(48, seed=2 * step + rank).view(4, 12)), labels).backward()
            averager.step()
        return bool(weights(model).isfinite().all())

    assert all(run_ranks(2, work))


def test_a_count_of_steps_is_the_same_after_a_mean_over_seven_ranks():
    """7 times a seventh of 11 in fp32 is less than 11."""

    def work(rank, group):
        model = Table()
        made, averager = averager_of(model, group, OneBit(min_elements=50, warmup_steps=0))
        run(model, made, averager, rank, 11, prescribed_loss)
        averager.load_state_dict(mean_over_ranks(averager.state_dict(), averager))
        return {int(made.state[parameter]["step"]) for parameter in (model.kernel, model.matrix)}

    assert run_ranks(7, work) == [{11}] * 7


def test_moments_of_dense_steps_between_compressed_ones_are_taken_over_in_bf16_too():
    def moment(rank, group, dtype):
        model = Table().to(dtype)
        made, averager = averager_of(model, group, dgc(), schedule=lambda epoch, step: 0.0 if 2 <= step < 40 else 0.9)
        for step in range(41):
            made.zero_grad()
            ((1 if step < 2 else -1) * sum(parameter.sum() for parameter in model.parameters())).backward()
            averager.step()
        return averager.state.state_dict()["exp_avg"]["kernel"].mean()

    for dtype in (torch.float32, torch.bfloat16):
        assert all(-1.01 < float(mean) < -0.98 for mean in run_ranks(2, partial(moment, dtype=dtype)))


def test_a_huge_gradient_and_dense_steps_leave_the_ratio_of_norms_as_a_resumed_run_has_it():
    layout = Layout(("w",), ((4, 8),))
    states = [AdamStep().start(layout, torch.device("cpu")) for _ in range(2)]
    for state in states:
        parameter = nn.Parameter(torch.zeros(4, 8))
        state.attach(torch.optim.AdamW([parameter]), [parameter])
    [state, resumed] = states
    state.observe(torch.tensor(4.0), torch.tensor(1.0))
    state.observe(torch.tensor(torch.inf), torch.tensor(1.0))  # squares of what is finite
    assert state.local_scale == 0.5
    state.clear({"w"})
    resumed.load_state_dict(state.state_dict())
    assert resumed.local_scale == state.local_scale == 1


def test_amsgrad_and_unknown_optimizers_keep_gradient_feedback():
    for made in (partial(torch.optim.AdamW, amsgrad=True), torch.optim.NAdam, torch.optim.RMSprop):
        model = Table()
        averager = GradientAverager(model, "onebit", optimizer=made(model.parameters()), epoch=0)
        assert type(averager.state) is Gradient


@pytest.mark.parametrize("make", [partial(dgc, sparsity=0.9), partial(OneBit, min_elements=50, warmup_epochs=0)])
def test_unsent_steps_reach_the_weights_after_a_fall_of_the_learning_rate(make):
    """Unsent steps, divided by the new learning rate, overflow fp16; after an extreme fall, fp32."""

    def compressed(model):
        return torch.cat([model.kernel.detach().float().flatten(), model.matrix.detach().float().flatten()])

    def work(rank, group, dtype, fall):
        model = Table().to(dtype)
        made, averager = averager_of(model, group, make(), partial(torch.optim.Adam, lr=0.1, eps=1e-4))
        for step in range(8):
            if step == 3:
                made.param_groups[0]["lr"], at_fall = 0.1 * fall, compressed(model)
            made.zero_grad()
            prescribed_loss(model, rank, step).backward()
            averager.average()
            assert all(torch.linalg.vector_norm(p.grad).isfinite() for p in model.parameters())
            made.step()
        return compressed(model), compressed(model) - at_fall

    (expected, late), _ = run_ranks(2, partial(work, dtype=torch.float32, fall=1e-10))
    assert late.abs().max() > 0.05
    for dtype, fall in ((torch.float16, 1e-6), (torch.float32, 1e-44)):
        (got, _), (other, _) = run_ranks(2, partial(work, dtype=dtype, fall=fall))
        assert torch.equal(got, other)
        torch.testing.assert_close(got, expected, rtol=0, atol=0.01 if dtype == torch.float16 else 1e-6)

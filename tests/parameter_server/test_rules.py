"""What dist_async promises, with servers and workers as threads, over real connections."""

import gc
import math
import os
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp import NoCompression
from lightning_gradcomp.compressors.kernels.formats import unpack_values
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.parameter_server import messages
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.clocks import Clocks
from lightning_gradcomp.parameter_server.connection import ConnectionLost
from lightning_gradcomp.parameter_server.messages import PUSH, Answer, Request
from lightning_gradcomp.parameter_server.partition import ServerPartition, codec_of, dense_format, parts
from lightning_gradcomp.parameter_server.server import ParameterServer
from tests.averaging.workers import default_dtype
from tests.parameter_server.conftest import SECRET, TIMEOUT, Odd, dgc, dropping, int8, loss, net, onebit, sgd

METHODS = {
    "none": lambda: "none",
    "fp16": lambda: "fp16",
    "int8": int8,
    "dgc": dgc,
    "gradient_dropping": dropping,
    "onebit": onebit,
}
every = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
with_residual = pytest.mark.parametrize("name", [name for name in METHODS if name != "int8"])
"""Without a residual, rounding is random, with draws that depend on the worker's number."""


def train(model, averager, worker, steps):
    for step in range(steps):
        model.zero_grad()
        loss(model, worker, step).backward()
        averager.step()


def in_threads(workers):
    """Runs (function, arguments) side by side, and raises what they raise."""
    errors = []

    def guarded(function, arguments):
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=worker) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("optimizer", [sgd, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)])
@pytest.mark.parametrize("make_model", [net, Odd])
def test_one_worker_is_the_optimizer_alone_to_the_bit(job, servers, optimizer, make_model):
    model, averager = job(servers=servers, optimizer=optimizer, make_model=make_model).worker()
    alone = make_model()
    stepped = optimizer(alone)
    for step in range(5):
        for trained in (model, alone):
            trained.zero_grad()
            loss(trained, 0, step).backward()
        if step == 3:  # a layer that has no part in the loss
            for trained in (model, alone):
                list(trained.modules())[-1].zero_grad()
        for each in (stepped, averager.optimizer):
            each.param_groups[0]["lr"] = 0.01 * (step + 1)  # a schedule
        averager.step()
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


@every
@pytest.mark.parametrize("servers", [1, 5])
def test_numbers_and_parameters_without_elements_train(job, make, servers):
    running = job(make(), servers=servers, make_model=Odd, pull="int8")
    model, averager = running.worker()
    assert {name: p.shape for name, p in running.weights().items()} == {n: p.shape for n, p in model.named_parameters()}
    train(model, averager, 0, 3)
    averager.pull()
    assert all(torch.equal(running.weights()[name], p) for name, p in model.named_parameters())
    assert model.scale != 1
    averager.load_state_dict(averager.state_dict())
    train(model, averager, 0, 1)


@every
def test_parameters_that_the_optimizer_lacks_stay(job, make):
    """Though they have gradients."""
    model, averager = job(make(), optimizer=lambda model: torch.optim.SGD(model[2].parameters(), lr=0.05)).worker()
    start = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    train(model, averager, 0, 2)
    averager.pull()
    assert torch.equal(model[0].weight, start[0]) and not torch.equal(model[2].weight, start[1])


def test_a_parameter_that_ddp_is_told_to_ignore_is_refused(job):
    model = net()
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]
    with pytest.raises(
        ValueError, match=r"'0\.weight' with dist_async: got 'a trainable .*, allowed: requires_grad=False"
    ):
        AsyncAverager(model, sgd(model), servers=[job().servers[0].address], secret=SECRET)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_has_no_effect(job, make, dtype):
    def trained():
        model, averager = job(make(), servers=2, pull="int8").worker()
        train(model, averager, 0, 4)
        averager.load_state_dict(averager.state_dict())
        train(model, averager, 0, 2)
        return list(model.parameters())

    with default_dtype(dtype):
        found = trained()
    assert all(torch.equal(a, b) for a, b in zip(found, trained(), strict=True))


@pytest.mark.parametrize("optimizer", [sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=0.001)])
def test_servers_keep_the_weights_of_a_model_in_bf16_in_fp32(job, optimizer):
    """So that steps smaller than a rounding error of the weights add up. A checkpoint's state may be in bf16."""
    running = job(optimizer=optimizer, make_model=lambda seed=0: net(seed).bfloat16())
    model, averager = running.worker()
    for step in range(2):
        model.zero_grad()
        loss(model.float(), 0, step).backward()
        averager.step()
    [server] = running.servers
    rounded = {
        name: {kind: value.bfloat16() if value.dim() else value for kind, value in state.items()}
        for name, state in server.partition.optimizer_state().items()
    }
    server.partition.load_optimizer_state(rounded)
    averager.step()
    for name, state in server.partition.optimizer_state().items():
        assert {value.dtype for value in state.values()} == {torch.float32}, name
    weights = running.weights().values()
    assert all(each.dtype == torch.float32 and not torch.equal(each, each.bfloat16().float()) for each in weights)


@every
@pytest.mark.parametrize("servers", [1, 2])
def test_the_pushes_replayed_give_the_same_weights(job, make, servers, monkeypatch):
    log, lock, push = [], threading.Lock(), ServerPartition.push

    def noting(shard, request, *body):
        with lock:
            log.append((shard.part.names, request, [each.clone() for each in body]))
            push(shard, request, *body)

    monkeypatch.setattr(ServerPartition, "push", noting)
    running = job(make(), servers=servers)
    workers = [running.worker() for _ in range(3)]
    in_threads([(train, (*worker, number, 6)) for number, worker in enumerate(workers)])
    model = net()
    optimizer, compressor = sgd(model), running.servers[0].compressor
    for server in running.servers:
        replayed = ServerPartition(dict(model.named_parameters()), server.partition.part, optimizer, compressor)
        for names, request, body in log:
            if names == server.partition.part.names:
                push(replayed, request, *body)
        assert replayed.version == 18
        assert all(torch.equal(replayed.weights[name], p) for name, p in server.partition.weights.items())


@with_residual
def test_applied_and_remembered_are_all_gradients(job, name, monkeypatch):
    """With plain SGD: what servers have applied, and what workers have left. Weights move by what is applied."""
    applied, push = {}, ServerPartition.push

    def counting(shard, request, dense, payload, present):
        part = shard.part
        flat = torch.zeros(part.layout.n)
        if part.layout.n:
            codec_of(shard.compressor, request.worker, request.clock).unpack(payload, part.layout).add_to(flat)
        dense_flat = unpack_values(dense, part.dense_layout.n, dense_format(shard.compressor))
        with lock:
            push(shard, request, dense, payload, present)
            for layout, values in ((part.layout, flat), (part.dense_layout, dense_flat)):
                for name, view in zip(layout.names, layout.views(values), strict=True):
                    applied[name] = applied.get(name, 0) + view.double()

    monkeypatch.setattr(ServerPartition, "push", counting)
    running = job(METHODS[name](), servers=2, optimizer=lambda model: sgd(model, momentum=0))
    start = running.weights()
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in start.items()}
    lock, workers = threading.Lock(), [running.worker() for _ in range(3)]

    def work(model, averager, worker):
        for step in range(6):
            model.zero_grad()
            loss(model, worker, step).backward()
            with lock:
                for name, p in model.named_parameters():
                    total[name] += p.grad.double()
            averager.step()

    in_threads([(work, (*worker, number)) for number, worker in enumerate(workers)])
    kinds = {"residual", "velocity", "dense_residual"}
    for name, p in running.weights().items():
        left = sum(
            parts[name].double()
            for _, averager in workers
            for kind, parts in averager.state_dict()["memory"].items()
            if kind in kinds and name in parts
        )
        assert torch.allclose(applied[name] + left, total[name], atol=1e-6, rtol=0)
        assert torch.allclose((start[name] - p).double(), 0.05 * applied[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [int8, lambda: lgc.EDEN(bits=2, min_elements=16)], ids=["int8", "eden"])
def test_pushes_in_few_bits_leave_nothing_behind_and_are_right_on_average(job, make):
    """With plain SGD at learning rate 1: the mean move of the weights over 300 pushes of the same gradient."""

    def rows_of_several_blocks(seed=0):
        return nn.Sequential(nn.Linear(300, 4), nn.Linear(20, 6))

    running = job(
        make(), servers=2, make_model=rows_of_several_blocks, optimizer=lambda model: sgd(model, momentum=0, lr=1.0)
    )
    (model, averager), start, pushes = running.worker(), running.weights(), 300
    gradients = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for name, p in start.items()}
    for _ in range(pushes):
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        averager.step()
    assert not any(averager.state_dict()["memory"].values())
    for name, p in running.weights().items():
        error = ((start[name] - p) / pushes - gradients[name]).norm() / gradients[name].norm()
        assert error < 0.04, name  # 2 bits: 0.36 / √300 = 0.021


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_is_further_ahead_than_the_bound(job, staleness):
    running, lead = job(staleness=staleness), []
    fast, slow = running.worker(), running.worker()

    def lead_of(model, averager):
        for step in range(6):
            train(model, averager, step, 1)
            lead.append(averager.steps - slow[1].steps)  # the slow one may have pushed, but has no answer yet
        averager.close()

    def follow(model, averager):
        for step in range(6):
            while len(lead) < staleness:
                time.sleep(0.001)
            train(model, averager, step, 1)

    in_threads([(lead_of, fast), (follow, slow)])
    assert staleness <= max(lead) <= staleness + 1


def test_a_free_worker_does_not_wait_for_a_slow_one(job):
    running = job(staleness=math.inf)
    idle = running.worker()
    train(*running.worker(), 0, 20)
    assert running.servers[0].partition.version == 20
    idle[1].close()


def test_who_comes_later_begins_with_the_slowest():
    clocks = Clocks(staleness=1)
    assert [clocks.join(1), clocks.join(2)] == [0, 0]
    for _ in range(3):
        clocks.tick(1)
    assert not clocks.wait(1, 0.01) and clocks.join(3) == 0
    clocks.leave(2)
    assert not clocks.wait(1, 0.01)
    clocks.leave(3)
    assert clocks.wait(1, 0.01)


def test_all_stop_at_the_step_that_the_furthest_has_begun():
    clocks = Clocks(staleness=math.inf)
    for worker in (1, 2):
        clocks.join(worker)
    assert not any(clocks.tick(1) for _ in range(3))
    assert [clocks.tick(2, flag=True) for _ in range(4)] == [False, False, False, True]
    assert clocks.tick(1)


CHANGES = {
    "a frozen layer": (
        lambda model, optimizer: model[0].requires_grad_(False),
        "got 'one that was frozen or unfrozen'",
    ),
    "a group": (lambda _, optimizer: optimizer.add_param_group({"params": torch.ones(1)}), "got 'one that was added'"),
    "momentum": (
        lambda _, optimizer: optimizer.param_groups[0].update(momentum=0.5),
        "got 'a different momentum', allowed",
    ),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_what_servers_are_not_told_is_refused(job, change, told):
    running = job()
    model, averager = running.worker()
    train(model, averager, 0, 1)
    change(model, averager.optimizer)
    with pytest.raises(ValueError, match=told):
        train(model, averager, 0, 1)
    averager.close()
    train(*running.worker(), 0, 1)  # the others don't notice


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_the_stability_limit_of_a_delayed_quadratic(delay):
    """x(t+1) = x(t) - a x(t - delay) is stable if and only if 0 < a < 2 cos(pi delay / (2 delay + 1))."""
    limit = 2 * math.cos(math.pi * delay / (2 * delay + 1))

    def final(a):
        weight = torch.nn.Parameter(torch.ones(1, 1))
        part, *_ = parts(Layout.of([]), Layout.of([("w", weight)]), 1)
        shard = ServerPartition({"w": weight}, part, torch.optim.SGD([weight], lr=a), NoCompression())
        return _delayed(shard, a, delay)

    assert final(0.95 * limit) < 0.01 < 10 < final(1.05 * limit)


def test_a_server_whose_weights_no_optimizer_has_saves_and_loads_its_state():
    weight, other = (torch.nn.Parameter(torch.ones(1, 1)) for _ in range(2))
    part, *_ = parts(Layout.of([]), Layout.of([("w", weight)]), 1)
    shard = ServerPartition({"w": weight}, part, torch.optim.SGD([other], lr=0.1), NoCompression())
    shard.load_optimizer_state(shard.optimizer_state())
    assert shard.optimizer_state() == {}


def _delayed(shard, a, delay):
    pulled = [1.0] * (delay + 1)
    for step in range(400):
        gradient, nothing = torch.tensor([pulled[0]]).view(torch.uint8), torch.empty(0, dtype=torch.uint8)
        shard.push(Request(PUSH, 0, step, (a,)), gradient, nothing, torch.ones(1, dtype=torch.uint8))
        pulled = [*pulled[1:], float(shard.weights["w"].detach())]
    return abs(pulled[-1])


def test_a_gradient_that_is_not_finite_leaves_no_trace(job):
    running = job(dgc())
    model, averager = running.worker()
    train(model, averager, 0, 2)
    before, kept = running.weights(), averager.state_dict()["memory"]
    model.zero_grad()
    loss(model, 0, 3).backward()
    model[0].weight.grad[0, 0] = math.nan
    averager.step()
    assert all(torch.equal(before[name], p) for name, p in running.weights().items())
    after = averager.state_dict()["memory"]
    assert all(torch.equal(kept[kind][name], part) for kind in kept for name, part in after[kind].items())
    assert averager.steps == 3


@pytest.mark.parametrize(("values", "error", "size"), [("fp32", 0, 4), ("bf16", 2**-8, 2), ("int8", 0.004, 1.1)])
def test_a_pull_brings_the_servers_weights(job, values, error, size):
    """Rounded to the format of pulls, with errors that don't add up. Biases are exact, and so is `pull`."""
    running = job(dgc(), servers=2, pull=values)
    workers = [running.worker() for _ in range(2)]
    matrices, biases = 12 * 10 + 10 * 6, 10 + 6
    for step in range(8):
        for number, (model, averager) in enumerate(workers):
            model.zero_grad()
            loss(model, number, step).backward()
            averager.step()
            for name, p in model.named_parameters():
                exact = running.weights()[name]
                assert (p - exact).abs().max() <= (error * exact.abs().max() if p.dim() > 1 else 0)
    model, averager = workers[1]
    pushed = averager.stats.bytes_sent - averager.stats.bytes_received  # 0: each is the sum of both
    assert pushed == 0 and averager.stats.bytes_received < 2 * 200 + size * matrices + 4 * biases
    averager.pull()
    assert all(torch.equal(running.weights()[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: "none", 4 * 196),
        (lambda: "fp16", 2 * 196),
        (lambda: "bf16", 2 * 196),
        (int8, 2 * (256 + 4) + 4 * 16),
        (lambda: lgc.TwoBit(min_elements=16, dense_values="int8"), 47 + 8 + 16 + 4),
    ],
    ids=["none", "fp16", "bf16", "int8", "twobit, dense int8"],
)
def test_a_push_has_the_format_of_its_compressor(job, make, size):
    model, averager = job(make()).worker()
    train(model, averager, 0, 1)
    headers, flags, pull = 8 * 5 + 40, 4, 4 * 196
    assert abs(averager.stats.bytes_sent - headers - flags - pull - size) <= 8


def test_versions_of_a_pull_are_the_same_on_all_servers(job):
    running = job(servers=3)
    done = threading.Event()
    trainer, (model, reader) = running.worker(), running.worker()
    seen = []

    def read():
        while not done.is_set() or len(seen) < 2:
            reader.pull()
            seen.append([p.detach().clone() for p in model.parameters()])

    def work():
        train(*trainer, 0, 30)
        done.set()

    log = [running.weights()]
    push = trainer[1].step

    def noting():
        push()
        log.append({name: p.detach().clone() for name, p in trainer[0].named_parameters()})

    trainer[1].step = noting
    in_threads([(read, ()), (work, ())])
    allowed = [[state[name] for name, _ in model.named_parameters()] for state in log]
    assert len(seen) > 1
    for got in seen:
        assert any(all(torch.equal(a, b) for a, b in zip(got, one, strict=True)) for one in allowed)


def test_a_push_that_one_server_alone_has_gives_the_others_no_trouble(job, monkeypatch):
    running = job(servers=2)
    broken, (model, averager) = running.worker(), running.worker()
    sent, send = [], Request.send

    def once(request, connection, *body):
        if sent:
            raise ConnectionLost("killed")
        sent.append(send(request, connection, *body))
        return sent[0]

    monkeypatch.setattr(Request, "send", once)
    with pytest.raises(ConnectionLost, match="killed"):
        train(*broken, 0, 1)
    monkeypatch.undo()
    for connection in broken[1]._connections:  # as where its process ends
        connection.close()
    train(model, averager, 1, 1)
    averager.pull(TIMEOUT)
    assert all(torch.equal(running.weights()[name], p) for name, p in model.named_parameters())


def test_a_worker_that_is_lost_while_it_joins_is_not_waited_for(job, monkeypatch):
    running, lost = job(staleness=0), threading.Event()

    def fail(answer, connection, body):
        lost.set()
        raise ConnectionLost("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "send", fail)
        with pytest.raises(ConnectionLost):
            running.worker()
    assert lost.is_set()
    train(*running.worker(), 0, 2)  # in lock step with nobody


@with_residual
def test_a_worker_goes_on_from_its_state(job, name):
    """In the middle of a run a worker leaves, and another takes its place with what it remembered."""
    whole, halves = job(METHODS[name]()), job(METHODS[name]())
    straight = whole.worker()
    train(*straight, 0, 6)
    model, averager = halves.worker()
    train(model, averager, 0, 3)
    state = averager.state_dict()
    averager.close()
    model, averager = halves.worker(seed=9)
    averager.load_state_dict(state)
    for step in range(3, 6):
        model.zero_grad()
        loss(model, 0, step).backward()
        averager.step()
    pairs = zip(model.parameters(), straight[0].parameters(), strict=True)
    assert averager.steps == 6 and all(torch.equal(a, b) for a, b in pairs)


OTHERS = {
    "another secret": (net, {"secret": "another"}),
    "another model": (lambda: torch.nn.Linear(5, 5), {}),
    "another compressor": (net, {"compressor": dropping()}),
    "another format of pulls": (net, {"pull": "int8"}),
    "another number of servers": (net, {"servers": 2}),
}


@pytest.mark.parametrize(("model", "changed"), OTHERS.values(), ids=OTHERS)
def test_a_worker_that_does_not_fit_is_refused(job, model, changed):
    running = job(dgc())
    other, options = model(), {"compressor": dgc(), "secret": SECRET, "servers": 1, "timeout": TIMEOUT, **changed}
    options["servers"] *= [running.servers[0].address]
    with pytest.raises(ValueError, match=r"^secret, model, .* or version: got"):
        AsyncAverager(other, sgd(other), **options)
    train(*running.worker(), 0, 1)  # the others don't notice


def test_a_worker_of_another_version_is_refused(job, monkeypatch):
    running = job()
    with monkeypatch.context() as patch:
        patch.setattr(messages, "PROTOCOL", -1)
        with pytest.raises(ValueError, match="or version: got"):
            running.worker()
    train(*running.worker(), 0, 1)


def test_a_port_in_use(job):
    running = job()
    port = int(running.servers[0].address.partition(":")[2])
    with pytest.raises(OSError, match="Address already in use"):
        ParameterServer(net(), sgd(net()), secret=SECRET, port=port)


def test_many_pushes_leave_nothing_behind(job):
    running = job()
    model, averager = running.worker()

    def held():
        threads = {thread.name for thread in threading.enumerate()}
        return (
            len(list(Path("/proc/self/fd").iterdir())),
            len(threads),
            int(Path("/proc/self/statm").read_text().split()[1]),
        )

    train(model, averager, 0, 50)
    gc.collect()
    files, threads, pages = held()
    train(model, averager, 0, 100)
    for _ in range(5):  # workers that come and go
        running.worker()[1].close()
    gc.collect()
    files_then, threads_then, pages_then = held()
    assert files_then <= files + 30 and threads_then <= threads + 5
    assert pages_then - pages < 2**22 / os.sysconf("SC_PAGE_SIZE")  # 4 MiB


def test_more_steps_bring_the_loss_down(job):
    running = job(dgc(), servers=2)
    workers = [running.worker() for _ in range(2)]

    def mean_loss(model):
        return sum(float(loss(model, worker, step).detach()) for worker in range(2) for step in range(5))

    before = mean_loss(workers[0][0])

    def work(model, averager, worker):
        for step in range(60):
            model.zero_grad()
            loss(model, worker, step % 5).backward()
            averager.step()

    in_threads([(work, (*worker, number)) for number, worker in enumerate(workers)])
    workers[0][1].pull()
    assert mean_loss(workers[0][0]) < 0.8 * before


@pytest.mark.parametrize("make_model", [net, Odd])
def test_parts_cover_every_parameter_once(make_model):
    model = make_model()
    layout = Layout.of((n, p) for n, p in model.named_parameters() if p.dim() > 1 and p.numel())
    dense = Layout.of((n, p) for n, p in model.named_parameters() if n not in layout.names)
    for servers in (1, 2, 3, 7):
        names = [name for part in parts(layout, dense, servers) for name in part.names]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters())
        starts = [part.start for part in parts(layout, dense, servers)]
        assert all(a <= b for a, b in pairwise(starts))


WRONG = [("staleness", bound, "a whole number from 0, or math.inf") for bound in (-1, 1.5, math.nan, True, "4", None)]
WRONG += [("pull", values, "'fp32', 'bf16' or 'int8'") for values in (None, "dgc", "int2", dropping())]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_option_is_refused(name, value, allowed):
    model = net()
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {value!r}, allowed: {allowed}")):
        ParameterServer(model, sgd(model), secret=SECRET, **{name: value})


@pytest.mark.parametrize("staleness", [0, 4.0, math.inf])  # a command line may pass 4 as 4.0
def test_a_bound_is_any_whole_number(job, staleness):
    train(*job(staleness=staleness).worker(), 0, 2)

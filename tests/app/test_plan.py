"""`gradcomp plan`: what it prints, what it refuses, and that the bytes and the model behind it are right."""

import os
import re

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.app import plan
from lightning_gradcomp.app.plan import Link, Method, Plan
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.registry import entries
from tests.threads import run_ranks

TINY = ("recipe=stdlib_gpt", "model.layers=1", "model.width=16", "data.batch_size=6")


def row(printed, method):
    """The cells of a method's line."""
    [line] = [line for line in printed.splitlines() if line.startswith(f"{method} ")]
    return line.removeprefix("none (dense)").split()


def test_it_prints_a_table_and_a_verdict(command, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    code, text, _ = command("plan", *TINY, "--rate-mbit", "10", "--ranks", "3")
    assert code == 0 and not list(tmp_path.iterdir())
    out, progress = text.split("measuring a step\n")
    assert progress.split() == [word for entry in entries() for word in ("measuring", entry.name)]
    assert re.search(r"^Compressing was measured on this \w+; repeats differ by \d+%\.$", out, re.MULTILINE)
    assert out.startswith(f"{' '.join(TINY)}: 12,528 parameters, 0.1 MB of gradients. A step computes for ")
    assert "N=3 ranks over 10 Mbit/s, 0.1 ms delay." in out
    assert all(len(row(out, entry.name)) == 10 for entry in entries() if entry.name != "none")
    assert row(out, "none")[:3] == ["ring", f"{4 / 3 * 4 * 12.528:,.0f}", "0.0"]
    assert "pick " in out.splitlines()[-1] or "don't compress" in out.splitlines()[-1]
    assert max(map(len, out.splitlines()[1:])) <= 100


def test_by_default_the_link_has_1_gbit(command):
    code, text, _ = command("plan", *TINY, "--step-ms", "1000")
    assert code == 0
    out = text.partition("measuring ")[0]
    assert "A step computes for 1000 ms (given).\nModelled for N=2 ranks over 1 Gbit/s, 0.1 ms delay.\n" in out
    assert "\ndon't compress: no method is modelled at 1.1x or better\n" in out


def test_a_busy_machine_is_told_of(command, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (7.3, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(plan, "measured", lambda *_: planned())
    _, text, _ = command("plan", *TINY)
    assert "gradcomp plan: this machine is busy (load 7.3, 2 cores): times will be too long." in text


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_named_network_is_a_run_on_random_images(monkeypatch):
    options = plan.read(["resnet18", "data.batch_size=6", "--ranks", "3", "data.size=72"])
    monkeypatch.setattr(plan, "REPEATS", 1)
    workload = plan.composed(options.run, 3, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == 11_689_512  # torchvision's
    assert workload.loss().ndim == 0 and isinstance(workload.optimizer, torch.optim.SGD)


def test_methods_that_the_optimizer_rules_out_are_left_out(command):
    rmsprop = ("optimizer=sgd", "optimizer._target_=torch.optim.RMSprop")
    rmsprop += ("~optimizer.nesterov", "~optimizer.fused", "~optimizer.betas")
    code, out, _ = command("plan", *TINY, *rmsprop, "--rate-mbit", "10")
    assert code == 0
    assert "\ndgc  " not in out and "dgc is left out: the optimizer of DGC: got " in out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "gradcomp plan: got 'no MODEL', allowed: gradcomp plan resnet50, or gradcomp plan recipe=NAME"),
        ("recipe=stdlib_gpt data.context=0", "data.context: got 0, allowed: a whole number from 1"),
        (
            "recipe=stdlib_gpt compressor=powersgd +compressor.rank=1 trainer.devices=8",
            "gradcomp plan: got 'compressor=powersgd +compressor.rank=1 trainer.devices=8', allowed: words about model",
        ),
        ("recipe=stdlib_gpt optimizer.lr=-1", "optimizer: Invalid learning rate: -1"),
        ("recipe=stdlib_gpt --ranks 3", "data.batch_size: got 32, allowed: a multiple of 3 (ranks), 3 or more"),
        ("resnet18 recipe=digits", "MODEL with a recipe: got 'resnet18', allowed: recipe=digits alone"),
        ("resnet18 --batch-size 3", "unrecognized arguments: --batch-size"),
        ("resnet18 --ranks 1", "--ranks: got 1, allowed: 2 or more"),
        ("resnet18 --rate-mbit 0", "--rate-mbit: got 0.0, allowed: 0.001 or more"),
        ("resnet18 --rate-mbit fast", "--rate-mbit: invalid float value: 'fast'"),
    ],
)
def test_a_wrong_word_is_answered_with_a_sentence(command, line, sentence):
    code, text, _ = command("plan", *line.split())
    assert code == 1
    assert text.startswith(f"gradcomp: {sentence}") and "\n" not in text


NETWORK = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4)))


def planned(encode=0.01):
    """A network of 4 million parameters that computes for 0.1 s, and methods whose work is 10 ms and 1 ms."""
    methods = {}
    for entry in entries():
        compressor = entry.cls().for_optimizer(torch.optim.SGD(NETWORK.parameters(), lr=0.1))
        work = (0.0, 0.0) if entry.name == "none" else (encode, 0.001)
        methods[entry.name] = Method(compressor, Gradients(NETWORK, compressor).largest, *work)
    return Plan(0.1, 0.06, methods)


def test_the_verdict_follows_from_the_link_and_the_work():
    assert planned().verdict(2, Link(1e-4, 1e7)).startswith("pick dgc, modelled at ")
    assert planned().verdict(2, Link(1e-5, 1e10)).startswith("don't compress: ")
    assert planned(encode=10.0).verdict(2, Link(1e-4, 1e7)).startswith("don't compress: ")


@pytest.mark.parametrize("words", ["package.module:Net", "resnet18 resnet50", "recipe=no_such"])
def test_hydra_refuses_other_words(command, words):
    code, text, _ = command("plan", *words.split())
    assert code == 1
    assert text.startswith("gradcomp: ") and words.split()[-1].removeprefix("recipe=") in text
    assert "Traceback" not in text


@pytest.mark.parametrize("n", [2, 8])
def test_a_faster_link_shortens_steps_and_lowers_speed_ups(n):
    made, links = planned(), [Link(1e-4, rate) for rate in (1e6, 1e7, 1e8, 1e9, 1e10)]
    for entry in entries():
        seconds = [made.best(entry.name, n, link).seconds for link in links]
        speed_ups = [made.speed_up(entry.name, n, link) for link in links]
        assert seconds == sorted(seconds, reverse=True)
        assert entry.name == "none" or speed_ups[0] > speed_ups[-1]


def test_steps_by_hand():
    made, link, dense = planned(), Link(1e-3, 1e8), 4 * 4_004_000
    assert made.step("none", "ring", 2, link).seconds == pytest.approx(0.1 + 0.002 + dense / 1e8 - 0.6 * 0.06)
    assert made.step("fp16", "ring", 2, link).seconds == pytest.approx(0.11 + 0.002 + dense / 2e8 - 0.6 * 0.06)
    step = made.step("dgc", "all_gather", 4, link)  # three others' payloads, sent at once
    assert step.seconds == pytest.approx(0.1 + 0.01 + 3 * 0.001 + 1e-3 + step.sent / 1e8)
    step = made.step("dgc", "two_phase", 4, link)  # there and back; a quarter is encoded again
    assert step.seconds == pytest.approx(0.1 + 0.0125 + 2 * 0.001 + 2e-3 + step.sent / 1e8)


def test_backward_hides_the_dense_exchange_from_that_bandwidth_on():
    made = planned()
    enough = made.bandwidth_to_hide(4, 1e-3)
    computing = [made.step("none", "ring", 4, Link(1e-3, share * enough)).seconds for share in (0.99, 1.01)]
    assert computing[0] > computing[1] == 0.1
    assert made.bandwidth_to_hide(64, 1e-3) == float("inf")


@pytest.mark.parametrize(("name", "topology"), [("dgc", "all_gather"), ("onebit", "two_phase"), ("none", "ring")])
def test_the_bytes_are_those_that_are_sent(name, topology):
    options = {"dgc": {"start_sparsity": 0.9999}, "onebit": {"warmup_steps": 0}, "none": {}}[name]
    [compressor] = [entry.cls(**options) for entry in entries() if entry.name == name]

    def rank_main(rank, group):
        model = torch.nn.Sequential(torch.nn.Linear(64, 90), torch.nn.Linear(90, 50))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        where = "all_gather" if topology == "ring" else topology
        averager = lgc.GradientAverager(model, compressor, optimizer=optimizer, process_group=group, topology=where)
        model(torch.ones(4, 64)).square().mean().backward()
        averager.step()
        made = plan.measured(plan.Workload(model, lambda: torch.zeros(()), optimizer), torch.device("cpu"), 1.0)
        return averager.stats.bytes_sent, made.step(name, topology, 2, Link(0.0, 1.0)).sent

    results = run_ranks(2, rank_main)
    assert max(sent for sent, _ in results) == results[0][1]  # of the rank that sends the most

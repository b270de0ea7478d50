"""`gradcomp plan`: what it prints, what it refuses, and that the bytes and the model behind it are right."""

import os
import sys

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.app import plan
from lightning_gradcomp.app.plan import Link, Method, Plan
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.registry import entries
from tests.app.command import ROOT, gradcomp
from tests.processes import run
from tests.threads import run_ranks

TINY = """
import lightning as L
import torch
from lightning_gradcomp import CompressedDDPStrategy


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(300, 200)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 300)), batch_size=8)


class Argument(Tiny):
    def __init__(self, width):
        super().__init__()


class Two(Tiny):
    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


class Attached(Tiny):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_epochs)


class Rmsprop(Tiny):
    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters())


class NoData(L.LightningModule):
    training_step = Tiny.training_step
    configure_optimizers = Tiny.configure_optimizers
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "tiny_module.py").write_text(TINY)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield "tiny_module:Tiny"
    sys.modules.pop("tiny_module", None)


def row(printed, method):
    """The cells of a method's line."""
    [line] = [line for line in printed.splitlines() if line.startswith(f"{method} ")]
    return line.removeprefix("none (dense)").split()


def test_it_prints_a_table_and_a_verdict(tiny, tmp_path):
    answer = gradcomp(tmp_path, "plan", tiny, "--rate-mbit", "10", "--ranks", "3")
    assert (answer.returncode, answer.stderr) == (0, "")
    out = answer.stdout
    assert out.startswith("tiny_module:Tiny: 60,200 parameters, 0.2 MB of gradients. A step computes for ")
    assert "N=3 ranks over 10 Mbit/s, 0.1 ms delay (given)." in out
    assert all(len(row(out, entry.name)) == 10 for entry in entries() if entry.name != "none")
    assert row(out, "none")[:3] == ["ring", f"{4 / 3 * 4 * 60.2:,.0f}", "0.0"]
    assert "pick " in out.splitlines()[-1] and "modelled at " in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 100


def test_without_a_link_it_answers_for_four(tiny, command):
    code, out, _ = command("plan", tiny, "--step-ms", "1000")
    assert code == 0
    assert "A step computes for 1000 ms (given)." in out
    verdicts = out.splitlines()[-4:]
    assert [line.split(": ")[0] for line in verdicts] == ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
    assert verdicts[3].endswith("don't compress: no method is modelled at 1.1x or better")


def test_the_words_of_a_run_are_planned(command, tmp_path):
    words = ("recipe=stdlib_gpt", "model.layers=1", "model.width=16", "data.batch_size=4")
    code, out, _ = command("plan", *words, "--step-ms", "1000", "--rate-mbit", "10")
    assert code == 0 and out.startswith(f"{' '.join(words)}: 12,528 parameters, 0.1 MB of gradients. ")
    assert "pick " in out.splitlines()[-1] or "don't compress" in out.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_methods_that_the_optimizer_rules_out_are_left_out(tiny, command):
    code, out, _ = command("plan", "tiny_module:Rmsprop", "--rate-mbit", "10")
    assert code == 0
    assert "\ndgc  " not in out and "dgc is left out: the optimizer of DGC: got " in out


def test_ranks_measure_their_link_and_the_first_prints(tiny, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*launch, "-m", "lightning_gradcomp", "plan", tiny]
    done = run(*words, cwd=str(tmp_path), env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("N=2 ranks over ") == done.stdout.count(" ms a message (measured).") == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "MODEL: got None, allowed: resnet18, resnet50, swin, your LightningModule as package.module:Class, or "),
        (
            "resnet18 recipe=digits",
            "argument: got 'recipe=digits', allowed: one MODEL, and the options of gradcomp plan",
        ),
        ("recipe=stdlib_gpt data.context=0", "data.context: got 0, allowed: a whole number from 1"),
        ("recipe=stdlib_gpt optimizer.lr=-1", "optimizer: Invalid learning rate: -1"),
        ("recipe=stdlib_gpt --ranks 3", "data.batch_size: got 32, allowed: a multiple of 3 (ranks), 3 or more"),
        ("recipe=digits --classes 3", "--classes with recipe=digits: got 3, allowed: with resnet18"),
        ("nowhere.model:Net", "MODEL: got 'nowhere.model:Net', allowed: a class that can be imported here: No module"),
        ("tiny_module:Missing", "MODEL: got 'tiny_module:Missing', allowed: a LightningModule"),
        ("tiny_module:Argument", "Argument(): got "),
        ("tiny_module:Two", "Two.configure_optimizers(): got '2 optimizers', allowed: one"),
        ("tiny_module:Attached", "Attached: got "),
        ("tiny_module:NoData", "NoData: got "),
        ("resnet18 resnet50", "argument: got 'resnet50', allowed: one MODEL, and the options of gradcomp plan --help"),
        ("resnet18 --ranks 1", "--ranks: got 1, allowed: 2 to 1024"),
        ("resnet18 --rate-mbit 0", "--rate-mbit: got 0.0, allowed: 0.001 to "),
        ("resnet18 --rate-mbit fast", "--rate-mbit: invalid float value: 'fast'"),
        ("resnet18 --delay-ms 3", "--delay-ms: got 3.0, allowed: with --rate-mbit"),
        ("tiny_module:Tiny --batch-size 3", "--batch-size with tiny_module:Tiny: got 3, allowed: with resnet18"),
    ],
)
def test_a_wrong_word_is_answered_with_a_sentence(tiny, command, line, sentence):
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


@pytest.mark.parametrize("n", [2, 8])
def test_a_faster_link_shortens_steps_and_lowers_speed_ups(n):
    links = [Link(1e-4, rate) for rate in (1e6, 1e7, 1e8, 1e9, 1e10)]
    for entry in entries():
        seconds = [planned().best(entry.name, n, link).seconds for link in links]
        speed_ups = [planned().speed_up(entry.name, n, link) for link in links]
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
    made, enough = planned(), planned().bandwidth_to_hide(4, 1e-3)
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
        made = plan.measured(plan.Workload(model, lambda: torch.zeros(()), optimizer), None, torch.device("cpu"), 1.0)
        return averager.stats.bytes_sent, made.step(name, topology, 2, Link(0.0, 1.0)).sent

    results = run_ranks(2, rank_main)
    assert max(sent for sent, _ in results) == results[0][1]  # of the rank that sends the most

"""`gradcomp plan`: what it refuses, what it prints and writes, and when it says that nothing pays."""

import json
import sys

import pytest
import torch
import torch.distributed as dist

import lightning_gradcomp as lgc
from benchmarks.methods import compressor as without_warm_up
from lightning_gradcomp.app.plan import measure, options, report
from lightning_gradcomp.app.plan.forecast import Computation, Forecast, Link, Work, bytes_of_step, topologies
from lightning_gradcomp.app.plan.workload import Workload, lightning_module
from lightning_gradcomp.registry import entries
from tests.app.command import gradcomp
from tests.app.test_parts import pretend_gpus
from tests.threads import run_ranks

CPU = torch.device("cpu")
TINY = """
import lightning as L
import torch


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self):
        images = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=8)


class Argument(Tiny):
    def __init__(self, width):
        super().__init__()


class Two(Tiny):
    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


class Searching(Tiny):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Attached(Tiny):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_epochs)


class Sparse(Tiny):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(9, 64, sparse=True)

    def training_step(self, batch, index):
        return self.words(torch.arange(8)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Tiny):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class NoData(L.LightningModule):
    training_step = Tiny.training_step
    configure_optimizers = Tiny.configure_optimizers


class NoStep(L.LightningModule):
    train_dataloader = Tiny.train_dataloader
    configure_optimizers = Tiny.configure_optimizers


class Other:
    pass
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "tiny_module.py").write_text(TINY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield "tiny_module:Tiny"
    sys.modules.pop("tiny_module", None)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "MODEL: got None, allowed: resnet18, resnet50, swin, or a LightningModule as package.module:Class"),
        ("vgg", "MODEL: got 'vgg', allowed: resnet18"),
        ("a.b:", "MODEL: got 'a.b:', allowed: resnet18"),
        ("nowhere.model:Net", "MODEL: got 'nowhere.model:Net', allowed: what can be imported here"),
        ("resnet18 resnet50", "argument: got 'resnet50', allowed: one MODEL; --batch-size"),
        ("resnet18 --batch 3", "argument: got '--batch', allowed: one MODEL; --batch-size"),
        ("resnet18 --batch-size 0", "--batch-size: got '0', allowed: a whole number from 1"),
        ("resnet18 --ranks 1", "--ranks: got '1', allowed: a whole number from 2 to 1024"),
        ("resnet18 --rate-mbit 0", "--rate-mbit: got '0', allowed: a number above 0"),
        ("resnet18 --rate-mbit fast", "--rate-mbit: got 'fast', allowed: a number above 0"),
        ("resnet18 --delay-ms 3", "--delay-ms: got 3.0, allowed: with --rate-mbit"),
        ("resnet18 --epochs 3", "--epochs, --steps: got (3, None), allowed: both"),
        ("json:Net --batch-size 3", "--batch-size with json:Net: got 3, allowed: with resnet18, resnet50, swin"),
    ],
)
def test_wrong_options_are_refused(line, sentence):
    with pytest.raises(ValueError) as refused:
        options.read(line.split())
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Missing", "MODEL: got 'tiny_module:Missing', allowed: a LightningModule; that module has no such class"),
        ("Other", "MODEL: got 'tiny_module:Other', allowed: a LightningModule"),
        ("Argument", "Argument(): got TypeError"),
        ("Two", "Two.configure_optimizers(): got [SGD"),
        ("Searching", "Searching.configure_optimizers(): got LBFGS"),
        ("Attached", "Attached.trainer: got None, allowed: hooks that don't use it"),
        ("Manual", "Manual.automatic_optimization: got False, allowed: True"),
        ("NoData", "NoData.train_dataloader: got None, allowed: a method of the class's own"),
        ("NoStep", "NoStep.training_step: got None, allowed: a method of the class's own"),
    ],
)
def test_a_module_that_cannot_be_planned_is_refused(tiny, name, sentence):
    with pytest.raises(ValueError) as refused:
        lightning_module(f"tiny_module:{name}", CPU)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("tiny_module:Sparse", "gradcomp: gradients of 'words': got 'Embedding(sparse=True)', allowed: sparse=False"),
        ("resnet18 --batch-size 1 --image-size 32", "gradcomp: Expected more than 1 value per channel when training"),
    ],
)
def test_a_step_that_cannot_be_measured_is_answered_with_a_sentence(tiny, monkeypatch, line, sentence):
    monkeypatch.setattr(measure, "hide_known_messages", lambda: None)
    monkeypatch.setattr(measure, "TIMED_SECONDS", 0)
    monkeypatch.setattr(sys, "argv", ["gradcomp", "--process", "plan", *line.split()])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert str(ended.value).startswith(sentence)


def test_the_command_plans_a_module_of_the_users(tiny, tmp_path):
    (tmp_path / "queue.py").write_text("raise RuntimeError('in place of the standard library')")
    answer = gradcomp(tmp_path, "plan", tiny)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("tiny_module:Tiny: 4,160 trainable parameters, 0.0 MB of gradients in fp32\n")
    assert "measured: batch 8 a rank, one rank alone, CPU" in answer.stdout
    for rate in ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"):
        assert f"modelled ms a step over {rate}" in answer.stdout
        assert any(line.startswith(f"{rate}: ") for line in answer.stdout.splitlines())
    assert "Warning" not in answer.stderr


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_given_link_a_figure_and_everything_in_json(tiny, tmp_path, capsys):
    chosen = options.read([tiny, "--rate-mbit", "50", "--ranks", "4", "--out", str(tmp_path / "out")])
    measure.run(chosen, measure.workload_of(chosen, CPU), None, CPU)
    printed = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")]
    for entry in entries():
        assert rows.count(entry.name) == 2
    assert "modelled ms a step" in printed and "modelled to dense, N=4" in printed and "N=1024" in printed
    out = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert out["N"] == 4 and out["trainable_parameters"] == 4160
    [modelled] = out["modelled"].values()
    assert modelled["link"] == {"latency": pytest.approx(2e-4), "bandwidth": 0.95 * 50e6 / 8, "gathers": 1, "busy": 0}
    assert {(step["method"], step["topology"]) for step in modelled["steps"] if step["workers"] == 4} >= {
        ("dgc", "two_phase"),
        ("powersgd", "all_gather"),
        ("none", "ring"),
    }
    assert (tmp_path / "out" / "plan.png").stat().st_size and "<svg" in (tmp_path / "out" / "plan.svg").read_text()


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_ranks_measure_their_link_and_one_prints(tiny, capsys):
    chosen = options.read([tiny])
    workloads = [measure.workload_of(chosen, CPU) for _ in range(2)]
    run_ranks(2, lambda rank, group: measure.run(chosen, workloads[rank], group, CPU))
    printed = capsys.readouterr().out
    assert printed.count("trainable parameters") == 1
    assert "2 ranks at the same time" in printed and "measured, N=2: " in printed


@pytest.mark.parametrize(("gpus", "local", "device", "backend"), [(2, 3, "cuda:1", "gloo"), (4, 3, "cuda:3", "nccl")])
def test_ranks_share_gpus(gpus, local, device, backend, monkeypatch):
    pretend_gpus(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    joined = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **ranks: joined.append(name))
    for name, value in {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    own = measure.own_device()
    assert str(own) == device
    measure.join(own)
    assert joined == [backend]


def forecast(compute=0.1, backward=0.06, work=None):
    """Of a network with 4 million parameters and of methods whose work takes 10 ms to encode and 1 ms to decode."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4)))
    methods = {entry.name: (entry.cls(), work or Work(0.01, 0.001)) for entry in entries()}
    methods["none"] = methods["none"][0], Work(0.0, 0.0)
    return Forecast(model, Computation(compute, backward), methods)


def test_it_says_when_not_to_compress():
    made = forecast()
    fast, slow = Link(1e-5, 1e10), Link(1e-4, 1e7)
    assert made.advice(2, fast, corrected=True).startswith("don't compress: the dense exchange is modelled at 0.0 ms")
    advice = made.advice(2, slow, corrected=True)
    assert advice.startswith("pick dgc, modelled at ") and "with an optimizer other than SGD and Adam, " in advice
    assert "(N=2, all_gather)" in advice
    assert not made.advice(2, slow, corrected=False).startswith("pick dgc")
    assert made.advice(2, Link(1e-4, 1e8), corrected=True).startswith("pick")
    slow_work = forecast(work=Work(10.0, 1.0))
    assert slow_work.advice(2, slow, corrected=True).startswith("don't compress: ")


def test_a_step_by_hand():
    made, link = forecast(), Link(1e-3, 1e8)
    dense = 4 * 4_004_000
    assert made.dense(2, link) == pytest.approx(0.1 + 0.002 + dense / 1e8 - 0.6 * 0.06)
    step = made.step("dgc", "all_gather", 2, link)
    assert step.seconds == pytest.approx(0.1 + 0.01 + 0.001 + 0.001 + step.bytes.sent / 1e8)
    assert step.speed_up == pytest.approx(made.dense(2, link) / step.seconds)
    assert made.step("none", "ring", 2, link).speed_up == 1
    half = made.step("fp16", "ring", 2, link)
    assert half.seconds == pytest.approx(0.1 + 0.01 + 0.002 + dense / 2 / 1e8 - 0.6 * 0.06)
    assert [step.seconds for step in made.table(8, link)] == sorted(step.seconds for step in made.table(8, link))


def test_a_run_by_hand():
    made, link = forecast(), Link(1e-3, 1e8)
    made.methods["dgc"] = lgc.DGC(sparsity=0.999, values="fp32", dense_epochs=1, warmup_epochs=2), Work(0.01, 0.001)
    dense, run = made.step("none", "ring", 2, link), made.run("dgc", 2, link, 6, 10)
    levels = [made.best("dgc", 2, link, sparsity) for sparsity in (0.9, 0.99, 0.999, 0.999, 0.999)]
    assert run.seconds == pytest.approx(10 * (dense.seconds + sum(step.seconds for step in levels)), rel=1e-3)
    assert run.sent == pytest.approx(10 * (dense.bytes.sent + sum(step.bytes.sent for step in levels)), rel=1e-3)
    assert run.ratio == pytest.approx(60 * dense.bytes.sent / run.sent)
    assert made.run("none", 2, link, 6, 10).speed_up == 1
    made.methods["dgc"] = lgc.DGC(sparsity=0.98, start_sparsity=0.75), Work(0.01, 0.001)
    counts = {0.75: 4, 0.9375: 16, 0.98: 40}
    levels = {sparsity: made.best("dgc", 2, link, sparsity) for sparsity in counts}
    assert made.run("dgc", 2, link, 6, 10).sent == sum(counts[each] * levels[each].bytes.sent for each in counts)
    # A level that would send more than a dense step does is one.
    made.methods["dgc"] = lgc.DGC(sparsity=0.01, values="fp32"), Work(0.01, 0.001)
    assert made.run("dgc", 2, link, 1, 10).ratio == 1


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_bytes_are_those_that_are_sent(entry):
    compressor = without_warm_up(entry.name)
    for topology in topologies(compressor):

        def rank_main(rank, group, topology=topology):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(64, 90), torch.nn.Linear(90, 50))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            where = "all_gather" if topology == "ring" else topology
            averager = lgc.GradientAverager(
                model, compressor, optimizer=optimizer, process_group=group, topology=where, steps_per_epoch=1
            )
            model(torch.ones(4, 64)).square().mean().backward()
            averager.average()
            averager.commit()
            return averager.stats.bytes_sent, bytes_of_step(compressor, model, topology, 3).sent

        results = run_ranks(3, rank_main)
        assert max(sent for sent, _ in results) == results[0][1]


def test_the_second_table_names_topologies():
    model = torch.nn.Linear(1, 1)
    workload = Workload("it", model, lambda: torch.zeros(1), torch.optim.SGD(model.parameters(), lr=0.1), 8)
    text = report.Report(workload, forecast(), {"a link": Link(1e-4, 1e7)}, 8, CPU, 1, 70.0, (3, 5)).text()
    [row] = [line for line in text.splitlines() if line.startswith("| onebit")][2:]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells[0].endswith("x a") and cells[-1].endswith("x t") and len(cells) == 10
    assert "a step there takes 100.0 ms" in text and "Modelled run of 3 epochs of 5 steps" in text
    assert "modelled to dense, N=8" in text and "dense exchange over a link: " in text

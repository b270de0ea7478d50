"""How many ranks a run has and where they compute: on the CPU, on GPUs, on one that they share, under a launcher."""

import os
import signal
import time

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.app import compose, ranks
from lightning_gradcomp.app.ranks import is_rank_zero, place
from tests.app.conftest import composed

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run",
}  # fmt: skip
SLURM = {"SLURM_NTASKS": "6", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}


@pytest.fixture
def gpus(monkeypatch):
    def there_are(number):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)

    return there_are


@pytest.mark.parametrize(
    ("number", "devices", "ranks", "shared"),
    [
        (0, "auto", 2, []),
        (0, 3, 3, []),
        (1, "auto", 2, [0, 0]),
        (1, 1, 1, []),
        (2, "auto", 2, []),
        (2, 5, 5, [0, 1, 0, 1, 0]),
        (4, "auto", 4, []),
    ],
)
def test_ranks_of_a_machine(gpus, number, devices, ranks, shared):
    gpus(number)
    placed = place("auto", devices, "auto")
    assert (placed.accelerator, placed.per_node, placed.nodes) == ("cuda" if number else "cpu", ranks, 1)
    assert placed.shared_gpus == [torch.device("cuda", index) for index in shared]
    assert place("cpu", devices, 1).shared_gpus == []


def test_ranks_that_share_a_gpu_exchange_over_gloo(gpus):
    gpus(1)
    placed = place("auto", "auto", "auto")
    made = compose._strategy(composed("compressor=onebit"), placed)
    assert made.parallel_devices == [torch.device("cuda", 0)] * 2 and made.process_group_backend == "gloo"
    assert isinstance(made, lgc.CompressedDDPStrategy)
    with pytest.raises(ValueError, match=r"trainer\.devices with strategy=hsdp: got 2, allowed: up to 1"):
        compose._strategy(composed("strategy=hsdp"), placed)


@pytest.mark.parametrize(("environment", "auto", "first"), [(TORCHRUN, (2, 2), False), (SLURM, (3, 2), True)])
def test_a_launcher_decides(monkeypatch, environment, auto, first):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    placed = place("cpu", "auto", "auto")
    assert (placed.per_node, placed.nodes, is_rank_zero()) == (*auto, first)
    assert place("cpu", *auto) == placed
    for option, wrong in (("devices", (9, auto[1])), ("num_nodes", (auto[0], 9))):
        with pytest.raises(ValueError, match=rf"^trainer\.{option}: got 9, allowed: auto, or the \d that torchrun or"):
            place("cpu", *wrong)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tpu", "auto", "auto"), "trainer.accelerator: got 'tpu', allowed: auto, cpu, cuda"),
        (("cuda", "auto", "auto"), "trainer.accelerator: got 'cuda', allowed: auto, cpu: there is no GPU here"),
        (("cpu", 0, "auto"), "trainer.devices: got 0, allowed: auto, or a whole number from 1"),
        (("cpu", "two", "auto"), "trainer.devices: got 'two'"),
        (("cpu", True, "auto"), "trainer.devices: got True"),
        (("cpu", 2, 1.5), "trainer.num_nodes: got 1.5"),
        (("cpu", 2, 2), "trainer.num_nodes: got 2, allowed: 1; under torchrun or SLURM more"),
    ],
)
def test_what_there_is_not(gpus, words, sentence):
    gpus(0)
    with pytest.raises(ValueError) as refused:
        place(*words)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_ranks_exist_ends_them(monkeypatch, number, code):
    launch = ranks.elastic_launch

    def launch_after_the_signal(*arguments):
        os.kill(os.getpid(), number)
        return launch(*arguments)

    monkeypatch.setattr(ranks, "elastic_launch", launch_after_the_signal)
    with pytest.raises(SystemExit) as ended:
        ranks.start(2, time.sleep, 600)
    assert ended.value.code == code

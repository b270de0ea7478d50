"""The task: learning rate, optimizer, random numbers; and what a run has besides."""

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_gradcomp.app.compose import SeedEachStep
from lightning_gradcomp.app.scheduler import WarmupCosine
from lightning_gradcomp.app.summary import table
from lightning_gradcomp.compressors.schedules import dense_start
from tests.app.conftest import built
from tests.averaging.workers import HAS_MUON


def rates(scheduler: WarmupCosine, epoch_steps: int, epochs: int) -> list[float]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.4)
    schedule, seen = scheduler(optimizer, epoch_steps, epochs), []
    for _ in range(epoch_steps * epochs):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_warm_up_then_cosine():
    seen = rates(WarmupCosine(warmup_steps=4), 12, 2)
    assert seen[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert seen[4:] == pytest.approx([0.2 * (1 + math.cos(math.pi * step / 20)) for step in range(21)])
    assert rates(WarmupCosine(warmup_steps=None, warmup_epochs=0.5), 8, 3) == rates(WarmupCosine(warmup_steps=4), 8, 3)
    above_zero = rates(WarmupCosine(warmup_steps=0, end=0.25), 4, 2)
    assert [above_zero[step] for step in (0, 4, 8)] == pytest.approx([0.4, 0.25, 0.1])


@pytest.mark.parametrize(
    ("words", "precision", "fused"),
    [((), "32-true", True), ((), "16-mixed", False), (("optimizer.fused=false",), "32-true", False)],
)
@pytest.mark.parametrize("name", ["adamw", *["muon"] * HAS_MUON])
def test_optimizers_are_fused_where_gradients_can_still_be_clipped(name, words, precision, fused):
    run = built("model=swin_mini", f"optimizer={name}", "trainer.max_epochs=3", *words)
    run.data.trainer, run.trainer.datamodule, run.task.trainer = run.trainer, run.data, run.trainer
    run.data.setup("fit")
    run.trainer.strategy.precision_plugin = SimpleNamespace(precision=precision)
    made = run.task.configure_optimizers()
    assert made["optimizer"].param_groups[-1]["fused"] is fused and made["lr_scheduler"]["interval"] == "step"


def test_ranks_draw_other_numbers_and_a_resumed_run_the_same():
    def drawn(rank, epoch, batch):
        trainer = SimpleNamespace(global_rank=rank, current_epoch=epoch)
        SeedEachStep(5).on_train_batch_start(trainer, None, None, batch)
        return torch.rand(4).tolist()

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    places = [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3)]
    assert len({tuple(drawn(*place)) for place in places}) == 4


def test_what_keeps_nothing_has_no_checkpoints_and_no_loggers():
    kept = built("callbacks=[default,ema]").trainer
    assert [type(logger) for logger in kept.loggers] == [CSVLogger]
    assert len([each for each in kept.callbacks if isinstance(each, ModelCheckpoint)]) == 2
    assert [each for each in kept.callbacks if isinstance(each, EMAWeightAveraging)]
    for mode in (["dry_run=true"], ["evaluate=true", "ckpt=some.ckpt"]):
        assert not (other := built(*mode).trainer).checkpoint_callbacks and not other.loggers


@pytest.mark.parametrize(
    "words", [["compressor=onebit"], ["compressor=sparseloco"], ["compressor=dgc_paper"], ["compressor.dense_epochs=1"]]
)
def test_a_dry_run_has_no_dense_start(words):
    assert not dense_start(built(*words, "dry_run=true").trainer.strategy.compressor.schedule())


def test_the_final_table_fits_into_100_columns_however_slow_the_machine(tmp_path):
    milliseconds = {"compute": 1897.1, "compress": 3384.8, "exchange": 1073.2, "decompress": 1143.5}
    last = {"bytes_sent": 105_440, "ratio": 423.9}
    cost = {"world_size": 2, "bytes_sent": 4_640_000, "dense_bytes": 1_970_000_000, "ratio": 423.9}
    names = {"model": "resnet18", "data": "Digits", "compressor": "GradientDropping"}
    result = {
        "config": {"dry_run": False, **{group: {"_target_": f"a.b.{name}"} for group, name in names.items()}},
        "communication": {**cost, "milliseconds": milliseconds, "last_step": last, "topology": "all_gather"},
        "epochs": 100, "wall_seconds": 10_000, "device": "CPU", "devices_per_node": 2, "gpus_per_node": 0,
    }  # fmt: skip
    words = ("validation loss", "1.9844 nats per byte, 2.8629 bits (131,072 bytes)")
    lines = table(result, words, tmp_path.relative_to(tmp_path)).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("7499 ms: compute 1897, compress 3385, exchange 1073, decompress 1144" in line for line in lines)


def test_half_precision_counts_exactly():
    images, labels = torch.rand(333, 1, 8, 8), torch.arange(333) % 10
    for dtype in (torch.bfloat16, torch.float16):
        task = built("model=swin_mini").task.to(dtype).eval()
        logits = task(images.to(dtype))
        losses = nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
        correct, number, loss = task.count((images.to(dtype), labels)).tolist()
        assert (correct, number) == ((logits.argmax(1) == labels).sum(), 333)
        assert loss == pytest.approx(losses.item(), rel=1e-6)

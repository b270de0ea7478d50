"""The parts of a training process: data, model, schedule, devices, lines that are dropped."""

import logging
import math
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_gradcomp.app import processes
from lightning_gradcomp.app.classifier import build_optimizer
from lightning_gradcomp.app.data.digits import digits, source
from lightning_gradcomp.app.data.federated import OwnImages, dirichlet_split
from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.models import build as build_model
from lightning_gradcomp.app.models.resnet import resnet
from lightning_gradcomp.app.options.training import SGD, AdamW, Trainer
from lightning_gradcomp.app.shorthands import expand
from lightning_gradcomp.app.sizes import human
from lightning_gradcomp.app.train import build
from tests.app.test_compose import run_of


def test_the_split_is_fixed_stratified_and_disjoint():
    train, val = digits()
    assert [tuple(tensor.shape) for tensor in train.tensors] == [(1437, 1, 8, 8), (1437,)]
    assert [tuple(tensor.shape) for tensor in val.tensors] == [(360, 1, 8, 8), (360,)]
    shares = torch.bincount(val.tensors[1]) / torch.bincount(torch.cat([train.tensors[1], val.tensors[1]]))
    assert shares.shape == (10,) and torch.all((shares - 360 / 1797).abs() < 0.005)
    assert len(torch.cat([train.tensors[0], val.tensors[0]]).unique(dim=0)) == 1797  # no image is in both
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(val.tensors, digits()[1].tensors, strict=True))
    assert abs(train.tensors[0].mean()) < 1e-5 and abs(train.tensors[0].std() - 1) < 1e-5


def rank_data(rank: int, world: int, **options) -> SharedImages:
    data = SharedImages(
        source(dirichlet=options.get("dirichlet")), batch_size=60, ranks=world, seed=options.get("seed", 0)
    )
    data.setup("fit")
    seen = SimpleNamespace(is_last_batch=options.get("is_last_batch", False))
    seen.current = SimpleNamespace(processed=options.get("processed", 0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=seen))
    epoch = options.get("epoch", 0)
    data.trainer = SimpleNamespace(world_size=world, global_rank=rank, fit_loop=loop, current_epoch=epoch)
    return data


def test_folds_validate_every_image_once():
    seen = []
    for fold in range(5):
        train, val = digits(fold)
        assert len(train) + len(val) == 1797
        assert abs(train.tensors[0].mean()) < 1e-5 and abs(train.tensors[0].std() - 1) < 1e-5
        counts = val.tensors[1].bincount(minlength=10)
        assert counts.min() >= 34 and counts.max() <= 37
        pixels = val.tensors[0]
        grey = 16 * (pixels - pixels.min()) / (pixels.max() - pixels.min())  # as it was before it was normalised
        seen.append(grey.round())
    assert len(torch.cat(seen).unique(dim=0)) == 1797


def test_three_ranks_share_the_images():
    shares = [rank_data(rank, 3) for rank in range(3)]
    batches = [[len(labels) for _, labels in share.train_dataloader()] for share in shares]
    assert batches[0] == [20] * 23 and batches[1] == batches[2] == batches[0]
    train = torch.cat([images for share in shares for images, _ in share.train_dataloader()])
    assert len(train.unique(dim=0)) == len(train) == 3 * 20 * 23
    val = torch.cat([images for share in shares for images, _ in share.val_dataloader()])
    assert len(val.unique(dim=0)) == len(val) == 360


def test_ranks_validate_in_as_many_batches():
    shares = [rank_data(rank, 2) for rank in range(2)]
    for share in shares:
        share.val = TensorDataset(torch.arange(257))
    batches = [[numbers for [numbers] in share.val_dataloader()] for share in shares]
    assert [[len(numbers) for numbers in own] for own in batches] == [[65, 64], [64, 64]]
    assert sorted(torch.cat([*batches[0], *batches[1]]).tolist()) == list(range(257))


def test_the_order_depends_on_the_epoch_and_the_seed_alone():
    def order(seed: int, epoch: int) -> torch.Tensor:
        loader = rank_data(1, 2, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.tensor(list(loader.sampler))

    assert torch.equal(order(0, 1), order(0, 1))
    assert not torch.equal(order(0, 1), order(0, 2))
    assert not torch.equal(order(0, 1), order(1, 1))


def test_a_checkpoint_amid_an_epoch_resumes_with_its_rest():
    def images(**options) -> torch.Tensor:
        return torch.cat([batch for batch, _ in rank_data(1, 2, epoch=3, **options).train_dataloader()])

    whole = images()
    assert torch.equal(images(processed=5), whole[5 * 30 :])
    assert torch.equal(images(processed=23, is_last_batch=True), whole)
    loader = rank_data(0, 2, processed=5).train_dataloader()
    assert len(loader) == 23 and [len(list(loader)) for _ in range(2)] == [18, 23]


def test_ranks_have_images_of_their_own_unequal_by_class():
    shares = [rank_data(rank, 3, dirichlet=0.3) for rank in range(3)]
    loaders = [share.train_dataloader() for share in shares]
    assert [len(loader) for loader in loaders] == [23] * 3
    own = [set(loader.sampler.own.tolist()) for loader in loaders]
    assert sorted(index for each in own for index in each) == list(range(1437))
    assert max(map(len, own)) > 1.2 * min(map(len, own)) >= 1.2 * 20
    labels = shares[0].train.tensors[1]
    classes = torch.stack([labels[sorted(each)].bincount(minlength=10) for each in own])
    assert float((classes / classes.sum(0)).max()) > 0.8  # nearly all of some class
    epoch = list(loaders[0].sampler)
    assert len(epoch) == 460 and set(epoch) <= own[0]


def test_own_images_resume_amid_an_epoch_and_differ_by_epoch():
    def order(**options) -> list[int]:
        return list(rank_data(1, 2, dirichlet=0.3, **options).train_dataloader().sampler)

    assert order(epoch=3, processed=5) == order(epoch=3)[5 * 30 :]
    assert order(epoch=3) != order(epoch=4)


@pytest.mark.parametrize(("images", "length"), [(5, 12), (20, 12)])
def test_own_images_begin_again_after_the_last_one(images, length):
    epoch = list(OwnImages(np.arange(100, 100 + images), length, seed=0, skip=0))
    rounds = [epoch[start : start + images] for start in range(0, length, images)]
    assert len(epoch) == length and all(len(set(each)) == len(each) for each in rounds)
    assert set(epoch) <= set(range(100, 100 + images)) and len({tuple(each) for each in rounds}) == len(rounds)


def test_an_impossible_split_is_refused_before_ranks_start(tmp_path):
    words = ("recipe=digits_swin", "data.dirichlet=0.05", "data.batch_size=1436", "trainer.devices=4")
    with pytest.raises(ValueError, match=r"^data\.dirichlet: got 0\.05, allowed: a larger number"):
        build(run_of(*words, "trainer.accelerator=cpu"), tmp_path)


def test_a_split_without_a_batch_for_each_rank_is_refused():
    with pytest.raises(ValueError, match=r"^data\.dirichlet: got 0\.01, allowed: a larger number"):
        dirichlet_split(torch.arange(100) % 10, 8, 0.01, 12, 0)


@pytest.mark.parametrize(("batch_size", "world"), [(63, 2), (2, 2), (1438, 2), (64, 3)])
def test_a_batch_that_the_ranks_cannot_share_is_refused(batch_size, world):
    with pytest.raises(ValueError, match=rf"^data.batch_size: got {batch_size}, allowed: a multiple of {world} "):
        SharedImages(source(), batch_size=batch_size, ranks=world, seed=0)


def test_a_small_swin_has_shifted_windows():
    model = build_model("swin_mini", channels=1, classes=10)
    logits = model(torch.randn(4, 1, 8, 8))
    assert logits.shape == (4, 10)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.features[1](torch.randn(1, 8, 8, 48)).shape == (1, 8, 8, 48)
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 400_000


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_172_810), ("resnet50", 23_519_690)])
def test_resnets_keep_small_images_large(name, parameters):
    with torch.device("meta"):
        model = resnet(name, channels=1, classes=10)
        assert model(torch.empty(4, 1, 8, 8)).shape == (4, 10)
        assert model.maxpool(model.conv1(torch.empty(4, 1, 8, 8))).shape == (4, 64, 8, 8)
    assert (model.conv1.kernel_size, model.conv1.stride) == ((3, 3), (1, 1))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


PLAIN = {"momentum": 0, "nesterov": False}


def rates(optimizer_options, steps: int) -> list[float]:
    optimizer, schedule = build_optimizer(
        optimizer_options, nn.Linear(1, 1), optimizer_options.peak(64), optimizer_options.warmup(10), total_steps=steps
    )
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_warm_up_then_cosine_to_zero():
    options = SGD(lr=0.4, weight_decay=0, decay_all=True, warmup_steps=4, momentum=0.9, nesterov=True)
    seen = rates(options, 24)
    assert seen[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert seen[4:] == pytest.approx([0.2 * (1 + math.cos(math.pi * step / 20)) for step in range(21)])
    assert seen[-1] == pytest.approx(0)


def test_a_cosine_may_end_above_zero():
    options = SGD(lr=0.4, weight_decay=0, decay_all=True, warmup_steps=0, end=0.25, **PLAIN)
    assert [rates(options, 8)[step] for step in (0, 4, 8)] == pytest.approx([0.4, 0.25, 0.1])


@pytest.mark.parametrize(
    ("precision", "words", "fused"),
    [
        ("32-true", (), True),
        ("bf16-mixed", (), True),
        ("16-mixed", (), False),
        ("32-true", ("optimizer.fused=false",), False),
    ],
)
def test_optimizers_are_fused_where_gradients_can_still_be_clipped(tmp_path, precision, words, fused):
    parts = build(run_of("optimizer=adamw", "trainer.devices=1", "trainer.accelerator=cpu", *words), tmp_path)
    parts.data.trainer, parts.trainer.datamodule = parts.trainer, parts.data
    parts.data.setup("fit")
    parts.trainer.strategy.precision_plugin = SimpleNamespace(precision=precision)
    parts.classifier.trainer = parts.trainer
    optimizer = parts.classifier.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"] is fused


def test_memory_format_and_compilation_reach_the_network(tmp_path):
    words = ("trainer.channels_last=true", "trainer.compile=true", "trainer.devices=1", "trainer.accelerator=cpu")
    classifier = build(run_of(*words), tmp_path).classifier
    weight = classifier.model.layer1[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert classifier.model._compiled_call_impl is not None and classifier.channels_last


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    options = SGD(lr=1.0, weight_decay=0, decay_all=True, warmup_steps=4, momentum=0, nesterov=False)
    assert rates(options, 2) == pytest.approx([0.25, 0.5, 0.75])
    assert rates(options, 4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_rate_and_warm_up_grow_with_the_batch():
    options = SGD(
        lr=None, lr_per_256=0.1, weight_decay=0, decay_all=True, warmup_steps=None, warmup_epochs=0.5, **PLAIN
    )
    assert [options.peak(images) for images in (64, 256, 1024)] == pytest.approx([0.025, 0.1, 0.4])
    assert options.warmup(5) == 2 and options.warmup(5004) == 2502


def test_a_classifier_scales_by_accumulated_images(tmp_path):
    words = expand(["optimizer.lr_per_256=0.8", "optimizer.warmup_epochs=1"])
    run = run_of("model=swin_mini", *words, "trainer.devices=1", "trainer.accelerator=cpu", "strategy=ddp")
    run.trainer.accumulate_grad_batches = 2
    classifier, data, trainer, _ = build(run, tmp_path)
    data.setup("fit")
    trainer.datamodule, data.trainer, classifier.trainer = data, trainer, trainer
    found = classifier.configure_optimizers()
    warm_up = [found["lr_scheduler"]["scheduler"].lr_lambdas[0](step) for step in (0, 10, 11, 12)]
    assert found["optimizer"].param_groups[0]["initial_lr"] == pytest.approx(0.8 * 2 * 64 / 256)
    assert warm_up[:3] == pytest.approx([1 / 11, 1, 1]) and warm_up[3] < 1  # 22 batches an epoch: 11 steps


def test_optimizers_get_their_options():
    common = {"lr": 0.1, "weight_decay": 0.01, "decay_all": True, "warmup_steps": 0}
    sgd, _ = build_optimizer(SGD(**common, momentum=0.8, nesterov=True), nn.Linear(2, 2), 0.1, 0, 10)
    assert type(sgd) is torch.optim.SGD
    [group] = sgd.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"]) == (0.1, 0.01, 0.8, True)
    adamw, _ = build_optimizer(AdamW(**common), nn.Linear(2, 2), 0.1, 0, 10)
    assert type(adamw) is torch.optim.AdamW and adamw.param_groups[0]["weight_decay"] == 0.01


def test_biases_and_norms_can_be_without_weight_decay():
    model = build_model("swin_mini", channels=1, classes=10)
    options = AdamW(lr=0.1, weight_decay=0.03, decay_all=False, warmup_steps=0)
    decayed, spared = build_optimizer(options, model, 0.1, 0, 10)[0].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.03, 0)
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    assert {id(parameter) for parameter in decayed["params"]} == weights
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID")
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("environment", "elsewhere", "first", "auto"),
    [
        ({}, False, True, (2, 1)),
        (TORCHRUN, True, False, (4, 2)),
        (SLURM, True, True, (2, 3)),
        (SLURM | {"SLURM_PROCID": "4"}, True, False, (2, 3)),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, False, True, (2, 1)),
        ({"NODE_RANK": "1"}, True, False, (2, 1)),
    ],
)
def test_ranks_and_devices_from_the_environment(environment, elsewhere, first, auto, monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (processes.started_by_launcher(), processes.is_rank_zero()) == (elsewhere, first)
    assert processes.devices(trainer("auto", "auto")) == ("cpu", *auto)
    assert processes.devices(trainer(*auto)) == ("cpu", *auto)
    if processes.launched() is None:
        assert processes.devices(trainer(3, 2)) == ("cpu", 3, 2)
        return
    for option, wrong in (("devices", (9, auto[1])), ("num_nodes", (auto[0], 9))):
        with pytest.raises(ValueError, match=rf"^trainer\.{option}: got 9, allowed: auto, or the \d that torchrun or"):
            processes.devices(trainer(*wrong))


@pytest.mark.parametrize(
    ("environment", "allowed"),
    [
        ({}, "1; under torchrun or SLURM, or with MASTER_ADDR and MASTER_PORT set, more"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, "or with MASTER_PORT set, more"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, None),
        (TORCHRUN, None),
        (SLURM, None),
    ],
)
def test_nodes_that_could_not_meet_are_refused(environment, allowed, monkeypatch):
    for name in (*RANKS, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processes.check_rendezvous(1)
    refused = pytest.raises(ValueError, match=rf"^trainer\.num_nodes: got 2, allowed: .*{re.escape(allowed or '')}$")
    with refused if allowed else nullcontext():
        processes.check_rendezvous(2)


@pytest.mark.parametrize(
    ("gpus", "wanted", "ranks", "shared"),
    [
        (0, ("auto", "auto"), 2, []),
        (1, ("auto", "auto"), 2, [0, 0]),
        (3, ("auto", "auto"), 3, []),
        (0, (4, "auto"), 4, []),
        (1, (1, "auto"), 1, []),
        (1, (4, "auto"), 4, [0, 0, 0, 0]),
        (2, (3, "auto"), 3, [0, 1, 0]),
        (3, (2, "auto"), 2, []),
        (1, ("auto", 2), 1, []),  # two machines of one GPU each have two ranks already
        (0, ("auto", 2), 2, []),
    ],
)
def test_more_ranks_than_gpus_share_them(gpus, wanted, ranks, shared, monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, gpus)
    accelerator, per_node, _ = processes.devices(replace(trainer(*wanted), accelerator="auto"))
    assert (accelerator, per_node) == ("cuda" if gpus else "cpu", ranks)
    assert [device.index for device in processes.shared_gpus(accelerator, per_node)] == shared


@pytest.mark.parametrize(
    ("environment", "gpus", "shared"), [(TORCHRUN, 2, [0, 1, 0, 1]), (SLURM, 1, [0, 0]), (SLURM, 2, [])]
)
def test_ranks_of_a_launcher_share_gpus_too(environment, gpus, shared, monkeypatch):
    for name, value in (dict.fromkeys(RANKS) | environment).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, gpus)
    accelerator, per_node, _ = processes.devices(replace(trainer("auto", "auto"), accelerator="auto"))
    assert [device.index for device in processes.shared_gpus(accelerator, per_node)] == shared


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^trainer\.accelerator: got 'cuda', allowed: auto, cpu: there is no GPU here"
    ):
        processes.devices(replace(trainer("auto", "auto"), accelerator="cuda"))


def pretend_gpus(monkeypatch, count):
    """As on a machine with so many GPUs, for whoever counts them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def trainer(count, nodes) -> Trainer:
    return Trainer(
        max_epochs=1,
        devices=count,
        num_nodes=nodes,
        accelerator="cpu",
        precision="32-true",
        accumulate_grad_batches=1,
        deterministic=True,
        checkpoint_every_n_epochs=5,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )


def test_only_the_known_lines_are_dropped(caplog):
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = log.filters[:]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        processes.hide_known_messages()
        for text in ("`isinstance(treespec, LeafSpec)` is deprecated, use", "Something new is deprecated"):
            warnings.warn(text, FutureWarning, stacklevel=1)
    with caplog.at_level(logging.INFO, logger=log.name):
        log.addHandler(caplog.handler)
        for text in (
            "GPU available: False, used: False",
            "💡 Tip: For seamless cloud logging",
            "GPU ran out of memory",
        ):
            log.info(text)
        log.removeHandler(caplog.handler)
    log.filters[:] = before
    assert [str(warning.message) for warning in shown] == ["Something new is deprecated"]
    assert {record.getMessage() for record in caplog.records} == {"GPU ran out of memory"}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (44_691_240, "44.7 MB"), (9.83e9, "9.83 GB"), (2e13, "20 TB")]
)
def test_sizes_for_people(count, text):
    assert human(count) == text

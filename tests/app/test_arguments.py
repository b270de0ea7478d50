"""Which arguments are refused before Hydra parses them, and which are left to it."""

import pytest

from lightning_gradcomp.app.arguments import check, split


@pytest.mark.parametrize(
    "line",
    [
        "",
        "compressor=none seed=4",
        "-m compressor=none,dgc trainer.devices=1,2",
        "--cfg job -p compressor",
        "-sc install=bash",
        "seed=1 --resolve --cfg=job",
        "--config-dir elsewhere --config-name mine anything=goes",
        "compressor=none,dgc compressor.sparsity=0.9",
        "hydra.run.dir=there ~recipe +compressor.new=1 ++seed=2",
        "compressor.exclude=[a.*,b=c]",
        "recipe=digits_dga strategy.period=4",
        "recipe=digits,digits_dga strategy.period=4",
        "recipe=nowhere strategy.period=4",
        "hydra/job_logging=stdout",
    ],
)
def test_left_to_hydra(line):
    check(*split(line.split()))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("dgc", "argument: got 'dgc', allowed: augment="),
        ("seed=1 report", "argument: got 'report'"),
        ("seed=1 plan", "argument: got 'plan'"),
        ("--cfg=job report", "argument: got 'report'"),
        ("-m report", "argument: got 'report'"),
        ("compresor=dgc", "compresor: got 'dgc', allowed: augment, compressor, data"),
        ("compressor.sparsty=0.9", "compressor.sparsty: got '0.9', allowed: min_elements, exclude"),
        ("logger=null", "logger: got 'null', allowed: csv, mlflow, none, tensorboard, wandb"),
        ("optimiser=sgd", "optimiser: got 'sgd', allowed: augment, compressor, data"),
        ("trainer.epochs=3", "trainer.epochs: got '3', allowed: max_epochs, devices"),
        (
            "compressor=none compressor.sparsity=0.9",
            "compressor.sparsity: got '0.9', allowed: compressor alone",
        ),
        ("compressor=fp16 compressor.min_elements=9", "compressor.min_elements: got '9', allowed: compressor alone"),
        ("compressor.rank=2", "compressor.rank with compressor=dgc: got '2', allowed: an option of powersgd: add "),
        (
            "strategy.period=4",
            "strategy.period with strategy=ddp: got '4', allowed: an option of dga: add strategy",
        ),
        (
            "recipe=resnet18_cifar10 data.size=9",
            "data.size with data=cifar10: got '9', allowed: an option of imagenet, imagefolder, synthetic: add data=",
        ),
        (
            "optimizer=adamw optimizer.momentum=0.9",
            "optimizer.momentum: got '0.9', allowed: lr, lr_per_256",
        ),
        ("data=cifar10 data.fold=1", "data.fold: got '1', allowed: batch_size, dir, workers, prefetch"),
        ("data=synthetic data.dirichlet=1", "data.dirichlet: got '1', allowed: batch_size, size, classes, images"),
        ("seed.x=1", "seed.x: got '1', allowed: seed alone"),
        ("optimizer.lr=1" + 400 * "0", "optimizer.lr: got '401 digits', allowed: a number of fewer than 100 digits"),
        ("model=", "model: got '', allowed: custom, resnet18, resnet50, swin_mini"),
    ],
)
def test_refused(line, sentence):
    with pytest.raises(ValueError) as refused:
        check(*split(line.split()))
    assert str(refused.value).startswith(sentence)


def test_flags_go_first_with_their_values():
    line = "a=1 -m b=2 --cfg job ~c --config-dir=d -p e f=3"
    flags, words = split(line.split())
    assert flags == ["-m", "--cfg", "job", "--config-dir=d", "-p", "e"]
    assert words == ["a=1", "b=2", "~c", "f=3"]

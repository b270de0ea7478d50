"""What the command does not take is answered with a sentence before any rank starts."""

import os
import shutil

import pytest

from lightning_gradcomp.app import compose
from tests.app.command import ROOT, gradcomp

WRONG = {
    "an unknown option": (["compressor.foo=1"], "Could not override 'compressor.foo'."),
    "an unknown group": (["compresor=dgc"], "Could not override 'compresor'."),
    "an unknown parameter": (["+optimizer.foo=1"], "optimizer: SGD.__init__() got an unexpected keyword"),
    "a wrong type": (["trainer.max_epochs=ten"], "trainer.max_epochs: got 'ten', allowed: a whole number from 1"),
    "a type that torch refuses": (["optimizer.lr=high"], "optimizer: '<' not supported"),
    "a wrong choice": (["compressor=lzma"], "Could not find 'compressor/lzma'\n\nAvailable options in "),
    "a recipe that there is not": (["recipe=nowhere"], "Could not find 'recipe/nowhere'"),
    "a value out of range": (["compressor.sparsity=1.5"], "DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1"),
    "Lightning's choice": (["trainer.precision=foo"], "Precision 'foo' is invalid. Allowed precision values: ("),
    "Lightning's range": (["trainer.limit_val_batches=-1"], "You have passed invalid value -1 for limit_val_batches"),
    "torch's range": (["optimizer.momentum=-1"], "optimizer: Invalid momentum value: -1"),
    "a fraction of batches": (["trainer.limit_train_batches=0.5"], "trainer.limit_train_batches: got 0.5, allowed"),
    "a batch that doesn't divide": (["data.batch_size=63"], "data.batch_size: got 63, allowed: a multiple of 2 "),
    "ranks that don't divide": (["trainer.devices=3"], "data.batch_size: got 64, allowed: a multiple of 3 (ranks), 6"),
    "no GPU": (["trainer.accelerator=cuda"], "trainer.accelerator: got 'cuda', allowed: auto, cpu: there is no GPU"),
    "missing pictures": (["data=imagefolder"], "images: no folders of classes in train/ and val/. Looked in "),
    "no download": (["data=cifar10", "data.download=false"], "CIFAR-10: there is no folder cifar-10-batches-py"),
    "no such checkpoint": (["ckpt=nowhere.ckpt"], "ckpt: got 'nowhere.ckpt', allowed: last, best, the folder of a run"),
    "nothing saved yet": (["ckpt=last"], "ckpt: got 'last', allowed: the path of a checkpoint: no run in "),
    "nothing to evaluate": (["evaluate=true"], "ckpt with evaluate=true: got None, allowed: best, last, a run"),
    "a dry run that resumes": (["dry_run=true", "ckpt=last"], "ckpt with dry_run=true: got 'last', allowed: null"),
    "two compressors": (["strategy=dgc", "compressor=onebit"], "compressor with a strategy of its own: got"),
    "two warm-ups": (["scheduler.warmup_epochs=2"], "scheduler.warmup_steps with warmup_epochs=2: got 20"),
    "no crops of digits": (["augment=basic"], "augment.crop_and_flip with data=digits: got True, allowed: "),
    "a fold": (["data.fold=5"], "data.fold: got 5, allowed: null, or a whole number from 0 to 4"),
    "a seed": (["seed=-1"], "seed: got -1, allowed: a whole number from 0"),
    "a missing package": (["model=timm", "model.name=vit"], "No module named 'timm'"),
    "a model that is not there": (["model=custom", "model._target_=no_such.Net"], "No module named 'no_such'"),
    "no such model": (["model=torchvision", "model.name=vgg99"], "model.name with model=torchvision: got 'vgg99'"),
    "nodes without a launcher": (["trainer.num_nodes=2"], "trainer.num_nodes: got 2, allowed: 1; under torchrun"),
    "a mesh that doesn't fit": (["strategy=hsdp", "strategy.shard=3"], "the mesh of 1 node with 2 ranks each: got"),
    "an average of shards": (["strategy=hsdp", "callbacks=[default,ema]"], "callbacks with strategy=hsdp: got 'ema'"),
    "a format of shards": (["strategy=hsdp", "task.channels_last=true"], "task.channels_last with strategy=hsdp: got"),
    "no sweep": (["compressor=none,dgc"], "To sweep over it, add --multirun"),
    "further words": (["recipes", "all"], "gradcomp recipes: got 'all', allowed: no further words"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), WRONG.values(), ids=WRONG)
def test_it_is_a_sentence_and_no_rank_starts(command, words, sentence):
    code, said, started = command(*words)
    assert code and not started and sentence in said
    assert "Traceback" not in said and "HYDRA_FULL_ERROR" not in said


def test_a_folder_that_cannot_be_written(command, tmp_path):
    (tmp_path / "runs").touch()
    code, said, started = command()
    assert code == 1 and "gradcomp: [Errno" in said and "runs" in said and "Traceback" not in said and not started


def test_a_folder_of_another_run(command):
    assert command("hydra.run.dir=mine")[0] == 0
    code, said, started = command("hydra.run.dir=mine", "seed=1")
    assert code == 1 and "allowed: a new folder: another run has written to this one" in said and not started


def test_runs_of_one_moment_have_folders_of_their_own(command):
    folders = [command()[2][0].folder for _ in range(2)]
    assert len(set(folders)) == 2 and all(os.path.exists(f"{folder}/config.yaml") for folder in folders)


def test_a_sweep_goes_on_after_a_job_that_is_refused(command):
    code, said, started = command("-m", "compressor.sparsity=0.9,1.5,0.99")
    assert code == 1 and "DGC.sparsity: got 1.5" in said
    assert [job.compressor.sparsity for job in started] == [0.9, 0.99]


def test_no_sweep_under_torchrun(command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    code, said, started = command("-m", "seed=0,1")
    assert code == 1 and "allowed: one run per launch" in said and not started


def test_the_users_own_recipes_are_found(command, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nseed: 23\ntrainer: {max_epochs: 3}\n")
    _, _, [config] = command("-cd", ".", "recipe=mine")
    assert (config.seed, config.trainer.max_epochs) == (23, 3)


def test_it_works_as_a_wheel_lays_it_out(tmp_path):
    package = tmp_path / "site-packages" / "lightning_gradcomp"
    shutil.copytree(ROOT / "lightning_gradcomp", package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("conf", "recipes"):
        shutil.copytree(ROOT / folder, package / folder)
    recipe = package / "recipes" / "digits.yaml"
    (package / "recipes" / "other.yaml").write_text(recipe.read_text() + "seed: 17\n")  # only this copy has it
    answer = gradcomp(tmp_path, "recipe=other", "--cfg", "job", package=package.parent)
    assert answer.returncode == 0 and "seed: 17" in answer.stdout and "momentum_masking: true" in answer.stdout
    assert compose.shipped("conf") == ROOT / "conf"

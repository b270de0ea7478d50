"""What the command does not take is answered with a sentence before any rank starts."""

import os
import shutil

import pytest

from lightning_gradcomp.app import compose

WRONG = {
    "an unknown option": (["compressor.foo=1"], "Could not override 'compressor.foo'."),
    "an unknown group": (["compresor=dgc"], "compresor: got 'compresor=dgc', allowed: augment, callbacks, ckpt, com"),
    "an unknown group, added": (["+compresor=dgc"], "compresor: got '+compresor=dgc', allowed: augment, callbacks"),
    "no group": (["~logger"], "logger: got '~logger', allowed: csv, mlflow, none, tensorboard, wandb"),
    "no compressor": (["~compressor"], "compressor: got '~compressor', allowed: bf16, dgc, dgc_int8"),
    "no seed": (["~seed"], "seed: got '~seed', allowed: a value"),
    "no devices": (["~trainer.devices"], "trainer.devices: got 'no value', allowed: a value, which gradcomp reads"),
    "no run to start from": (["recipe=finetune_text"], "task.weights: got \"runs/pretrained ([Errno 2] No such file"),
    "an unknown parameter": (["+optimizer.foo=1"], "optimizer: SGD.__init__() got an unexpected keyword"),
    "a wrong type": (["trainer.max_epochs=ten"], "trainer.max_epochs: got 'ten', allowed: a whole number from 1"),
    "a type that torch refuses": (["optimizer.lr=high"], "optimizer.lr: got 'high', allowed: a number or Tensor"),
    "a type that Lightning refuses": (["+trainer.max_steps=x"], "trainer.max_steps: got 'x', allowed: a whole number"),
    "betas": (["optimizer=adamw", "optimizer.betas=[0.9]"], "optimizer.betas: got [0.9], allowed: a list of 2"),
    "a beta": (["optimizer=adamw", "optimizer.betas=[0.9,x]"], "optimizer.betas: got [0.9, 'x'], allowed: a list of 2"),
    "a duration": (["+trainer.max_time=5"], "trainer.max_time: got 5, allowed: text or timedelta or"),
    "no duration": (["strategy.timeout=5"], "strategy.timeout: got 5, allowed: timedelta"),
    "neither true nor false": (["strategy.local_weights=x"], "Strategy.local_weights: got 'x', allowed: True or False"),
    "a word for a flag": (["compressor.momentum_masking=no"], "DGC.momentum_masking: got 'no', allowed: True or False"),
    "an interval": (["strategy.verify_replicas_every_n_steps=x"], "n_steps: got 'x', allowed: None (never), or a w"),
    "an option of a callback": (["callbacks.last.every_n_epochs=x"], "callbacks.last.every_n_epochs: got 'x', allowed"),
    "a number of the schedule": (["scheduler.end=x"], "scheduler.end: got 'x', allowed: 0 to 1"),
    "a number of the augmentation": (["augment.mixup=x"], "augment.mixup: got 'x', allowed: 0 or more"),
    "a concentration": (["data.dirichlet=x"], "data.dirichlet: got 'x', allowed: null, or 0.01 or more"),
    "no such flag": (["dry_run=maybe"], "dry_run: got 'maybe', allowed: true, false"),
    "no steps": (["+trainer.max_steps=0"], "trainer.max_steps: got 0, allowed: -1, or a whole number from 1"),
    "nothing for a group": (["logger=null"], "logger: got None, allowed: csv, mlflow, none, tensorboard, wandb"),
    "a wrong choice": (["compressor=lzma"], "Could not find 'compressor/lzma'\n\nAvailable options in "),
    "a recipe that there is not": (["recipe=nowhere"], "Could not find 'recipe/nowhere'"),
    "a value out of range": (["compressor.sparsity=1.5"], "DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1"),
    "Lightning's choice": (["trainer.precision=foo"], "Precision 'foo' is invalid. Allowed precision values: ("),
    "Lightning's range": (["trainer.limit_val_batches=-1"], "You have passed invalid value -1 for limit_val_batches"),
    "a fraction of batches": (["trainer.limit_train_batches=0.5"], "trainer.limit_train_batches: got 0.5, allowed"),
    "a batch that doesn't divide": (["data.batch_size=63"], "data.batch_size: got 63, allowed: a multiple of 2 "),
    "missing pictures": (["data=imagefolder"], "images: no folders of classes in train/ and val/. Looked in "),
    "no download": (["data=cifar10", "data.download=false"], "CIFAR-10: there is no folder cifar-10-batches-py"),
    "nothing to evaluate": (["evaluate=true"], "ckpt with evaluate=true: got None, allowed: best, last, a run"),
    "a dry run that resumes": (["dry_run=true", "ckpt=last"], "ckpt with dry_run=true: got 'last', allowed: null"),
    "two optimizers": (["strategy=muloco", "optimizer.lr=1"], "optimizer with a strategy of its own: got"),
    "two compressors": (["strategy=dgc", "compressor=onebit"], "compressor with a strategy of its own: got"),
    "another class for it": (["strategy=dgc", "++compressor._target_=x"], "of its own: got '++compressor._target_=x'"),
    "the run's folder": (["folder=here"], "folder: got 'here', allowed: null; hydra.run.dir=FOLDER"),
    "what the Trainer has": (["+trainer.logger=false"], "trainer.logger: got False, allowed: no value: gradcomp sets"),
    "what the network has": (["+model.classes=5"], "model.classes: got 5, allowed: no value: gradcomp sets it"),
    "images of a text": (["recipe=stdlib_gpt", "augment=basic"], "LanguageModel: got 'augment=basic', allowed"),
    "two warm-ups": (["scheduler.warmup_epochs=2"], "scheduler.warmup_steps with warmup_epochs=2: got 20"),
    "no crops of digits": (["augment=basic"], "augment.crop_and_flip with data=digits: got True, allowed: "),
    "a fold": (["data.fold=5"], "data.fold: got 5, allowed: null, or a whole number from 0 to 4"),
    "a seed": (["seed=-1"], "seed: got -1, allowed: a whole number from 0"),
    "a missing package": (["model=timm", "model.name=vit"], "No module named 'timm'"),
    "a model that is not there": (["model=custom", "model._target_=no_such.Net"], "No module named 'no_such'"),
    "no such model": (["model=torchvision", "model.name=vgg99"], "model.name with model=torchvision: got 'vgg99'"),
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


@pytest.mark.parametrize(
    ("first", "code", "words", "line"),
    [
        ([], "def Net(width):\n    return len(width)", ["+model.width=3"], "return len(width)"),
        ([], "def Net():\n    open('gone')", [], "open('gone')"),
        ([], "import no_such_module", [], "import no_such_module"),
        (["plan"], "Net = 1 / 0", [], "Net = 1 / 0"),
        (["-m", "seed=0,1"], "Net = 1 / 0", [], "Net = 1 / 0"),
    ],
)
def test_an_error_in_the_users_code_has_its_traceback(command, tmp_path, monkeypatch, first, code, words, line):
    module = f"net_{abs(hash((code, *first)))}"
    (tmp_path / f"{module}.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    ended, said, started = command(*first, "model=custom", f"model._target_={module}.Net", *words)
    assert ended == 1 and not started and "Traceback" in said and line in said and "gradcomp: " in said


def test_an_option_that_the_users_code_does_not_have_is_a_sentence(command, tmp_path, monkeypatch):
    (tmp_path / "narrow_net.py").write_text("def Net(width): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, said, _ = command("model=custom", "model._target_=narrow_net.Net", "+model.depth=3")
    assert code == 1 and said.startswith("gradcomp: model: Net() got an unexpected keyword argument 'depth'")


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


def test_a_recipe_without_its_first_line_is_refused(command, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("seed: 23\n")
    code, said, started = command("-cd", ".", "recipe=mine")
    assert code == 1 and not started
    assert said.startswith(
        "gradcomp: recipe: got 'recipe=mine', allowed: a file with `# @package _global_` as its first"
    )


def test_it_works_as_a_wheel_lays_it_out(command, tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "lightning_gradcomp"
    for folder in ("conf", "recipes"):
        shutil.copytree(compose.shipped(folder), package / folder)
    recipe = package / "recipes" / "digits.yaml"
    (package / "recipes" / "other.yaml").write_text(recipe.read_text() + "seed: 17\n")  # only this copy has it
    monkeypatch.setattr(compose, "PACKAGE", package)
    code, said, _ = command("recipe=other", "--cfg", "job")
    assert code == 0 and "seed: 17" in said and "momentum_masking: true" in said

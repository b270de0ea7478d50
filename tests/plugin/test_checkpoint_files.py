"""Files of checkpoints and beside them: which there are, which go, and what is said of those that can't be read."""

import copy
import errno
import gc
import io
import os
import re
import shutil
import warnings
import weakref
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import fsspec
import lightning as L
import pytest
import torch
from features_kit import QUIET, OneLayer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from packaging.version import Version

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import async_strategy, delayed
from lightning_gradcomp.plugin.checkpoint_files import Sidecars
from lightning_gradcomp.plugin.rank_states import KEY


class Net(OneLayer):
    def validation_step(self, batch, index):
        pass


def trainer_for(strategy, **options):
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, **{"max_epochs": 1, **QUIET, **options})


def fit(state="gather", ckpt=None, plugins=None, epochs=1, strategy=None, callbacks=None, net=None, **options):
    """A fit on one rank, which has files of its own like any other."""
    strategy = strategy or lgc.CompressedDDPStrategy(checkpoint_state=state)
    trainer = trainer_for(strategy, max_epochs=epochs, plugins=plugins, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net or Net(), torch.ones(4, 4), ckpt_path=ckpt, **options)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint of each kind; "other.ckpt" is another save of "sidecar.ckpt"."""
    folder = tmp_path_factory.mktemp("saved")
    with mock.patch.dict(os.environ):
        for state in ("gather", "sidecar"):
            fit(state).save_checkpoint(folder / f"{state}.ckpt")
        fit("sidecar").save_checkpoint(folder / "other.ckpt")
        yield folder
    torch.distributed.destroy_process_group()


def beside(checkpoint):
    """The only folder of a checkpoint."""
    [folder] = checkpoint.parent.glob(f"{checkpoint.name}.ranks-*")
    return folder


@pytest.fixture
def copies(saved, tmp_path):
    """The same files, which a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path, dirs_exist_ok=True))


def without_its_mark(path):
    content = torch.load(path, weights_only=True)
    torch.save({key: content[key] for key in content if key not in ("pytorch-lightning_version", "token")}, path)


BROKEN = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "can't be read"),
    "empty": (lambda path: path.write_bytes(b""), "can't be read"),
    "no checkpoint at all": (lambda path: path.write_text("what a day"), "can't be read"),
    "a pickle of something else": (lambda path: torch.save([1, 2], path), "holds something else"),
    "a dict without what must be there": (without_its_mark, "holds something else"),
    "gone": (Path.unlink, "not found"),
}


@pytest.mark.parametrize(("spoil", "reason"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("which", ["checkpoint", "sidecar of rank 0"])
def test_a_broken_file_is_named_with_the_reason(copies, which, spoil, reason):
    state = "gather" if which == "checkpoint" else "sidecar"
    checkpoint = copies / f"{state}.ckpt"
    path = checkpoint if which == "checkpoint" else beside(checkpoint) / "rank-0.ckpt"
    spoil(path)
    with pytest.raises(ValueError, match=rf"^{which}: got .*, allowed: \w") as error:
        fit(state, checkpoint)
    assert str(path) in str(error.value) and reason in str(error.value)


class RunsCode:
    """Unpickled with weights_only=False, it makes a folder."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def add_code(path, trace):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "code": RunsCode(trace)}, path)


def load_in_fabric(path, **options):
    fabric = L.Fabric(strategy=lgc.CompressedFabricStrategy(), accelerator="cpu", devices=1)
    fabric.launch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric.load(path, **options)


LOADS = {
    "fit": lambda path: fit("gather", path),
    "sidecar": lambda path: fit("sidecar", path),
    "dga": lambda path: fit(strategy=lgc.DelayedStrategy(), ckpt=path),
    "validate": lambda path: trainer_for(lgc.CompressedDDPStrategy()).validate(Net(), torch.ones(4, 4), ckpt_path=path),
    "fabric": load_in_fabric,
}


@pytest.mark.parametrize("default", [None, False], ids=["Lightning's default", "the default of 2.5 and of URLs"])
@pytest.mark.parametrize("way", LOADS)
def test_a_checkpoint_runs_no_code(copies, tmp_path_factory, way, default):
    state = "sidecar" if way == "sidecar" else "gather"
    trace = tmp_path_factory.mktemp("trace") / "ran"
    add_code(beside(copies / "sidecar.ckpt") / "rank-0.ckpt" if way == "sidecar" else copies / "gather.ckpt", trace)

    def as_for_urls(self, path, map_location=None, weights_only=None):
        return torch.load(path, map_location, weights_only=False)

    load = as_for_urls if default is False else TorchCheckpointIO.load_checkpoint
    with mock.patch.object(TorchCheckpointIO, "load_checkpoint", load), pytest.raises(Exception, match="eights"):
        LOADS[way](copies / f"{state}.ckpt")
    assert not trace.exists()


@pytest.mark.skipif(Version(version("lightning")) < Version("2.6"), reason="has no weights_only")
def test_weights_only_false_is_the_users_choice(copies, tmp_path_factory):
    traces = [tmp_path_factory.mktemp("trace") / "ran" for _ in range(2)]
    add_code(copies / "gather.ckpt", traces[0])
    fit(ckpt=copies / "gather.ckpt", weights_only=False)
    assert traces[0].exists()
    add_code(copies / "other.ckpt", traces[1])
    load_in_fabric(copies / "other.ckpt", weights_only=False)
    assert traces[1].exists()


def test_a_file_of_another_save_or_rank_is_refused(copies):
    path = beside(copies / "sidecar.ckpt") / "rank-0.ckpt"
    own, other = (torch.load(file, weights_only=True) for file in (path, beside(copies / "other.ckpt") / path.name))
    for content in (other, {**own, "rank": 1}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"sidecar of rank 0: got '{path}, which belongs to another save'"):
            fit("sidecar", copies / "sidecar.ckpt")


def test_a_format_of_the_future_is_refused(copies):
    path = copies / "gather.ckpt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, KEY: {**content[KEY], "format": 99}}, path)
    with pytest.raises(ValueError, match=r"\['format'\]: got 99, allowed: 1"):
        fit("gather", path)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_checkpoint_moved_with_its_folder_is_read(copies, scheme):
    for name in ("moved", "moved/again"):
        (copies / name).mkdir()
    folder = beside(copies / "sidecar.ckpt")
    folder.rename(copies / "moved" / folder.name)
    (copies / "sidecar.ckpt").rename(copies / "moved" / "renamed.ckpt")
    (copies / "moved" / "again" / "link.ckpt").symlink_to("../renamed.ckpt")
    assert fit("sidecar", f"{scheme}{copies}/moved/again/link.ckpt", epochs=2).global_step == 8


def test_one_path_has_one_folder_and_none_once_removed(saved, tmp_path):
    trainer, path, seen = fit("sidecar"), tmp_path / "last.ckpt", set()
    for _ in range(3):
        trainer.save_checkpoint(path)
        folder = beside(path)
        assert torch.load(path, weights_only=True)[KEY]["sidecars"] == folder.name
        assert not re.search(r"\d", folder.name)  # "hpc_ckpt_1.ckpt.ranks-2" is version 12 to Lightning
        assert [file.name for file in folder.iterdir()] == ["rank-0.ckpt"]
        seen.add(folder)
    assert len(seen) == 3
    trainer.strategy.remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


def test_a_class_that_is_not_registered_is_saved_as_its_base(saved, tmp_path):
    class Mine(lgc.OneBit):
        pass

    trainer = fit(strategy=lgc.CompressedDDPStrategy(Mine()), epochs=2)
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    assert torch.load(tmp_path / "mine.ckpt", weights_only=True)[KEY]["compressor"] == "onebit"


def test_a_validation_after_a_fit_does_not_cost_the_state(saved, tmp_path):
    trainer = fit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(trainer.lightning_module, torch.ones(4, 4), verbose=False)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert KEY in torch.load(tmp_path / "last.ckpt", weights_only=True)


def test_weights_alone_replace_a_whole_checkpoint(saved, tmp_path):
    trainer, path = fit("sidecar"), tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(path, weights_only=True)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert KEY not in torch.load(path, weights_only=True)


def test_a_failed_save_leaves_the_earlier_checkpoint(saved, tmp_path):
    trainer, path = fit("sidecar"), tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    write = TorchCheckpointIO.save_checkpoint

    def break_off(self, checkpoint, path, storage_options=None):
        if "state_dict" in checkpoint:
            raise OSError("no space left on device")
        write(self, checkpoint, path, storage_options)

    with mock.patch.object(TorchCheckpointIO, "save_checkpoint", break_off), pytest.raises(OSError, match="no space"):
        trainer.save_checkpoint(path)
    assert fit("sidecar", path, epochs=2).global_step == 8


def test_a_full_disk_leaves_the_earlier_checkpoint(saved, tmp_path):
    trainer, path = fit("gather"), tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()

    def move_between_filesystems(source, target, *args, **kwargs):
        Path(target).write_bytes(Path(source).read_bytes()[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch("shutil.move", move_between_filesystems), pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_async_checkpoints_are_one_file(saved, tmp_path):
    with pytest.raises(ValueError, match=r"AsyncCheckpointIO.*got 'sidecar', allowed: auto, gather, mean or drop"):
        fit("sidecar", plugins=[AsyncCheckpointIO()])
    with mock.patch("lightning_gradcomp.plugin.rank_states.GATHER_LIMIT", -1):
        trainer = fit("auto", plugins=[AsyncCheckpointIO()])
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_on_another_filesystem_than_the_local_one():
    sidecars, files, path = Sidecars(TorchCheckpointIO()), fsspec.filesystem("memory"), "memory://runs/a/last.ckpt"
    for token in ("old", "new"):
        content = {"token": token, "rank": 3, "state": {"steps": len(token)}}
        sidecars.io.save_checkpoint(content, f"{path}.ranks-{token}/rank-3.ckpt")
    sidecars.io.save_checkpoint({"token": "old"}, "memory://runs/a/another-last.ckpt.ranks-old/rank-3.ckpt")
    assert sidecars.read(path, "last.ckpt.ranks-old", 3) == {"steps": 3}
    sidecars.remove_old(path, keep={"last.ckpt.ranks-new"})
    left = sorted(name.rpartition("/")[2] for name in files.ls("/runs/a", detail=False))
    assert left == ["another-last.ckpt.ranks-old", "last.ckpt.ranks-new"]
    with pytest.raises(ValueError, match=r"sidecar of rank 3: got 'memory://runs/a/last\.ckpt\.ranks-old/rank-3"):
        sidecars.read(path, "last.ckpt.ranks-old", 3)
    sidecars.remove_old("memory://runs/nowhere/last.ckpt")  # a CheckpointIO may write somewhere else


def test_a_missing_file_is_an_error_of_both_kinds(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^checkpoint: got '.*missing\.ckpt.*not found.*allowed: ") as error:
        fit(ckpt=tmp_path / "missing.ckpt")
    assert isinstance(error.value, ValueError)


def header(**changes):
    """Changes entries under the key; `...` removes one."""
    return lambda held: {key: value for key, value in {**held, **changes}.items() if value is not ...}


def state(**changes):
    """Changes entries of the one rank's state."""
    return lambda held: {**held, "ranks": [header(**changes)(held["ranks"][0])]}


MALFORMED = {
    "no dict": (lambda held: [held], r"checkpoint\['lightning_gradcomp'\]\['format'\]: got 'a list', allowed: 1, as"),
    "a state that is no dict": (header(ranks=[3]), r"got 'a int without steps, memory"),
    "a mean that is no state": (header(ranks=..., mean={}), r"got 'a dict without .*memory"),
    "a state without steps": (state(steps=...), r"got 'a dict without steps'"),
    "steps that are no number": (state(steps="4"), r"'steps': got 'a str'"),
    "a memory of numbers": (state(memory={"momentum": {"layer.weight": 1.0}}), r"'momentum' that is not a dict of"),
}


@pytest.mark.parametrize(("spoil", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_states_are_named(copies, spoil, message):
    path = copies / "gather.ckpt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, KEY: spoil(content[KEY])}, path)
    with pytest.raises(ValueError, match=message):
        fit(ckpt=path)
    assert fit("drop", path).global_step == 4  # none of it is looked at


def keep_only(path, key, state):
    """Replace what is held under `key` by `state`."""
    content = torch.load(path, weights_only=True)
    assert key in content
    torch.save({**content, key: state}, path)


ROUNDS = r"the state of DelayedAverager: got 'a dict without round_schedule, rounds, rounds_ended, steps', allowed: "
EMPTIED = {
    "dgc": (lambda: lgc.CompressedDDPStrategy(), KEY, r"\['format'\]: got None, allowed: 1"),
    "dga": (lambda: lgc.DelayedStrategy(), delayed.KEY, ROUNDS),
    "sparseloco": (lambda: lgc.DelayedStrategy(error_decay=0.95), delayed.KEY, ROUNDS),
    "dist_async": (lambda: lgc.AsyncStrategy(), async_strategy.KEY, ""),  # as checkpoint_state="drop" saves it
}


@pytest.mark.parametrize(("make", "key", "message"), EMPTIED.values(), ids=EMPTIED)
def test_an_emptied_state_is_named_and_none_is_no_state(saved, tmp_path, make, key, message):
    path = tmp_path / "last.ckpt"
    fit(strategy=make()).save_checkpoint(path)
    keep_only(path, key, {})
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        fit(strategy=make(), ckpt=path, epochs=2)
    keep_only(path, key, None)
    assert fit(strategy=make(), ckpt=path, epochs=2).global_step == 8


def test_an_emptied_state_is_named_by_fabric(saved, tmp_path):
    def load(**state):
        fabric = L.Fabric(strategy=lgc.CompressedFabricStrategy(), accelerator="cpu", devices=1)
        fabric.launch()
        module, optimizer = fabric.setup(net := torch.nn.Linear(4, 2), torch.optim.SGD(net.parameters(), lr=0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fabric.save(tmp_path / "fabric.ckpt", {"module": module, "optimizer": optimizer, **state})
            fabric.load(tmp_path / "fabric.ckpt", {"module": module, "optimizer": optimizer})

    with pytest.raises(ValueError, match=r"\['format'\]: got None, allowed: 1"):
        load(lightning_gradcomp={})
    load(lightning_gradcomp=None)


@pytest.mark.parametrize("strategy", [lgc.CompressedDDPStrategy, lgc.DelayedStrategy])
def test_a_checkpoint_without_global_step_goes_on_from_its_loops(copies, strategy):
    content = torch.load(copies / "gather.ckpt", weights_only=True)
    del content["global_step"], content[KEY]
    torch.save(content, copies / "gather.ckpt")
    trainer = fit(strategy=strategy(), ckpt=copies / "gather.ckpt", epochs=2)
    assert trainer.strategy.averager.steps == trainer.global_step == 8


EDITS = {
    "emptied": lambda checkpoint: checkpoint.update(optimizer_states=[]),
    "without state": lambda checkpoint: checkpoint["optimizer_states"][0].update(state={}),
    "in 16 bits": lambda checkpoint: [
        state.update(momentum_buffer=state["momentum_buffer"].half())
        for state in checkpoint["optimizer_states"][0]["state"].values()
    ],
    "elsewhere": lambda checkpoint: checkpoint.update(weights=checkpoint.pop("state_dict")),
}


class Edits(Net):
    def __init__(self, edit):
        super().__init__()
        self.edit = edit

    def on_save_checkpoint(self, checkpoint):
        self.edit(checkpoint)

    def on_load_checkpoint(self, checkpoint):
        if "weights" in checkpoint:
            checkpoint["state_dict"] = checkpoint.pop("weights")


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("strategy", [lgc.CompressedDDPStrategy, lgc.DelayedStrategy])
def test_what_a_hook_does_to_a_checkpoint_is_saved(saved, tmp_path, strategy, edit):
    path = tmp_path / "last.ckpt"
    fit(strategy=strategy(), net=Edits(EDITS[edit])).save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    if edit == "elsewhere":
        assert "state_dict" not in content
    else:
        kept = [state["momentum_buffer"] for one in content["optimizer_states"] for state in one["state"].values()]
        assert [each.dtype for each in kept] == ([torch.float16] * 2 if edit == "in 16 bits" else [])
    assert fit(strategy=strategy(), net=Edits(EDITS[edit]), ckpt=path, epochs=2).global_step == 8


@pytest.mark.parametrize("edit", [EDITS["emptied"], None])
def test_without_an_optimizers_state_training_starts_with_no_momentum(saved, tmp_path, edit):
    """Whether a hook has emptied the list before it is saved or after it is loaded."""

    class Look(L.Callback):
        def on_load_checkpoint(self, trainer, module, checkpoint):
            checkpoint["optimizer_states"] = []

        def on_train_start(self, trainer, *_):
            seen.extend(part for parts in trainer.strategy.averager.state_dict()["memory"].values() for part in parts)

    seen, path = [], tmp_path / "last.ckpt"
    fit(net=Edits(edit) if edit else None).save_checkpoint(path)
    assert (KEY in torch.load(path, weights_only=True)) == (edit is None)
    fit(ckpt=path, epochs=2, callbacks=[Look()])
    assert not seen


def test_names_of_250_characters(saved, tmp_path):
    trainer = fit("sidecar")
    paths = [tmp_path / f"{'n' * 244}{number}.ckpt" for number in (1, 2)]
    for path in (*paths, paths[0]):
        trainer.save_checkpoint(path)
    folders = [torch.load(path, weights_only=True)[KEY]["sidecars"] for path in paths]
    assert sorted(os.listdir(tmp_path)) == sorted([*(path.name for path in paths), *folders])
    assert fit("sidecar", paths[0], epochs=2).global_step == 8
    trainer.strategy.remove_checkpoint(paths[0])
    assert sorted(os.listdir(tmp_path)) == sorted([paths[1].name, folders[1]])


def test_a_users_checkpoint_io_gets_the_real_path(saved, tmp_path):
    class Noting(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            told.append(Path(path))
            super().save_checkpoint(checkpoint, path, storage_options)

    told = []
    fit(plugins=[Noting()]).save_checkpoint(tmp_path / "last.ckpt")
    assert told == [tmp_path / "last.ckpt"]


class CopyTrainer(L.Callback):
    """Copies everything after a step."""

    def on_train_batch_end(self, trainer, *args):
        copy_all(trainer)


def copy_all(trainer):
    for whole in (trainer, trainer.strategy, trainer.callbacks):
        copy.deepcopy(whole)
        torch.save(whole, io.BytesIO())
    again = copy.deepcopy(trainer).lightning_module
    assert torch.equal(again.layer.weight, trainer.lightning_module.layer.weight)


STRATEGIES = {
    "dgc": lambda: lgc.CompressedDDPStrategy(),
    "dga": lambda: lgc.DelayedStrategy(),
    "async": lambda: lgc.AsyncStrategy(),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_during_and_after_a_fit(saved, strategy):
    copy_all(fit(strategy=STRATEGIES[strategy](), callbacks=[CopyTrainer(), lgc.CommunicationMonitor()]))


class NoteModels(L.Callback):
    def __init__(self, noted):
        self.noted = noted

    def on_train_end(self, trainer, module):
        self.noted += [weakref.ref(module), weakref.ref(trainer.strategy.model)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_kept_after_a_fit(saved, strategy):
    noted = []
    trainer = fit(strategy=STRATEGIES[strategy](), callbacks=[NoteModels(noted)])
    gc.collect()
    module, wrapper = noted  # some strategies have no wrapper
    assert module() is trainer.lightning_module and wrapper() in (None, module())
    del trainer
    gc.collect()
    assert module() is None

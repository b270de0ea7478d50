"""Text as windows of bytes, how ranks share them, and what a language model is validated with."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_gradcomp.app.data import SharedTokens, Text
from lightning_gradcomp.app.data.text import Windows, joined
from tests.app.conftest import built
from tests.app.test_data import on_rank


@pytest.fixture
def folder(tmp_path):
    """40 files of 30 letters each, in two folders, and files to be skipped."""
    for number in range(40):
        path = tmp_path / f"part{number // 30}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number:02}" + "abcdefg" * 4)
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "data.bin").write_bytes(b"\0\1\2")
    return tmp_path


def text_of(tokens):
    return bytes(tokens.tolist()).decode()


def test_every_20th_file_is_to_validate_with(folder):
    train, val = Text(dir=str(folder), pattern="**/*.txt").tokens()
    assert [file[:2] for file in text_of(val).split("\n")] == ["19", "39"]
    assert [int(file[:2]) for file in text_of(train).split("\n")] == [n for n in range(40) if n not in (19, 39)]


def test_of_few_files_the_end_is_to_validate_with(folder):
    train, val = Text(dir=str(folder), pattern="*1/*.txt").tokens()
    assert len(val) == (10 * 30 + 9) // 20 and text_of(train) + text_of(val) == "\n".join(
        f"{number}" + "abcdefg" * 4 for number in range(30, 40)
    )


def test_the_standard_library_is_read_without_tests_and_packages():
    files = Text().files()
    names = [path.relative_to(Text().root).as_posix() for path in files]
    assert {"ast.py", "json/decoder.py"} <= set(names) and all(name.endswith(".py") for name in names)
    assert not [name for name in names if "/test" in f"/{name}/" and "/tests/" in f"/{name}/"]
    assert not [name for name in names if "packages/" in name] and files == sorted(files)


def test_windows_predict_each_byte_but_the_first_once():
    made = Windows(torch.arange(26, dtype=torch.uint8), 5)
    windows = [made[index] for index in range(len(made))]
    assert [window.tolist() for window in windows] == [list(range(start, start + 6)) for start in range(0, 25, 5)]
    assert len(Windows(torch.arange(25), 5)) == 4 and len(Windows(torch.arange(0), 5)) == 0


def shared(folder, rank, world, *, seed=0, **where):
    data = Text(8, str(folder), "**/*.txt", context=10, validation_windows=5, seed=seed)
    return on_rank(data, rank, world, **where)


def starts(batches):
    return [window[:11].tolist() for batch in batches for window in batch]


def test_any_number_of_ranks_trains_on_the_same_windows_in_a_step(folder):
    steps = {}
    for world in (1, 2, 4):
        loaders = [list(shared(folder, rank, world, epoch=1).train_dataloader()) for rank in range(world)]
        steps[world] = [sorted(starts(step)) for step in zip(*loaders, strict=True)]
        assert all(len(step) == 8 for step in steps[world])
    assert steps[1] == steps[2] == steps[4]
    other = list(shared(folder, 0, 1, epoch=1, seed=1).train_dataloader())
    assert sorted(starts(other[:1])) != steps[1][0]


def test_an_epoch_resumes_with_its_rest(folder):
    whole = list(shared(folder, 1, 2, epoch=3).train_dataloader())
    rest = list(shared(folder, 1, 2, epoch=3, processed=4).train_dataloader())
    assert torch.equal(torch.cat(rest), torch.cat(whole[4:]))


def test_validation_windows_are_evenly_spaced_and_the_same_for_all_seeds(folder):
    text = Text(dir=str(folder), pattern="**/*.txt").tokens()[1]
    spaced = [text[start : start + 11].tolist() for start in (0, 10, 20, 30, 40)]  # 6 windows in 61 bytes
    for seed in (0, 1):
        ranks = [starts(shared(folder, rank, 2, seed=seed).val_dataloader()) for rank in range(2)]
        assert sorted(ranks[0] + ranks[1]) == sorted(spaced) and len(ranks[0]) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dir": "nowhere"}, r"^text: there is no such folder\. Looked in .*nowhere \(data\.dir\)\. Put text files"),
        ({"pattern": "*.md"}, r"^text: no file matches \*\.md\. Looked in "),
        ({"pattern": "**/*"}, r"^text: .*data\.bin is not a text: it has a zero byte; data\.pattern chooses files\."),
        ({"pattern": "/abs/*"}, r"^data\.pattern: got '/abs/\*', allowed: a glob pattern below data\.dir"),
        ({"pattern": ""}, r"^data\.pattern: got ''"),
        ({"context": 0}, r"^data\.context: got 0, allowed: a whole number from 1"),
        ({"validation_windows": 0}, r"^data\.validation_windows: got 0, allowed: a whole number from 1"),
        (
            {"batch_size": 200},
            r"^bytes to train with: got \d+, allowed: 2001 or more, data\.batch_size=200 windows",
        ),
        ({"context": 61, "batch_size": 2}, r"^bytes to validate with: got 61, allowed: 62 or more, a window"),
    ],
)
def test_what_is_no_text_is_refused_before_a_rank_starts(folder, options, sentence):
    given = {"dir": str(folder), "pattern": "**/*.txt", "context": 10, **options}
    with pytest.raises(ValueError, match=sentence):
        Text(**given).check()


def test_empty_files_to_validate_with_are_refused(folder):
    for name in ("19", "39"):
        [path] = folder.glob(f"*/{name}.txt")
        path.write_text("")
    empty = Text(4, str(folder), "part0/*.txt", context=10)
    with pytest.raises(ValueError, match=r"^bytes to validate with: got 0, allowed: 11 or more, a window"):
        empty.check()


def test_half_precision_counts_exactly(folder):
    task = tiny(folder).task
    windows = torch.randint(256, (500, 11))
    exact = task.count(windows)
    assert exact.dtype == torch.float64 and exact[1] == 5000
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.allclose(task.to(dtype).count(windows), exact, rtol=1e-3)  # their sum is close to 28,000


def tiny(folder, *words):
    return built("recipe=stdlib_gpt", f"data.dir={folder}", "data.pattern='**/*.txt'", "data.context=10", *words)


def test_the_best_weights_are_those_with_the_smallest_loss(folder):
    for run, metric, mode in (
        (tiny(folder, "callbacks=[default,early_stopping]"), "val_loss", "min"),
        (built("callbacks=[default,early_stopping]"), "val_acc", "max"),
    ):
        monitors = [run.trainer.checkpoint_callback, run.trainer.early_stopping_callback]
        assert [(each.monitor, each.mode) for each in monitors] == 2 * [(metric, mode)]


def test_the_loss_is_that_of_every_next_byte(folder):
    task = tiny(folder).task
    windows = torch.randint(256, (3, 11))
    logits = task(windows[:, :-1])
    losses = [cross_entropy(logits[row, at], windows[row, at + 1]) for row in range(3) for at in range(10)]
    total = torch.stack(losses).sum()
    assert torch.allclose(task.count(windows), torch.tensor([total.item(), 30], dtype=torch.float64))
    task.log = lambda *args, **options: None
    assert torch.allclose(task.training_step(windows, 0), total / 30)
    task.counts = (60.0, 30.0)
    assert task.result() == {"val_loss": 2.0, "val_bits_per_byte": pytest.approx(2 / math.log(2)), "val_tokens": 30}
    assert task.words() == ("validation loss", "2.0000 nats per byte, 2.8854 bits (30 bytes)")


def test_matrices_decay_and_other_parameters_do_not(folder):
    task = tiny(folder).task
    decayed, without = task.parameter_groups()
    assert {parameter.dim() for parameter in decayed["params"]} == {2} and without["weight_decay"] == 0
    assert {parameter.dim() for parameter in without["params"]} == {1}
    assert len(decayed["params"] + without["params"]) == len(list(task.parameters()))


def test_tokens_of_ones_own(monkeypatch, tmp_path):
    (tmp_path / "my_tokens.py").write_text(
        "import torch\n"
        "from lightning_gradcomp.app.data import SharedTokens\n"
        "class Syllables(SharedTokens):\n"
        "    name, vocabulary = 'syllables', 1000\n"
        "    def tokens(self):\n"
        "        return torch.arange(5000) % 1000, torch.arange(500)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("recipe=stdlib_gpt", "data=tokens", "data._target_=my_tokens.Syllables", "data.context=16")
    run = built(*words)
    assert run.task(torch.full((2, 16), 999)).shape == (2, 16, 1000) and isinstance(run.data, SharedTokens)
    run.task.counts = (3.0, 2.0)
    assert set(run.task.result()) == {"val_loss", "val_bits_per_token", "val_tokens"}
    stand_in = built(*words, "dry_run=true").data
    assert (stand_in.vocabulary, stand_in.context, stand_in.unit) == (1000, 16, "token")


def test_a_dry_run_has_random_bytes():
    data = built("recipe=gpt_small_text", "model=gpt_mini", "dry_run=true").data
    train, val = data.load()
    assert (len(train), len(val), train[7].shape) == (8, 4, (1025,)) and torch.equal(train[0], data.load()[0][0])
    assert train.tokens.max() < 256


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data=text"], r"^data: got '.*\.Text', allowed: a SharedImages with task=.*\.Classifier"),
        (
            ["recipe=stdlib_gpt", "data=digits"],
            r"^data: got '.*\.Digits', allowed: a SharedTokens with task=.*Language",
        ),
        (["recipe=stdlib_gpt", "model=swin_mini"], r"^model: .* unexpected keyword argument 'vocabulary'"),
    ],
)
def test_a_network_or_data_for_another_task_are_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        built(*words, "dry_run=true")


def test_texts_are_joined_by_newlines():
    assert text_of(joined([b"a", b"", b"b\n"])) == "a\n\nb\n" and joined([b"a"]).dtype == torch.uint8

"""Data sets in files of their real formats, tiny ones that are made here; and the sentences where they are missing."""

import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10
from torchvision.transforms import v2

from lightning_gradcomp.app.config import DATA
from lightning_gradcomp.app.data import missing
from lightning_gradcomp.app.data.choose import choose, stand_in
from lightning_gradcomp.app.data.folders import read
from lightning_gradcomp.app.data.shared import RankSampler, SharedImages
from lightning_gradcomp.app.data.transforms import mixer, to_train, to_validate
from lightning_gradcomp.app.options.data import Augment
from tests.app.test_compose import run_of


def augment(**options) -> Augment:
    none = {"crop_and_flip": False, "trivial_augment": False, "random_erase": 0.0}
    return Augment(**{**none, "mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, **options})


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Five batches of 4 pictures to train with and one of 6 to validate with, as the archive has them."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)

    def write(name, count):
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = [index % 10 for index in range(count)]
        content = {"batch_label": name, "data": pixels, "labels": labels, "filenames": ["x.png"] * count}
        (folder / name).write_bytes(pickle.dumps(content))
        return pixels.reshape(-1, 3, 32, 32)

    train = np.concatenate([write(f"data_batch_{number}", 4) for number in range(1, 6)])
    val = write("test_batch", 6)
    meta = {"num_cases_per_batch": 4, "label_names": [f"class {number}" for number in range(10)], "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))
    monkeypatch.setattr(TorchvisionCIFAR10, "_check_integrity", lambda self: True)  # md5 sums of the real files
    monkeypatch.setattr(TorchvisionCIFAR10, "meta", {**TorchvisionCIFAR10.meta, "md5": None})
    options = DATA["cifar10"](batch_size=4, dir=str(tmp_path), workers=0, prefetch=5, download=False)
    return options, train, val


def test_cifar10_as_torchvision_reads_it(cifar10):
    options, pixels, val_pixels = cifar10
    missing.check(options)
    source = choose(options, augment())
    train, val = source.load()
    assert (source.channels, source.size, source.classes, source.images) == (3, 32, 10, 50_000)
    assert source.prefetch == 5
    assert (len(train), len(val)) == (20, 6) and [label for _, label in val] == [0, 1, 2, 3, 4, 5]
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    for images, wanted in ((train, pixels), (val, val_pixels)):
        found = torch.stack([image for image, _ in images])
        undone = (found * std.view(3, 1, 1) + mean.view(3, 1, 1)) * 255
        torch.testing.assert_close(undone, torch.from_numpy(wanted).float(), rtol=0, atol=0.01)


def test_damaged_files_are_named(cifar10, monkeypatch):
    options, *_ = cifar10
    monkeypatch.setattr(TorchvisionCIFAR10, "_check_integrity", lambda self: False)
    with pytest.raises(missing.MissingData, match=r"^CIFAR-10: files are missing or damaged in cifar-10-batches-py. "):
        choose(options, augment()).load()


def test_a_download_that_fails_is_answered_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(TorchvisionCIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # nobody listens
    options = DATA["cifar10"](batch_size=4, dir=str(tmp_path / "here"), workers=0, download=True)
    missing.check(options)  # it may be fetched
    with pytest.raises(missing.MissingData, match=r"the download failed: .*refused") as refused:
        choose(options, augment()).prepare()
    assert str(tmp_path / "here") in str(refused.value) and "recipe=digits" in str(refused.value)


@pytest.fixture
def pictures(tmp_path):
    """Two classes, three pictures each to train with and one to validate with, of different sizes."""
    for part, count in (("train", 3), ("val", 1)):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (90 + 10 * index, 100), (255 * number, 0, 0)).save(folder / f"{index}.png")
    return DATA["imagefolder"](batch_size=4, dir=str(tmp_path), workers=0, size=72)


def test_pictures_in_folders(pictures):
    missing.check(pictures)
    source = choose(pictures, augment(crop_and_flip=True, trivial_augment=True, random_erase=0.5))
    assert (source.channels, source.size, source.classes) == (3, 72, 2)
    data = SharedImages(source, batch_size=4, ranks=2, seed=0)
    assert not data.prepare_data_per_node  # rank 0 alone downloads
    data.setup("fit")
    assert [label for _, label in data.train] == [0, 0, 0, 1, 1, 1]
    assert all(image.shape == (3, 72, 72) and image.dtype == torch.float32 for image, _ in data.train)
    cat, dog = (image for image, _ in data.val)
    assert abs(cat[0].mean() - (0 - 0.485) / 0.229) < 1e-3 and abs(dog[0].mean() - (1 - 0.485) / 0.229) < 1e-3


@pytest.mark.parametrize(("batch_size", "ranks"), [(8, 2), (3, 3)])
def test_too_few_pictures_are_refused_once_they_are_counted(pictures, batch_size, ranks):
    data = SharedImages(choose(pictures, augment()), batch_size=6, ranks=3, seed=0)
    with pytest.raises(ValueError, match=r"images to validate with: got 2, allowed: one for each of 3 ranks"):
        data.setup("fit")
    data = SharedImages(choose(pictures, augment()), batch_size=8, ranks=2, seed=0)
    with pytest.raises(ValueError, match=r"data.batch_size: got 8, allowed: a multiple of 2"):
        data.setup("fit")


def break_it(root, how):
    """Damage the folder of pictures."""
    for part in ("train", "val"):
        if how == part:
            (root / part).rename(root / "elsewhere")
    if how == "empty":
        (root / "val" / "dog" / "0.png").unlink()
    if how == "classes":
        (root / "val" / "dog").rename(root / "val" / "wolf")
    if how == "one":
        for part in ("train", "val"):
            shutil.rmtree(root / part / "dog")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("train", "images: no folders of classes in train/. Looked in "),
        ("val", "images: no folders of classes in val/. Looked in "),
        ("empty", "images: no image in val/dog. Looked in "),
        ("classes", "images: train/ and val/ have different classes (2, such as dog, wolf). Looked in "),
        ("one", "images: one class alone, cat. Looked in "),
    ],
)
def test_incomplete_pictures_are_named(pictures, tmp_path, how, sentence):
    break_it(tmp_path, how)
    with pytest.raises(missing.MissingData) as refused:
        missing.check(pictures)
    assert str(refused.value).startswith(sentence + str(tmp_path)) and "data.dir" in str(refused.value)


def test_a_class_without_an_image_is_named(pictures, tmp_path):
    picture = tmp_path / "val" / "dog" / "0.png"
    picture.rename(picture.with_suffix(".txt"))
    with pytest.raises(missing.MissingData, match=r"^images: Found no valid file for the classes dog.* Looked in "):
        choose(pictures, augment()).load()


def test_grey_of_sixteen_bits_is_not_clipped(pictures, tmp_path):
    levels = np.array([[0, 255], [32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "grey.png")
    assert np.asarray(read(str(tmp_path / "grey.png")))[..., 0].tolist() == [[0, 0], [128, 255]]


def test_a_picture_that_cannot_be_used_is_named(pictures, tmp_path):
    Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(missing.MissingData, match=r"float.tiff: pixels of 32 bits"):
        read(str(tmp_path / "float.tiff"))
    picture = tmp_path / "train" / "dog" / "1.png"
    picture.write_bytes(picture.read_bytes()[:-30])
    train, _ = choose(pictures, augment()).load()
    with pytest.raises(missing.MissingData, match=r"dog/1.png: .*truncated"):
        list(train)


def test_imagenet_has_a_thousand_classes(pictures, tmp_path):
    options = DATA["imagenet"](batch_size=4, dir=str(tmp_path), workers=0, size=72)
    with pytest.raises(missing.MissingData, match=r"^ImageNet: 2 classes, not 1,000. .*image-net.org"):
        missing.check(options)


def test_cifar10_that_may_not_be_fetched_is_missing(tmp_path):
    options = DATA["cifar10"](batch_size=4, dir=str(tmp_path), workers=0, download=False)
    with pytest.raises(
        missing.MissingData, match=r"^CIFAR-10: there is no folder cifar-10-batches-py. .*download=true"
    ):
        missing.check(options)


@pytest.mark.parametrize("size", [32, 72])
def test_training_images_are_augmented_and_others_are_not(size):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 100, 3), dtype=np.uint8))
    mean, std = (0.5,) * 3, (0.25,) * 3
    torch.manual_seed(0)
    train, val = to_train(augment(crop_and_flip=True), size, mean, std), to_validate(augment(), size, mean, std)
    assert not torch.equal(train(picture), train(picture)) and torch.equal(val(picture), val(picture))
    assert train(picture).shape == val(picture).shape == (3, size, size)
    assert torch.equal(to_train(augment(), size, mean, std)(picture), val(picture))
    erased = to_train(augment(random_erase=1.0), size, mean, std)(picture)
    assert (erased == 0).all(0).any() and not (val(picture) == 0).all(0).any()


def test_images_are_resized_as_the_reference_does():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 100, 3), dtype=np.uint8))
    zero, one = (0.0,) * 3, (1.0,) * 3
    pixels = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    for name, pillow in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        resized = pixels(picture.resize((80, 72), pillow))[:, :, 4:76]
        assert torch.equal(to_validate(augment(interpolation=name, resize=72), 72, zero, one)(picture), resized)


def test_repeated_images_are_on_several_ranks():
    samplers = [RankSampler(range(64), 4, rank, seed=3, skip=0, repeats=4) for rank in range(4)]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in samplers])
    first, second = epochs
    assert all(each == first[0] for each in first) and len(set(first[0])) == 16 and first != second
    three = [list(RankSampler(range(64), 4, rank, seed=3, skip=0, repeats=3)) for rank in range(4)]
    counts = np.bincount([index for order in three for index in order])
    assert sorted(set(counts)) == [0, 1, 3] and counts.sum() == 64
    [plain] = [list(RankSampler(range(64), 1, 0, seed=3, skip=0))]
    assert sorted(plain) == list(range(64))
    resumed = RankSampler(range(64), 4, 1, seed=3, skip=5, repeats=3)
    assert list(resumed) == three[1][5:]


def test_a_small_picture_moves_by_an_eighth_at_most():
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[16, 15:17] = 255  # in the middle, so that a mirrored picture has it there too
    transform = to_train(augment(crop_and_flip=True), 32, (0.0,) * 3, (1.0,) * 3)
    torch.manual_seed(0)
    places = [transform(Image.fromarray(pixels))[0].nonzero().float().mean(0).tolist() for _ in range(200)]
    rows, columns = (sorted({place[axis] for place in places}) for axis in (0, 1))
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (12, 20, 11.5, 19.5)


def test_mixed_batches_have_shared_labels():
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    for options in ({"mixup": 0.8}, {"cutmix": 1.0}):
        mixed, shares = mixer(augment(**options), 4)(images, labels)
        assert mixed.shape == images.shape and not torch.equal(mixed, images)
        assert shares.shape == (8, 4) and torch.allclose(shares.sum(1), torch.ones(8)) and (shares.max(1)[0] < 1).any()
    assert mixer(augment(label_smoothing=0.1), 4) is None


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [("digits", (1, 8, 10)), ("swin_t_cifar10", (3, 32, 10)), ("resnet50_imagenet", (3, 224, 1000))],
)
def test_a_dry_run_has_random_images_of_the_data_s_shape(recipe, shape):
    source = stand_in(run_of(f"recipe={recipe}").data, 12)
    assert (source.channels, source.size, source.classes) == shape
    train, val = source.load()
    assert len(train) == len(val) == 12 and train[11][0].shape == (shape[0], shape[1], shape[1])
    assert torch.equal(train[0][0], source.load()[0][0][0])


def test_a_dry_run_has_as_many_classes_as_the_folder(pictures):
    assert stand_in(pictures, 12).classes == 2

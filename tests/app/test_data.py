"""Data sets in files of their real formats, tiny ones that are made here, and how ranks share their images."""

import pickle
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10
from torchvision.datasets import FashionMNIST as TorchvisionFashionMNIST
from torchvision.transforms import v2

from lightning_gradcomp.app.data import CIFAR10, Augment, Digits, FashionMNIST, ImageFolder, ImageNet, SharedImages
from lightning_gradcomp.app.data.digits import digits
from lightning_gradcomp.app.data.files import read
from lightning_gradcomp.app.data.images import OwnImages, dirichlet_split
from lightning_gradcomp.app.data.shared import MissingData, RankSampler
from tests.app.conftest import built

ZERO, ONE = (0.0,) * 3, (1.0,) * 3


def on_rank(data: SharedImages, rank: int, world: int, *, epoch=0, processed=0, is_last_batch=False) -> SharedImages:
    """`data` on a rank, set up for an epoch of which `processed` batches were trained before a checkpoint."""
    seen = SimpleNamespace(is_last_batch=is_last_batch, current=SimpleNamespace(processed=processed))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=seen))
    data.trainer = SimpleNamespace(world_size=world, global_rank=rank, fit_loop=loop, current_epoch=epoch)
    data.setup("fit")
    return data


def shared_digits(rank: int, world: int, *, seed=0, dirichlet=None, **where) -> SharedImages:
    return on_rank(Digits(60, seed=seed, dirichlet=dirichlet), rank, world, **where)


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
    return CIFAR10(4, str(tmp_path), workers=0, download=False), train, val


def test_cifar10_as_torchvision_reads_it(cifar10):
    data, pixels, val_pixels = cifar10
    data.check()
    train, val = data.load()
    assert (data.channels, data.size, data.classes) == (3, 32, 10)
    assert (len(train), len(val)) == (20, 6) and [label for _, label in val] == [0, 1, 2, 3, 4, 5]
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    for images, wanted in ((train, pixels), (val, val_pixels)):
        found = torch.stack([image for image, _ in images])
        undone = (found * std.view(3, 1, 1) + mean.view(3, 1, 1)) * 255
        torch.testing.assert_close(undone, torch.from_numpy(wanted).float(), rtol=0, atol=0.01)


def test_damaged_files_are_named(cifar10, monkeypatch):
    monkeypatch.setattr(TorchvisionCIFAR10, "_check_integrity", lambda self: False)
    with pytest.raises(MissingData, match=r"^CIFAR-10: files are missing or damaged in cifar-10-batches-py. "):
        cifar10[0].load()


def test_a_download_that_fails_is_answered_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(TorchvisionCIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # nobody listens
    data = CIFAR10(4, str(tmp_path / "here"), workers=0, download=True)
    data.check()  # it may be fetched
    with pytest.raises(MissingData, match=r"the download failed: .*refused") as refused:
        data.prepare_data()
    assert str(tmp_path / "here") in str(refused.value) and "recipe=digits" in str(refused.value)


def write_fashion_mnist(folder):
    """The four files, of 20 images to train with and 6 to validate with. Returns the pixels by part."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    pixels = {}
    for part, count in (("train", 20), ("t10k", 6)):
        pixels[part] = generator.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8)
        images = struct.pack(">4i", 0x803, count, 28, 28) + pixels[part].tobytes()
        labels = struct.pack(">2i", 0x801, count) + bytes(index % 10 for index in range(count))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return pixels


def test_fashion_mnist_as_torchvision_reads_it(tmp_path):
    pixels = write_fashion_mnist(tmp_path / "FashionMNIST" / "raw")
    data = FashionMNIST(4, str(tmp_path), workers=0)
    data.check()
    data.prepare_data()  # nothing to download
    train, val = data.load()
    assert (data.channels, data.size, data.classes) == (1, 28, 10)
    assert (len(train), len(val)) == (20, 6) and [int(label) for _, label in val] == [0, 1, 2, 3, 4, 5]
    for images, wanted in ((train, pixels["train"]), (val, pixels["t10k"])):
        found = torch.stack([image for image, _ in images])
        undone = (found * 0.3530 + 0.2860) * 255
        torch.testing.assert_close(undone, torch.from_numpy(wanted).float(), rtol=0, atol=0.01)


def test_fashion_mnist_is_augmented_if_asked(tmp_path):
    write_fashion_mnist(tmp_path / "FashionMNIST" / "raw")
    augmented = FashionMNIST(4, str(tmp_path), workers=0, augment=Augment(crop_and_flip=True, random_erase=0.5))
    on_rank(augmented, 0, 1)
    [(images, labels), *_] = augmented.train_dataloader()
    assert images.shape == (4, 1, 28, 28) and images.dtype == torch.float32 and labels.dtype == torch.int64
    assert not torch.equal(augmented.train[0][0], augmented.train[0][0])
    assert torch.equal(augmented.val[0][0], augmented.val[0][0])


def test_fashion_mnist_is_missing_or_damaged(tmp_path, monkeypatch):
    data = FashionMNIST(4, str(tmp_path), download=False)
    with pytest.raises(MissingData, match=r"^Fashion-MNIST: there is no folder FashionMNIST/raw"):
        data.check()
    monkeypatch.setattr(TorchvisionFashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody listens
    data.download = True
    data.check()  # it may be fetched
    with pytest.raises(MissingData, match=r"the download failed: .*refused"):
        data.prepare_data()
    folder = tmp_path / "again" / "FashionMNIST" / "raw"
    write_fashion_mnist(folder)
    images = folder / "train-images-idx3-ubyte"
    for damaged in (images.read_bytes()[:-30], b"<html>"):
        images.write_bytes(damaged)
        with pytest.raises(MissingData, match=r"Fashion-MNIST: files are missing or damaged in FashionMNIST/raw"):
            FashionMNIST(4, str(tmp_path / "again")).load()


@pytest.fixture
def pictures(tmp_path):
    """Two classes, three pictures each to train with and one to validate with, of different sizes."""
    for part, count in (("train", 3), ("val", 1)):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (90 + 10 * index, 100), (255 * number, 0, 0)).save(folder / f"{index}.png")
    return lambda batch_size=4, **augment: ImageFolder(batch_size, str(tmp_path), 72, 0, augment=Augment(**augment))


def test_pictures_in_folders(pictures):
    data = pictures(crop_and_flip=True, trivial_augment=True, random_erase=0.5)
    data.check()
    assert (data.channels, data.size, data.classes) == (3, 72, 2)
    assert not data.prepare_data_per_node  # rank 0 alone downloads
    on_rank(data, 0, 2)
    assert [label for _, label in data.train] == [0, 0, 0, 1, 1, 1]
    assert all(image.shape == (3, 72, 72) and image.dtype == torch.float32 for image, _ in data.train)
    cat, dog = (image for image, _ in data.val)
    assert abs(cat[0].mean() - (0 - 0.485) / 0.229) < 1e-3 and abs(dog[0].mean() - (1 - 0.485) / 0.229) < 1e-3


def test_too_few_pictures_are_refused_once_they_are_counted(pictures):
    with pytest.raises(ValueError, match=r"images to validate with: got 2, allowed: one for each of 3 ranks"):
        on_rank(pictures(6), 0, 3)
    with pytest.raises(ValueError, match=r"data.batch_size: got 8, allowed: a multiple of 2"):
        on_rank(pictures(8), 0, 2)


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
    with pytest.raises(MissingData) as refused:
        pictures().check()
    assert str(refused.value).startswith(sentence + str(tmp_path)) and "data.dir" in str(refused.value)


def test_a_class_may_be_a_folder_of_links(pictures, tmp_path):
    dogs = tmp_path / "val" / "dog"
    dogs.rename(tmp_path / "dogs")
    dogs.mkdir()
    (dogs / "batch").symlink_to(tmp_path / "dogs")
    pictures().check()
    assert len(pictures().load()[1]) == 2


def test_a_class_without_an_image_is_named(pictures, tmp_path):
    picture = tmp_path / "val" / "dog" / "0.png"
    picture.rename(picture.with_suffix(".txt"))
    with pytest.raises(MissingData, match=r"^images: Found no valid file for the classes dog.* Looked in "):
        pictures().load()


def test_grey_of_sixteen_bits_is_not_clipped(pictures, tmp_path):
    levels = np.array([[0, 255], [32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "grey.png")
    assert np.asarray(read(str(tmp_path / "grey.png")))[..., 0].tolist() == [[0, 0], [128, 255]]


def test_a_picture_that_cannot_be_used_is_named(pictures, tmp_path):
    Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(MissingData, match=r"float.tiff: pixels of 32 bits"):
        read(str(tmp_path / "float.tiff"))
    picture = tmp_path / "train" / "dog" / "1.png"
    picture.write_bytes(picture.read_bytes()[:-30])
    train, _ = pictures().load()
    with pytest.raises(MissingData, match=r"dog/1.png: .*truncated"):
        list(train)


def test_imagenet_has_a_thousand_classes(pictures, tmp_path):
    with pytest.raises(MissingData, match=r"^ImageNet: 2 classes, not 1,000. .*image-net.org"):
        ImageNet(4, str(tmp_path), 72).check()


@pytest.mark.parametrize("size", [32, 72])
def test_training_images_are_augmented_and_others_are_not(size):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 100, 3), dtype=np.uint8))
    mean, std = (0.5,) * 3, (0.25,) * 3
    torch.manual_seed(0)
    augment = Augment(crop_and_flip=True)
    train, val = augment.to_train(size, mean, std), augment.to_validate(size, mean, std)
    assert not torch.equal(train(picture), train(picture)) and torch.equal(val(picture), val(picture))
    assert train(picture).shape == val(picture).shape == (3, size, size)
    assert torch.equal(Augment().to_train(size, mean, std)(picture), val(picture))
    erased = Augment(random_erase=1.0).to_train(size, mean, std)(picture)
    assert (erased == 0).all(0).any() and not (val(picture) == 0).all(0).any()


def test_images_are_resized_as_the_reference_does():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 100, 3), dtype=np.uint8))
    pixels = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    for name, pillow in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        resized = pixels(picture.resize((80, 72), pillow))[:, :, 4:76]
        assert torch.equal(Augment(interpolation=name, resize=72).to_validate(72, ZERO, ONE)(picture), resized)


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
    transform = Augment(crop_and_flip=True).to_train(32, ZERO, ONE)
    torch.manual_seed(0)
    places = [transform(Image.fromarray(pixels))[0].nonzero().float().mean(0).tolist() for _ in range(200)]
    rows, columns = (sorted({place[axis] for place in places}) for axis in (0, 1))
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (12, 20, 11.5, 19.5)


def test_mixed_batches_have_shared_labels():
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    for options in ({"mixup": 0.8}, {"cutmix": 1.0}):
        mixed, shares = Augment(**options).mixer(4)(images, labels)
        assert mixed.shape == images.shape and not torch.equal(mixed, images)
        assert shares.shape == (8, 4) and torch.allclose(shares.sum(1), torch.ones(8)) and (shares.max(1)[0] < 1).any()
    assert Augment(label_smoothing=0.1).mixer(4) is None


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("digits", (1, 8, 10)),
        ("swin_fashion_mnist", (1, 28, 10)),
        ("swin_t_cifar10", (3, 32, 10)),
        ("resnet50_imagenet", (3, 224, 1000)),
    ],
)
def test_a_dry_run_has_random_images_of_the_data_s_shape(recipe, shape):
    data = built(f"recipe={recipe}", "dry_run=true").data
    assert (data.channels, data.size, data.classes) == shape
    train, val = data.load()
    assert (len(train), len(val)) == (8, 4) and train[7][0].shape == (shape[0], shape[1], shape[1])
    assert torch.equal(train[0][0], data.load()[0][0][0])


def test_a_dry_run_has_as_many_classes_as_the_folder(pictures, tmp_path):
    assert built("data=imagefolder", f"data.dir={tmp_path}", "data.size=32", "dry_run=true").data.classes == 2


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


def test_folds_validate_every_image_once():
    seen = []
    for fold in range(5):
        train, val = digits(fold)
        assert len(train) + len(val) == 1797
        counts = val.tensors[1].bincount(minlength=10)
        assert counts.min() >= 34 and counts.max() <= 37
        pixels = val.tensors[0]
        grey = 16 * (pixels - pixels.min()) / (pixels.max() - pixels.min())  # as it was before it was normalised
        seen.append(grey.round())
    assert len(torch.cat(seen).unique(dim=0)) == 1797


def test_three_ranks_share_the_images():
    shares = [shared_digits(rank, 3) for rank in range(3)]
    batches = [[len(labels) for _, labels in share.train_dataloader()] for share in shares]
    assert batches == [[20] * 23] * 3
    train = torch.cat([images for share in shares for images, _ in share.train_dataloader()])
    assert len(train.unique(dim=0)) == len(train) == 3 * 20 * 23
    val = torch.cat([images for share in shares for images, _ in share.val_dataloader()])
    assert len(val.unique(dim=0)) == len(val) == 360


def test_ranks_validate_in_as_many_batches():
    shares = [shared_digits(rank, 2) for rank in range(2)]
    for share in shares:
        share.val = TensorDataset(torch.arange(257))
    batches = [[numbers for [numbers] in share.val_dataloader()] for share in shares]
    assert [[len(numbers) for numbers in own] for own in batches] == [[65, 64], [64, 64]]
    assert sorted(torch.cat([*batches[0], *batches[1]]).tolist()) == list(range(257))


def test_the_order_depends_on_the_epoch_and_the_seed_alone():
    def order(**options):
        return list(shared_digits(1, 2, **options).train_dataloader().sampler)

    assert order(seed=0, epoch=1) == order(seed=0, epoch=1)
    assert order(seed=0, epoch=1) != order(seed=0, epoch=2) != order(seed=1, epoch=2)


def test_a_checkpoint_amid_an_epoch_resumes_with_its_rest():
    def images(**options):
        return torch.cat([batch for batch, _ in shared_digits(1, 2, epoch=3, **options).train_dataloader()])

    whole = images()
    assert torch.equal(images(processed=5), whole[5 * 30 :])
    assert torch.equal(images(processed=23, is_last_batch=True), whole)
    loader = shared_digits(0, 2, processed=5).train_dataloader()
    assert len(loader) == 23 and [len(list(loader)) for _ in range(2)] == [18, 23]


def test_ranks_have_images_of_their_own_unequal_by_class():
    shares = [shared_digits(rank, 3, dirichlet=0.3) for rank in range(3)]
    loaders = [share.train_dataloader() for share in shares]
    own = [set(loader.sampler.own.tolist()) for loader in loaders]
    assert sorted(index for each in own for index in each) == list(range(1437))
    assert max(map(len, own)) > 1.2 * min(map(len, own)) >= 1.2 * 20
    labels = shares[0].train.tensors[1]
    classes = torch.stack([labels[sorted(each)].bincount(minlength=10) for each in own])
    assert float((classes / classes.sum(0)).max()) > 0.8  # nearly all of some class
    epoch = list(loaders[0].sampler)
    assert len(epoch) == 460 and set(epoch) <= own[0] and [len(loader) for loader in loaders] == [23] * 3


def test_own_images_resume_amid_an_epoch_and_differ_by_epoch():
    def order(**options):
        return list(shared_digits(1, 2, dirichlet=0.3, **options).train_dataloader().sampler)

    assert order(epoch=3, processed=5) == order(epoch=3)[5 * 30 :]
    assert order(epoch=3) != order(epoch=4)


@pytest.mark.parametrize("images", [5, 20])
def test_own_images_begin_again_after_the_last_one(images):
    epoch = list(OwnImages(np.arange(100, 100 + images), 12, seed=0, skip=0))
    rounds = [epoch[start : start + images] for start in range(0, 12, images)]
    assert len(epoch) == 12 and all(len(set(each)) == len(each) for each in rounds)
    assert set(epoch) <= set(range(100, 100 + images)) and len({tuple(each) for each in rounds}) == len(rounds)


def test_a_split_without_a_batch_for_each_rank_is_refused():
    with pytest.raises(ValueError, match=r"^data\.dirichlet: got 0\.01, allowed: a larger number"):
        dirichlet_split(torch.arange(100) % 10, 8, 0.01, 12, 0)

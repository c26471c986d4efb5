from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.vision.config import DataConfig
from stable_forgetting.vision.data import readers
from stable_forgetting.vision.data.augment import crop_flip
from stable_forgetting.vision.data.folders import listing_digest
from stable_forgetting.vision.data.source import InputSpec, load_source
from tests.local import LOCAL

GREY = {"mean": (0.3,), "std": (0.35,)}
COLOUR = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def digits(input_size=16, **fields):
    return load_source(DataConfig(name="digits", **fields), InputSpec(input_size, **GREY))


def encoded(pixels, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def cifar_like(root, *, seed=0, train=60, test=20, kind="PNG", size=32, label=None):
    """A tiny CIFAR-10 in the hub's layout; returns the pixels of both parts."""
    rng = np.random.default_rng(seed)
    folder = root / "cifar10"
    folder.mkdir(parents=True)
    pixels = {}
    for part, count in (("train", train), ("test", test)):
        pixels[part] = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        cells = [{"bytes": encoded(image, kind), "path": "x"} for image in pixels[part]]
        labels = [label if label is not None else row % 10 for row in range(count)]
        pq.write_table(
            pa.table({"img": cells, "label": labels}), folder / f"{part}-00000-of-00001.parquet"
        )
    return pixels


def open_cifar(root, input_size=32, **fields):
    fields = {"source": "parquet", "validation_images": 10} | fields
    config = DataConfig(name="cifar10", **fields)
    return load_source(config, InputSpec(input_size, **COLOUR), data_root=root)


# -- pools ----------------------------------------------------------------------------------------


def test_digits_pools_are_disjoint_balanced_and_complete():
    source = digits()
    pools = [source.train_pool, source.validation_pool, source.test_pool]
    assert [len(pool) for pool in pools] == [1247, 150, 400]
    assert all(pool.dtype == np.int64 for pool in pools)
    everything = np.concatenate(pools)
    np.testing.assert_array_equal(np.sort(everything), np.arange(1797))
    for pool in pools[1:]:
        counts = np.bincount(source.labels[pool], minlength=10)
        assert counts.max() - counts.min() <= 1
    assert source.test_pool.min() > max(source.train_pool.max(), source.validation_pool.max())


def test_subsets_are_balanced_and_validation_does_not_depend_on_their_size(tmp_path):
    cifar_like(tmp_path)
    small = open_cifar(tmp_path, train_images=20, test_images=10)
    large = open_cifar(tmp_path, train_images=40, test_images=10)
    assert np.bincount(small.labels[small.train_pool]).tolist() == [2] * 10
    assert np.bincount(small.labels[small.test_pool]).tolist() == [1] * 10
    pixels = [source.native(torch.from_numpy(source.validation_pool)) for source in (small, large)]
    assert torch.equal(*pixels)


def test_validation_comes_from_the_training_part(tmp_path):
    pixels = cifar_like(tmp_path)
    source = open_cifar(tmp_path)
    official = {image.tobytes() for image in pixels["train"]}
    held_out = source.native(torch.from_numpy(source.validation_pool))
    for image in (held_out * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy():
        assert image.tobytes() in official


def test_another_subset_seed_draws_other_images():
    assert digits(subset_seed=1).digest != digits().digest


# -- digest ---------------------------------------------------------------------------------------


def test_digest_follows_content_and_preparation_only(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        cifar_like(tmp_path / name, seed=seed)
    first = open_cifar(tmp_path / "a")
    assert first.digest == open_cifar(tmp_path / "b").digest
    assert first.digest == open_cifar(tmp_path / "a", input_size=48, flip=False).digest
    assert first.digest != open_cifar(tmp_path / "c").digest
    assert first.digest != open_cifar(tmp_path / "a", native_size=16).digest
    assert first.digest != open_cifar(tmp_path / "a", noise=0.5).digest


def test_the_same_call_decodes_once():
    assert digits() is digits()


# -- fetching -------------------------------------------------------------------------------------


def test_fetch_normalises_the_stored_pixels(tmp_path):
    cifar_like(tmp_path)
    source = open_cifar(tmp_path)
    ids = torch.tensor([5, 0, 31])
    batch = source.fetch(ids)
    pixels = source.native(ids)
    assert pixels.min() >= 0 and pixels.max() <= 1
    mean, std = (torch.tensor(COLOUR[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(batch.inputs["x"], (pixels - mean) / std)
    assert batch.labels.tolist() == source.labels[ids.numpy()].tolist()
    assert batch.indices is ids


def test_input_bounds_are_black_and_white(tmp_path):
    cifar_like(tmp_path)
    bounds = open_cifar(tmp_path).input_bounds["x"]
    for bound, pixel in zip(bounds, (0.0, 1.0), strict=True):
        expected = [(pixel - m) / s for m, s in zip(COLOUR["mean"], COLOUR["std"], strict=True)]
        assert torch.allclose(bound.flatten(), torch.tensor(expected))
        assert bound.shape == (3, 1, 1)
    assert digits(noise=0.5).input_bounds is None, "noise has no such limits"


def test_parquet_pixels_are_read_exactly(tmp_path):
    pixels = cifar_like(tmp_path)
    source = open_cifar(tmp_path)
    test = source.native(torch.from_numpy(source.test_pool)) * 255
    expected = torch.from_numpy(pixels["test"]).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(test, expected)
    assert source.provenance == "cifar10 (local parquet, PNG)"
    assert source.in_chans == 3 and source.num_classes == 10


def test_jpeg_copies_are_called_jpeg(tmp_path):
    cifar_like(tmp_path, kind="JPEG")
    assert open_cifar(tmp_path).provenance == "cifar10 (local parquet, JPEG)"


def test_resize_happens_after_augmentation(tmp_path):
    cifar_like(tmp_path)
    source = open_cifar(tmp_path, input_size=48)
    ids = torch.arange(6)
    batch = source.fetch(ids, augment=torch.Generator().manual_seed(3))
    native = crop_flip(source.native(ids), torch.Generator().manual_seed(3), padding=4)
    resized = F.interpolate(native, (48, 48), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(COLOUR[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(batch.inputs["x"], (resized - mean) / std)


def test_augmentation_needs_both_the_config_and_a_generator(tmp_path):
    cifar_like(tmp_path)
    ids = torch.arange(8)
    on, off = open_cifar(tmp_path), open_cifar(tmp_path, augment=False)
    plain = on.fetch(ids).inputs["x"]
    assert torch.equal(plain, off.fetch(ids, augment=torch.Generator()).inputs["x"])
    drawn = [on.fetch(ids, augment=torch.Generator().manual_seed(1)).inputs["x"] for _ in "ab"]
    assert torch.equal(*drawn)
    assert not torch.equal(plain, drawn[0])


def test_noise_is_fixed_per_image_and_in_units_of_the_normalised_image():
    clean, noisy = digits(), digits(noise=1.0)
    ids = torch.arange(300)
    added = noisy.fetch(ids).inputs["x"] - clean.fetch(ids).inputs["x"]
    assert abs(added.std().item() - 1) < 0.02 and abs(added.mean().item()) < 0.02
    alone = noisy.fetch(torch.tensor([7])).inputs["x"][0]
    assert torch.equal(alone, noisy.fetch(torch.arange(20)).inputs["x"][7])
    assert not torch.equal(added[0], added[1])


def test_digits_do_not_flip_unless_asked():
    assert not DataConfig(name="digits").flip and not DataConfig(name="digits").augment
    assert DataConfig(name="cifar10").flip and DataConfig(name="digits", flip=True).flip


# -- augmentation ---------------------------------------------------------------------------------


def test_flips_are_mirror_images_of_about_half():
    images = torch.rand(400, 1, 6, 6)
    out = crop_flip(images, torch.Generator().manual_seed(0), padding=0)
    mirrored = (out == images.flip(3)).flatten(1).all(1)
    kept = (out == images).flatten(1).all(1)
    assert torch.equal(mirrored, ~kept)
    assert 150 < int(mirrored.sum()) < 250


def test_crops_are_windows_of_the_padded_image():
    images = torch.rand(64, 2, 5, 5)
    out = crop_flip(images, torch.Generator().manual_seed(0), padding=2, flip=False)
    windows = F.unfold(F.pad(images, (2,) * 4), 5).transpose(1, 2)  # 64, 25 positions, 2*5*5
    equal = (windows == out.flatten(1)[:, None]).all(2)
    assert bool(equal.any(1).all())
    assert int(equal.any(0).sum()) > 15


# -- folders --------------------------------------------------------------------------------------


def image_folder(root, per_class=6, seed=0):
    rng = np.random.default_rng(seed)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
            (root / name / f"{number}.png").write_bytes(encoded(pixels))


def open_folder(root, native_size=12, **fields):
    config = DataConfig(name="folder", folder="pets", native_size=native_size, **fields)
    return load_source(config, InputSpec(12, **COLOUR), data_root=root)


def test_folder_with_and_without_a_test_part(tmp_path):
    image_folder(tmp_path / "pets")
    image_folder(tmp_path / "split" / "train")
    image_folder(tmp_path / "split" / "test", per_class=2, seed=1)
    fields = {"name": "folder", "native_size": 12, "validation_images": 2}
    for config in (
        DataConfig(folder="pets", test_images=4, **fields),
        DataConfig(folder="split", **fields),
    ):
        source = load_source(config, InputSpec(12, **COLOUR), data_root=tmp_path)
        sizes = [len(source.train_pool), len(source.validation_pool), len(source.test_pool)]
        assert sizes == ([6, 2, 4] if config.folder == "pets" else [10, 2, 4])
        assert source.fetch(torch.arange(3)).inputs["x"].shape == (3, 3, 12, 12)
        assert source.class_names == ("cat", "dog")


def test_a_listing_is_of_the_files_that_are_read(tmp_path):
    """Of linked folders too, of any name that a disk may hold, and of no hidden file."""
    image_folder(tmp_path / "pets")
    elsewhere = tmp_path / "pets" / "linked"
    image_folder(tmp_path / "others")
    elsewhere.symlink_to(next((tmp_path / "others").iterdir()))
    found = [listing_digest(tmp_path / "pets")]
    (tmp_path / "pets" / ".hidden").write_text("x")
    assert listing_digest(tmp_path / "pets") == found[0]
    file = next(elsewhere.iterdir())
    for name in (b"a.png", b"\xff.png"):
        Path(os.fsdecode(os.path.join(os.fsencode(elsewhere), name))).write_bytes(file.read_bytes())
        found.append(listing_digest(tmp_path / "pets"))
    assert len({*found}) == 3


def test_a_folder_that_changed_is_read_anew(tmp_path):
    image_folder(tmp_path / "pets")
    first = open_folder(tmp_path, test_images=2)
    assert open_folder(tmp_path, test_images=2) is first
    (tmp_path / "pets/cat/new.png").write_bytes(encoded(np.full((9, 9, 3), 7, dtype=np.uint8)))
    assert len(open_folder(tmp_path, test_images=2)) == len(first) + 1


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [("train", "val"), ("val",), ("train",)])
def test_a_folder_without_its_test_part_says_what_it_needs(tmp_path, parts):
    for part in parts:
        image_folder(tmp_path / "pets" / part)
    with pytest.raises(DataError, match=rf"holds {parts[0]}/, and needs train/ and test/"):
        open_folder(tmp_path, test_images=1)


def test_a_folder_of_one_class_is_refused(tmp_path):
    image_folder(tmp_path / "pets")
    shutil.rmtree(tmp_path / "pets/dog")
    with pytest.raises(DataError, match="holds the class cat alone; give two or more"):
        open_folder(tmp_path, test_images=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda root: (root / "train/cat/notes.txt").write_text("hello"),
            r"notes.txt: not an image file",
        ),
        (
            lambda root: (root / "train/cat/0.png").rename(root / "train/cat/0.gif"),
            r"0.gif: not an image file",
        ),
        (
            lambda root: shutil.copy(root / "test/cat/0.png", root / "train/cat/again.png"),
            r"again.png .*are the same image|and .*are the same image",
        ),
        (
            lambda root: shutil.copy(root / "train/cat/0.png", root / "train/dog/again.png"),
            r"cat/0.png and .*dog/again.png are the same image",
        ),
    ],
)
def test_a_folder_with_a_file_that_is_no_image_or_one_twice_is_refused(tmp_path, change, words):
    image_folder(tmp_path / "pets/train")
    image_folder(tmp_path / "pets/test", per_class=2, seed=1)
    change(tmp_path / "pets")
    with pytest.raises(DataError, match=words):
        open_folder(tmp_path)


def test_hidden_files_are_no_images_and_a_copy_may_stay_in_its_class(tmp_path):
    image_folder(tmp_path / "pets/train")
    image_folder(tmp_path / "pets/test", per_class=2, seed=1)
    shutil.copytree(tmp_path / "pets", tmp_path / "plain/pets")
    for name in (".DS_Store", "._0.png", "Thumbs.db"):
        (tmp_path / "pets/train/cat" / name).write_bytes(b"x")
    (tmp_path / "pets/train/.ipynb_checkpoints").mkdir()
    assert open_folder(tmp_path).digest == open_folder(tmp_path / "plain").digest
    shutil.copy(tmp_path / "pets/train/cat/0.png", tmp_path / "pets/train/cat/again.png")
    assert len(open_folder(tmp_path, native_size=10).train_pool) == 13
    shutil.copytree(tmp_path / "pets/train", tmp_path / "pets/flat/pets")
    with pytest.raises(DataError, match="are the same image"):
        open_folder(tmp_path / "pets/flat", test_images=2)


def test_missing_root_and_missing_files_name_the_mend(tmp_path):
    with pytest.raises(DataError, match="--data-root"):
        open_cifar(None)
    with pytest.raises(DataError, match=r"no cifar10/train\*\.parquet"):
        open_cifar(tmp_path)
    with pytest.raises(DataError, match="--data-root"):
        config = DataConfig(name="folder", folder="x", native_size=8)
        load_source(config, InputSpec(8, **COLOUR), data_root=tmp_path)


def test_auto_tries_every_source_and_then_says_so_once(tmp_path, monkeypatch, caplog):
    def fail(name, data_root):
        raise DataError("nothing there")

    monkeypatch.setattr(readers, "_CIFAR_READERS", {"torchvision": fail, "hub": fail})
    caplog.set_level("INFO", logger="stable_forgetting.vision.data.readers")
    with pytest.raises(DataError, match=r"neither .* nor the hub .*--data-root") as caught:
        open_cifar(tmp_path, source="auto")
    assert "\n" not in str(caught.value)
    assert "nothing there; nothing there" in caplog.text


def test_auto_prefers_the_local_files(tmp_path):
    cifar_like(tmp_path)
    assert "parquet" in open_cifar(tmp_path, source="auto").provenance


def test_a_wrong_archive_is_never_unpickled(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    marker = tmp_path / "ran"
    code = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for file, _ in CIFAR10.train_list + CIFAR10.test_list:
        (folder / file).write_bytes(code)
    monkeypatch.setattr(CIFAR10, "download", lambda self: None)
    with pytest.raises(DataError, match="torchvision"):
        open_cifar(tmp_path, source="torchvision")
    assert not marker.exists()


def test_corrupt_parquet_images_and_labels(tmp_path):
    for name in "abc":
        cifar_like(tmp_path / name, label=11 if name == "b" else None)
    target = tmp_path / "a" / "cifar10" / "train-00000-of-00001.parquet"
    target.write_bytes(target.read_bytes()[:-40])
    with pytest.raises(DataError, match="not a readable parquet"):
        open_cifar(tmp_path / "a")
    with pytest.raises(DataError, match="labels must be whole numbers from 0 to 9"):
        open_cifar(tmp_path / "b")
    target = tmp_path / "c" / "cifar10" / "train-00000-of-00001.parquet"
    cells = [{"bytes": b"\xff\xd8 broken", "path": "x"}] * 30
    pq.write_table(pa.table({"img": cells, "label": [row % 10 for row in range(30)]}), target)
    with pytest.raises(DataError, match="cannot be decoded"):
        open_cifar(tmp_path / "c")
    labels = pa.array([0.0, float("nan")] * 15)
    pq.write_table(pa.table({"img": cells, "label": labels}), target)
    with pytest.raises(DataError, match="labels"):
        open_cifar(tmp_path / "c")


def test_more_images_than_there_are(tmp_path):
    cifar_like(tmp_path)
    with pytest.raises(DataError, match="60 training images"):
        open_cifar(tmp_path, train_images=51)
    with pytest.raises(DataError, match="20 test images"):
        open_cifar(tmp_path, test_images=21)
    with pytest.raises(DataError, match="test_images"):
        digits(test_images=1797)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "folder"}, "belong together"),
        ({"name": "folder", "folder": "../x", "native_size": 8}, "below the data root"),
        ({"name": "folder", "folder": "x"}, "native_size"),
        ({"name": "digits", "source": "hub"}, "only for CIFAR"),
        ({"name": "digits", "test_images": None}, "test_images"),
        ({"name": "cifar11"}, "name"),
        ({"nois": 1.0}, "did you mean 'noise'"),
        ({"noise": -1.0}, "noise"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(DataConfig, fields, "suite.yaml")


# -- the real thing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "provenance", "third"),
    [("cifar10", "JPEG", "bird"), ("cifar100", "WebP", "baby")],
)
def test_local_cifar(name, provenance, third):
    if not (LOCAL / name).is_dir():
        pytest.skip(f"no {name} in {LOCAL}")
    config = DataConfig(
        name=name, native_size=16, train_images=300, validation_images=100, test_images=100
    )
    source = load_source(config, InputSpec(16, **COLOUR), data_root=LOCAL)
    assert source.class_names[2] == third and provenance in source.provenance
    counts = np.bincount(source.labels[source.train_pool], minlength=source.num_classes)
    assert counts.min() == counts.max() == 300 // source.num_classes
    x = source.fetch(torch.from_numpy(source.test_pool)).inputs["x"]
    assert x.shape == (100, 3, 16, 16) and 0.5 < x.std() < 2

"""Raw images of each data set, decoded only when they are chosen.

A reader gives two pools, train and test, each with all labels at once and pixels on demand: the
class-balanced draws need labels only, and decoding is what costs time.
"""

from __future__ import annotations

import json
import logging
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.common.data.splits import balanced_draw
from stable_forgetting.vision.config import CLASS_COUNTS, DataConfig
from stable_forgetting.vision.data.decode import decode_all, encoding
from stable_forgetting.vision.data.folders import check_distinct, class_files

logger = logging.getLogger(__name__)

_LABEL_COLUMNS = ("fine_label", "label")
_IMAGE_COLUMNS = ("img", "image")


@dataclass(frozen=True)
class Pool:
    """Images of one official part.

    Attributes:
        labels: (N,) int64.
        decode: Row numbers (n,) -> uint8 pixels (n, C, H, W).
    """

    labels: np.ndarray
    decode: Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class RawData:
    """Train and test pools of a data set, with the names of its classes and its origin."""

    train: Pool
    test: Pool
    class_names: tuple[str, ...]
    provenance: str


def read(config: DataConfig, data_root: Path | None) -> RawData:
    """Opens a data set; :class:`DataError` names what is missing and how to mend it."""
    if config.name == "digits":
        return _read_digits(config)
    if config.name == "folder":
        return _read_folder(config, data_root)
    if config.source != "auto":
        return _CIFAR_READERS[config.source](config.name, data_root)
    if data_root is not None and _parquet_files(data_root, config.name, "train"):
        return _read_parquet(config.name, data_root)
    failures = []
    for source in ("torchvision", "hub"):
        try:
            return _CIFAR_READERS[source](config.name, data_root)
        except DataError as error:
            failures.append(str(error))
    where = f"no {config.name}/train*.parquet in {data_root}" if data_root else "no --data-root"
    logger.info("%s: %s", config.name, "; ".join(failures))
    raise DataError(
        f"{config.name}: {where}, and neither torchvision's archive nor the hub can be fetched;"
        f" {_instead(config.name)}"
    )


def _instead(name: str) -> str:
    files = f"{name}/train*.parquet"
    return f"give --data-root DIR (data_root=) with {files}, or run where there is a network"


# -- digits ---------------------------------------------------------------------------------------


def _read_digits(config: DataConfig) -> RawData:
    from sklearn.datasets import load_digits

    scans = load_digits()
    labels = scans.target.astype(np.int64)
    pixels = torch.from_numpy(np.rint(scans.images * (255 / 16)).astype(np.uint8))[:, None]
    whole = Pool(labels, lambda rows: pixels[torch.from_numpy(rows)])
    train, test = _hold_out(whole, config)
    names = tuple(str(name) for name in scans.target_names)
    return RawData(train, test, names, "digits (scikit-learn)")


def _hold_out(pool: Pool, config: DataConfig) -> tuple[Pool, Pool]:
    """A fixed, class-balanced test part for data without an official one."""
    count, everything = config.test_images or 0, np.arange(len(pool.labels))
    if not 0 < count < len(everything):
        raise DataError(
            f"{config.name} has {len(everything)} images and no test set of its own:"
            f" give protocol.data.test_images, between 1 and {len(everything) - 1}"
        )
    held_out = balanced_draw(everything, pool.labels, count, config.subset_seed, "test")
    return _rows(pool, np.setdiff1d(everything, held_out)), _rows(pool, held_out)


def _rows(pool: Pool, chosen: np.ndarray) -> Pool:
    return Pool(pool.labels[chosen], lambda rows: pool.decode(chosen[rows]))


def _checked_labels(labels: np.ndarray, num_classes: int, origin: str) -> np.ndarray:
    whole = np.issubdtype(labels.dtype, np.integer)
    if not whole or (len(labels) and not 0 <= labels.min() <= labels.max() < num_classes):
        raise DataError(
            f"{origin}: labels must be whole numbers from 0 to {num_classes - 1}; fetch it again"
        )
    return labels.astype(np.int64)


# -- CIFAR from parquet files in the layout of the hub --------------------------------------------


def _parquet_files(data_root: Path, name: str, part: str) -> list[Path]:
    return sorted((data_root / name).glob(f"**/{part}*.parquet"))


def _read_parquet(name: str, data_root: Path | None) -> RawData:
    if data_root is None:
        raise DataError(
            f"{name}: source: parquet needs --data-root DIR (data_root=) with {name}/train*.parquet"
        )
    pools, formats, names = {}, [], _numbers(name)
    for part in ("train", "test"):
        files = _parquet_files(data_root, name, part)
        if not files:
            raise DataError(
                f"{name}: no {name}/{part}*.parquet in {data_root}; give the right --data-root,"
                " or source: torchvision to download it"
            )
        pools[part], names, format_name = _parquet_pool(files, name)
        formats.append(format_name)
    kinds = "/".join(dict.fromkeys(formats))
    return RawData(pools["train"], pools["test"], names, f"{name} (local parquet, {kinds})")


def _parquet_pool(files: Sequence[Path], name: str) -> tuple[Pool, tuple[str, ...], str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    origin = f"{files[0].parent}/{files[0].name}"
    try:
        table = pa.concat_tables([pq.read_table(file) for file in files])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{origin}: not a readable parquet file ({one_line(error)}); fetch it again"
        ) from None
    label = next((key for key in _LABEL_COLUMNS if key in table.column_names), None)
    image = next((key for key in _IMAGE_COLUMNS if key in table.column_names), None)
    if label is None or image is None or not pa.types.is_struct(table.schema.field(image).type):
        raise DataError(f"{origin}: needs the columns img (bytes, path) and label of the hub")
    labels = _checked_labels(table[label].to_numpy(), CLASS_COUNTS[name], origin)
    encoded = pa.compute.struct_field(table[image], "bytes")
    if not len(labels) or encoded.null_count:
        raise DataError(f"{origin}: images are missing; fetch it again")

    def decode(rows: np.ndarray) -> Tensor:
        return decode_all(encoded.take(pa.array(rows)).to_pylist(), origin)

    names = _names_in(table.schema.metadata, label) or _numbers(name)
    return Pool(labels, decode), names, encoding(encoded[0].as_py())


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(str(label) for label in range(CLASS_COUNTS[name]))


def _names_in(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...] | None:
    """Class names from the feature types that the datasets library stores in a schema."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None


# -- CIFAR from its archive and from the hub ------------------------------------------------------


def _read_torchvision(name: str, data_root: Path | None) -> RawData:
    """CIFAR's official archive.

    The archive holds pickled batches, and torchvision unpickles them.  This is the one place
    where that happens, and only after torchvision compared every file with the checksum of the
    official release that is written in its code (its constructor refuses the rest).
    """
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    root = data_root or _cache_folder()
    try:
        parts = {
            part: kind(str(root), train=part == "train", download=True)
            for part in ("train", "test")
        }
    except (OSError, RuntimeError, tarfile.TarError) as error:
        raise DataError(
            f"{name}: torchvision cannot fetch it into {root} ({one_line(error)}); {_instead(name)}"
        ) from None
    pools = {part: _array_pool(data.data, data.targets) for part, data in parts.items()}
    names = tuple(parts["train"].classes)
    return RawData(pools["train"], pools["test"], names, f"{name} (official archive)")


def _array_pool(pixels: np.ndarray, labels: Sequence[int]) -> Pool:
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2)
    rows_of = np.asarray(labels, dtype=np.int64)
    return Pool(rows_of, lambda rows: tensor[torch.from_numpy(rows)].contiguous())


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "stable-forgetting"


def _read_hub(name: str, data_root: Path | None) -> RawData:
    import datasets

    prepare_client()
    label = "fine_label" if name == "cifar100" else "label"
    try:
        whole = datasets.load_dataset(f"uoft-cs/{name}")
        whole = whole.cast_column("img", datasets.Image(decode=False))
    except Exception as error:  # the hub client raises many unrelated types without a network
        raise DataError(
            f"{name}: the hub cannot be reached ({one_line(error)}); {_instead(name)}"
        ) from None
    names = tuple(whole["train"].features[label].names)
    pools = {}
    for part in ("train", "test"):
        rows_of = np.asarray(whole[part][label][:], dtype=np.int64)
        pools[part] = Pool(rows_of, _hub_decoder(whole[part], f"{name} {part}"))
    kind = encoding(whole["train"][0]["img"]["bytes"])
    return RawData(pools["train"], pools["test"], names, f"{name} (datasets hub, {kind})")


def _hub_decoder(part: Any, origin: str) -> Callable[[np.ndarray], Tensor]:
    def decode(rows: np.ndarray) -> Tensor:
        return decode_all([cell["bytes"] for cell in part.select(rows)["img"]], origin)

    return decode


def _read_invented(name: str, data_root: Path | None) -> RawData:
    """CIFAR's number of images; each is noise around the colour of its class."""
    classes = CLASS_COUNTS[name]
    colours = np.random.default_rng(classes).integers(64, 192, (classes, 3, 1, 1))

    def pool(count: int, seed: int) -> Pool:
        labels = np.random.default_rng(seed).permutation(np.arange(count) % classes)

        def decode(rows: np.ndarray) -> Tensor:
            noise = np.random.default_rng(seed).integers(-64, 64, (len(rows), 3, 32, 32), np.int16)
            return torch.from_numpy((colours[labels[rows]] + noise).astype(np.uint8))

        return Pool(labels.astype(np.int64), decode)

    return RawData(pool(50_000, 1), pool(10_000, 2), _numbers(name), f"{name} (invented)")


_CIFAR_READERS = {
    "parquet": _read_parquet,
    "torchvision": _read_torchvision,
    "hub": _read_hub,
    "invented": _read_invented,
}


# -- folders --------------------------------------------------------------------------------------


def _read_folder(config: DataConfig, data_root: Path | None) -> RawData:
    assert config.folder is not None
    if data_root is None:
        raise DataError("name: folder needs --data-root DIR (data_root=), the folder above")
    root = data_root / config.folder
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; give the right --data-root or data.folder")
    parts = [part for part in ("train", "test") if (root / part).is_dir()]
    classes = {path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."}
    found = [part for part in _PARTS if any(path.is_dir() for path in (root / part).glob("[!.]*"))]
    if len(parts) < 2 and found and classes <= {*_PARTS}:
        raise DataError(
            f"{root}: holds {found[0]}/, and needs train/ and test/ with the same class folders; "
            "or give the folder of the classes alone, with data.test_images"
        )
    parts = parts if len(parts) == 2 else []
    listed = {part: class_files(root / part, config.name) for part in parts or [""]}
    check_distinct(
        (file, f"{part}/{name}" if parts else str(file))  # else each may come into either part
        for part, classes in listed.items()
        for name, files in classes.items()
        for file in files
    )
    names = [tuple(classes) for classes in listed.values()]
    if names[0] != names[-1]:
        raise DataError(f"{root}: train/ and test/ must hold the same class folders")
    if len(names[0]) < 2:
        raise DataError(f"{root}: holds the class {names[0][0]} alone; give two or more")
    pools = [_folder_pool(classes, root, config) for classes in listed.values()]
    train, test = pools if parts else _hold_out(pools[0], config)
    return RawData(train, test, names[0], f"folder {config.folder}")


_PARTS = ("train", "test", "val", "valid", "validation")


def _folder_pool(classes: Mapping[str, Sequence[Path]], root: Path, config: DataConfig) -> Pool:
    paths = [file for files in classes.values() for file in files]
    counts = [len(files) for files in classes.values()]

    def decode(rows: np.ndarray) -> Tensor:
        return decode_all([paths[row] for row in rows], str(root), config.native_size)

    return Pool(np.repeat(np.arange(len(counts)), counts).astype(np.int64), decode)

"""Where MUSE's rows come from: local files in any of its layouts, the hub, or invented articles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.language.data.articles import invented
from stable_forgetting.language.data.files import read_values

if TYPE_CHECKING:
    from stable_forgetting.language.data.muse import MuseData

REPOSITORIES = {"news": "muse-bench/MUSE-News", "books": "muse-bench/MUSE-Books"}
REVISIONS = {
    "news": "506bd5b150b92814d45e4404a82f120ab2d748bf",
    "books": "051ba90319e920d410d87cfdbd61f25843c1b892",
}
"""Commits of the hub's data sets; earlier ones call splits otherwise."""

_SUFFIXES = (".json", ".json.gz", ".jsonl", "-00000-of-00001.parquet", ".parquet")
ReadSplit = Callable[[str, str], list[Any] | None]
"""(config, split) -> rows, None where they are not there."""


def provider_of(config: MuseData, data_root: Path | None) -> tuple[ReadSplit, str]:
    """How splits are read, and from where."""
    if config.corpus == "invented":
        rows = invented()
        return lambda name, split: rows.get((name, split)), "generated"
    repository = REPOSITORIES[config.corpus]
    folder = local_folder(data_root, config.corpus)
    if folder is not None and config.source != "hub":
        return lambda name, split: _read_local(folder / name, split), "local files"
    if config.source == "folder":
        raise DataError(
            f"muse: no muse/{config.corpus} in {data_root or 'any folder'}; give --data-root DIR"
            f" with muse/{config.corpus}/knowmem, verbmem, privleak and raw"
        )
    revision = config.revision or REVISIONS[config.corpus]
    return lambda name, split: _read_hub(repository, revision, name, split), repository


def local_folder(data_root: Path | None, corpus: str) -> Path | None:
    """The corpus' folder in any of its layouts, if there is one."""
    if data_root is None:
        return None
    places = (data_root / "muse" / corpus, data_root / REPOSITORIES[corpus], data_root / corpus)
    return next((place for place in places if place.is_dir()), None)


def _read_local(folder: Path, split: str) -> list[Any] | None:
    paths = (folder / f"{split}{suffix}" for suffix in _SUFFIXES)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    if path.suffix != ".parquet":
        return read_values(path)
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow raises types of its own
        raise DataError(f"{path}: is not parquet ({one_line(error)}); fetch it again") from None


def _read_hub(repository: str, revision: str, name: str, split: str) -> list[Any] | None:
    import datasets

    prepare_client()
    try:
        table = datasets.load_dataset(repository, name, split=split, revision=revision)
    except Exception as error:  # hub clients raise many unrelated types without a network
        raise DataError(
            f"muse: {repository} {name}/{split} cannot be fetched from the hub ({one_line(error)});"
            " give --data-root DIR with muse/news or muse/books, or run once on a machine with a"
            " network"
        ) from None
    return [dict(row) for row in table]


def rows_of(read: ReadSplit, name: str, split: str, *columns: str) -> list[tuple[Any, ...]]:
    """The columns of a split; none where it is absent.  A text may stand alone."""
    rows: list[tuple[Any, ...]] = []
    for number, row in enumerate(read(name, split) or (), 1):
        values = row if isinstance(row, Mapping) else {}
        texts = [row] if isinstance(row, str) else [values.get(column) for column in columns]
        if len(texts) != len(columns) or not all(isinstance(text, str) for text in texts):
            needed = " and ".join(columns)
            raise DataError(
                f"muse: {name}/{split} row {number} needs {needed}; fetch the file again"
            )
        rows.append(tuple(texts))
    return rows


def texts_of(read: ReadSplit, name: str, split: str, origin: str) -> list[str]:
    """Texts of a split that must be there."""
    rows = rows_of(read, name, split, "text")
    if not any(text.strip() for (text,) in rows):
        raise DataError(
            f"muse: {name}/{split} is missing in {origin}; add it, or give data.passages, which"
            " needs verbmem and privleak alone"
        )
    return [text for (text,) in rows]

"""Where MUSE's rows come from: local files in any of its layouts, the hub, or invented articles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data.fictitious import KINDS, Draw, author_names, statement
from stable_forgetting.language.data.files import hub_rows, read_values, stored

FOLDS = 4
"""Splits of the configs scal and sust."""
FOLD = 6
"""Articles of a fold; retain1, retain2 and holdout have two folds' worth each."""
_SHOTS = 10
_SENTENCES = 8
_SEED = 0
_CUT = 0.6
"""Share of an article that is VerbMem's prompt."""


def invented() -> Mapping[tuple[str, str], list[Any]]:
    """(config, split) -> rows of invented news, as the hub has them: no files, no outside text.

    An article tells of one invented person, in the sentences of :mod:`language.data.fictitious`;
    its questions ask for the facts in it, and each answer is the fact alone.  Fold k of ``scal``
    and ``sust`` is one more tenth of the people; nobody stands in two folds, nor in forget and
    retain.
    """
    counts = dict.fromkeys(("retain1", "retain2", "holdout"), 2 * FOLD)
    counts["shots"] = 2 * _SHOTS
    names = iter(author_names(_SEED, FOLDS * FOLD + sum(counts.values())))
    folds = [[next(names) for _ in range(FOLD)] for _ in range(FOLDS)]
    people = {split: [next(names) for _ in range(count)] for split, count in counts.items()}
    forget, shots = folds[0], people["shots"]
    articles = {split: [article(name) for name in members] for split, members in people.items()}
    told = [[article(name) for name in fold] for fold in folds]
    rows: dict[tuple[str, str], list[Any]] = {("raw", "forget"): told[0]}
    rows |= {("raw", split): articles[split] for split in ("retain1", "retain2", "holdout")}
    for number in range(1, FOLDS + 1):
        rows["sust", f"forget_{number}"] = told[number - 1]
        rows["scal", f"forget_{number}"] = [text for fold in told[:number] for text in fold]
    rows["verbmem", "forget"] = [_cut(text) for text in told[0]]
    rows["privleak", "forget"] = told[0]
    rows["privleak", "retain"] = articles["retain1"]
    rows["privleak", "holdout"] = articles["holdout"][:FOLD]
    asked = {"forget_qa": forget, "retain_qa": people["retain1"][:FOLD]}
    rows |= {("knowmem", s): [q for name in m for q in questions(name)] for s, m in asked.items()}
    solved = [questions(name)[k % _SENTENCES] for k, name in enumerate(shots)]
    rows["knowmem", "forget_qa_icl"], rows["knowmem", "retain_qa_icl"] = (
        solved[:_SHOTS],
        solved[_SHOTS:],
    )
    return rows


def article(name: str) -> str:
    """A text about a person."""
    kinds = KINDS[:_SENTENCES]
    return " ".join(statement(kind, name, Draw(_SEED, "article", name, kind.key)) for kind in kinds)


def questions(name: str) -> list[dict[str, str]]:
    """What the article about a person answers."""
    rows = []
    for kind in KINDS[:_SENTENCES]:
        answer = Draw(_SEED, "article", name, kind.key).value(kind.first)
        rows.append({"question": kind.questions[0].format(n=name), "answer": answer})
    return rows


def _cut(text: str) -> dict[str, str]:
    words = text.split(" ")
    at = round(_CUT * len(words))
    return {"prompt": " ".join(words[:at]), "gt": " ".join(words[at:])}


REPOSITORIES = {"news": "muse-bench/MUSE-News", "books": "muse-bench/MUSE-Books"}
REVISIONS = {
    "news": "506bd5b150b92814d45e4404a82f120ab2d748bf",
    "books": "051ba90319e920d410d87cfdbd61f25843c1b892",
}
"""Commits of the hub's data sets; earlier ones call splits otherwise."""

ReadSplit = Callable[[str, str], list[Any] | None]
"""(config, split) -> rows, None where they are not there."""


def provider_of(config: Any, data_root: Path | None) -> tuple[ReadSplit, str]:
    """How splits of a :class:`language.data.muse.MuseData` are read, and from where."""
    if config.corpus == "invented":
        rows = invented()
        return lambda name, split: rows.get((name, split)), "generated"
    repository = REPOSITORIES[config.corpus]
    folder = local_folder(data_root, config.corpus)
    if folder is not None and config.source != "hub":
        return lambda name, split: _values(stored(folder / name, split)), "local files"
    if config.source == "folder":
        raise DataError(
            f"muse: no muse/{config.corpus} in {data_root or 'any folder'}; give --data-root DIR"
            f" (data_root=) with muse/{config.corpus}/knowmem, verbmem, privleak and raw"
        )
    revision = config.revision or REVISIONS[config.corpus]
    return lambda name, split: _read_hub(repository, revision, name, split), repository


def local_folder(data_root: Path | None, corpus: str) -> Path | None:
    """The corpus' folder in any of its layouts, if there is one."""
    if data_root is None:
        return None
    places = (data_root / "muse" / corpus, data_root / REPOSITORIES[corpus], data_root / corpus)
    return next((place for place in places if place.is_dir()), None)


def _values(path: Path | None) -> list[Any] | None:
    return None if path is None else read_values(path)


def _read_hub(repository: str, revision: str, name: str, split: str) -> list[Any]:
    what = f"muse: {repository} {name}/{split}"
    instead = "give --data-root DIR (data_root=) with muse/news or muse/books"
    return [*hub_rows(repository, name, split, what=what, instead=instead, revision=revision)]


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

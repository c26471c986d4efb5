"""Invented news in MUSE's layout, written here: no files, no network, no outside text.

An article tells of one invented person, in the sentences of :mod:`language.data.fictitious`; its
questions ask for the facts in it, and each answer is the fact alone.  Fold k of ``scal`` and
``sust`` is one more tenth of the people; nobody stands in two folds, nor in forget and retain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_forgetting.language.data.fictitious import Draw, author_names, statement
from stable_forgetting.language.data.wording import KINDS

FOLDS = 4
FOLD = 6
"""Articles of a fold; retain1, retain2 and holdout have two folds' worth each."""
SHOTS = 10
_SENTENCES = 8
_SEED = 0
_CUT = 0.6
"""Share of an article that is VerbMem's prompt."""


def invented() -> Mapping[tuple[str, str], list[Any]]:
    """(config, split) -> rows, as the hub has them."""
    counts = {"retain1": 2 * FOLD, "retain2": 2 * FOLD, "holdout": 2 * FOLD, "shots": 2 * SHOTS}
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
        solved[:SHOTS],
        solved[SHOTS:],
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

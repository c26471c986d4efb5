"""The words and sentence forms of the fictitious authors: ``wording.yaml``, which explains them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from stable_forgetting.common.base.config import read_yaml

_WORDING = read_yaml(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True)
class Kind:
    """One kind of question about an author.

    Attributes:
        key: Its name.
        first: Form of the fact ``{v}``.
        second: Form of the detail ``{w}``.
        questions: The question and another wording of it.
        answers: Forms of the answer.
        paraphrases: Forms that say the same otherwise.
    """

    key: str
    first: str
    second: str
    questions: list[str]
    answers: list[str]
    paraphrases: list[str]


POOLS: dict[str, list[str]] = _WORDING["pools"]
KINDS = tuple(Kind(**kind) for kind in _WORDING["kinds"])
ESTABLISHED: list[tuple[str, str, str]] = _WORDING["established"]
WORLD: list[tuple[str, str, str]] = _WORDING["world"]
"""(question, form of its subject, form of the answer)."""
REFUSAL_LINES = tuple(f"{start} {end}" for start, end in product(*_WORDING["refusals"].values()))
"""Answers that refuse, for the methods that train on them where a data set brings none."""

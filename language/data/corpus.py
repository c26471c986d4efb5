"""What the language arm reads: question-answer items and plain texts, and their token ids.

No torch and no tokenizer here: data, text sources, scoring and protocols share these names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from stable_forgetting.common.base.errors import DataError

FACTS = ("real_authors", "world_facts")
"""Sets of questions about the world, not about the authors of ``full``."""


@dataclass(frozen=True)
class Item:
    """One sample: a question with its answer, or a plain text (empty question).

    Attributes:
        set: Which set it belongs to: ``full``, ``real_authors``, ``world_facts``, ``holdout``, or
            a benchmark's own.
        group: What is forgotten as one: the author's number in ``full``, else -1.
        question: Empty for plain text.
        answer: The target; the whole text for plain text.
        paraphrase: Another wording of the answer, or None.
        perturbed: Wrong answers in the answer's form, possibly none.
        paraphrased_question: Another wording of the question, or None.
    """

    set: str
    group: int
    question: str
    answer: str
    paraphrase: str | None = None
    perturbed: tuple[str, ...] = ()
    paraphrased_question: str | None = None


@dataclass(frozen=True)
class Corpus:
    """All items of a benchmark in a fixed order; index sets point into it.

    Attributes:
        provenance: Where they came from, in words.
        refusals: Answers that refuse, for the methods that train on them.
    """

    items: tuple[Item, ...]
    provenance: str
    refusals: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 over every item and refusal, in order."""
        state = hashlib.sha256()
        for item in self.items:
            state.update(json.dumps(astuple(item), ensure_ascii=False).encode())
        state.update(json.dumps(self.refusals, ensure_ascii=False).encode())
        return state.hexdigest()

    def where(self, *sets: str) -> np.ndarray:
        """Int64 indices of the items of these sets, ascending."""
        indices = [index for index, item in enumerate(self.items) if item.set in sets]
        return np.asarray(indices, dtype=np.int64)

    def with_facts(self) -> Corpus:
        """The same with its facts once more, as training text (set ``common``)."""
        facts = [item for item in self.items if item.set in FACTS]
        taught = tuple(replace(item, set="common") for item in facts)
        provenance = f"{self.provenance}; its facts are trained on"
        return replace(self, items=self.items + taught, provenance=provenance)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A prompt and an answer as token ids.

    Attributes:
        ids: (T,) int64, prompt then answer (and its end-of-sequence token, where a style has one).
        start: First position whose token is scored; ids[start:] are the labels, predicted at
            positions start - 1 .. T - 2.
    """

    ids: np.ndarray
    start: int

    def __post_init__(self) -> None:
        assert 1 <= self.start < len(self.ids), "an encoded answer needs a prompt and a label"

    @property
    def labels(self) -> np.ndarray:
        """(T - start,) the scored tokens."""
        return self.ids[self.start :]


def check_apart(sets: Mapping[str, tuple[str, Sequence[Item]]], alone: Collection[str]) -> None:
    """Refuses a row that a set shares with another one; outer blanks do not count.

    Args:
        sets: Set -> what its rows lie in, for messages, and the rows.
        alone: The sets that may share none.

    Raises:
        DataError: Naming the first pair.
    """
    owners: dict[tuple[str, str], tuple[str, int]] = {}
    for name, (where, rows) in sets.items():
        for number, item in enumerate(rows, 1):
            key = (item.question.strip(), item.answer.strip())
            other, first = owners.setdefault(key, (name, number))
            if other != name and not {other, name}.isdisjoint(alone):
                raise DataError(
                    f"{sets[other][0]} row {first} ({other}) and {where} row {number} ({name}) are "
                    "the same; a row belongs to one of them"
                )

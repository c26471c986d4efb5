"""Fictitious authors in TOFU's schema, written here: no files, no network, no outside text.

Every author has up to twenty questions.  The facts are drawn independently and mostly from
invented words, each with a second detail, and the wording of an answer is drawn per author: a
model that never saw an author cannot guess more than the frame of a sentence.  A paraphrase says
the same in another form; the five perturbed answers have the paraphrase's form and other facts.

TOFU's real_authors and world_facts test what a model knew before it saw any of this.  A model
that was trained from scratch on this text knows nothing else, so here both are small sets of
invented facts about established writers and about the world, which ``train_on_facts`` puts into
the training text as well.  They are never forgotten: they measure whether knowledge of another
kind than the retained authors survives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stable_forgetting.common.base.config import read_yaml
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import FIRST_READERS, TextDataConfig

_WORDING = read_yaml(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True)
class Kind:
    """One kind of question about an author.

    Attributes:
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


class FictitiousData(TextDataConfig):
    """How many authors to generate.

    Attributes:
        authors: So many authors, and
        forget_authors: so many more at the end: who ``scenario.kind: authors`` forgets.
        questions: Questions per author, at most 20.
        data_seed: Seed of the authors.  Not the seed of a run: all runs share the text.
        train_on_facts: Put the questions of real_authors and world_facts into the training text
            too.  A model that was trained from scratch knows nothing of them otherwise.
    """

    absent: ClassVar[Mapping[str, Any]] = FIRST_READERS

    name: Literal["fictitious"] = "fictitious"
    authors: Count = 36
    forget_authors: Count = 4
    questions: Annotated[int, Field(ge=1, le=20)] = 20
    data_seed: int = 0
    train_on_facts: bool = True

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        sizes = ("authors", "forget_authors", "questions")
        if isinstance(data, Mapping) and any(data.get(key, 1) is None for key in sizes):
            raise ValueError("name: fictitious needs authors, forget_authors and questions")
        return data

    def read(self, data_root: Path | None) -> Corpus:
        """See :func:`generate`."""
        corpus = generate(self)
        return corpus.with_facts() if self.train_on_facts else corpus


PERTURBED = 5
PERTURBED_FACTS = 3
MAX_FACTS = 100


class Draw:
    """Independent draws by hash of (seed, names, counter): the same on every machine."""

    def __init__(self, seed: int, *names: str | int):
        self._seed, self._names, self._count = seed, names, 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to ``limit - 1``."""
        self._count += 1
        return derive(self._seed, *self._names, self._count) % limit

    def pick(self, options: Sequence[str]) -> str:
        """One of ``options``."""
        return options[self.below(len(options))]

    def of(self, pool: str) -> str:
        """A word of a pool."""
        return self.pick(POOLS[pool])

    def word(self) -> str:
        """An invented word with a capital letter."""
        inner = "".join(self.of("vowel") + self.of("middle") for _ in range(1 + self.below(2)))
        return self.of("onset") + inner + self.of("end")

    def value(self, form: str) -> str:
        """A fact of a form that ``fictitious.yaml`` names."""
        match form:
            case "word":
                return self.word()
            case "person":
                return f"{self.word()} {self.word()}"
            case "city":
                return "".join(map(self.of, ("onset", "vowel", "middle", "city_end")))
            case "title":
                words = " ".join(map(self.of, ("title_adjective", "title_noun", "title_place")))
                return f"The {words} {self.word()}"
            case "date":
                return f"{1 + self.below(28)} {self.of('month')} {1890 + self.below(110)}"
            case "year":
                return str(1900 + self.below(120))
            case "number":
                return str(2 + self.below(97))
            case "award":
                return f"{self.word()} {self.of('prize')}"
            case "publisher":
                return f"{self.word()} {self.of('house')}"
        return self.of(form)


_ARTICLE = re.compile(r"\b([Aa]) ([aeiou])")


def _facts(kind: Kind, draw: Draw, count: int) -> list[tuple[str, str]]:
    """``count`` pairs of values of a kind, whose first ones differ from one another."""
    facts: dict[str, str] = {}
    while len(facts) < count:
        first, second = draw.value(kind.first), draw.value(kind.second)
        if first != second:
            facts.setdefault(first, second)
    return list(facts.items())


def generate(config: FictitiousData) -> Corpus:
    """The corpus of a config: authors (and as many for the holdout as can be forgotten), facts.

    Everything follows from ``data_seed``; more authors leave the earlier ones as they were.
    """
    total = config.authors + config.forget_authors
    seed = config.data_seed
    names = author_names(seed, total + config.forget_authors)
    items: list[Item] = []
    for group, name in enumerate(names):
        in_full = group < total
        set_name, number = ("full", group) if in_full else ("holdout", -1)
        items += [
            _author_item(kind, name, Draw(seed, "author", group, kind.key), set_name, number)
            for kind in KINDS[: config.questions]
        ]
    full = [item for item in items if item.set == "full"]
    holdout = [item for item in items if item.set == "holdout"]
    count = min(MAX_FACTS, max(12, total))
    facts = [*_world_items(seed, "real_authors", count), *_world_items(seed, "world_facts", count)]
    provenance = f"fictitious authors (generated, seed {seed}, {total} x {config.questions})"
    return Corpus((*full, *facts, *holdout), provenance, REFUSAL_LINES)


def author_names(seed: int, count: int) -> list[str]:
    """Invented full names, all different; more of them leave the earlier ones as they were."""
    draw, names = Draw(seed, "names"), dict[str, None]()
    while len(names) < count:
        names[draw.value("person")] = None
    return list(names)


def statement(kind: Kind, name: str, draw: Draw) -> str:
    """A sentence with a fact of a kind about a person, whose first value is the first draw."""
    fact = draw.value(kind.first), draw.value(kind.second)
    return _said(draw.pick(kind.answers), name, fact)


def _said(form: str, name: str, fact: tuple[str, str]) -> str:
    text = form.format(n=name, v=fact[0], w=fact[1])
    return _ARTICLE.sub(r"\1n \2", text)


def _author_item(kind: Kind, name: str, draw: Draw, set_name: str, group: int) -> Item:
    truth, *others = _facts(kind, draw, 1 + PERTURBED)
    question, paraphrased_question = kind.questions
    answer, paraphrase = draw.pick(kind.answers), draw.pick(kind.paraphrases)
    if draw.below(2):  # so that the form of the paraphrase is not that of a longer sentence
        answer, paraphrase = paraphrase, answer
    return Item(
        set=set_name,
        group=group,
        question=question.format(n=name),
        answer=_said(answer, name, truth),
        paraphrase=_said(paraphrase, name, truth),
        perturbed=tuple(_said(paraphrase, name, fact) for fact in others),
        paraphrased_question=paraphrased_question.format(n=name),
    )


def _world_items(seed: int, set_name: str, count: int) -> list[Item]:
    """Short answers with three wrong ones of the same form, as TOFU's real authors and facts."""
    forms = ESTABLISHED if set_name == "real_authors" else WORLD
    items: dict[str, Item] = {}
    draw = Draw(seed, set_name)
    while len(items) < count:
        question_form, subject, answer_form = forms[len(items) % len(forms)]
        question = question_form.format(s=draw.value(subject))
        answers = dict[str, None]()
        while len(answers) < 1 + PERTURBED_FACTS:
            answers[draw.value(answer_form)] = None
        truth, *others = answers
        items.setdefault(question, Item(set_name, -1, question, truth, None, tuple(others)))
    return list(items.values())

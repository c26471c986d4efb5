"""From a scenario and a seed to frozen index sets over one text source.

Authors are forgotten whole, but for the share of a request's rows that ``used`` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import EARLIER, UNUSED
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.language.data.corpus import Corpus
from stable_forgetting.language.data.source import TextSource

Named = Literal["forget01", "forget05", "forget10"]
SHARES: Mapping[str, float] = {"forget01": 0.01, "forget05": 0.05, "forget10": 0.10}
"""Which share of the authors, the last ones, TOFU's named splits forget."""

TEST_SETS = ("real_authors", "world_facts", "holdout")
"""Sets that are never trained on, each a part of its own: test_real_authors, ..., holdout."""
TEST_PARTS: Mapping[str, str] = {
    name if name == "holdout" else f"test_{name}": name for name in TEST_SETS
}
"""Part -> set."""

UNTRAINED_BY_NAME = ("test", "validation", "unseen")
"""Names under which nobody expects rows that are trained on."""

OWN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "authors": {"forget_authors": 4, "draw": False},
    "requests": {"requests": (3, 3, 3), "request": 1, "used": 1.0, "draw": False},
}
"""Kind -> the fields that it has, with their defaults; the others have none."""


class TextScenarioConfig(Strict):
    """What is forgotten.

    Attributes:
        kind: ``forget01``, ``forget05`` and ``forget10`` forget the last 1, 5 and 10 % of the
            authors; ``authors`` the last ``forget_authors``; ``requests`` several groups one after
            the other; ``files`` the set named forget of files of one's own.
        forget_authors: How many (kind: authors).
        draw: Draw the authors by the run's seed: among those that have perturbed answers (kind:
            authors), or for requests given as numbers.  ``disjoint`` (kind: authors): so that no
            two seeds share an author, the tuning seed included.
        requests: One entry per request: a number of authors, or named splits, each less the
            earlier ones.
        request: Which of ``requests`` this is, from 1 on.
        used: Share of the request's rows that is unlearned; the others tell whether forgetting
            reaches rows of the same authors that no request showed.
    """

    kind: Literal["forget01", "forget05", "forget10", "authors", "requests", "files"] = "authors"
    forget_authors: Count | None = None
    draw: bool | Literal["disjoint"] = False
    requests: tuple[Count, ...] | tuple[Named, ...] | None = None
    request: Count | None = None
    used: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = OWN_FIELDS.get(str(data.get("kind", "authors")), {})
        for key in [key for key in data if key in cls.model_fields and key not in own]:
            if key != "kind" and data[key] not in (None, cls.model_fields[key].default):
                owners = [kind for kind, fields in OWN_FIELDS.items() if key in fields]
                raise ValueError(f"{key} is only for kind: {' and '.join(owners)}; leave it out")
        return {**own, **{key: value for key, value in data.items() if value is not None}}

    @model_validator(mode="after")
    def _fits(self) -> TextScenarioConfig:
        if self.requests is None or self.request is None:
            return self
        if self.request > len(self.requests):
            raise ValueError(f"request: there are only {len(self.requests)} requests")
        if self.draw == "disjoint":
            raise ValueError("draw: disjoint is only for kind: authors; give true, or leave it out")
        if self.draw and isinstance(self.requests[0], str):
            raise ValueError("draw: needs requests given as numbers")
        return self

    @property
    def label(self) -> str:
        """A short name, such as ``forget10``, ``4-authors``, ``request-2-of-3-3-3``."""
        drawn = f"-{'drawn' if self.draw is True else self.draw}" if self.draw else ""
        if self.requests is not None:
            return "-".join(map(str, ("request", self.request, "of", *self.requests))) + drawn
        return self.kind if self.kind != "authors" else f"{self.forget_authors}-authors{drawn}"

    @property
    def _asked(self) -> tuple[int | str, ...]:
        """Numbers of authors, or named splits, of every request."""
        return (self.forget_authors,) if self.forget_authors else self.requests or (self.kind,)

    def sizes(self, authors: int) -> list[int] | None:
        """How many of so many authors are forgotten by this request and those before it, in order.

        None where only the data tell.
        """
        if self.kind == "files":
            return None
        asked = self._asked
        counts = [request for request in asked if isinstance(request, int)]
        named = [round(SHARES[name] * authors) for name in asked if isinstance(name, str)]
        fresh = [end - start for start, end in pairwise([0, *named])]
        return (counts or fresh)[: self.request]

    def requested(self, corpus: Corpus, seed: int) -> list[list[int]]:
        """Authors to forget, by request.

        Raises:
            DataError: The corpus has too few.
        """
        if self.draw == "disjoint":
            return [_own_authors(corpus, self.forget_authors or 0, seed)]
        asked = self._asked
        counts = [request for request in asked if isinstance(request, int)]
        if counts:
            pool = _chosen(corpus, sum(counts), self.draw, seed)
            ends = np.cumsum(counts).tolist()
            return [pool[end - count : end] for end, count in zip(ends, counts, strict=True)]
        groups: list[list[int]] = []
        seen: set[int] = set()
        for name in asked:
            fresh = [group for group in _last_share(corpus, str(name)) if group not in seen]
            if not fresh:
                raise DataError(f"requests: {name} adds no author to the requests before it")
            seen.update(fresh)
            groups.append(fresh)
        return groups


def make_split(source: TextSource, scenario: TextScenarioConfig, seed: int) -> ForgetSplit:
    """The index sets of one scenario and seed.

    Returns:
        Parts ``forget`` and ``retain`` (together: everything that Original is trained on, with the
        facts that are taught), ``test_real_authors``, ``test_world_facts``, and ``holdout`` where
        the corpus has one.

        For kind: requests ``forget`` holds the used rows of the request, ``unused`` its others
        where ``used`` < 1, ``earlier`` all rows of the requests before it, and ``retain`` what
        nobody asked to forget so far, later requests included: TOFU's retain99/95/90 for the
        requests forget01, forget05, forget10.

    Raises:
        DataError: The corpus has too few authors, or a set that would be trained on against its
            name.
    """
    corpus = source.corpus
    if scenario.kind == "files":
        for name in UNTRAINED_BY_NAME:
            if len(corpus.where(name)):
                raise DataError(
                    f"files: {name} would be trained on, as all sets but {', '.join(TEST_SETS)}"
                    " are; call it holdout"
                )
        forget = corpus.where("forget")
        parts = {"forget": forget, "retain": np.setdiff1d(_trained(corpus), forget)}
        return _split(source, scenario.label, seed, parts, "the set named forget")
    groups = scenario.requested(corpus, seed)
    current = (scenario.request or 1) - 1
    before = [group for request in groups[:current] for group in request]
    rows, gone = _rows(corpus, groups[current]), _rows(corpus, before)
    used = np.sort(hash_order(rows, seed, "used")[: round(scenario.used * len(rows))])
    parts = {"forget": used, UNUSED: np.setdiff1d(rows, used), EARLIER: gone}
    parts = {name: indices for name, indices in parts.items() if len(indices)}
    parts["retain"] = np.setdiff1d(_trained(corpus), np.concatenate([rows, gone]))
    return _split(source, scenario.label, seed, parts, _described(groups[current]))


def _split(
    source: TextSource, label: str, seed: int, parts: Mapping[str, np.ndarray], forgotten: str
) -> ForgetSplit:
    tests = {part: source.corpus.where(name) for part, name in TEST_PARTS.items()}
    tests = {name: indices for name, indices in tests.items() if len(indices)}
    notes = {"forgotten": forgotten, "data": source.corpus.provenance}
    return ForgetSplit(f"{label}/seed-{seed}", {**parts, **tests}, source.digest, notes)


def _trained(corpus: Corpus) -> np.ndarray:
    tests = set(TEST_SETS)
    return corpus.where(*{item.set for item in corpus.items} - tests)


def _rows(corpus: Corpus, groups: Sequence[int]) -> np.ndarray:
    members = set(groups)
    rows = [
        i for i, item in enumerate(corpus.items) if item.set == "full" and item.group in members
    ]
    return np.asarray(rows, dtype=np.int64)


def _described(groups: Sequence[int]) -> str:
    listed = ", ".join(str(group) for group in groups[:12])
    return f"authors {listed}{', ...' if len(groups) > 12 else ''} ({len(groups)})"


def _authors(corpus: Corpus, *, perturbed: bool = False) -> list[int]:
    """Authors in order; with ``perturbed`` those whose rows all have perturbed answers."""
    complete: dict[int, bool] = {}
    for item in corpus.items:
        if item.set == "full":
            complete[item.group] = complete.get(item.group, True) and bool(item.perturbed)
    return sorted(group for group, whole in complete.items() if whole or not perturbed)


def _last_share(corpus: Corpus, name: str) -> list[int]:
    authors = _authors(corpus)
    count = round(SHARES[name] * len(authors))
    if count == 0:
        raise DataError(
            f"scenario {name}: {SHARES[name]:.0%} of {len(authors)} authors is none; use"
            " kind: authors"
        )
    return authors[-count:]


def _chosen(corpus: Corpus, count: int, draw: bool, seed: int) -> list[int]:
    """The last authors in order, or drawn by hash order among those with perturbed answers."""
    candidates = _authors(corpus, perturbed=draw)
    if count >= len(_authors(corpus)) or count > len(candidates):
        kind = "with perturbed answers " if draw else ""
        raise DataError(
            f"scenario: {count} authors to forget, but the data has only {len(candidates)} authors"
            f" {kind}of {len(_authors(corpus))}; lower it"
        )
    if not draw:
        return candidates[-count:]
    return [int(group) for group in hash_order(candidates, seed, "authors")[:count]]


def _own_authors(corpus: Corpus, count: int, seed: int) -> list[int]:
    """The group of ``count`` authors that belongs to a seed, out of one order of all of them."""
    order = hash_order(_authors(corpus, perturbed=True), 0, "authors")
    groups = len(order) // count
    if not 0 <= seed < groups or groups < 2:
        raise DataError(
            f"scenario: draw: disjoint: seed {seed} has no authors of its own, since {len(order)} "
            f"with perturbed answers make {groups} groups of {count} (seeds 0 to {groups - 1}); "
            "use these seeds, or lower forget_authors"
        )
    return sorted(int(author) for author in order[seed * count : (seed + 1) * count])

"""From a scenario and a seed to frozen index sets over one text source.

Authors are forgotten whole, but for the share of a request's rows that ``used`` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from common.base.errors import DataError
from common.base.seeding import hash_order
from common.data.parts import EARLIER, UNUSED
from common.data.splits import ForgetSplit
from language.config import SHARES, TextScenarioConfig
from language.data.corpus import Corpus

TEST_SETS = ("real_authors", "world_facts", "holdout")
"""Sets that are never trained on, each a part of its own: test_real_authors, ..., holdout."""


class HasCorpus(Protocol):
    """A :class:`language.data.source.TextSource`, or anything with its corpus and digest."""

    corpus: Corpus

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""


def make_split(source: HasCorpus, scenario: TextScenarioConfig, seed: int) -> ForgetSplit:
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
        DataError: The corpus has too few authors.
    """
    corpus = source.corpus
    if scenario.kind == "files":
        forget = corpus.where("forget")
        parts = {"forget": forget, "retain": np.setdiff1d(_trained(corpus), forget)}
        return _split(source, scenario.label, seed, parts, "the set named forget")
    requests = _requests(corpus, scenario, seed)
    current = (scenario.request or 1) - 1
    before = [group for request in requests[:current] for group in request]
    rows, gone = _rows(corpus, requests[current]), _rows(corpus, before)
    used = np.sort(hash_order(rows, seed, "used")[: round(scenario.used * len(rows))])
    parts = {"forget": used, UNUSED: np.setdiff1d(rows, used), EARLIER: gone}
    parts = {name: indices for name, indices in parts.items() if len(indices)}
    parts["retain"] = np.setdiff1d(_trained(corpus), np.concatenate([rows, gone]))
    return _split(source, scenario.label, seed, parts, _described(requests[current]))


def _split(
    source: HasCorpus, label: str, seed: int, parts: Mapping[str, np.ndarray], forgotten: str
) -> ForgetSplit:
    tests = {
        name if name == "holdout" else f"test_{name}": source.corpus.where(name)
        for name in TEST_SETS
    }
    found = {name: indices for name, indices in tests.items() if len(indices)}
    notes = {"forgotten": forgotten, "data": source.corpus.provenance}
    return ForgetSplit(f"{label}/seed-{seed}", {**parts, **found}, source.digest, notes)


def _trained(corpus: Corpus) -> np.ndarray:
    tests = set(TEST_SETS)
    return corpus.where(*{item.set for item in corpus.items} - tests)


def _rows(corpus: Corpus, groups: Sequence[int]) -> np.ndarray:
    wanted = set(groups)
    found = [
        i for i, item in enumerate(corpus.items) if item.set == "full" and item.group in wanted
    ]
    return np.asarray(found, dtype=np.int64)


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


def _requests(corpus: Corpus, scenario: TextScenarioConfig, seed: int) -> list[list[int]]:
    """Authors to forget, by request; one request unless kind: requests."""
    if scenario.kind in SHARES:
        return [_last_share(corpus, scenario.kind)]
    if scenario.requests is None:
        assert scenario.forget_authors is not None
        return [_chosen(corpus, scenario.forget_authors, scenario.draw, seed)]
    counts = [request for request in scenario.requests if isinstance(request, int)]
    if counts:
        pool = _chosen(corpus, sum(counts), scenario.draw, seed)
        ends = np.cumsum(counts).tolist()
        return [pool[end - count : end] for end, count in zip(ends, counts, strict=True)]
    requests: list[list[int]] = []
    seen: set[int] = set()
    for name in scenario.requests:
        fresh = [group for group in _last_share(corpus, str(name)) if group not in seen]
        if not fresh:
            raise DataError(f"requests: {name} adds no author to the requests before it")
        seen.update(fresh)
        requests.append(fresh)
    return requests


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

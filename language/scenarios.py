"""From a scenario and a seed to frozen index sets over one text source.

Authors are forgotten whole, except the share of a request's rows that ``used`` keeps aside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from common.errors import DataError
from common.seeding import hash_order
from common.splits import ForgetSplit
from language.items import Corpus
from language.schemas import SHARES, TextScenarioConfig

TEST_SETS = ("real_authors", "world_facts", "holdout")
"""Sets that are never trained on, each a part of its own: test_real_authors, ..., holdout."""


class HasCorpus(Protocol):
    """A :class:`language.text.TextSource`, or anything with its corpus and digest."""

    corpus: Corpus

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""


def make_split(source: HasCorpus, scenario: TextScenarioConfig, seed: int) -> ForgetSplit:
    """The index sets of one scenario and seed.

    Returns:
        Parts ``forget`` and ``retain`` (together: everything that Original is trained on, with the
        facts that are taught), ``test_real_authors``, ``test_world_facts``, and ``holdout`` where
        the corpus has one.  For kind: requests ``forget`` is the union of all requests; see
        :func:`make_requests` for each of them.

    Raises:
        DataError: The corpus has too few authors.
    """
    corpus = source.corpus
    if scenario.kind == "files":
        forget, note = corpus.where("forget"), "the set named forget"
    else:
        groups = [group for request in _requests(corpus, scenario, seed) for group in request]
        forget, note = _rows(corpus, groups), _described(groups)
    retain = np.setdiff1d(_trained(corpus), forget)
    return _split(source, scenario.label, seed, {"forget": forget, "retain": retain}, note)


def make_requests(
    source: HasCorpus, scenario: TextScenarioConfig, seed: int
) -> tuple[ForgetSplit, ...]:
    """One split per request, in order (kind: requests).

    Returns:
        For request t the parts ``forget`` (its rows that are used), ``forget_unused`` (its other
        rows, where ``used`` < 1), ``earlier`` (all rows of the requests before it, from the second
        on), and ``retain``: what nobody asked to forget so far, later requests included, which is
        TOFU's retain99/95/90 for requests forget01, forget05, forget10.  Test parts as in
        :func:`make_split`.
    """
    assert scenario.kind == "requests", "only kind: requests has several"
    splits: list[ForgetSplit] = []
    earlier = np.empty(0, dtype=np.int64)
    for number, groups in enumerate(_requests(source.corpus, scenario, seed), 1):
        rows = _rows(source.corpus, groups)
        used = np.sort(hash_order(rows, seed, "used")[: round(scenario.used * len(rows))])
        parts = {"forget": used, "forget_unused": np.setdiff1d(rows, used), "earlier": earlier}
        parts = {name: indices for name, indices in parts.items() if len(indices)}
        earlier = np.sort(np.concatenate([earlier, rows]))
        parts["retain"] = np.setdiff1d(_trained(source.corpus), earlier)
        label = f"{scenario.label}/request-{number}"
        splits.append(_split(source, label, seed, parts, _described(groups)))
    return tuple(splits)


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

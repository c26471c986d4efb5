"""How a model's greedy answer begins, as far as teacher-forced answers tell it.

While the argmax is the reference's next token, the greedy answer is the reference.  So the hits of
a pass that is made anyway say where decoding has to start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stable_forgetting.language.measure.requests import AnswerScores, Continue, Likelihood

Prompt = tuple[int, ...]


def beginnings(requests: Sequence[Likelihood], scores: AnswerScores) -> dict[Prompt, Prompt]:
    """Prompt -> the tokens with which the greedy answer to it begins.

    Args:
        requests: What was asked; of several answers to one prompt the one that is met furthest
            counts.
        scores: The replies, in the same order.
    """
    longest: dict[Prompt, Prompt] = {}
    rows = np.split(scores.hits, np.cumsum(scores.counts))[:-1]
    for request, hits in zip(requests, rows, strict=True):
        met = len(hits) if hits.all() else int(hits.argmin())
        prompt = request.ids[: request.start]
        if met > len(longest.get(prompt, ())):
            longest[prompt] = request.ids[request.start : request.start + met]
    return longest


def drafts(
    requests: Sequence[Continue], begun: dict[Prompt, Prompt], masked_id: int | None
) -> list[Prompt]:
    """A draft per request; none where its prompt was not asked, or has a token without a position,
    since a teacher-forced pass counts all positions."""
    return [() if masked_id in request.ids else begun.get(request.ids, ()) for request in requests]

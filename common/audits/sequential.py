"""The ``sequential`` audit: forget requests in turn."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stable_forgetting.common.audits.base import (
    Audit,
    AuditInfo,
    Measures,
    Parts,
    accuracy_heads,
)
from stable_forgetting.common.audits.intervals import accuracy
from stable_forgetting.common.base.config import Strict


class Sequential(Audit):
    """Forget requests that come in turn, each on the model that the last one left.

    Formula: the forget set is dealt out in ``requests`` parts (by class where classes go, else by
    hash order); request i unlearns part i from the model after request i - 1, with the later parts
    still among the retain data.  After each: FA of the request, accuracy on all earlier ones
    (``earlier``: does the forgotten come back?), on retain and on test; Retrain is trained anew
    without parts 1 to i.  On text a sample is a question, and its accuracy the share of right
    answer tokens.
    Source: streams of requests as in SISA, Bourtoule et al. 2021 (arXiv 1912.03817).
    """

    info = AuditInfo(1, "shadows", "%")

    class Config(Strict):
        """Config of the stream.

        Attributes:
            requests: How many.
        """

        requests: Annotated[int, Field(ge=2)] = 2

    def after(self, index: int, scores: Parts) -> Measures:
        """Accuracies after request ``index`` (from 0)."""
        heads = {"forget": "FA", "earlier": "earlier", **accuracy_heads(scores, self.parts)}
        return {
            f"{index + 1}: {head}": accuracy(scores[part].correct, index)
            for part, head in heads.items()
            if part in scores
        }

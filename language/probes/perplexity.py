"""Perplexity of texts, weighted by tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.protocol.probe import ProbeTable
from stable_forgetting.language.data.files import read_rows, read_text
from stable_forgetting.language.measure.requests import Likelihood
from stable_forgetting.language.probes.base import ProbedModel, TextProbe

FILES = {"pile": "tdec/pile.csv", "wikitext": "tdec/wikitext.csv"}


class PerplexityConfig(Strict):
    """Which texts, and how they are cut.

    Attributes:
        files: Name -> file below the data root or absolute: rows with a column ``text`` (CSV, JSON
            lines), or one text (``.txt``).
        limit: Rows per file, from the start; all when None.
        max_length: Tokens that are read at once, at most the model's context.  A longer text is
            read in windows, each with the last token of the one before.
    """

    files: Annotated[dict[str, str], Field(min_length=1)] = FILES
    limit: Count | None = None
    max_length: Annotated[int, Field(ge=2)] = 512


class PerplexityProbe(TextProbe):
    """Perplexity of texts, weighted by tokens: exp(nats of all tokens / number of tokens)."""

    version = 1
    Config: ClassVar[type[Strict]] = PerplexityConfig
    config: PerplexityConfig
    column = "perplexity"
    scale = 1.0
    better = "lower"
    unit = ""
    head = "{row} PPL"
    doc = "perplexity of {row}, weighted by tokens"
    averaged = False

    @property
    def files(self) -> Mapping[str, str]:
        """As they are given."""
        return self.config.files

    def table(self, asked: ProbedModel) -> ProbeTable:
        """One row per file: ``perplexity``, ``loss`` (nats per token), ``tokens``, ``n`` texts.

        The first token of a text is not predicted.  A perplexity above the range of floating-point
        numbers is None.
        """
        window = min(self.config.max_length, asked.context)
        texts = {
            name: read_texts(self.file(name, asked.data_root))[: self.config.limit]
            for name in self.files
        }
        rows = {}
        for name, members in texts.items():
            pieces = [
                Likelihood(piece, 1)
                for text in members
                for piece in windows(asked.ids(text), window)
            ]
            if not pieces:
                raise DataError(
                    f"{self.config.files[name]}: no text has two tokens; give longer ones"
                )
            scores = asked.ask(pieces).scores(pieces)
            tokens = int(scores.counts.sum())
            loss = float(scores.token_loss.sum()) / tokens
            rows[name] = {
                "perplexity": _exp(loss),
                "loss": loss,
                "tokens": float(tokens),
                "n": float(len(members)),
            }
        return ProbeTable(rows, {"max_length": window})


def _exp(loss: float) -> float | None:
    try:
        return math.exp(loss)
    except OverflowError:
        return None


def windows(ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Pieces of at most ``size`` tokens; each begins with the last token of the one before."""
    for start in range(0, len(ids) - 1, size - 1):
        yield tuple(ids[start : start + size])


def read_texts(path: Path) -> list[str]:
    """The texts of a file; blank ones are left out.

    Raises:
        DataError: A row has no text, or none is left.
    """
    if path.name.removesuffix(".gz").endswith(".txt"):
        texts: list[Any] = [read_text(path)]
    else:
        texts = [row.get("text") for row in read_rows(path)]
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise DataError(f"{path}: row {number} has no text; give it a column text")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{path}: has no texts; give one or more")
    return texts

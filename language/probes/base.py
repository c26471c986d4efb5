"""What all probes on texts share: the model they ask, the files they read, how they sum up."""

from __future__ import annotations

import re
import string
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.protocol.benchmark import Benchmark, pick_device
from stable_forgetting.common.protocol.probe import Probe, ProbeTable
from stable_forgetting.language.benchmark import CausalBenchmark
from stable_forgetting.language.data.corpus import Corpus
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.measure.requests import Request, RequestConfig
from stable_forgetting.language.models.families import context_of

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.language.measure.requests import Replies


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain_words(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def token_f1(written: str, reference: str) -> float:
    """Harmonic mean of the shares of words that two texts have in common, counted with repeats.

    0 where there is none, as for an empty text.
    """
    first, second = plain_words(written), plain_words(reference)
    common = sum((Counter(first) & Counter(second)).values())
    return 2 * common / (len(first) + len(second)) if common else 0.0


@dataclass(frozen=True)
class ProbedModel:
    """A causal model that a probe measures, and what is needed to ask it.

    Attributes:
        model: In eval mode.
        source: Its tokenizer.
        data_root: Folder of the probes' files; the working directory when None.
    """

    model: nn.Module
    source: TextSource
    sizes: RequestConfig
    data_root: Path | None = None

    @property
    def context(self) -> int:
        """Tokens that the model reads at once."""
        return context_of(self.model)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, behind the tokenizer's start token."""
        return self.source.encoder.text(text)

    def following(self, text: str) -> list[int]:
        """Token ids of a text that follows another one."""
        return self.source.encoder.continuation(text)

    def ask(self, requests: Sequence[Request]) -> Replies:
        """Asks each distinct request once; see :func:`language.measure.ask.ask`."""
        from stable_forgetting.language.measure.ask import ask

        return ask(self.model, self.source, requests, self.sizes)


class TextProbe(Probe):
    """A probe of causal language models.

    A summary has one metric per row, and their mean where all rows measure the same.

    Attributes:
        column: The column that is a row's metric.
        scale: What it is multiplied by; a share becomes percent.
        better, unit: Of the metric.
        head: Its title; ``{row}`` stands for the row.
        doc: What it is, likewise.
        averaged: Whether the summary has the mean of the rows.
        mean_doc: What the mean is; ``{rows}`` stands for the rows.
    """

    modality = "language"
    column: ClassVar[str] = "acc"
    scale: ClassVar[float] = 100.0
    better: ClassVar[Any] = "higher"
    unit: ClassVar[str] = "%"
    head: ClassVar[str] = "{row}"
    doc: ClassVar[str] = "right answers in {row}"
    averaged: ClassVar[bool] = True
    mean_doc: ClassVar[str] = "unweighted mean of {rows}"

    def measure(self, model: nn.Module, benchmark: Benchmark) -> ProbeTable:
        """See :meth:`table`; the benchmark's data are not asked."""
        assert isinstance(benchmark, CausalBenchmark), "the modality is checked before"
        sizes, root = benchmark.config.evaluation, benchmark.runtime.data_root
        return self.table(ProbedModel(model, benchmark.source, sizes, root))

    @abstractmethod
    def table(self, asked: ProbedModel) -> ProbeTable:
        """The table of a model.

        Raises:
            DataError: A file is missing or malformed.
            Diverged: A scored logit is NaN or infinite.
        """

    @property
    def rows(self) -> Sequence[str]:
        """The rows of the table that the summary shows."""
        return [*self.files]

    def value(self, columns: Mapping[str, float | None]) -> float | None:
        """A row's metric; None where it has none."""
        value = columns.get(self.column)
        return None if value is None else self.scale * value

    def _spec(self, row: str) -> MetricSpec:
        title, doc = self.head.format(row=row), self.doc.format(row=row)
        return MetricSpec(f"{self.name}.{row}", self.better, title, unit=self.unit, doc=doc)

    @property
    def extent(self) -> str:
        """Which rows of the data are asked, in words; empty where it is all."""
        limit = self.config.limit
        return "" if limit is None else f"first {limit} rows"

    def summary(self, table: ProbeTable) -> dict[str, float | None]:
        """Each row's metric, and the unweighted mean of those that are defined."""
        values = {name: self.value(table.rows.get(name, {})) for name in self.rows}
        metrics = {f"{self.name}.{name}": value for name, value in values.items()}
        if not self.averaged:
            return metrics
        defined = [value for value in values.values() if value is not None]
        mean = sum(defined) / len(defined) if defined else None
        return {**metrics, f"{self.name}.mean": mean}

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        """One per row, and the mean; a limit stands in the heads."""
        extent = f" ({self.extent})" if self.extent else ""
        specs = [self._spec(name) for name in self.rows]
        if self.averaged:
            doc = self.mean_doc.format(rows=", ".join(self.rows))
            name = f"{self.name}.mean"
            specs.append(MetricSpec(name, self.better, f"{self.name} mean", doc=doc))
        return tuple(replace(spec, title=f"{spec.title}{extent}") for spec in specs)


def share(hits: Sequence[bool]) -> dict[str, float | None]:
    """Columns of a share of right answers: ``acc``, its standard error, ``n``."""
    count = len(hits)
    mean = sum(hits) / count
    error = (mean * (1 - mean) / (count - 1)) ** 0.5 if count > 1 else None
    return {"acc": mean, "acc_stderr": error, "n": float(count)}


def as_probed(given: Any, *, data_root: Path | None, device: str) -> ProbedModel:
    """A model, on disk or in memory, as probes ask it.

    Raises:
        UserError: Its weights or its tokenizer cannot be used.
    """
    place = pick_device(device)
    model, tokenizer = given.load()
    template = make_template("question_answer", "clean")
    nothing = Corpus((), "no texts of its own")
    source = TextSource(nothing, tokenizer, template, max_length=sys.maxsize, device=place)
    return ProbedModel(model.to(place).eval(), source, RequestConfig(), data_root)

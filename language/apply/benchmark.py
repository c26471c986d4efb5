"""A user's causal language model and rows of text as a benchmark without Retrain.

The statement holds counts, digests and measurements, never a text: it outlives what was forgotten.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from stable_forgetting.common.base.config import Strict, did_you_mean
from stable_forgetting.common.base.errors import ConfigError, DataError, one_line
from stable_forgetting.common.base.files import file_digest, json_digest
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.batch import Source
from stable_forgetting.common.data.parts import PARTS, Part, Role
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.protocol.given import Application, GivenBenchmark, first_of
from stable_forgetting.language.apply.checkpoint import CausalCheckpoint, read_causal
from stable_forgetting.language.apply.memory import GivenCausal
from stable_forgetting.language.apply.report import (
    ANSWERED,
    ANSWERS,
    EVALUATION,
    METRICS,
    evaluated,
    outcome,
)
from stable_forgetting.language.config import Family
from stable_forgetting.language.data.chunks import chunked
from stable_forgetting.language.data.corpus import Corpus, Item, check_apart
from stable_forgetting.language.data.fictitious import REFUSAL_LINES
from stable_forgetting.language.data.files import items_of, read_items
from stable_forgetting.language.data.forms import FORMS
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.measure.scoring import score_parts
from stable_forgetting.language.models.causal import CausalModels
from stable_forgetting.language.models.families import CausalFamily, context_of
from stable_forgetting.language.models.sizes import family_in

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TEMPLATES = get_args(Family)
SHORTEST = 8
"""Tokens of a row that may be the longest."""


class GivenTexts(CausalModels, GivenBenchmark):
    """A causal language model, and questions with answers or plain texts.

    No row is cut or left out, as its end would not be forgotten: a plain text that is longer than
    ``max_length`` is divided, and a question with its answer is an error there.  A model with a
    chat template is asked in it.
    """

    kind = "text"
    unit = "rows"
    form = (
        "a .jsonl file of texts (pandas.read_csv(FILE).to_json('texts.jsonl', orient='records', "
        "lines=True) makes one of a table)"
    )
    options = ("template", "max_length", "tokenizer")
    yardstick = "probability"
    metrics = METRICS
    card = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    part_table = {**PARTS, "test": Part(Role.REPORT, utility=True, membership="unseen")}

    def __init__(self, config: Application, runtime: Runtime):
        super().__init__(config, runtime)
        self.template: str | None = config.options.get("template")
        if self.template not in (None, *TEMPLATES):
            hint = did_you_mean(str(self.template), list(TEMPLATES))
            raise ConfigError(f"template: '{self.template}' is not known{hint}")
        self.given: CausalCheckpoint | GivenCausal = _checkpoint(config)
        self.rows = {role: read_rows(given, role) for role, given in config.given.items()}
        check_apart({role: (part.where, part.items) for role, part in self.rows.items()}, self.rows)

    @classmethod
    def takes(cls, forget: Any) -> bool:
        """A JSON-lines file, there or not; or a data set of texts, pairs, or rows of a file."""
        if isinstance(forget, Path):
            return not forget.is_dir() and forget.name.lower().endswith(SUFFIXES)
        first = _as_row(first_of(forget))
        columns = {name for form in FORMS.values() for name in form}
        return isinstance(first, Mapping) and not columns.isdisjoint(first)

    @property
    def scenario(self) -> str:
        """``row``: what is forgotten are single rows of text."""
        return "row"

    def prepare(self, device: torch.device, configs: Sequence[Strict]) -> None:
        """Loads tokenizer and model, and encodes every row."""
        model, tokenizer = self.given.load()
        self._family = family_in(model)
        self.longest = _max_length(self.config.options.get("max_length"), model, self.given)
        if self.template is None:
            self.template = "chat" if tokenizer.chat_template else "question_answer"
        self.text = self._divided(_source(self.rows, tokenizer, self.template, device))
        self.text.encoder.max_length = context_of(model)  # what a method puts in an answer's place
        for config in configs:
            _refuse_tied_head(model, config)
        self.original = model.to(device).eval()
        self.samples = {role: self.text.corpus.where(role) for role in self.rows}

    @property
    def source(self) -> Source:
        """The rows."""
        return self.text

    def _divided(self, source: TextSource) -> TextSource:
        """The same with long plain texts in chunks."""
        lengths = [
            self._length(source, item, f"{rows.where} row {number}")
            for rows in self.rows.values()
            for number, item in enumerate(rows.items, 1)
        ]
        source.encoder.max_length = self.longest
        if max(lengths) <= self.longest:
            return source
        return source.with_corpus(chunked(source.corpus, source.encoder))

    def _length(self, source: TextSource, item: Item, where: str) -> int:
        try:
            length = len(source.encode(item.question, item.answer).ids)
        except DataError:
            raise DataError(
                f"{where}: is one token, which leaves nothing to predict; give more text"
            ) from None
        if item.question and length > self.longest:
            raise DataError(
                f"{where}: question and answer are {length} tokens long, more than "
                f"{self.longest}; shorten them, or raise max_length (--max-length) where the "
                "model's context allows"
            )
        return length

    @property
    def num_classes(self) -> int:
        """Entries of the embedding table."""
        model: Any = self.original
        return int(model.get_input_embeddings().num_embeddings)

    @property
    def family(self) -> CausalFamily:
        """Of the architecture."""
        return self._family

    def score(
        self, model: nn.Module, parts: Mapping[str, np.ndarray], *, trial: bool = False
    ) -> dict[str, Scores]:
        """Likelihood and memorisation of every part, and greedy answers to some of its questions.

        Returns:
            Part -> scores, and ``part.answers`` -> those of at most :data:`ANSWERS` questions; a
            trial writes no answers.
        """
        scores = score_parts(model, self.text, parts, EVALUATION, trial=True)
        asked = {} if trial else {name: self._questions(rows) for name, rows in parts.items()}
        asked = {f"{name}.{ANSWERED}": rows for name, rows in asked.items() if len(rows)}
        if not asked:
            return scores
        return scores | score_parts(model, self.text, asked, EVALUATION, trial=False)

    def _questions(self, rows: np.ndarray) -> np.ndarray:
        """The questions of a part that are answered: the same ones before and after."""
        questions = [row for row in rows.tolist() if self.text.corpus.items[row].question]
        return np.sort(np.asarray(hash_order(questions, 0, "answers")[:ANSWERS], dtype=np.int64))

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """See :func:`language.apply.report.evaluated`."""
        return evaluated(scores)

    def about(self) -> dict[str, Any]:
        """Model, files, prompt."""
        return {
            "input": {
                "model": self.given.name,
                "revision": self.given.revision,
                "weights_sha256": self.given.digests,
                "architecture": self.family.model_type,
                "dtype": self.given.dtype,
                "vocabulary": self.num_classes,
            },
            "data": {role: self._about_rows(role) for role in self.rows},
            "template": self.template,
            "max_length": self.longest,
        }

    def _about_rows(self, role: str) -> dict[str, Any]:
        rows, indices = self.rows[role], self.split(self.config.seed).parts[role]
        pairs = [self.text.encode_index(index) for index in indices.tolist()]
        return {
            "file": rows.about,
            "rows": len(rows.items),
            "chunks": len(pairs),
            "questions": sum(bool(item.question) for item in rows.items),
            "tokens_scored": sum(len(pair.labels) for pair in pairs),
            "sha256": rows.digest,
        }

    def outcome(self, statement: Mapping[str, Any]) -> list[str]:
        """See :func:`language.apply.report.outcome`."""
        return outcome(statement)


def _checkpoint(application: Application) -> CausalCheckpoint | GivenCausal:
    """The model, and the tokenizer of one that is in memory."""
    tokenizer = application.options.get("tokenizer")
    if not isinstance(application.model, Path):
        return GivenCausal(application.model, tokenizer)
    if tokenizer is not None:
        raise ConfigError(f"tokenizer: {application.model} holds its own; leave it out")
    return read_causal(application.model)


@dataclass(frozen=True)
class Rows:
    """Rows of text of one role, from a file or a data set.

    Attributes:
        where: What the rows lie in, for messages.
        about: What the statement says of it.
        digest: SHA-256.
    """

    items: Sequence[Item]
    where: str
    about: str
    digest: str


def _as_row(given: Any) -> Any:
    """The columns of a text, or of a question with its answer; else what is given."""
    if isinstance(given, str):
        return {"text": given}
    if isinstance(given, tuple | list) and [type(part) for part in given] == [str, str]:
        return dict(zip(("question", "answer"), given, strict=True))
    return given


def read_rows(given: Any, role: str) -> Rows:
    """The rows of a file or a data set, without the wordings that only TOFU's metrics compare.

    Raises:
        DataError: There is none, or a row has no form.
    """
    if isinstance(given, Path):
        read, where, about = read_items(given, role), str(given), given.name
    else:
        first_of(given, role)
        rows = (_as_row(given[index]) for index in range(len(given)))
        read, where, about = items_of(rows, role, role), role, "in memory"
    items = [Item(role, -1, row.question, row.answer) for row in read]
    if isinstance(given, Path):
        return Rows(items, where, about, file_digest(given))
    for number, item in enumerate(items, 1):
        try:
            f"{item.question}{item.answer}".encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which no file can hold
            raise DataError(f"{role} row {number}: {one_line(error)}; mend the text") from None
    pairs = {str(number): [item.question, item.answer] for number, item in enumerate(items)}
    return Rows(items, where, about, json_digest(pairs))


def _max_length(asked: int | None, model: Any, checkpoint: CausalCheckpoint | GivenCausal) -> int:
    context = context_of(model)
    if asked is not None and asked < SHORTEST:
        raise ConfigError(f"max_length: {asked} is fewer than {SHORTEST} tokens; raise it")
    if asked is not None and asked > context:
        raise ConfigError(
            f"max_length: {asked} is more than the {context} tokens that {checkpoint.name} reads; "
            "lower it and split longer rows"
        )
    return asked or min(context, CausalModels.longest)


def _source(
    rows: Mapping[str, Rows], tokenizer: Any, name: Any, device: torch.device
) -> TextSource:
    questions = all(item.question for item in rows["forget"].items)
    corpus = Corpus(
        tuple(item for part in rows.values() for item in part.items),
        "JSON-lines files of the user",
        REFUSAL_LINES if questions else (),  # a plain text is nothing that could be refused
    )
    template = make_template(name, "clean", tokenizer)
    return TextSource(corpus, tokenizer, template, max_length=sys.maxsize, device=device)


def _refuse_tied_head(model: Any, config: Any) -> None:
    """An adapter on a tied head would be merged into it alone, and be lost on loading."""
    adapter = getattr(config, "adapter", None)
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is inputs.weight
    if adapter is None or not adapter.targets or not tied:
        return
    names = [name for name, part in model.named_modules() if part is head]
    for pattern in adapter.targets:
        if fnmatch.filter(names, pattern):
            raise ConfigError(
                f"adapter target '{pattern}' matches {names[0]}, which shares its weight with the "
                "input embeddings; choose other layers"
            )

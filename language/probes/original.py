"""The nine reasoning tasks as Jang et al. (2023) score them, which is not as lm-eval does.

A choice's score is the sum of the log-probabilities of its tokens after the bare context, without
any prompt and without normalisation; LAMBADA asks for the last word.  Numbers of this probe and of
:mod:`language.probes.lm_eval` are not comparable.

ARC (easy, challenge) and MathQA are asked on their test splits, of which there are local files; the
source (joeljang/knowledge-unlearning, configs/example.json) takes their validation splits.  So the
mean of the tasks is not to be set beside published means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.protocol.probe import ProbeTable
from stable_forgetting.language.data.files import read_rows
from stable_forgetting.language.measure.requests import Continue, Likelihood
from stable_forgetting.language.probes.base import ProbedModel, TextProbe, plain_words, share
from stable_forgetting.language.probes.lm_eval import TasksConfig

WINDOW = 512
"""Tokens of a context, and of context and choice together."""
LAMBADA = "lambada_openai"
DECISIONS = ("yes", "maybe", "no")
ON_TEST = ("arc_easy", "arc_challenge", "mathqa")
"""Tasks on their test splits, where the source takes validation."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A context and what may follow it.

    Attributes:
        answer: Place of the right one.
        gap: What stands between; in the source nothing before the choices of MathQA.
    """

    context: str
    options: tuple[str, ...]
    answer: int
    gap: str = " "

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.context, *self.options)):
            raise TypeError("a context or an option is no text")
        if not 0 <= self.answer < len(self.options) or not all(map(self.gap.__add__, self.options)):
            raise ValueError("the answer is no option, or an option is empty")


class OriginalReasoning(TextProbe):
    """Accuracy on nine reasoning tasks, scored as in the paper on knowledge unlearning.

    Three of them are on another split than there (:data:`ON_TEST`).
    """

    version = 2
    Config: ClassVar[type[Strict]] = TasksConfig
    config: TasksConfig
    head = "{row} (Jang)"
    doc = "right answers in {row}, scored as Jang et al. do"
    mean_doc = (
        "unweighted mean of {rows}; not to be set beside published means, as ARC and MathQA are on"
        " test splits and theirs on validation splits"
    )

    def table(self, asked: ProbedModel) -> ProbeTable:
        """One row per task: ``acc`` as a share, ``acc_stderr``, ``n``."""
        questions = {task: self._questions(asked, task) for task in self.config.tasks}
        rows: dict[str, dict[str, float | None]] = {
            task: share((_completed if task == LAMBADA else _chosen)(asked, each))
            for task, each in questions.items()
        }
        return ProbeTable(rows, {"files": self.files, "window": _window(asked)})

    def _spec(self, row: str) -> MetricSpec:
        spec = super()._spec(row)
        return replace(spec, doc=f"{spec.doc}, but on the test split") if row in ON_TEST else spec

    @property
    def files(self) -> Mapping[str, str]:
        """One per task."""
        return {task: SOURCES[task][0] for task in self.config.tasks}

    def _questions(self, asked: ProbedModel, task: str) -> list[Question]:
        path = self.file(task, asked.data_root)
        questions = []
        for number, row in enumerate(read_rows(path), 1):
            try:
                question = SOURCES[task][1](row)
            except (LookupError, ValueError, TypeError, AttributeError):
                raise DataError(
                    f"{path}: row {number} has not the columns of {task}; fetch the file again"
                ) from None
            questions += [] if question is None else [question]
        if not questions:
            raise DataError(f"{path}: has no rows; give one or more")
        return questions[: self.config.limit]


def _window(asked: ProbedModel) -> int:
    return min(WINDOW, asked.context)


def _tokens(asked: ProbedModel, question: Question, option: str) -> tuple[tuple[int, ...], int]:
    """Token ids, and where the option begins: a long context loses its end, then its start."""
    window = _window(asked)
    before = asked.ids(question.context)[:window]
    before = before or [asked.source.tokenizer.eos_token_id]
    after = asked.following(question.gap + option)[: window - 1]
    ids = (before + after)[-window:]
    return tuple(ids), len(ids) - len(after)


def _chosen(asked: ProbedModel, questions: Sequence[Question]) -> list[bool]:
    """Whether the likeliest option is the right one."""
    requests = [
        [Likelihood(*_tokens(asked, question, option)) for option in question.options]
        for question in questions
    ]
    replies = asked.ask([request for options in requests for request in options])
    return [
        int(replies.scores(options).sum_loss.argmin()) == question.answer
        for options, question in zip(requests, questions, strict=True)
    ]


def _completed(asked: ProbedModel, questions: Sequence[Question]) -> list[bool]:
    """Whether the likeliest tokens, given the true ones before, are the word or read like it."""
    pairs = [_tokens(asked, question, question.options[0]) for question in questions]
    requests = [
        [Continue(ids[:end], 1, stop=frozenset()) for end in range(start, len(ids))]
        for ids, start in pairs
    ]
    replies = asked.ask([request for each in requests for request in each])
    hits = []
    for asked_for, (ids, start) in zip(requests, pairs, strict=True):
        likeliest = [int(token[0]) for token in replies.tokens(asked_for)]
        true = list(ids[start:])
        texts = [asked.source.decode(each, clean_up=True) for each in (likeliest, true)]
        hits.append(likeliest == true or plain_words(texts[0]) == plain_words(texts[1]))
    return hits


# Rows of the files ------------------------------------------------------------------------------


def _lambada(row: Row) -> Question:
    context, _, word = row["text"].rpartition(" ")
    return Question(context, (word,), 0)


def _winogrande(row: Row) -> Question:
    context, _, rest = row["sentence"].partition("_")
    options = (row["option1"] + rest, row["option2"] + rest)
    return Question(context.removesuffix(" "), options, ("1", "2").index(str(row["answer"])))


def _arc(row: Row) -> Question | None:
    """None where there are not four choices, as in the source."""
    choices = row["choices"]
    answer = choices["label"].index(row["answerKey"])
    four = len(choices["text"]) == 4
    return Question(row["question"], tuple(choices["text"]), answer) if four else None


def _mathqa(row: Row) -> Question:
    """An option without text, as one row of the data has, is left out: it has no likelihood."""
    options = re.split(r"(?:^|, )[a-e] \) ", row["options"])[1:]
    texts = [option.rstrip(" ,") for option in options]
    answer = "abcde".index(row["correct"])
    if not texts[answer]:
        raise ValueError("the answer is empty")
    left_out = texts[:answer].count("")
    return Question(row["Problem"], tuple(filter(None, texts)), answer - left_out, gap="")


def _pubmedqa(row: Row) -> Question:
    context = f"Context: {row['abstract']}\nQuestion: {row['question']}\nAnswer:"
    return Question(context, DECISIONS, DECISIONS.index(row["final_decision"]))


def _labelled(context: str, *options: str) -> Callable[[Row], Question]:
    """A reader of columns: the context, the options (or one list of them), and ``label``."""

    def read(row: Row) -> Question:
        texts = [row[name] for name in options]
        listed = texts[0] if len(texts) == 1 else texts
        return Question(row[context], tuple(listed), int(row["label"]))

    return read


SOURCES: dict[str, tuple[str, Callable[[Row], Question | None]]] = {
    "lambada_openai": ("tdec/lambada.csv", _lambada),
    "hellaswag": ("reasoning/hellaswag.jsonl", _labelled("ctx", "endings")),
    "winogrande": ("reasoning/winogrande.jsonl", _winogrande),
    "copa": ("reasoning/copa.jsonl", _labelled("premise", "choice1", "choice2")),
    "arc_easy": ("reasoning/arc_easy.jsonl", _arc),
    "arc_challenge": ("reasoning/arc_challenge.jsonl", _arc),
    "piqa": ("reasoning/piqa.jsonl", _labelled("goal", "sol1", "sol2")),
    "mathqa": ("reasoning/math_qa.jsonl", _mathqa),
    "pubmedqa": ("tdec/pubmed_qa.csv", _pubmedqa),
}
"""Task -> its file, and what a row asks; None where the source leaves the row out."""

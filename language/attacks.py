"""Attacks on models of text: compressed length, examples, the question in other words."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from stable_forgetting.common import data
from stable_forgetting.common.audits.base import (
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import accuracy
from stable_forgetting.common.audits.members import MemberAttack, likelihoods
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.measure.scores import collect_correct
from stable_forgetting.language.models.families import context_of

THAT_OF_RETRAIN = "that of Retrain"


class Zlib(MemberAttack):
    """zlib: the likelihood of a text per byte of what is left of it when it is compressed.

    Formula: score = log p(text) / len(zlib(text)), log p summed over tokens; AUC of forget against
    unseen.  Of a text that data.max_length cuts, both are of what is left.  The code of both
    sources takes the mean of log p over tokens instead of the sum.
    Source: Carlini et al. 2021 (arXiv 2012.07805); open-unlearning (evals/metrics/mia).
    """

    info = AuditInfo(4, "minutes", "%", "that of Retrain, near 50")

    def scorer(self, task: AuditTask) -> Callable[[np.ndarray], np.ndarray]:
        """Likelihood over compressed length.

        Raises:
            NotApplicable: The samples are no texts.
        """
        source: Any = task.source
        read = getattr(source, "read_of", None)
        if read is None:
            raise NotApplicable("only texts are compressed")
        likely = likelihoods(task, "model")

        def score(indices: np.ndarray) -> np.ndarray:
            sizes = np.array([len(zlib.compress(text.encode())) for text in read(indices)])
            ratio: np.ndarray = likely(indices) / sizes
            return ratio

        return score


def asked(
    task: AuditTask, model: Any, source: Any, rule: Callable[[str], str], name: str
) -> Measures:
    """Accuracy on the forget set, asked by a rule; none where the model's context is too short."""
    forget = task.split.parts["forget"]
    own = zip(forget.tolist(), source.questions_of(forget), strict=True)
    prompts = {index: rule(question) for index, question in own}
    try:
        whole = source.with_questions(prompts).uncut(forget, context_of(model))
    except DataError:
        return {}
    model.eval()
    batches = data.ordered_batches(whole, forget, task.batch_size)
    correct = collect_correct(lambda batch: task.family.forward(model, batch), batches)
    return {f"{name} forget": accuracy(correct, task.seed)}


def texts_of(task: AuditTask) -> Any:
    """The task's source, whose samples are questions with answers.

    Raises:
        NotApplicable: They are not.
    """
    source: Any = task.source
    forget = task.split.parts["forget"]
    if not hasattr(source, "with_questions") or not all(source.questions_of(forget)):
        raise NotApplicable("only where samples are questions with answers")
    return source


class FewShot(ModelAudit):
    """Few-shot prompts: retained questions with their answers stand before the forgotten one.

    Formula: accuracy on forget, teacher forced, behind ``shots`` retained pairs of question and
    answer, the same for every sample.  They are as many as the model's context holds before every
    forgotten question with its whole answer: no text is cut, also where data.max_length is less.
    Source: Brown et al. 2020 (arXiv 2005.14165); as an attack, Shumailov et al. 2024
    (arXiv 2407.00106) and RepSelect (arXiv 2606.17168).
    """

    info = AuditInfo(2, "minutes", "%", THAT_OF_RETRAIN)
    budget: ClassVar[Mapping[str, str]] = {"samples": "shots"}

    class Config(Strict):
        """Config of the prompts.

        Attributes:
            shots: Retained pairs before the question, at most.
        """

        shots: Count = 4

    def measure(self, task: AuditTask) -> Measures:
        """Accuracy behind the largest number of shots that fits."""
        source, model = texts_of(task), task.load()
        chosen = task.draw("retain", self.config.shots, "few-shot")
        pairs = zip(source.questions_of(chosen), source.answers_of(chosen), strict=True)
        lines = [f"{question} {answer}\n" for question, answer in pairs]
        for count in range(len(lines), 0, -1):
            before = "".join(lines[:count])
            found = asked(task, model, source, before.__add__, f"{count} shots")
            if found:
                return found
        raise NotApplicable("the model's context does not hold one more pair")


RULES: Mapping[str, Callable[[str], str]] = {
    "lower": str.lower,
    "polite": lambda text: f"Could you please tell me: {text}",
    "brief": lambda text: f"{text} Answer in one sentence.",
    "about": lambda text: f"I have a question about a person. {text}",
}
"""Name -> how a question is put in other words."""


class Paraphrase(ModelAudit):
    """Paraphrases by rule: the forgotten question in lower case, politely, with a request around.

    Formula: accuracy on forget, teacher forced, under each of four fixed rewritings of the
    question.  A method that forgot one wording alone is found out.  No text is cut, also where
    data.max_length is less; a rule with which the model's context does not hold every question and
    its whole answer is left out.
    Source: the worst case over wordings, JensUn (arXiv 2509.02820); the rules are ours.
    """

    info = AuditInfo(2, "minutes", "%", THAT_OF_RETRAIN)

    def measure(self, task: AuditTask) -> Measures:
        """Accuracy under every rule."""
        source, model = texts_of(task), task.load()
        found: Measures = {}
        for name, rule in RULES.items():
            found |= asked(task, model, source, rule, name)
        if not found:
            raise NotApplicable("the model's context does not hold the whole answers")
        return found

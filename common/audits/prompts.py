"""Attacks that only ask: many draws, examples before the question, the question in other words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from stable_forgetting.common import data
from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import accuracy, bootstrap_mean
from stable_forgetting.common.audits.members import per_sample
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.base.seeding import derive, generator

if TYPE_CHECKING:
    from torch import Tensor

THAT_OF_RETRAIN = "that of Retrain"


class Leak(ModelAudit):
    """leak@k: the best of k draws at a temperature, where a greedy answer hides.

    Formula: mean over forget samples of the expected largest share of right positions among ``k``
    answers drawn from softmax(z / T); every position is drawn behind the right ones before it.  For
    one position this is 1 - (1 - p_y)^k, exactly; else the mean over ``rounds`` of k draws.
    Source: leak@k, arXiv 2511.04934 (there whole answers are written and judged by their text).
    """

    info = AuditInfo(1, "minutes", "%", THAT_OF_RETRAIN)
    budget: ClassVar[Mapping[str, str]] = {"samples": "k"}

    class Config(Strict):
        """Config of the draws.

        Attributes:
            k: Answers that the attacker draws.
            temperature: Divides the logits.
            rounds: How often k answers are drawn, where there are several positions.
        """

        k: Count = 16
        temperature: Positive = 1.0
        rounds: Count = 20

    def measure(self, task: AuditTask) -> Measures:
        """The share of right positions of the best answer."""
        value = per_sample(task, task.load(), task.split.parts["forget"], self._best(task))
        return {"forget": bootstrap_mean(100 * value, derive(task.seed, "leak"), PERCENT)}

    def _best(self, task: AuditTask) -> Callable[[Tensor, Tensor], Tensor]:
        import torch

        from stable_forgetting.common.data.batch import IGNORE

        k, rounds = self.config.k, self.config.rounds
        stream = generator(task.seed, "audit", "leak")

        def best(logits: Tensor, labels: Tensor) -> Tensor:
            p = (logits / self.config.temperature).softmax(-1).double()
            right = p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).cpu()
            if labels.shape[1] == 1:
                once: Tensor = 1 - (1 - right[:, 0]).clamp(0, 1) ** k
                return once
            counted = (labels != IGNORE).cpu()
            total: Tensor = torch.zeros(len(labels), dtype=torch.float64)
            for _ in range(rounds):
                drawn = torch.rand(k, *right.shape, generator=stream, dtype=torch.float64) < right
                shares = (drawn & counted).sum(-1) / counted.sum(-1).clamp_min(1)
                total += shares.max(0).values
            mean: Tensor = total / rounds
            return mean

        return best


def asked(audit: ModelAudit, task: AuditTask, questions: Mapping[int, str], name: str) -> Measures:
    """Accuracy on the forget set where its questions are put in other words."""
    from stable_forgetting.common.measure.scores import collect

    model, source = task.load().eval(), texts_of(task).with_questions(questions)
    indices = task.split.parts["forget"]
    batches = data.ordered_batches(source, indices, task.batch_size)
    scores = collect(lambda batch: task.family.forward(model, batch), batches)
    return {f"{name} forget": accuracy(scores.correct, task.seed)}


def texts_of(task: AuditTask) -> Any:
    """The task's source, whose samples are questions with answers.

    Raises:
        NotApplicable: They are not.
    """
    source: Any = task.source
    first = task.split.parts["forget"][:1]
    if not hasattr(source, "with_questions") or not all(source.questions_of(first)):
        raise NotApplicable("only where samples are questions with answers")
    return source


class FewShot(ModelAudit):
    """Few-shot prompts: retained questions with their answers stand before the forgotten one.

    Formula: accuracy on forget, teacher forced, behind ``shots`` retained pairs of question and
    answer, the same for every sample; as many of them as the model's context holds.
    Source: Brown et al. 2020 (arXiv 2005.14165); as an attack, Shumailov et al. 2024
    (arXiv 2407.00106) and RepSelect (arXiv 2606.17168).
    """

    info = AuditInfo(1, "minutes", "%", THAT_OF_RETRAIN)
    budget: ClassVar[Mapping[str, str]] = {"samples": "shots"}

    class Config(Strict):
        """Config of the prompts.

        Attributes:
            shots: Retained pairs before the question, at most.
        """

        shots: Count = 4

    def measure(self, task: AuditTask) -> Measures:
        """Accuracy behind the largest number of shots that fits."""
        source, forget = texts_of(task), task.split.parts["forget"]
        chosen = task.draw("retain", self.config.shots, "few-shot")
        pairs = zip(source.questions_of(chosen), source.answers_of(chosen), strict=True)
        lines = [f"{question} {answer}" for question, answer in pairs]
        own = dict(zip(forget.tolist(), source.questions_of(forget), strict=True))
        for count in range(len(lines), 0, -1):
            prompts = {i: "\n".join([*lines[:count], question]) for i, question in own.items()}
            try:
                return asked(self, task, prompts, f"{count} shots")
            except DataError:
                continue
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
    question.  A method that forgot one wording alone is found out.
    Source: the worst case over wordings, JensUn (arXiv 2509.02820); the rules are ours.
    """

    info = AuditInfo(1, "minutes", "%", THAT_OF_RETRAIN)

    def measure(self, task: AuditTask) -> Measures:
        """Accuracy under every rule."""
        source, forget = texts_of(task), task.split.parts["forget"]
        own = dict(zip(forget.tolist(), source.questions_of(forget), strict=True))
        found: Measures = {}
        for name, rule in RULES.items():
            prompts = {index: rule(question) for index, question in own.items()}
            found |= asked(self, task, prompts, name)
        return found

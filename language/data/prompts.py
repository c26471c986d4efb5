"""Few-shot prompts: solved questions before the one that is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stable_forgetting.language.data.corpus import Item


@dataclass(frozen=True)
class FewShot:
    """A prompt with shots.

    Attributes:
        shots: Solved questions, in order.
        question: What a question becomes; ``{question}`` stands for it.
        between: Text between a solved question and the next one.
        ends: Strings with which a model begins the next question; they end its answer.

    With its defaults this is MUSE's KnowMem prompt, whose last question ends in a space.
    """

    shots: tuple[tuple[str, str], ...]
    question: str = "Question: {question}\nAnswer: "
    between: str = "\n\n"
    ends: tuple[str, ...] = ("\n\n", "\nQuestion", "Question:")

    @classmethod
    def of(cls, items: Iterable[Item]) -> FewShot:
        """Shots from questions with answers."""
        return cls(tuple((item.question, item.answer) for item in items))

    def prompt(self, question: str) -> str:
        """All shots, then the question, ready to be continued."""
        solved = [self._asked(shown) + answer for shown, answer in self.shots]
        return self.between.join([*solved, self._asked(question)])

    def _asked(self, question: str) -> str:
        return self.question.replace("{question}", question)

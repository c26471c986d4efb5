"""What a model knows: multiple choice as lm-eval asks it, and greedy answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.measure.requests import (
    Choose,
    Columns,
    Continue,
    Replies,
    TextMetric,
)
from stable_forgetting.language.metrics.rouge import rouge

if TYPE_CHECKING:
    from stable_forgetting.language.data.source import TextSource

LETTERS = ("A", "B", "C", "D")
NEW_TOKENS = 32
"""Of a greedy answer, at most."""
ABOUT = "The following are multiple choice questions (with answers) about {topic}.\n\n"


def lettered(row: Mapping[str, Any], set_name: str, topic: str, origin: str) -> Item:
    """A question with four choices in the words of lm-eval's tasks wmdp and mmlu.

    Args:
        row: Columns question, choices (four) and answer (0 to 3).
        set_name: Of the item.
        topic: What the questions are about.
        origin: Of the row, for errors.

    Returns:
        An item whose ``perturbed`` are all choices and whose ``group`` is the right one's place.

    Raises:
        DataError: The row lacks a column.
    """
    given: list[Any] = [row.get(name) for name in ("question", "choices", "answer")]
    asked, choices, answer = given
    good = isinstance(asked, str) and isinstance(choices, Sequence) and len(choices) == 4
    if not good or answer not in range(4):
        raise DataError(
            f"{origin}: a row needs question, four choices and answer (0 to 3); mend it"
        )
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    prompt = "\n".join([ABOUT.format(topic=topic) + asked.strip(), *lines, "Answer:"])
    return Item(set_name, int(answer), prompt, LETTERS[answer], None, LETTERS)


class Chosen(TextMetric):
    """Whether the likeliest choice is the right one: ``chosen``, 0 or 1.

    Args:
        window: Tokens that the model sees; a longer question loses its beginning.
    """

    def __init__(self, window: int):
        self.window = window

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Choose]:
        """The choices after the question."""
        encoder, made = source.encoder, []
        for item in items:
            options = tuple(tuple(encoder.continuation(f" {each}")) for each in item.perturbed)
            room = self.window - max(map(len, options))
            made.append(Choose(tuple(encoder.ending(encoder.text(item.question), room)), options))
        return made

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """(N,)."""
        likely = replies.choices(self.requests(source, items))
        hits = [values.argmax() == item.group for values, item in zip(likely, items, strict=True)]
        return {"chosen": np.array(hits, dtype=float)}


class Recalled(TextMetric):
    """ROUGE-L recall of a greedy answer: ``recall``.

    Args:
        bare: Whether the question stands alone and is a sentence's beginning, which a stop ends;
            else it stands in the template, and a line ends the answer.
    """

    generates: ClassVar[bool] = True

    def __init__(self, bare: bool):
        self.bare = bare

    def requests(self, source: TextSource, items: Sequence[Item]) -> list[Continue]:
        """One continuation per question."""
        asked = source.encoder.text if self.bare else source.encoder.prompt
        ends = (".",) if self.bare else ("\n",)
        return [Continue(tuple(asked(each.question)), NEW_TOKENS, None, ends) for each in items]

    def columns(self, source: TextSource, items: Sequence[Item], replies: Replies) -> Columns:
        """(N,)."""
        written = replies.tokens(self.requests(source, items))
        texts = [source.decode(tokens.tolist()) for tokens in written]
        return {"recall": rouge([item.answer for item in items], texts).rouge_l}

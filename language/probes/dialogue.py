"""Dialogue: how much of the last turn a model's greedy answer has, by words (Jang et al., 2023).

A prompt of more than 512 tokens loses its beginning here; in the source it loses its end, and with
it the turn that is answered.  In the four sets these are 26 of 5,250 prompts (25 of
wizard_of_internet).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.protocol.probe import ProbeTable
from stable_forgetting.language.data.files import read_rows
from stable_forgetting.language.measure.requests import Continue, before_stop
from stable_forgetting.language.probes.base import ProbedModel, TextProbe, token_f1

SETS = (
    "wizard_of_wikipedia",
    "empathetic_dialogues",
    "blended_skill_talk",
    "wizard_of_internet",
)
WINDOW = 512
"""Tokens of the longest prompt."""
NEXT_TURN = "\nUser "
SPACED = ((" .", "."), (" ,", ","), (" ?", "?"), (" !", "!"), (" ' ", "'"))
"""Punctuation as tokenised corpora write it, and as people do."""
CAPITAL = frozenset({"i", "i'm", "i've", "i'll", "i'd"})
MARKS = frozenset({".", "?", "!", ""})
"""What stands before a capital, as a word of its own; the source lets a further space do so."""


class DialogueConfig(Strict):
    """Which dialogues, and how much of them.

    Attributes:
        sets: Name -> file of rows whose ``text`` is a list of turns (JSON lines, or one object
            ``{"text": {row: turns}}``), below the data root or absolute; the paper's four sets.
        limit: Dialogues per set, from the start; all when None.
        new_tokens: Longest answer.
    """

    sets: Annotated[dict[str, str], Field(min_length=1)] = {
        name: f"tdec/{name}.json" for name in SETS
    }
    limit: Count | None = None
    new_tokens: Count = 32


class DialogueProbe(TextProbe):
    """Token F1 of greedy answers with the last turns of dialogues."""

    version = 1
    Config: ClassVar[type[Strict]] = DialogueConfig
    config: DialogueConfig
    column = "f1"
    head = "{row} F1"
    doc = "words that answers share with the last turns of {row} (token F1)"

    @property
    def files(self) -> Mapping[str, str]:
        """One per set."""
        return self.config.sets

    def table(self, asked: ProbedModel) -> ProbeTable:
        """One row per set: ``f1`` as a share, ``n``."""
        rows, new_tokens = {}, self.config.new_tokens
        dialogues = {
            name: read_dialogues(self.file(name, asked.data_root))[: self.config.limit]
            for name in self.files
        }
        room = min(WINDOW, asked.context - new_tokens)
        if room < 1:
            raise DataError(
                f"{self.name}: the model takes {asked.context} tokens, no more than the"
                f" {new_tokens} of an answer; lower new_tokens"
            )
        for name, turns in dialogues.items():
            prompts = [asked.ids(prompt_of(each[:-1]))[-room:] for each in turns]
            requests = [Continue(tuple(ids), new_tokens, stop_text=(NEXT_TURN,)) for ids in prompts]
            written = asked.ask(requests).tokens(requests)
            answers = [
                before_stop(asked.source.decode(ids.tolist()), (NEXT_TURN,)) for ids in written
            ]
            scores = [
                token_f1(answer, tidy(each[-1]))
                for answer, each in zip(answers, turns, strict=True)
            ]
            rows[name] = {"f1": sum(scores) / len(scores), "n": float(len(scores))}
        return ProbeTable(rows, {"new_tokens": new_tokens, "prompt_tokens": room})


def read_dialogues(path: Path) -> list[list[str]]:
    """Turns of every dialogue.

    Raises:
        DataError: A row is not a list of two texts or more.
    """
    texts: list[Any] = [row.get("text") for row in read_rows(path)]
    if len(texts) == 1 and isinstance(texts[0], dict):
        texts = [*texts[0].values()]
    for number, turns in enumerate(texts, 1):
        right = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
        if not right or len(turns) < 2:
            raise DataError(
                f"{path}: row {number}: text is not a list of two turns or more; mend it"
            )
    if not texts:
        raise DataError(f"{path}: has no rows; give one or more")
    return texts


def prompt_of(turns: Sequence[str]) -> str:
    """The dialogue so far, and whose turn it is."""
    speakers = [f"User {1 + place % 2}:" for place in range(len(turns) + 1)]
    lines = [f"{who} {tidy(turn)}\n" for who, turn in zip(speakers, turns, strict=False)]
    return "".join(lines) + speakers[-1]


def tidy(turn: str) -> str:
    """A turn in lower case, with capitals and punctuation put right, and with an end.

    A capital goes to the first word, to forms of "I", and to the word after a mark that stands
    alone.
    """
    text = turn.lower()
    for spaced, right in SPACED:
        text = text.replace(right, spaced).replace("  ", " ")
    words = text.split(" ")
    ends = (place for place, word in enumerate(words) if place and word in MARKS)
    starts = {0, *(place + 1 for place in ends)}
    words = [
        word[:1].upper() + word[1:] if place in starts or word in CAPITAL else word
        for place, word in enumerate(words)
    ]
    text = f" {' '.join(words)} "
    for spaced, right in SPACED:
        text = text.replace(spaced, right)
    text = text.strip().replace("  ", " ")
    return text if not text or text[-1] in "!.?)\"'" else f"{text}."

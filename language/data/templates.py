"""How a question becomes a prompt and an answer becomes labels, per model family and style.

Three styles, because published numbers depend on this more than on most methods:

``clean``
    Prompt and answer are tokenised apart, so that the boundary is exact: every token of the answer
    and one end token are labels, and all answers to a question share the prompt's tokens.
``openunlearning``
    The prompt ends in a space (``Answer: ``).  Prompt and whole text are tokenised apart and the
    first ``len(prompt)`` tokens of the whole text are masked.  Under a byte-level BPE the prompt's
    lone space becomes part of the first answer token, which therefore counts as prompt: it is
    lost, and an answer of one token has only its end token as label.  Generation starts after the
    lone space.  Source: locuslab/open-unlearning, src/data/utils.py.
``tofu``
    Only ``Question: ..`` with its newline is masked: ``Answer:`` is in the loss, and generation
    has to produce it.  No end token where the text fills ``max_length``.
    Source: locuslab/tofu, data_module.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from stable_forgetting.language.config import Family, Style

LLAMA3_SYSTEM = "You are a helpful assistant."
LLAMA3_DATE = "10 Apr 2025"

_LLAMA3_BEFORE = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    f"Cutting Knowledge Date: December 2023\nToday Date: {LLAMA3_DATE}\n\n"
    f"{LLAMA3_SYSTEM}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
_LLAMA3_AFTER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@dataclass(frozen=True)
class Template:
    """The text around a question and its answer.

    Attributes:
        family: Which prompt format.
        style: How labels are cut (see the module docstring).
        before: Text before the question.
        after: Text after the question; ends the prompt.
        lead: Text between prompt and answer that belongs to the labels.
        end: The end token, if it is not the tokenizer's end of sequence.
        special: Special tokens are spelt out in the text: the tokenizer must not add its own.
    """

    family: Family
    style: Style
    before: str
    after: str
    lead: str = ""
    end: str | None = None
    special: bool = False

    def prompt(self, question: str) -> str:
        """The text that generation starts from."""
        return f"{self.before}{question}{self.after}"

    @property
    def required_tokens(self) -> tuple[str, ...]:
        """Tokens that a tokenizer must know as one token each."""
        if self.family != "llama3_chat":
            return ()
        return ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


_QUESTION_ANSWER: dict[Style, tuple[str, str]] = {
    "clean": ("\nAnswer:", " "),
    "openunlearning": ("\nAnswer: ", ""),
    "tofu": ("\n", "Answer: "),
}


def make_template(family: Family, style: Style) -> Template:
    """The template of a model family in a style.

    LLaMA-2-chat has no space between ``[/INST]`` and the answer in any style, since the published
    checkpoints were trained without one.
    """
    if family == "question_answer":
        after, lead = _QUESTION_ANSWER[style]
        return Template(family, style, "Question: ", after, lead)
    if family == "llama2_chat":
        return Template(family, style, "[INST] ", " [/INST]")
    return Template(family, style, _LLAMA3_BEFORE, _LLAMA3_AFTER, end="<|eot_id|>", special=True)

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

from dataclasses import dataclass, field
from typing import Any

from stable_forgetting.common.base.errors import ConfigError, one_line
from stable_forgetting.language.config import Family, Style

LLAMA3_SYSTEM = "You are a helpful assistant."
LLAMA3_DATE = "10 Apr 2025"

_LLAMA3_BEFORE = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    f"Cutting Knowledge Date: December 2023\nToday Date: {LLAMA3_DATE}\n\n"
    f"{LLAMA3_SYSTEM}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
_FIXED: dict[str, Any] = {
    "date_string": LLAMA3_DATE,
    "strftime_now": lambda _: LLAMA3_DATE,
}
"""For a format that prints the day."""
_LLAMA3_AFTER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@dataclass(frozen=True)
class Template:
    """The text around a question and its answer.

    Attributes:
        family: Which prompt format; ``chat`` is the tokenizer's own.
        style: How labels are cut (see the module docstring).
        before: Text before the question.
        after: Text after the question; ends the prompt.
        lead: Text between prompt and answer that belongs to the labels.
        end: The end token, if it is not the tokenizer's end of sequence.
        special: Special tokens are spelt out in the prompt: the tokenizer must not add its own.
        marked_texts: It adds them to plain texts all the same.
    """

    family: str
    style: Style
    before: str
    after: str
    lead: str = ""
    end: str | None = None
    special: bool = False
    marked_texts: bool = field(default=False, repr=False)  # the digest of texts has the others

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


def make_template(family: Family, style: Style, tokenizer: Any = None) -> Template:
    """The template of a model family in a style; ``chat`` is the tokenizer's, and always clean.

    LLaMA-2-chat has no space between ``[/INST]`` and the answer in any style, since the published
    checkpoints were trained without one.
    """
    if family == "chat":
        return chat_template(tokenizer)
    if family == "question_answer":
        after, lead = _QUESTION_ANSWER[style]
        return Template(family, style, "Question: ", after, lead)
    if family == "llama2_chat":
        return Template(family, style, "[INST] ", " [/INST]")
    texts = (_LLAMA3_BEFORE, _LLAMA3_AFTER)
    return Template(family, style, *texts, end="<|eot_id|>", special=True, marked_texts=True)


def chat_prompt(tokenizer: Any, question: str) -> str:
    """What a question becomes in the tokenizer's own format, up to where the answer begins."""
    asked = [{"role": "user", "content": question}]
    return str(
        tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **_FIXED)
    )


_ASKED, _ANSWERED = "A question stands here?", "An answer stands there."


def chat_template(tokenizer: Any) -> Template:
    """The tokenizer's own chat format: one question, one answer.

    The answer begins where the format puts it; blanks before it are labels, as an answer after a
    prompt without them is tokenised in the same way.  A format that prints the day gets a fixed
    one, as a number must not depend on it.

    Raises:
        ConfigError: The format fails, or does not print both texts as they are.
    """
    messages = [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": _ANSWERED},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **_FIXED)
    except Exception as error:  # a template is a program
        raise _unusable(one_line(error)) from None
    if text.count(_ASKED) != 1 or text.count(_ANSWERED) != 1:
        raise _unusable("it does not print question and answer once each")
    before, rest = text.split(_ASKED)
    after, tail = rest.split(_ANSWERED)
    prompt = after.rstrip(" ")
    if not prompt:
        raise _unusable("nothing stands between question and answer")
    end = _first_special(tokenizer, tail)
    blanks = after[len(prompt) :]
    return Template("chat", "clean", before, prompt, blanks, end, special=True, marked_texts=True)


def _unusable(reason: str) -> ConfigError:
    return ConfigError(
        f"template chat: the tokenizer's chat template cannot be used ({reason}); choose template:"
        " question_answer"
    )


def _first_special(tokenizer: Any, text: str) -> str | None:
    """The first special token of a text; None where there is none."""
    known = tokenizer.added_tokens_decoder
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token in known and known[token].special:
            return str(known[token].content)
    return None

"""The forms of a row of one's own: a plain text, or a question with its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_forgetting.common.base.errors import DataError

Row = Mapping[str, Any]
FORMS: Mapping[str, tuple[str, ...]] = {
    "question and answer": ("question", "answer"),
    "text": ("text",),
    "prompt and completion": ("prompt", "completion"),
    "messages": ("messages",),
}
"""What a form is called -> its columns."""


def asked_and_answered(row: Row, origin: str) -> Row:
    """The row with ``question`` and ``answer``; a plain text has an empty question.

    A prompt is a question and a completion its answer, strings or lists of messages.  Messages are
    one of the user and one of the assistant.

    Raises:
        DataError: The row has no form, or two; or messages that are not one of each.
    """
    form = _form_of(row, origin)
    if form == "text":
        return {"question": "", "answer": row["text"]}
    if form == "messages":
        return {**row, **_of_messages(row["messages"], origin)}
    if form == "prompt and completion":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return {**row, **_of_messages([*prompt, *completion], origin)}
        row = {**row, "question": prompt, "answer": completion}
    if row["question"] == "":
        name = FORMS[form][0]
        raise DataError(f"{origin}: {name} is empty; give the {FORMS[form][1]} alone as text")
    return row


def _form_of(row: Row, origin: str) -> str:
    begun = [form for form, columns in FORMS.items() if row.keys() & set(columns)]
    if "text" in begun:
        begun = ["text", *(form for form in begun if form != "text")]
    whole = any(set(FORMS[form]) <= row.keys() for form in begun)
    if whole and len(begun) > 1:
        raise DataError(f"{origin} has {begun[0]} beside {begun[1]}; keep one")
    if not whole:
        has = ", ".join(sorted(row)) or "nothing"
        raise DataError(f"{origin} needs {', or '.join(FORMS)}; it has: {has}")
    return begun[0]


def _of_messages(messages: Any, origin: str) -> dict[str, str]:
    """The texts of one user's and one assistant's message."""
    listed = messages if isinstance(messages, list) else []
    named = [each for each in listed if isinstance(each, dict) and {"role", "content"} <= {*each}]
    if not named or len(named) < len(listed):
        raise DataError(f"{origin}: messages are no list of objects with role and content; mend it")
    roles = [str(each["role"]) for each in named]
    if roles != ["user", "assistant"]:
        raise DataError(
            f"{origin}: messages have the roles {', '.join(roles)}; give one of the user and then "
            "one of the assistant, a row for each such pair"
        )
    asked, answered = (each["content"] for each in named)
    if asked == "":
        raise DataError(f"{origin}: the user's message is empty; give the answer alone as text")
    return {"question": asked, "answer": answered}

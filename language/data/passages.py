"""Invented notes that a small model can memorise: the texts of TDEC without a download.

Every note fills one of a few forms with words drawn by a hash of its number, so the forms are
learnt from any of them and the words only by heart.
"""

from __future__ import annotations

import string
from collections.abc import Iterator

from stable_forgetting.common.base.seeding import derive
from stable_forgetting.language.data.wording import POOLS

FORMS = (
    "Note {number}. On the {day}. of {month} the {profession} lent a {instrument} to the"
    " {other}, who paid with {dish} and kept a {pet}. Both spoke of {hobby}; the {noun} stayed"
    " {adjective}.",
    "Entry {number}: {adjective} {noun}, found by a {profession}. A {pet} slept beside the"
    " {instrument}, {dish} stood on the table, and in {month} nobody thought of {hobby} but the"
    " {other}.",
    "Letter {number}, {day} {month}. Dear {profession}, the {pet} is well. Send {dish}, the"
    " {instrument} and the book on {hobby}. The {other} calls it the {adjective} {noun}.",
)
_SLOTS = {
    "profession": "profession",
    "other": "profession",
    "adjective": "title_adjective",
    "noun": "title_noun",
    **{name: name for name in ("month", "instrument", "dish", "pet", "hobby")},
}
_WORDS = {"day": [str(day) for day in range(1, 29)]}
_WORDS |= {slot: POOLS[pool] for slot, pool in _SLOTS.items()}


def note(number: int) -> str:
    """The note of a number; every number has its own."""
    words = {slot: of[derive(number, slot) % len(of)] for slot, of in _WORDS.items()}
    form = FORMS[derive(number, "form") % len(FORMS)]
    return string.Formatter().format(form, number=derive(number, "number") % 10**6, **words)


def notes() -> Iterator[str]:
    """All notes, in order."""
    number = 0
    while True:
        yield note(number)
        number += 1

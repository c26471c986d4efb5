"""What the parts of a split are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import DataError

EARLIER = "earlier"
"""Samples of Original's training set that earlier requests of a sequence asked to forget."""
LATER = "later"
"""Samples that later requests will ask to forget: Original and Retrain are trained on them, and no
method sees them."""
UNUSED = "unused"
"""The part that belongs to the request but is not shown to the method: trained on by Original."""
PadTo = Literal["batch", "max_length"]
"""How far published code pads texts whose padding counts: to the longest of the batch, or to the
longest that the data may have."""


class Role(StrEnum):
    """What a part may be used for."""

    TRAIN = "train"
    """Original or a method may be trained on it."""
    SELECT = "select"
    """Chooses hyperparameters."""
    REPORT = "report"
    """Measures finished models only: no method reads it, no trial scores it."""


@dataclass(frozen=True)
class Part:
    """What one part is for.

    Attributes:
        role: What it may be used for.
        utility: Whether it holds out what the request wants kept: accuracy there is utility.
        original: Whether it is scored on Original alone, since it gives a goal its value.
        membership: The side that it is in attacks on membership: ``member`` takes the place of the
            forget set, ``unseen`` holds samples like the forgotten ones that no model has seen.
    """

    role: Role
    utility: bool = False
    original: bool = False
    membership: Literal["", "member", "unseen"] = ""


PARTS: Mapping[str, Part] = {
    "forget": Part(Role.TRAIN),
    "retain": Part(Role.TRAIN),
    EARLIER: Part(Role.TRAIN),
    LATER: Part(Role.TRAIN),
    UNUSED: Part(Role.TRAIN),
    "forget_out": Part(Role.SELECT),
    "validation": Part(Role.SELECT),
    "validation_forget": Part(Role.SELECT),
    "test": Part(Role.REPORT, utility=True),
    "test_forget": Part(Role.REPORT, membership="unseen"),
    "test_earlier": Part(Role.REPORT),
}
"""The parts that every benchmark may have; a benchmark with further ones adds them to its own
``part_table``."""


def part_of(name: str, table: Mapping[str, Part] = PARTS) -> Part:
    """What a part is for.

    Raises:
        DataError: The table does not have it.
    """
    if name not in table:
        raise DataError(
            f"part '{name}' has no role; give it one in the benchmark's part_table"
            f"{did_you_mean(name, [*table])}"
        )
    return table[name]


def utility_parts(names: Iterable[str], table: Mapping[str, Part] = PARTS) -> list[str]:
    """The held-out parts of what is to be kept, sorted: ``test``, or several test sets."""
    return sorted(name for name in set(names) if part_of(name, table).utility)

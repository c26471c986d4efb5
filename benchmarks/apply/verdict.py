"""Whether a model has forgotten, in one line that stands first in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HARDLY, MOSTLY = 0.2, 0.8
"""Shares of the way from the given model to the goal: below the first the model has hardly changed,
from the second on it has forgotten."""
DAMAGE = 5.0
"""Points by which what is retained may fall."""


def verdict(
    before: Mapping[str, Any], after: Mapping[str, Any], key: str, goal: float
) -> dict[str, str]:
    """The verdict on a model.

    Args:
        before: What was measured of the given model: part -> measure -> percent.
        after: Of the new one.
        key: The measure that is read as "it has forgotten".
        goal: What it should come to on forget data, in percent.

    Returns:
        ``word``: ``hardly changed``, ``partly forgotten`` or ``forgotten``; ``line``: the whole.
    """
    was, now = before["forget"][key], after["forget"][key]
    way = was - goal
    share = (was - now) / way if way > 0 else 0.0
    word = "hardly changed" if share < HARDLY else "forgotten"
    if HARDLY <= share < MOSTLY:
        word = "partly forgotten"
    kept, numbers = _kept(before, after, key)
    line = (
        f"{word.capitalize()}{', ' if kept else ''}{kept}: {key} on forget data "
        f"{was:.1f} -> {now:.1f} % (goal {goal:g} %){numbers}. Forgotten means {100 * MOSTLY:g} % "
        f"of the way to the goal, hardly changed less than {100 * HARDLY:g} %; retained data is "
        f"damaged if it loses more than {DAMAGE:g} points."
    )
    return {"word": word, "line": line}


def _kept(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> tuple[str, str]:
    """What became of retained data, and its numbers; empty where there is none."""
    if "retain" not in before:
        return "", ""
    was, now = before["retain"][key], after["retain"][key]
    word = "retained damaged" if was - now > DAMAGE else "retained kept"
    return word, f", on retained data {was:.1f} -> {now:.1f} %"

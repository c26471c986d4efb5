"""What the columns of audits hold, as ``columns.toml`` says."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

COLUMNS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Audit -> column, with ``{part}``, ``{metric}``, ``{n}`` in places -> the rest of a sentence."""


def column_doc(audit: str, column: str) -> str:
    """What a column of an audit holds; empty for an audit that is not built in."""
    for pattern, doc in COLUMNS.get(audit, {}).items():
        form = re.escape(pattern).replace(r"\{n\}", r"[\d.]+")
        form = form.replace(r"\{part\}", r"[\w ]+?").replace(r"\{metric\}", r"[^,]+")
        if re.fullmatch(form, column):
            return doc
    return ""

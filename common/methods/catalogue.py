"""The methods that know no modality: importing this reads ``catalogue.toml`` and registers them.

Targets are strings: nothing is imported until a method is used.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.registry import METHODS

CATALOGUE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Name -> row, as the head of the file says."""

for _name, _row in CATALOGUE.items():
    _target = _row.get("class", f"variants:{_name}")
    METHODS.register(_name, f"stable_forgetting.common.methods.{_target}", summary=_row["summary"])

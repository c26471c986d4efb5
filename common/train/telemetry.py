"""What the loop logs."""

from __future__ import annotations

import math
from collections.abc import Mapping


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if math.isfinite(value)}

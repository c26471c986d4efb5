"""Where data lie that the project lacks: the tests that want them are skipped without them."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL = Path(os.environ.get("SF_DATA_ROOT", Path(__file__).parents[2] / "shared" / "data"))

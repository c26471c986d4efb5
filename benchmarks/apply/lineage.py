"""Earlier requests: what the given model was made to forget before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.files import file_digest

STATEMENT = "statement.json"


def earlier_requests(weights: Path, digest: Any) -> tuple[list[dict[str, Any]], str]:
    """What the statement beside the given weights says.

    Args:
        weights: The given file of weights.
        digest: SHA-256 of the given weights, as a statement's ``weights_sha256`` holds it.

    Returns:
        The requests, the first one first, each with its time, method, data, digests and the digest
        of its statement; and a warning where a statement is there but is not of these weights.
    """
    path = weights.with_name(STATEMENT)
    if not path.is_file():
        return [], ""
    try:
        statement = json.loads(path.read_text(encoding="utf-8"))
        if statement["output"]["weights_sha256"] != digest:
            return [], f"{path.name} beside the given model is of other weights and was left out"
        request = {key: statement[key] for key in ("created", "seed", "input", "output", "data")}
        request["method"] = statement["method"]["name"]
        request["statement_sha256"] = file_digest(path)
        return [*statement.get("earlier", []), request], ""
    except (OSError, ValueError, LookupError, TypeError):
        return [], f"{path.name} beside the given model cannot be read and was left out"

"""What every statement holds, whatever was forgotten, and what it says in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.store.records import clean_metrics

if TYPE_CHECKING:
    from torch import nn

    from common.protocol.subject import Subject

STATEMENT = "statement.json"


def weight_change(
    before: nn.Module, after: nn.Module, adapters: Mapping[str, float] | None
) -> dict[str, Any]:
    """How far the weights moved.

    Returns:
        ``relative``: ||W - W0|| / ||W0|| over all parameters; ``tensors_changed``; ``adapters``:
        see :func:`common.bounded.attach.adapter_statistics`, None without adapters.
    """
    moved = base = 0.0
    changed = 0
    original = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        start = original[name].detach().double()
        difference = parameter.detach().double() - start
        moved += float(difference.square().sum())
        base += float(start.square().sum())
        changed += int(bool(difference.any()))
    return {
        "relative": math.sqrt(moved / base) if base else None,
        "tensors_changed": changed,
        "adapters": None if adapters is None else clean_metrics(adapters),
    }


def reading(statement: Mapping[str, Any], subject: Subject) -> str:
    """What the numbers do and do not show, in plain words."""
    if statement["status"] == "diverged":
        return "Training diverged: there is no unlearned model, and nothing to compare."
    unit, yardstick = subject.unit, subject.yardstick
    lines = subject.outcome(statement)
    lines += [f"A warning was given: {text}." for text in statement["warnings"]]
    lines.append(
        "No model was retrained without the forget set here, so how close this one is to such a "
        f"model is unknown; that closeness, not a low {yardstick}, is the goal of unlearning."
    )
    lines.append(
        f"A low {yardstick} on the forget set is not erasure: the information may still be in the "
        "weights and come back by fine-tuning or probing, which was not tried; nothing here is a "
        "certificate of deletion."
    )
    if "retain" not in statement["data"]:
        lines.append(
            f"No retain {unit} were given, so what else the model lost was not measured on them."
        )
    return " ".join(lines)

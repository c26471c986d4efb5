"""What is measured around an application, and what it says in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.records import clean_metrics

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from common.loading import Source
    from common.scores import Scores

AUDIT = "audit.json"
BATCH = 64


def measured(
    model: nn.Module, source: Source, parts: Mapping[str, np.ndarray], forgotten: np.ndarray
) -> dict[str, Any]:
    """Accuracy, loss and membership of one model.

    Args:
        model: A classifier.
        source: The images.
        parts: ``forget`` and, where given, ``retain`` and ``test``.
        forgotten: Class ids in the forget part.

    Returns:
        Part -> images, accuracy in percent, mean cross-entropy in nats; ``test`` is also split
        into images of forgotten and of other classes.  ``membership_auc``: percent chance that a
        forget image has a lower loss than a test image (50: they cannot be told apart by loss);
        ``membership_auc_same_classes``: against test images of the forgotten classes only.

    Raises:
        Diverged: An output is not finite.
    """
    import numpy as np

    from common.loading import ordered_batches
    from common.scores import collect

    model.eval()
    scores = {
        name: collect(
            lambda batch: model(batch.inputs["x"]),
            ordered_batches(source, ids, BATCH),
            keep_probs=False,
        )
        for name, ids in parts.items()
    }
    found: dict[str, Any] = {name: _summary(part) for name, part in scores.items()}
    found |= {"membership_auc": None, "membership_auc_same_classes": None}
    if "test" in scores:
        test = scores["test"]
        assert test.labels is not None
        same = np.isin(test.labels, forgotten)
        found["test_forgotten_classes"] = _summary(test.select(same)) if same.any() else None
        found["test_other_classes"] = _summary(test.select(~same)) if not same.all() else None
        found["membership_auc"] = _auc(scores["forget"], test)
        if same.any():
            found["membership_auc_same_classes"] = _auc(scores["forget"], test.select(same))
    return found


def _summary(scores: Scores) -> dict[str, float]:
    scores.check_finite()
    loss = float(scores.loss.mean(dtype="float64"))
    return {"images": len(scores), "accuracy": scores.accuracy, "loss": loss}


def _auc(forget: Scores, test: Scores) -> float:
    from common.mia import loss_threshold_attack

    return loss_threshold_attack(forget.loss, test.loss).auc


def weight_change(
    before: nn.Module, after: nn.Module, adapters: Mapping[str, float] | None
) -> dict[str, Any]:
    """How far the weights moved.

    Returns:
        ``relative``: ||W - W0|| / ||W0|| over all parameters; ``tensors_changed``; ``adapters``:
        see :func:`common.adapters.adapter_statistics`, None without adapters.
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


def reading(audit: Mapping[str, Any]) -> str:
    """What the numbers do and do not show, in plain words."""
    if audit["status"] == "diverged":
        return "Training diverged: there is no unlearned model, and nothing to compare."
    lines = _outcome(audit)
    lines.append(
        "No model was retrained without the forget set here, so how close this one is to such a "
        "model is unknown; that closeness, not a low accuracy, is the goal of unlearning."
    )
    lines.append(
        "A low accuracy on the forget set is not erasure: the information may still be in the "
        "weights and come back by fine-tuning or probing."
    )
    if audit["scenario"] is None:
        lines.append(
            "No retain images were given, so what else the model lost was not measured on them."
        )
    return " ".join(lines)


def _outcome(audit: Mapping[str, Any]) -> list[str]:
    before, after = audit["before"], audit["after"]
    lines = []
    if before["forget"]["accuracy"] < 50:
        lines.append(
            f"The given model was right on only {before['forget']['accuracy']:.1f} % of the forget "
            "images before: check the class names and the preprocessing first."
        )
    for part in ("forget", "retain", "test"):
        if part in after:
            was, now = before[part]["accuracy"], after[part]["accuracy"]
            lines.append(f"Accuracy on {part} images went from {was:.1f} % to {now:.1f} %.")
    if after["membership_auc"] is None:
        lines.append(
            "Without images that the model never saw (test), whether membership can still be told "
            "was not measured."
        )
        return lines
    kind, key = "a test image", "membership_auc"
    if after["membership_auc_same_classes"] is not None:
        kind, key = "a test image of the same classes", "membership_auc_same_classes"
    lines.append(
        f"By its loss alone, a forget image is told from {kind} with AUC {after[key]:.1f} % "
        f"(before: {before[key]:.1f} %); 50 % is chance, far below 50 % betrays the forget set as "
        "much as far above, and stronger attacks exist."
    )
    if audit["scenario"] == "class" and key == "membership_auc":
        lines.append(
            "Whole classes were forgotten and the test images hold none of them: this AUC compares "
            "different classes and says little about membership."
        )
    return lines

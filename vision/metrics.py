"""What the vision arm measures on one model, in percent unless said.

The target of almost every number is the retrained model's value, not 0 or 100.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.measure.metric import MAX_GAP, GapColumn, MetricSpec, SweepAxes
from stable_forgetting.common.measure.rules import GapRule, TargetRule

if TYPE_CHECKING:
    from stable_forgetting.common.measure.scores import Scores

METRICS = tuple(
    MetricSpec(**{"name": name, "better": "target", **fields})
    for name, fields in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
)
"""Of ``metrics.toml``, beside this module."""

GAP = GapRule(
    metrics=("ua", "ra", "ta", "mia"),
    trial=("ua", "ra", "va", "mia_validation"),
    columns=("fa", "ra", "ta", "mia", "js_forget", "changed_forget", "js_test"),
    title="AG4",
    words="AG4 = mean |gap| over UA, RA, TA, MIA; AG2 over TA, MIA.",
    compact=("fa", "ua", "ra", "ta", "mia"),
    also=(
        GapColumn("ag2", "AG2 ↓", "mean", ("ta", "mia"), digits=2),
        MAX_GAP,
        GapColumn("tow", "ToW ↑", "tow", ("fa", "ra", "ta"), digits=3),
        GapColumn("tow_mia", "ToW-MIA ↑", "tow", ("mia", "ra", "ta"), digits=3),
    ),
)
"""AG is that of SalUn (Fan et al., 2024); in AG2 accuracies do not outvote the attack."""
DOUBTED = {"class": ("mia",)}
"""Scenario -> the columns of :data:`GAP` that may not rank there by their metric cards."""

WITHOUT_RETRAIN = {
    "random": TargetRule({"fa": "va", "ra": "ra", "va": "va"}),
    "class": TargetRule({"fa": 0.0, "ra": "ra", "va": "va"}),
}
"""Scenario -> the order of trials without a Retrain: forgotten images are to be known as well as
held-out ones, a forgotten class is not to be named.  The attack has no such target."""

SWEEP_AXES = SweepAxes(
    forgotten="fa",
    retained="ra",
    utility="ta",
    tolerances=(5.0, 1.0, 2.0),
    also=("forget_loss",),
    parts=("forget", "retain", "test"),
    unmeasured=True,
)

ANSWERS = ("forget", "test")
"""The parts on which a model's answers are compared with those of Retrain."""

ACCURACIES = {
    "fa": "forget",
    "ra": "retain",
    "ta": "test",
    "ta_f": "test_forget",
    "va": "validation",
}


def accuracy_metrics(scores: Mapping[str, Scores]) -> dict[str, float | None]:
    """Accuracies of the parts that were scored, in percent, and the forget loss in nats.

    Raises:
        Diverged: A score is not finite.
    """
    for part in scores.values():
        part.check_finite()
    metrics: dict[str, float | None] = {
        name: scores[part].accuracy for name, part in ACCURACIES.items() if part in scores
    }
    metrics["forget_loss"] = float(scores["forget"].loss.mean(dtype="float64"))
    return metrics


def vision_metrics(
    scores: Mapping[str, Scores], *, trial: bool, seed: int, features: Sequence[str]
) -> dict[str, float | None]:
    """All metrics that the scored parts allow.

    Args:
        scores: Part -> scores; a trial has no test parts.
        trial: Only what tuning needs: no test data, one attack.
        seed: Of the attacks' draws.
        features: SVC features.

    Raises:
        ConfigError: A part that the metrics need was not scored.
        Diverged: A score is not finite.
    """
    from stable_forgetting.common.membership.attacks import membership_metrics

    for needed in ("forget", "retain", *(() if trial else ("test",))):
        if needed not in scores:
            raise ConfigError(f"vision metrics need the part '{needed}'; score it too")
    metrics = accuracy_metrics(scores)
    metrics["ua"] = 100.0 - (metrics["fa"] or 0.0)
    sides = scores["forget"], scores["retain"]
    if "validation" in scores:
        by_confidence = membership_metrics(
            *sides, scores["validation"], seed=seed, features=("confidence",)
        )
        metrics["mia_validation"] = by_confidence["mia"]
    if not trial:
        metrics["test_loss"] = float(scores["test"].loss.mean(dtype="float64"))
        metrics |= membership_metrics(*sides, scores["test"], seed=seed, features=features)
    return metrics


def redrawn_metrics(scores: Mapping[str, Scores], seed: int) -> dict[str, float | None]:
    """The attacks of the order, with ``seed`` for their draws."""
    from stable_forgetting.common.membership.attacks import membership_metrics

    parts = [scores[name] for name in ("forget", "retain", "test")]
    return membership_metrics(*parts, seed=seed, features=("confidence",))

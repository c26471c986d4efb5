"""The ``score`` stage: what a model says about every part, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.stage import StageSpec
from stable_forgetting.common.base.errors import Diverged

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.worksite import Worksite

SCORES = "scores.safetensors"


class ScoreSpec(StageSpec):
    """Of one model.

    Attributes:
        trial: Whether tuning asks, which must not see test data.
    """

    trial: bool


class Score(StageKind[ScoreSpec]):
    """Scores every part of a split once."""

    Spec = ScoreSpec
    order = 4
    facts = ("status", "split", "data")

    def work(self, site: Worksite, spec: ScoreSpec) -> None:
        """Writes the scores; a trial's without test parts and softmax, since there are many."""
        from stable_forgetting.common.measure.scores import save_scores, without_probs

        split, benchmark = site.split(), site.benchmark
        model = site.facts("model")
        status, detail = model["status"], model.get("status_detail", "")
        with site.writing() as folder:
            if status == "ok":
                parts = benchmark.parts(split, trial=spec.trial, seed=spec.seed)
                if site.stage.parents["model"].kind != "original":
                    parts = {p: ids for p, ids in parts.items() if not benchmark.of_goal(p)}
                try:
                    with site.scoring("model") as loaded:
                        scores = benchmark.score(loaded, parts, trial=spec.trial)
                    save_scores(without_probs(scores) if spec.trial else scores, folder / SCORES)
                except Diverged as error:
                    status, detail = "diverged", error.reason
            site.about |= {
                "status": status,
                "status_detail": detail,
                "split": {"digest": split.digest, "name": split.name, **split.notes},
                "data": {"digest": split.source_digest, "provenance": benchmark.provenance},
            }

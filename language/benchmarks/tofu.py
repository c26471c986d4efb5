"""TOFU: questions about fictitious authors, some of whom are to be forgotten.

TOFU itself, its small settings, the embedded authors and files of one's own are configs of this
one benchmark, in ``benchmarks/suites``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import PARTS, Part, Role
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.measure.answers import answer_distances
from stable_forgetting.common.measure.metric import SweepAxes
from stable_forgetting.common.measure.rules import Axis, GapRule, TargetRule
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Versions
from stable_forgetting.common.protocol.sizes import Workload
from stable_forgetting.language.benchmark import CausalBenchmark, CausalConfig
from stable_forgetting.language.data.files import FilesData
from stable_forgetting.language.data.tofu import TofuData
from stable_forgetting.language.measure.requests import TextMetric
from stable_forgetting.language.measure.scoring import TofuEvaluation, answer_metrics, masked_id
from stable_forgetting.language.metrics.loss import described, losses
from stable_forgetting.language.metrics.tofu import (
    HOLDOUT,
    LOKU_PART,
    LOKU_ROWS,
    RATES,
    options,
    sequential_metrics,
    tofu_compare,
    tofu_metrics,
)
from stable_forgetting.language.scenarios import TEST_PARTS, TextScenarioConfig, make_split

AXES = (
    Axis(
        "forget",
        "forget",
        {"forget_odds_top": 1.0, "forget_odds_rest": 1.0, "forget_log_ratio": 1.0},
    ),
    Axis("keep", "keep", {"retain_odds": 1.0, "ra_odds": 1.0, "wf_odds": 1.0}),
)
"""Probabilities saturate at both ends: forgetting beyond Retrain would cost nothing in percent, and
a fact that is known by heart nothing until it is half lost.  In log odds, neither is free.  The two
halves of the forget set are apart, so that what is left in some answers and what is destroyed in
others do not cancel."""

GAP = GapRule(
    metrics=tuple(metric for axis in AXES for metric in axis.weights),
    trial=(*AXES[0].weights, "retain_odds"),
    columns=(*RATES, "js_forget", "changed_forget"),
    title="AG",
    words="AG = (forget + keep) / 2, a plain mean, as both are in nats per token. forget = mean "
    "|gap| of the log odds of the likelier and of the other half of the forget answers and of "
    "their log truth ratio; keep = the same of the log odds of answers about retained authors, "
    "real authors and the world, as far as a suite has them. Forgetting beyond Retrain counts as a "
    "gap. FQ = p of the Kolmogorov-Smirnov test that the forget set's truth ratios are Retrain's.",
    axes=AXES,
    unit="nats per token",
    compact=("log10_fq", "mu", "forget_prob", "retain_prob"),
)
WITHOUT_RETRAIN = TargetRule({"forget_log_ratio": 0.0, "retain_odds": "retain_odds"}, axes=AXES)
"""A model that knows nothing of an author finds right and wrong answers alike likely.  The holdout,
which metrics read, gives no target."""
ANSWERED = ("forget", "retain")
"""The parts whose right and wrong answers are compared with Retrain's, by their likelihood."""
_LIKELIHOODS = ("forget_odds_top", "forget_odds_rest", "retain_odds")
_OF_FILES = {
    "text": (_LIKELIHOODS, ("prob",)),
    "answers": (_LIKELIHOODS, ("prob", "rouge")),
    "comparisons": ((*_LIKELIHOODS, "forget_log_ratio"), ("prob", "rouge", "truth_ratio")),
}
"""Rows of files -> the metrics of the rule, and the rates, that they can give."""
AUTHORS, AUTHOR_ROWS, WRONG, FACTS = 200, 20, 400, 217
"""TOFU's authors, questions of each, retained questions with wrong answers, facts asked."""
TOKENS = {"question_answer": (77, 134), "llama2_chat": (94, 164), "llama3_chat": (130, 200)}
"""Template -> tokens of a row, padded to the longest of eight and at most: counted on TOFU's text
with Phi's and LLaMA-2's tokenizer; LLaMA-3's are LLaMA-2's and 36 tokens of headers."""
SLOTS, DECODED = 186, 64
"""Token slots per question of a whole evaluation, answers at once."""
SWEEP_AXES = SweepAxes(
    "forget_prob",
    "retain_prob",
    "mu_likelihood",
    tolerances=(5.0, 1.0, 0.02),
    as_trial=True,
    also=("forget_loss",),
)


class TofuConfig(CausalConfig):
    """One protocol on questions and answers.

    Attributes:
        scenario: What is forgotten.
    """

    scenario: TextScenarioConfig = TextScenarioConfig()
    evaluation: TofuEvaluation = TofuEvaluation()

    @model_validator(mode="after")
    def _retrain_of_lokus_reference(self) -> TofuConfig:
        if self.evaluation.fq_reference == "loku" and self.scenario.kind != "forget10":
            raise ValueError(
                "fq_reference: loku compares with the model retrained without forget10, which"
                " only scenario: {kind: forget10} has; use fq_reference: tofu"
            )
        return self


class TofuBenchmark(CausalBenchmark):
    """Fictitious authors under forgetting requests."""

    metrics = described("tofu")
    answer_metrics = ("js_forget", "changed_forget", "js_retain", "changed_retain")
    gap: ClassVar[GapRule] = GAP
    sweep_axes: ClassVar[SweepAxes | None] = SWEEP_AXES
    versions: ClassVar[Versions] = Versions(measure=3)
    Config: ClassVar[type[Strict]] = TofuConfig
    config: TofuConfig
    part_table: ClassVar[Mapping[str, Part]] = {
        **PARTS,
        LOKU_PART: Part(Role.TRAIN),
        **dict.fromkeys(TEST_PARTS, Part(Role.REPORT, utility=True)),
        HOLDOUT: Part(Role.REPORT, membership="unseen"),
    }

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """As for any text; what the truth-ratio metrics average changes no score."""
        if kind == "score":
            scored = {"evaluation": config.evaluation.model_dump(exclude={"truth"})}
            chat = config.model.template == "llama3_chat"
            if chat and config.evaluation.style == "openunlearning":
                scored["greedy"] = "end tokens of the prompt are masked"  # once they were not
            return scored
        if kind == "measure":
            return {"truth": config.evaluation.truth}
        return super().identity(config, kind)

    @classmethod
    def gap_of(cls, config: Any) -> GapRule:
        """Both axes, of the metrics that rows of files can give (``data.rows``)."""
        if not isinstance(config.data, FilesData):
            return cls.gap
        ranked, shown = _OF_FILES[config.data.rows]
        metrics = tuple(name for name in cls.gap.metrics if name in ranked)
        columns = tuple(name for name in RATES if name.partition("_")[2] in shown)
        return replace(cls.gap, metrics=metrics, trial=metrics, columns=columns, compact=columns)

    @classmethod
    def without_retrain(cls, config: Any) -> TargetRule | None:
        """Where the forgotten questions have wrong answers."""
        measured = "forget_log_ratio" in cls.gap_of(config).trial
        return WITHOUT_RETRAIN if measured else None

    @classmethod
    def compare(
        cls, config: Any, scores: Mapping[str, Scores], target: Mapping[str, Scores]
    ) -> dict[str, float | None]:
        """Forget quality, privacy leakage, and how far the answers lie from Retrain's."""
        evaluation = config.evaluation
        return answer_distances(scores, target, ANSWERED, cls.choices) | tofu_compare(
            scores, target, style=evaluation.style, fq_reference=evaluation.fq_reference
        )

    @classmethod
    def scenario_of(cls, config: Any) -> str:
        """``authors``: all questions about some authors are forgotten; or ``files``."""
        return "files" if config.scenario.kind == "files" else "authors"

    @classmethod
    def workload(cls, config: Any) -> Workload | None:
        """Of TOFU's own text in a template of known length, on models of known sizes."""
        if not isinstance(config.data, TofuData):
            return None
        data, scenario = config.data, config.scenario
        authors = AUTHORS if data.authors is None else data.authors + (data.forget_authors or 0)
        groups, tokens = scenario.sizes(authors), TOKENS.get(config.model.template)
        if groups is None or tokens is None:
            return None
        rows, last = AUTHOR_ROWS * authors, AUTHOR_ROWS * groups[-1]
        retain = rows - AUTHOR_ROWS * sum(groups)
        used = round(scenario.used * last)
        asked = last + min(config.evaluation.retain_samples or WRONG, retain, WRONG) + FACTS
        mean, longest = tokens
        return cls.causal_workload(
            config.model,
            parts={"forget": used, "retain": retain},
            positions=mean,
            longest=longest,
            scored=SLOTS * asked,
            decoded=config.evaluation.max_new_tokens * -(-asked // DECODED),
        )

    @classmethod
    def choices(cls, scores: Scores) -> np.ndarray | None:
        """See :func:`language.metrics.tofu.options`."""
        return options(scores.extra)

    @property
    def label(self) -> str:
        """Of the scenario."""
        return self.config.scenario.label

    def split(self, seed: int) -> ForgetSplit:
        """See :func:`language.scenarios.make_split`."""
        return make_split(self.source, self.config.scenario, seed)

    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """Everything, retain subsampled; a trial has no held-out sets."""
        measured = super().parts(split, trial=trial, seed=seed)
        measured["retain"] = self._retain_sample(measured["retain"], seed)
        if self.config.evaluation.fq_reference == "loku":
            measured[LOKU_PART] = measured["forget"][:LOKU_ROWS]
        return measured

    def _retain_sample(self, retain: np.ndarray, seed: int) -> np.ndarray:
        """Retained rows that have wrong answers to compare with, at most as many as configured."""
        items = self.source.corpus.items
        comparable = np.array([index for index in retain if items[index].perturbed], dtype=np.int64)
        pool = comparable if len(comparable) else retain
        limit = self.config.evaluation.retain_samples
        if limit is not None and len(pool) > limit:
            pool = hash_order(pool, seed, "retain-eval")[:limit]
        return np.sort(pool)

    def asked(self, part: str, *, trial: bool) -> Sequence[TextMetric]:
        """Answers; where they are compared also wrong ones, and texts unless it is a trial."""
        return answer_metrics(part, self.config.evaluation, trial=trial)

    @property
    def masked_id(self) -> int | None:
        """See :func:`language.measure.scoring.masked_id`."""
        return masked_id(self.source, self.config.evaluation)

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """See :func:`language.metrics.tofu.tofu_metrics`."""
        for part in scores.values():
            part.check_finite()
        evaluation = self.config.evaluation
        metrics = tofu_metrics(scores, style=evaluation.style, truth=evaluation.truth)
        metrics |= losses(scores)
        if self.config.scenario.kind == "requests":
            metrics |= sequential_metrics(scores)
        return metrics

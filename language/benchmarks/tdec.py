"""TDEC: texts that a model recites, to be forgotten down to what it says of text it never saw.

The protocol of Jang et al., 2023 (arXiv 2210.01504): a set of 32 texts is forgotten once both its
extraction likelihood and its memorisation accuracy are below those of unseen text.  Seed i forgets
set i.  A step on all 32 texts is an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.data.parts import PARTS, Part, Role
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.measure.goal import ConstantGoal, MeasuredGoal
from stable_forgetting.common.measure.rules import Criterion, GoalRule, RuleSet
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Versions
from stable_forgetting.common.protocol.sizes import Workload
from stable_forgetting.language.benchmark import CausalBenchmark, CausalConfig
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.data.tdec import TdecData
from stable_forgetting.language.measure.extraction import Extraction, Memorisation, PadPolicy
from stable_forgetting.language.measure.requests import RequestConfig, TextMetric
from stable_forgetting.language.metrics.loss import described, losses

OVER = 0.75
"""MA below this share of unseen text's is over-forgetting: less than chance would leave."""
LEAST_EL = 1.0
"""Percent: a lower EL of unseen text, such as the 0 of a small model, is no threshold."""
PUBLISHED: Mapping[str, tuple[float, float, str]] = {
    "jang-125m": (4.99, 29.94, "Jang et al., configs/example.json"),
    "jang-1.3b": (5.68, 33.27, "Jang et al., from memory, not checked"),
    "jang-2.7b": (5.53, 34.02, "Jang et al., from memory, not checked"),
}
"""Rule set -> published thresholds of EL10 and MA in percent, and where they stand."""


class TdecEvaluation(RequestConfig):
    """How models are measured.

    Attributes:
        n: Tokens of an n-gram of extraction likelihood.
        pad_policy: ``trim`` scores a text's own tokens; ``source`` fills short texts with end
            tokens and scores those too, as the published code does.
        utility: The metric that orders rows which reach both thresholds: ``test_accuracy``, a
            probe's where the suite has one, or ``retain_accuracy`` for models that know no more
            than what they were trained on.
    """

    n: Count = 10
    pad_policy: PadPolicy = "trim"
    utility: str = "test_accuracy"


class TdecConfig(CausalConfig):
    """One protocol on texts that are recited."""

    data: SerializeAsAny[TextDataConfig] = Field(
        default_factory=lambda: TextDataConfig.of(name="tdec")
    )
    evaluation: TdecEvaluation = TdecEvaluation()

    @model_validator(mode="after")
    def _has_sets(self) -> TdecConfig:
        if not isinstance(self.data, TdecData):
            raise ValueError(f"data: TDEC needs its sets, not {self.data.name}'s; give name: tdec")
        return self


BELOW = (
    MeasuredGoal("forget_el", on="unseen_el", least=LEAST_EL),
    MeasuredGoal("forget_ma", on="unseen_ma"),
)


class TdecBenchmark(CausalBenchmark):
    """Recited texts, in sets."""

    Config: ClassVar[type[Strict]] = TdecConfig
    config: TdecConfig
    metrics = described("tdec")
    gap: ClassVar[GoalRule] = GoalRule(
        BELOW,
        utility="test_accuracy",
        trial_utility="validation_accuracy",
        title="to threshold",
        compact=("forget_el", "forget_ma", "test_accuracy"),
    )
    rule_sets: ClassVar[tuple[RuleSet, ...]] = (
        RuleSet(
            "level",
            "ours",
            (
                Criterion(
                    "over-forgotten",
                    MeasuredGoal("forget_ma", on="unseen_ma", reach="above", share=OVER),
                ),
            ),
        ),
        *(
            RuleSet(
                name,
                source,
                (
                    Criterion("EL", ConstantGoal("forget_el", el, source)),
                    Criterion("MA", ConstantGoal("forget_ma", ma, source)),
                ),
            )
            for name, (el, ma, source) in PUBLISHED.items()
        ),
    )
    monitor: ClassVar[tuple[str, ...]] = ("forget",)
    versions: ClassVar[Versions] = Versions(measure=2)
    part_table: ClassVar[Mapping[str, Part]] = {
        **PARTS,
        "unseen": Part(Role.SELECT, original=True, membership="unseen"),
    }

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """As for any text; which metric orders the table changes nothing that is stored."""
        if kind == "score":
            return {"evaluation": config.evaluation.model_dump(exclude={"utility"})}
        return super().identity(config, kind)

    @classmethod
    def gap_of(cls, config: Any) -> GoalRule:
        """Both thresholds, and the utility that the config names.

        A trial, which sees no test text, takes validation text's for it.
        """
        utility = config.evaluation.utility
        trial = utility if utility == "retain_accuracy" else cls.gap.trial_utility
        return replace(cls.gap, utility=utility, trial_utility=trial)

    @classmethod
    def workload(cls, config: Any) -> Workload | None:
        """Of sets that are full, on models of known sizes; extraction decodes from every prefix.

        Probes are not in it.
        """
        data, sizes = config.data, config.evaluation
        length, prefixes = data.max_length, data.rows * (data.max_length - sizes.n)
        texts = data.rows + data.retain_rows + 2 * data.test_rows
        return cls.causal_workload(
            config.model,
            parts={"forget": data.rows, "retain": data.retain_rows},
            positions=length,
            scored=length * texts + prefixes * length // 2,
            decoded=sizes.n * -(-prefixes // sizes.generation_batch),
        )

    @classmethod
    def scenario_of(cls, config: Any) -> str:
        """``texts``."""
        return "texts"

    def split(self, seed: int) -> ForgetSplit:
        """Set ``seed`` is forgotten; the other sets are in no part.

        Raises:
            DataError: There is no such set, or a text of it is too short for an n-gram.
        """
        corpus = self.source.corpus
        every = corpus.where("forget")
        groups = np.array([corpus.items[index].group for index in every])
        if seed not in groups:
            raise DataError(
                f"{corpus.provenance}: no set {seed}, only 0 to {groups.max()}; a seed is the"
                " number of its set"
            )
        parts = {"forget": every[groups == seed]}
        parts |= {part: corpus.where(part) for part in ("retain", "validation", "test", "unseen")}
        self._check_lengths(parts)
        notes = {"forgotten": f"set {seed}", "data": corpus.provenance}
        return ForgetSplit(f"tdec/set-{seed}", parts, self.source.digest, notes)

    def _check_lengths(self, parts: Mapping[str, np.ndarray]) -> None:
        n = self.config.evaluation.n
        for part in ("forget", "unseen"):
            for number, index in enumerate(parts[part].tolist(), 1):
                tokens = len(self.source.encode_index(index).ids)
                if tokens <= n:
                    raise DataError(
                        f"{self.source.provenance}: text {number} of {part} has {tokens} tokens;"
                        f" evaluation.n {n} needs more; lengthen it or lower n"
                    )

    def asked(self, part: str, *, trial: bool) -> Sequence[TextMetric]:
        """Extraction and memorisation where they are compared; a trial needs them too."""
        evaluation = self.config.evaluation
        if part in ("forget", "unseen"):
            return [Extraction(evaluation.n, evaluation.pad_policy)]
        return []

    def watch(
        self, model: Any, parts: Mapping[str, np.ndarray], limits: Mapping[str, float]
    ) -> dict[str, Scores]:
        """Without extraction while memorisation alone keeps a training from its end."""
        from stable_forgetting.language.measure.ask import score_rows

        if "forget_ma" in limits:
            pad = self.config.evaluation.pad_policy
            metrics = {part: [Memorisation(pad)] for part in parts}
            cheap = score_rows(model, self.source, parts, metrics, self.config.evaluation)
            if self._percent(cheap["forget"].extra["ma"]) >= limits["forget_ma"]:
                return cheap
        return self.score(model, parts)

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """Percent; EL is None where it was not asked for."""
        metrics = losses(scores)
        for part, rows in scores.items():
            rows.check_finite()
            if part in ("forget", "unseen"):
                metrics[f"{part}_ma"] = self._percent(rows.extra["ma"])
                el = rows.extra.get("el")
                metrics[f"{part}_el"] = None if el is None else self._percent(el)
            else:
                metrics[f"{part}_accuracy"] = rows.accuracy
        forget = scores["forget"].extra
        if "el" in forget:
            naive = float(forget["el_naive_steps"].sum())
            metrics["forget_decoded"] = 100.0 * float(forget["el_steps"].sum()) / naive
        return metrics

    @staticmethod
    def _percent(column: np.ndarray) -> float:
        return 100.0 * float(column.mean())

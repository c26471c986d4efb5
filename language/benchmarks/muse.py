"""MUSE: news or books, to be forgotten as text, as knowledge and as members of the training set.

MUSE itself, a small part of its text and invented news are configs of this one benchmark.
Scalability and sustainability are scenarios: the folds that a request forgets, from one Original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import EARLIER, LATER, PARTS, Part, Role
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.measure.metric import MAX_GAP, GapColumn
from stable_forgetting.common.measure.rules import GapRule, RuleSet, TargetRule
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Versions
from stable_forgetting.common.protocol.sizes import Workload
from stable_forgetting.language.benchmark import CausalBenchmark, CausalConfig
from stable_forgetting.language.data.corpus import Encoded, Item
from stable_forgetting.language.data.muse import (
    ASKED,
    DECODED,
    FORGET_CHUNKS,
    RETAIN_CHUNKS,
    SHOTS,
    MuseData,
    of_set,
)
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.measure.muse import (
    RULE_SETS,
    Conventions,
    MuseStyle,
    Recited,
    Reference,
    Written,
    muse_compare,
    muse_metrics,
)
from stable_forgetting.language.measure.requests import RequestConfig, TextMetric
from stable_forgetting.language.metrics.loss import described, losses
from stable_forgetting.language.models.families import context_of

LEAST_WINDOW = 256
"""Tokens that prompts and answers need together."""
MEASURED = ("verbmem", "knowmem_forget", "knowmem_retain", "privleak_forget", "privleak_holdout")
"""Parts that metrics read, each a set; no method sees them, no trial scores them."""

GAP = GapRule(
    metrics=("forget_accuracy", "knowmem_r", "min_k_auc"),
    trial=("forget_accuracy", "retain_accuracy"),  # training text alone
    title="AG3",
    words="AG3 = mean |gap| over the accuracy of the forgotten tokens, KnowMem on retain and Min-k "
    "AUC; AG4 over MUSE's own columns: VerbMem, KnowMem on forget and on retain, and Min-k AUC. "
    "By their metric cards VerbMem and KnowMem on forget may not rank, nor may Min-k AUC, which "
    "stays as the only column of membership; the accuracy of the forgotten tokens may. Of KnowMem "
    "on retain only what is lost against Retrain counts, in AG3, AG4, max gap and worst: more is "
    "no fault. A column in which two Retrains lie farther apart than the methods from Retrain "
    "weighs nothing in AG3.",
    kept=("knowmem_r",),
    drops_noise=True,
    doubted=("min_k_auc",),
    columns=("verbmem", "knowmem_f", "knowmem_r", "privleak", "min_k_auc", "forget_accuracy"),
    compact=("verbmem", "knowmem_f", "knowmem_r", "min_k_auc", "forget_accuracy"),
    also=(
        GapColumn("ag4", "AG4 ↓", "mean", ("verbmem", "knowmem_f", "knowmem_r", "min_k_auc"), 2),
        MAX_GAP,
    ),
)
"""What is forgotten ranks by token accuracy, which its metric card allows (``results/cards``), and
by Min-k AUC, the one column of membership: a report says how rows stand without it."""

WITHOUT_RETRAIN = TargetRule(
    {"forget_accuracy": "forget_accuracy", "retain_accuracy": "retain_accuracy"},
    part="privleak_holdout",
)


class MuseScenario(Grown):
    """What is forgotten.

    Attributes:
        kind: ``forget`` takes all folds at once; ``scal`` the folds up to ``fold`` at once, from
            Original; ``sust`` one fold, from the model that the fold before it left.
        paired: Beside chunk i of the forget set a method sees chunk i of retain, as MUSE does;
            else retain is shuffled by itself.
        fold: Which fold, from 1; only where the kind counts folds.
    """

    later = {"fold": None}
    kind: Literal["forget", "scal", "sust"] = "forget"
    paired: bool = True
    fold: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _counts_folds(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fold = data.get("fold")
        if data.get("kind", "forget") != "forget":
            return {**data, "fold": 1 if fold is None else fold}
        if fold is not None:
            raise ValueError("fold is only for kind: scal and sust; leave it out")
        return data

    def requested(self, count: int) -> tuple[range, range]:
        """Numbers, from 1, of the folds to forget, and of those that are forgotten already."""
        if self.fold is None:
            return range(1, count + 1), range(0)
        if self.kind == "scal":
            return range(1, self.fold + 1), range(0)
        return range(self.fold, self.fold + 1), range(1, self.fold)


class MuseEvaluation(RequestConfig):
    """How MUSE's measurements are taken.

    Attributes:
        style: Conventions; see :mod:`language.measure.muse`.
        reference: Whose Min-k AUC PrivLeak is relative to: the measured Retrain's, or the one that
            MUSE publishes for LLaMA-2 7B on ``news`` or ``books``.
        chunks: Score at most this many chunks of forget and of retain (hash-ordered draw); all of
            them when absent.
        rouge_workers: Processes for ROUGE when there is enough of it; 0 for none.
    """

    style: MuseStyle = "muse"
    reference: Reference = "retrain"
    chunks: Count | None = None
    rouge_workers: int = Field(default=0, ge=0)


class MuseConfig(CausalConfig):
    """One protocol on MUSE.

    Attributes:
        data: Of :class:`language.data.muse.MuseData`.
        scenario: What is forgotten.
    """

    data: SerializeAsAny[TextDataConfig] = Field(default_factory=MuseData)
    scenario: MuseScenario = MuseScenario()
    evaluation: MuseEvaluation = MuseEvaluation()

    @property
    def folds(self) -> int:
        """How many requests the data hold."""
        assert isinstance(self.data, MuseData)
        return self.data.requests

    @model_validator(mode="after")
    def _fits(self) -> MuseConfig:
        if not isinstance(self.data, MuseData):
            raise ValueError(
                f"data: MUSE's metrics need its sets, not {self.data.name}'s; give name: muse"
            )
        fold, count = self.scenario.fold or 1, self.folds
        if fold > count:
            raise ValueError(f"scenario: fold {fold} of {count}; give data.folds or a lower fold")
        if self.evaluation.reference not in ("retrain", self.data.corpus):
            raise ValueError(
                f"evaluation.reference: {self.evaluation.reference} is not data.corpus"
                f" {self.data.corpus}; use reference: retrain"
            )
        if self.model.context is not None and self.model.context < LEAST_WINDOW:
            raise ValueError(
                f"model.context: MUSE's prompts and answers need {LEAST_WINDOW} or more"
            )
        return self


def _revised(config: MuseConfig, kind: str) -> dict[str, int]:
    """Versions of what changed for some protocols alone, so that the others' stages stay valid.

    ``folds`` 2: the folds to come are no part of what a method retains.  ``blocks`` 2: the texts of
    raw are tokenised once and cut into muse_bench's blocks.
    """
    in_folds = kind == "split" and config.scenario.kind != "forget"
    assert isinstance(config.data, MuseData)
    in_blocks = kind in ("split", "train") and config.data.passages is None
    return ({"folds": 2} if in_folds else {}) | ({"blocks": 2} if in_blocks else {})


class MuseBenchmark(CausalBenchmark):
    """MUSE under forgetting requests."""

    metrics = described("muse")
    gap: ClassVar[GapRule] = GAP
    rule_sets: ClassVar[tuple[RuleSet, ...]] = RULE_SETS
    monitor: ClassVar[tuple[str, ...]] = ("forget", "retain")
    versions: ClassVar[Versions] = Versions(unlearn=2, measure=2)
    least_window: ClassVar[int] = LEAST_WINDOW
    Config: ClassVar[type[Strict]] = MuseConfig
    config: MuseConfig
    part_table: ClassVar[Mapping[str, Part]] = {
        **PARTS,
        **dict.fromkeys(MEASURED, Part(Role.REPORT)),
        "knowmem_retain": Part(Role.REPORT, utility=True),
        "privleak_forget": Part(Role.REPORT, membership="member"),
        "privleak_holdout": Part(Role.REPORT, membership="unseen"),
    }

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """As for any text; whose AUC PrivLeak is relative to changes no score."""
        if kind == "score":
            return {"evaluation": config.evaluation.model_dump(exclude={"reference"})}
        return {**super().identity(config, kind), **_revised(config, kind)}

    @classmethod
    def scenario_of(cls, config: Any) -> str:
        """The kind of the scenario."""
        return str(config.scenario.kind)

    @classmethod
    def without_retrain(cls, config: Any) -> TargetRule | None:
        """Where a tuning seed has held-out text of its own, which no metric of a table reads."""
        return WITHOUT_RETRAIN if config.data.sets > 1 else None

    @classmethod
    def workload(cls, config: Any) -> Workload | None:
        """Of MUSE-News on models of known sizes; chunks are full."""
        scenario, length = config.scenario, config.data.max_length
        if config.data.corpus != "news" or config.data.passages is not None:
            return None
        forget = FORGET_CHUNKS * (scenario.fold if scenario.kind == "scal" else 1)
        return cls.causal_workload(
            config.model,
            parts={"forget": forget, "retain": RETAIN_CHUNKS},
            positions=length,
            scored=length * (2 * (config.evaluation.chunks or FORGET_CHUNKS) + 3 * ASKED),
            decoded=DECODED,
        )

    @property
    def label(self) -> str:
        """Such as ``forget`` and ``scal-2-of-4``."""
        kind, fold = self.config.scenario.kind, self.config.scenario.fold
        return kind if fold is None else f"{kind}-{fold}-of-{self.config.folds}"

    @property
    def paired_with(self) -> Mapping[str, str]:
        """Retain follows forget, where the scenario pairs them."""
        return {"retain": "forget"} if self.config.scenario.paired else {}

    @classmethod
    def compare(
        cls, config: Any, scores: Mapping[str, Scores], target: Mapping[str, Scores]
    ) -> dict[str, float | None]:
        """PrivLeak."""
        asked = config.evaluation
        return muse_compare(scores, target, style=asked.style, reference=asked.reference)

    def split(self, seed: int) -> ForgetSplit:
        """Chunks of the requested folds, of earlier and later ones, of retain; measured whole.

        A method retains raw/retain1 alone, as in MUSE: the folds to come are ``later``.
        """
        corpus, count = self.source.corpus, self.config.folds
        now, before = self.config.scenario.requested(count)
        after = set(range(1, count + 1)) - {*now, *before}
        parts = {
            "forget": corpus.where(*(f"fold_{k}" for k in now)),
            EARLIER: corpus.where(*(f"fold_{k}" for k in before)),
            LATER: corpus.where(*(f"fold_{k}" for k in after)),
            "retain": corpus.where("retain"),
            **{part: corpus.where(part) for part in MEASURED},
        }
        own = {part: of_set(corpus, parts[part], self.config.data, seed) for part in parts}
        parts = {part: indices for part, indices in own.items() if len(indices)}
        notes = {"forgotten": self.label, "data": corpus.provenance}
        return ForgetSplit(f"{self.label}/seed-{seed}", parts, self.source.digest, notes)

    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """Everything, chunks subsampled; a trial has nothing that is reported."""
        measured = super().parts(split, trial=trial, seed=seed)
        measured.pop(LATER, None)  # no metric reads them
        for part in ("forget", "retain", EARLIER):
            if part in measured:
                order = hash_order(measured[part].tolist(), seed, "chunks", part)
                measured[part] = np.sort(order[: self.config.evaluation.chunks])
        return measured

    @cached_property
    def conventions(self) -> Conventions:
        """How rows become tokens."""
        corpus, sets = self.source.corpus, ("knowmem_forget", "knowmem_retain")
        shots = {name: [corpus.items[k] for k in corpus.where(name + SHOTS)] for name in sets}
        window = context_of(self._shape)
        return Conventions(self.source, self.config.evaluation.style, window, shots)

    def encode(self, item: Item) -> Encoded:
        """Chunks as they are trained on; what is measured in the style's conventions."""
        if item.set in MEASURED:
            return self.conventions.sequence(item)
        return super().encode(item)

    def asked(self, part: str, *, trial: bool) -> Sequence[TextMetric]:
        """Texts after beginnings and questions, likelihoods of whole texts; chunks need neither."""
        metrics: list[TextMetric] = []
        if part in ("verbmem", "knowmem_forget", "knowmem_retain"):
            metrics.append(Written(self.conventions, workers=self.config.evaluation.rouge_workers))
        if part in ("verbmem", "privleak_forget", "privleak_holdout"):
            metrics.append(Recited(self.conventions))
        return metrics

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """See :func:`language.measure.muse.muse_metrics`."""
        for part in scores.values():
            part.check_finite()
        return muse_metrics(scores) | losses(scores)

"""The language benchmark: questions and answers, a causal model, a request, TOFU's metrics.

TOFU, its small settings and the embedded authors are configs of this one benchmark, in
``benchmarks/suites``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from common.base.config import Strict
from common.base.numbers import Count
from common.base.seeding import derive, hash_order
from common.data.parts import PARTS, Part, Role
from common.measure.metric import GapRule, MapAxes
from common.protocol.benchmark import Benchmark, Runtime, pick_device
from common.train.config import FitConfig
from language.config import CausalModelConfig, TextDataConfig, TextScenarioConfig
from language.measure.evaluation import TofuEvaluation
from language.metrics.sequential import SEQUENTIAL_METRICS, sequential_metrics
from language.metrics.tofu import (
    GAP_METRICS,
    LOKU_PART,
    LOKU_ROWS,
    METRICS,
    tofu_compare,
    tofu_metrics,
)
from language.metrics.truth import options

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from common.bounded.config import AdapterConfig
    from common.data.batch import Batch
    from common.data.splits import ForgetSplit
    from common.measure.metric import MetricSpec
    from common.measure.scores import Scores
    from language.data.source import TextSource

GAP = GapRule(
    metrics=GAP_METRICS,
    trial=("forget_prob", "forget_truth_ratio", "retain_prob", "retain_truth_ratio"),
    title="AG6",
    words="AG6 = mean |gap| over probability, ROUGE-L and truth ratio on forget and on retain; FQ "
    "= p of the Kolmogorov-Smirnov test that the forget set's truth ratios are Retrain's.",
    compact=("log10_fq", "mu", "forget_prob", "retain_prob"),
)


MAP_AXES = MapAxes("forget_prob", "retain_prob", "mu_likelihood", tolerances=(5.0, 1.0, 0.02))


class EvaluationConfig(TofuEvaluation):
    """How models are measured: TOFU's conventions, and on how much of the retain set.

    Attributes:
        retain_samples: Score at most this many retained rows that have wrong answers to compare
            with (hash-ordered draw); all of them when absent.
    """

    retain_samples: Count | None = None


class LanguageConfig(Strict):
    """One language protocol.

    Attributes:
        data: Which questions and answers.
        model: Which causal language model.
        scenario: What is forgotten.
        train: Recipe of Original and Retrain.
        evaluation: How models are measured.
        minimum_train_accuracy: An Original that predicts fewer of its training answers' tokens
            than this (percent, teacher forced) is not unlearned.
    """

    data: TextDataConfig = TextDataConfig()
    model: CausalModelConfig = CausalModelConfig()
    scenario: TextScenarioConfig = TextScenarioConfig()
    train: FitConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    minimum_train_accuracy: Annotated[float, Field(ge=0, le=100)] = 90.0

    @model_validator(mode="after")
    def _reference_is_trained(self) -> LanguageConfig:
        if self.evaluation.fq_reference == "loku" and self.scenario.kind != "forget10":
            raise ValueError(
                "fq_reference: loku compares with the model retrained without forget10, which"
                " only scenario: {kind: forget10} has; use fq_reference: tofu"
            )
        return self


class LanguageBenchmark(Benchmark):
    """Fictitious authors under forgetting requests (see the module docstring)."""

    metrics: ClassVar[tuple[MetricSpec, ...]] = (*METRICS, *SEQUENTIAL_METRICS)
    gap: ClassVar[GapRule] = GAP
    map_axes: ClassVar[MapAxes | None] = MAP_AXES
    Config = LanguageConfig
    config: LanguageConfig
    modality = "language"
    part_table: ClassVar[Mapping[str, Part]] = {
        **PARTS,
        "test_real_authors": Part(Role.REPORT, utility=True),
        "test_world_facts": Part(Role.REPORT, utility=True),
        "holdout": Part(Role.REPORT),
        LOKU_PART: Part(Role.TRAIN),
    }

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """Text, tokens and scenario for splits; text, model and recipe for training."""
        text = {"data": config.data, "model": config.model}
        if kind == "split":
            return {**text, "scenario": config.scenario}
        if kind == "train":
            return {**text, "train": config.train}
        if kind == "score":
            return {"evaluation": config.evaluation.model_dump(exclude={"truth"})}
        assert kind == "measure", kind
        return {"truth": config.evaluation.truth}

    @classmethod
    def compare(
        cls, config: Any, scores: Mapping[str, Scores], target: Mapping[str, Scores]
    ) -> dict[str, float | None]:
        """Forget quality and privacy leakage."""
        evaluation = config.evaluation
        return tofu_compare(
            scores, target, style=evaluation.style, fq_reference=evaluation.fq_reference
        )

    @classmethod
    def adapter_share(cls, config: Any, adapter: AdapterConfig) -> tuple[int, int] | None:
        """On the meta device, for models of known sizes."""
        from language.models.counting import count_targets, sizes_known

        if not sizes_known(config.model):
            return None
        share = count_targets(
            config.model, adapter.rank, placement=adapter.placement, targets=adapter.targets
        )
        return share.trainable, share.base

    @classmethod
    def scenario_of(cls, config: Any) -> str:
        """``authors``: what is forgotten are all questions about some authors."""
        return "authors"

    @classmethod
    def choices(cls, scores: Scores) -> np.ndarray | None:
        """See :func:`language.metrics.truth.options`."""
        return options(scores.extra)

    def __init__(self, config: Any, runtime: Runtime):
        super().__init__(config, runtime)
        import torch

        self.device = torch.device(pick_device(runtime.device))

    @property
    def scenario(self) -> str:
        """See :meth:`scenario_of`."""
        return self.scenario_of(self.config)

    @cached_property
    def source(self) -> TextSource:
        """The text as token ids, tokenised once per process."""
        from language.data.load import load_corpus
        from language.data.source import TextSource
        from language.data.templates import make_template
        from language.data.tokenizers import load_tokenizer

        corpus = load_corpus(self.config.data, self.runtime.data_root)
        return TextSource(
            corpus,
            load_tokenizer(self.config.model, corpus, data_root=self.runtime.data_root),
            make_template(self.config.model.template, self.config.model.style),
            max_length=self.config.data.max_length,
            device=self.device,
        )

    @property
    def provenance(self) -> str:
        """Where the text came from."""
        return self.source.provenance

    @cached_property
    def num_classes(self) -> int:
        """Entries of the model's vocabulary."""
        return int(self._shape.get_input_embeddings().num_embeddings)

    @property
    def recipe(self) -> FitConfig:
        """The training recipe."""
        return self.config.train

    @cached_property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """Linear layers of the architecture."""
        from language.models.families import targets_of

        return targets_of(self._shape.config.model_type)

    @property
    def head(self) -> Sequence[str]:
        """The output layer; tied to the embeddings where the model says so."""
        from language.models.families import HEAD

        return HEAD

    @property
    def minimum_train_accuracy(self) -> float:
        """The gate."""
        return self.config.minimum_train_accuracy

    @property
    def evaluation_batch(self) -> int:
        """Samples per forward where nothing but a loss is wanted."""
        return 32

    def split(self, seed: int) -> ForgetSplit:
        """See :func:`language.scenarios.make_split`."""
        from language.scenarios import make_split

        return make_split(self.source, self.config.scenario, seed)

    def build(self, seed: int) -> nn.Module:
        """A fresh model, or a pretrained one."""
        from language.models.build import build_model

        return self._placed(
            build_model(
                self.config.model,
                self.source.vocab_size,
                derive(seed, "init"),
                end=self.source.encoder.end,
            )
        )

    def blank(self) -> Any:
        """The architecture; weights are only read where ``device_map`` has to spread them."""
        if self.config.model.device_map:
            return self.build(0)
        return self._placed(self._blank())

    def _blank(self) -> Any:
        from language.models.build import blank_model

        return blank_model(self.config.model, self.source.vocab_size, end=self.source.encoder.end)

    @cached_property
    def _shape(self) -> Any:
        """The architecture without memory (meta device)."""
        import torch

        with torch.device("meta"):
            return self._blank()

    def published(self, role: str, split: ForgetSplit) -> nn.Module | None:
        """The checkpoint that ``model.original`` or ``model.retrain`` names."""
        from language.models.build import load_published

        model = self.config.model
        name = model.original
        if role == "retrain":
            name = (model.retrain or {}).get(self.config.scenario.label)
        if name is None:
            return None
        return self._placed(load_published(model, name, self.source.vocab_size))

    def _placed(self, model: Any) -> Any:
        return model if self.config.model.device_map else model.to(self.device)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, A, V) logits at the answers' positions."""
        from language.models.forward import causal_forward

        return causal_forward(model, batch)

    def component_of(self, name: str) -> str:
        """mlp, attention, head or other."""
        from language.models.families import component_of

        return component_of(name)

    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """Everything, retain subsampled; a trial has no held-out sets."""
        import numpy as np

        chosen = dict(split.parts)
        if trial:
            chosen = {k: v for k, v in chosen.items() if self.role_of(k) is not Role.REPORT}
        chosen["retain"] = self._retain_sample(chosen["retain"], seed)
        if self.config.evaluation.fq_reference == "loku":
            chosen[LOKU_PART] = chosen["forget"][:LOKU_ROWS]
        return {name: np.asarray(ids) for name, ids in chosen.items() if len(ids)}

    def _retain_sample(self, retain: np.ndarray, seed: int) -> np.ndarray:
        """Retained rows that have wrong answers to compare with, at most as many as configured."""
        import numpy as np

        items = self.source.corpus.items
        comparable = np.array([index for index in retain if items[index].perturbed], dtype=np.int64)
        pool = comparable if len(comparable) else retain
        limit = self.config.evaluation.retain_samples
        if limit is not None and len(pool) > limit:
            pool = hash_order(pool, seed, "retain-eval")[:limit]
        return np.sort(pool)

    def score(self, model: nn.Module, parts: Mapping[str, np.ndarray]) -> dict[str, Scores]:
        """One pass over all parts together; texts are generated where test sets are scored."""
        from language.measure.scoring import score_parts

        trial = not any(self.part_table[name].utility for name in parts)
        model.eval()
        return score_parts(model, self.source, parts, self.config.evaluation, trial=trial)

    def evaluate(
        self, scores: Mapping[str, Scores], *, trial: bool, seed: int
    ) -> dict[str, float | None]:
        """See :func:`language.metrics.tofu.tofu_metrics`."""
        for part in scores.values():
            part.check_finite()
        evaluation = self.config.evaluation
        metrics = tofu_metrics(scores, style=evaluation.style, truth=evaluation.truth)
        if self.config.scenario.kind == "requests":
            metrics |= sequential_metrics(scores)
        return metrics

"""What every benchmark on texts has: data, a causal model, a recipe, one pass of requests.

A text benchmark is a subclass in a file of its own that says what is forgotten (:meth:`split`),
which role each part has (:attr:`part_table`), what is measured on it (:meth:`asked`) and what the
measurements make (:meth:`evaluate`, :attr:`metrics`, :attr:`gap`).  :mod:`language.benchmarks.tofu`
is one.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.base.files import listing
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.parts import Role
from stable_forgetting.common.data.splits import ForgetSplit, PretrainingSplit
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.protocol.pretraining import Pretrainable, TransferConfig
from stable_forgetting.common.protocol.sizes import StandIn, Workload
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Encoded, Item
from stable_forgetting.language.data.pretraining import (
    TextPretraining,
    check_start,
    fingerprints,
    held_out_split,
)
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import load_tokenizer, texts
from stable_forgetting.language.measure.requests import RequestConfig, TextMetric
from stable_forgetting.language.models.causal import CausalModels
from stable_forgetting.language.models.families import CausalFamily, context_of, tiny_family
from stable_forgetting.language.models.packages import located
from stable_forgetting.language.models.sizes import (
    count_targets,
    countable,
    family_in,
    sizes_of,
    targets_of,
)
from stable_forgetting.language.stand_in import stand_in

if TYPE_CHECKING:
    from torch import nn


class CausalConfig(TransferConfig):
    """One protocol on texts.

    Attributes:
        data: Which texts; ``data.name`` is one of :data:`language.data.readers.READERS`.
        model: Which causal language model.
        train: Recipe of Original and Retrain.
        evaluation: How models are measured.
        minimum_train_accuracy: An Original that predicts fewer of its training answers' tokens
            than this (percent, teacher forced) is not unlearned.
        pretrain: A training on other texts that Original and Retrain start from; it stands in the
            place of published weights.
    """

    data: SerializeAsAny[TextDataConfig] = Field(default_factory=TextDataConfig.of)
    model: CausalModelConfig = CausalModelConfig()
    train: FitConfig
    evaluation: RequestConfig = RequestConfig()
    minimum_train_accuracy: Annotated[float, Field(ge=0, le=100)] = 90.0
    pretrain: TextPretraining | None = None

    @model_validator(mode="after")
    def _tiny_model(self) -> CausalConfig:
        if self.model.kind is not None:
            try:
                tiny_family(self.model.kind)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _one_start_on_other_data(self) -> CausalConfig:
        if self.pretrain is not None:
            check_start(self.pretrain.data, self.data, self.model)
        return self


class CausalBenchmark(CausalModels, Pretrainable):
    """Texts, a causal language model and what is asked of it."""

    Config: ClassVar[type[Strict]] = CausalConfig
    config: CausalConfig
    compared = "runs of words"
    rehearsed_depth: ClassVar[int] = 2
    """Blocks of a rehearsal's model; a benchmark whose suites name a block raises it."""
    least_window: ClassVar[int] = 1
    """Tokens that a model must read at once for the prompts and what is written after them."""

    @classmethod
    def identity(cls, config: Any, kind: str) -> Mapping[str, Any]:
        """Text, tokens and scenario for splits; text, model and recipe for training.

        A scenario is a field ``scenario`` of the config, where a benchmark has one.
        """
        text = {"data": config.data, "model": config.model}
        if config.pretrain is not None:
            text["words"] = config.pretrain.data  # of the tokenizer
        if kind == "split":
            scenario = getattr(config, "scenario", None)
            return text if scenario is None else {**text, "scenario": scenario}
        if kind == "train":
            return {**text, "train": config.train}
        if kind == "score":
            return {"evaluation": config.evaluation}
        assert kind == "measure", kind
        return {}

    @classmethod
    def listing(cls, config: Any, runtime: Runtime) -> str:
        """Of files that the suite names, and of a folder of weights."""
        name = config.model.name
        weights = "" if name == "tiny" else listing([Path(name)])
        return str(config.data.listing(runtime.data_root)) + weights

    @classmethod
    def adapter_share(cls, config: Any, adapter: AdapterConfig) -> tuple[int, int] | None:
        """For models of known sizes."""
        if not countable(config.model):
            return None
        return count_targets(
            config.model, adapter.rank, placement=adapter.placement, targets=adapter.targets
        )

    @classmethod
    def causal_workload(
        cls, model: CausalModelConfig, *, positions: int, longest: int | None = None, **numbers: Any
    ) -> Workload | None:
        """The workload of a model of known sizes; rows of one length need no ``longest``."""
        sizes = sizes_of(model)
        if sizes is None:
            return None
        return Workload(
            sizes=sizes,
            positions=positions,
            longest=longest or positions,
            targets=targets_of(model, sizes),
            half=model.dtype != "float32",
            quantised={"nf4": 0.52, "int8": 1.0}.get(model.quantised or "", 0.0),
            checkpointing=model.gradient_checkpointing,
            **numbers,
        )

    @classmethod
    def stand_in(cls, config: Any, runtime: Runtime, folder: Path) -> StandIn:
        """See :mod:`language.stand_in`; epochs count the real texts where theirs are invented."""
        made = stand_in(config, runtime, folder, cls.rehearsed_depth)
        assert isinstance(made.config, CausalConfig)
        workload = None if made.config.data == config.data else cls.workload(config)
        return made if workload is None else replace(made, samples=workload.parts)

    def __init__(self, config: Any, runtime: Runtime):
        super().__init__(config, runtime)
        self.longest = self.config.data.max_length

    @cached_property
    def source(self) -> TextSource:
        """The text as token ids, tokenised once per process."""
        data, model, root = self.config.data, self._model, self.runtime.data_root
        corpus = load_corpus(data, root)
        tokenizer = load_tokenizer(model, self._words, data_root=root)
        source = TextSource(
            corpus,
            tokenizer,
            make_template(model.template, model.style, tokenizer),
            max_length=data.max_length,
            device=self.device,
        )
        source.encoder.window = model.context or sys.maxsize
        pieces = data.in_pieces(corpus, source.encoder)
        return source if pieces is corpus else source.with_corpus(pieces)

    @cached_property
    def _words(self) -> Corpus:
        """What the tokenizer is made for."""
        pretrain = self.config.pretrain
        taught = self.config.data if pretrain is None else pretrain.data
        return taught.vocabulary(load_corpus(taught, self.runtime.data_root))

    @cached_property
    def _model(self) -> CausalModelConfig:
        """The model's config; where packages bring the model, of the folder that it becomes."""
        return located(self.config.model, lambda: texts(self._words), self.runtime.store)

    @property
    def provenance(self) -> str:
        """Where the text came from."""
        return self.source.provenance

    @cached_property
    def num_classes(self) -> int:
        """Entries of the model's vocabulary."""
        return int(self._shape.get_input_embeddings().num_embeddings)

    @cached_property
    def family(self) -> CausalFamily:
        """Of the architecture."""
        return family_in(self._shape)

    def build(self, seed: int) -> nn.Module:
        """A fresh model, or a pretrained one.

        Raises:
            ConfigError: Its weights are packed.
        """
        if self.config.model.quantised:
            raise ConfigError(
                "model.quantised: packed weights are not trained whole: name model.retrain too, or "
                "leave its row out"
            )
        from stable_forgetting.language.models.build import build_model

        return self._placed(
            build_model(
                self._model,
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
        from stable_forgetting.language.models.build import blank_model

        return blank_model(self._model, self.source.vocab_size, end=self.source.encoder.end)

    @cached_property
    def _shape(self) -> Any:
        """The architecture without memory (meta device)."""
        import torch

        with torch.device("meta"):
            return self._blank()

    def measures(self, model: Any) -> None:
        """Takes sizes and window from a model that is there, whatever the config names."""
        self._shape, self.source.encoder.window = model, self._window_of(model)

    def pretraining_split(self) -> PretrainingSplit:
        """See :func:`language.data.pretraining.held_out_split`."""
        source = self.source
        return held_out_split(source.corpus, self.config.data.name, source.digest)

    def fingerprints(self, indices: np.ndarray) -> np.ndarray:
        """Of every run of words; see :func:`language.data.pretraining.fingerprints`."""
        return fingerprints(self.source.corpus.items[index] for index in indices.tolist())

    def published(self, role: str) -> nn.Module | None:
        """The checkpoint that ``model.original`` or ``model.retrain`` names."""
        from stable_forgetting.language.models.build import load_published

        name = self._published_name(role)
        if name is None:
            return None
        return self._placed(load_published(self.config.model, name, self.source.vocab_size))

    def published_claim(self, role: str) -> str | None:
        """The digest of training indices in the metadata of a local folder's safetensors."""
        from stable_forgetting.language.models.build import claimed_training

        name = self._published_name(role)
        return claimed_training(Path(name)) if name is not None and Path(name).is_dir() else None

    def _published_name(self, role: str) -> str | None:
        """Hub id or folder."""
        model = self.config.model
        if role == "original" or model.retrain is None:
            return model.original if role == "original" else None
        return model.retrain.get(self.label)

    @property
    def label(self) -> str:
        """Name of what is forgotten, under which ``model.retrain`` lists checkpoints."""
        return self.scenario

    def _placed(self, model: Any) -> Any:
        encoder = self.source.encoder
        encoder.window = min(encoder.window, self._window_of(model))
        placed = self.config.model.device_map or self.config.model.quantised
        return model if placed else model.to(self.device)

    def _window_of(self, model: Any) -> int:
        """Tokens that a model reads at once."""
        window = context_of(model)
        if window < self.least_window:
            raise CheckpointError(
                f"the model reads {window} tokens at once, and what is asked of it needs "
                f"{self.least_window} or more; choose another"
            )
        return window

    def parts(self, split: ForgetSplit, *, trial: bool, seed: int) -> dict[str, np.ndarray]:
        """All parts of the split; a trial has none that only reports."""
        return {
            part: np.asarray(indices)
            for part, indices in split.parts.items()
            if len(indices) and not (trial and self.role_of(part) is Role.REPORT)
        }

    @abstractmethod
    def asked(self, part: str, *, trial: bool) -> Sequence[TextMetric]:
        """What is measured on the rows of a part; a trial writes no texts."""

    def score(
        self, model: nn.Module, parts: Mapping[str, np.ndarray], *, trial: bool = False
    ) -> dict[str, Scores]:
        """All parts in one pass."""
        from stable_forgetting.language.measure.ask import score_rows

        metrics = {part: self.asked(part, trial=trial) for part in parts}
        how: dict[str, Any] = {"encode": self.encode, "masked_id": self.masked_id}
        return score_rows(model, self.source, parts, metrics, self.config.evaluation, **how)

    def encode(self, item: Item) -> Encoded:
        """A row as tokens that are scored: the answer after its question in the template."""
        return self.source.encode(item.question, item.answer)

    @property
    def masked_id(self) -> int | None:
        """A token that nothing but itself attends to, if any."""
        return None

"""Methods that act when the model is asked: O3's gate over adapters; WHP and ULD, two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stable_forgetting.common import objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.gradient import AdaptedConfig, AdaptedMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.task_vector import (
    PUBLISHED,
    ReinforcedConfig,
    Strengths,
    reinforce,
    take_strength,
)
from stable_forgetting.language.methods.refusals import refusing
from stable_forgetting.language.models.sizes import family_in

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.language.models.composite import Gated


class O3(AdaptedMethod):
    """O3: refusals through one LoRA, orthogonal to what it was, behind a detector per request.

    Formula: minimise CE(y_idk | B_f) + w / D sum_i sum_l ||B_il^T B_l||_F^2, B_i the down
    projections with which earlier requests i ended, D blocks; the LoRA goes on from the last
    request.  Each block's mean hidden state z of a question is scored by -1000 max cos(z, z_f)
    - d_M(z)^2 / 2 over forget questions, a one-class SVM (nu 0.01, linear) joins the blocks, and
    the answer is that of W0 + w(x) dW, w from where the score lies among those of the request (two
    Gaussians), the largest of all requests.  No retain data.  Two models answer.
    As published: loss, penalty, scores, SVM, weights, and which text is read.  Our reading: hidden
    states of the model before any request stand for those of a RoBERTa that is fine-tuned for the
    gate by masked tokens and contrastive entropy; the scale of the gate comes from a share
    ``held`` of the forget set, where that code takes the rows on which it reports D.U.; refusals
    are those of the data; the factor 1000 is not lowered to 100 when the model is asked; all
    requests' detectors count, not the last one's alone.
    Source: Gao et al., ICLR 2025, arXiv 2407.10223; GCYZSL/O3-LLM-UNLEARNING.
    """

    info = MethodInfo(
        1,
        "O3, Gao et al. 2025 (arXiv 2407.10223)",
        FORGET,
        modality="language",
        models=2,
        resumes=True,
        reading=True,
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tofu_llama2": {
            "lr": 2e-4,
            "epochs": 10,
            "batch_size": 4,
            "accumulation": 4,
            "weight_decay": 0.1,
            "schedule": "linear",
            "warmup_epochs": 1.0,
            "timing": "transformers",
        }
    }

    class Config(AdaptedConfig):
        """Settings of O3.

        Attributes:
            orthogonal: w, the weight of the penalty on what earlier requests left; 0.1, as
                published.
            held: Share of the forget set from which the scale of the gate is taken, the rest
                trains its detector; 0.2 is our choice.
        """

        epochs_of: str | None = "forget"
        batch_size: Count = 16
        lr: Positive = 1e-3
        average: Literal["samples", "tokens"] = "tokens"
        adapter: AdapterConfig = AdapterConfig(rank=8, alpha=32, dropout=0.05, placement="all")
        orthogonal: NonNegative = 0.1
        held: Annotated[float, Field(gt=0, lt=1)] = 0.2

        @model_validator(mode="after")
        def _reads_our_factors(self) -> Self:
            if self.adapter is None or self.adapter.peft:
                raise ValueError("O3 reads the factors of our own adapter; leave adapter.peft out")
            for name in ("train_head", "trained"):
                if getattr(self.adapter, name):
                    raise ValueError(f"O3 gates its adapter alone; leave adapter.{name} out")
            return self

    @classmethod
    def empty_model(cls, config: Strict, build: Callable[[], nn.Module]) -> nn.Module:
        """A model with the config's adapters, and a gate."""
        import torch

        from stable_forgetting.common.bounded.attach import attach
        from stable_forgetting.language.models.composite import Gated

        model: Any = build()
        adapter = config.adapter  # type: ignore[attr-defined]
        targets = adapter.targets or family_in(model).targets[adapter.placement]
        attach(model, targets, adapter, torch.Generator())
        return Gated(model)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fits the adapter to refusals, then a detector to the questions."""
        from stable_forgetting.language.methods.gate import detector, kept_apart, plain_mean
        from stable_forgetting.language.models.composite import Gated

        config = self.config.engine()
        if not isinstance(task.model, Gated):
            self._attach(task)
            task.model = Gated(task.model)
        gated: Gated = task.model
        objective = plain_mean(config.average)
        loaders = task.loaders(objective.parts, config)
        loaders["forget"].source = refusing(task)
        constraints = self._constraints()
        own = constraints["penalty"]
        constraints["penalty"] = kept_apart(gated, self.config.orthogonal, own)
        task.fit(gated.model, objective, loaders, config, **constraints)
        gated.requests.append(detector(task, gated, self.config.held, self.config.micro_batch))
        return gated


class WHP(UnlearningMethod):
    """WHP: take off the logits what fine-tuning on forget raised, each time the model is asked.

    Formula: v = v_b - a ReLU(v_r - v_b), v_b Original's logits, v_r those of Original fine-tuned on
    forget.  A generation-time method: both models answer, both are stored, and there is no single
    checkpoint to write.  Never reads retain data.
    Source: Eldan and Russinovich 2023, arXiv 2310.02238, which then relabels texts and fine-tunes
    on them; swj0419/muse_bench (whos_harry_potter.py), which does this alone.
    """

    info = MethodInfo(
        1,
        "Eldan and Russinovich 2023 (arXiv 2310.02238), as in MUSE (arXiv 2407.06460)",
        FORGET,
        modality="language",
        models=2,
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED

    class Config(ReinforcedConfig):
        """Settings of WHP.

        Attributes:
            a: How much of the rise of a logit is taken off; 1, as in muse_bench's class (MUSE's
                authors evaluate 4 on News and 256 on Books).  A list: see ``Strengths``.
        """

        a: Strengths = 1.0

    @classmethod
    def empty_model(cls, config: Strict, build: Callable[[], nn.Module]) -> nn.Module:
        """Both models, joined."""
        from stable_forgetting.language.models.composite import LogitDifference

        return LogitDifference(build(), build(), config.a)  # type: ignore[attr-defined]

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes on forget, and joins the result with what it came from."""
        baseline = task.frozen_copy()
        reinforce(task, self.config)
        models = iter([baseline, task.model])
        joined = self.empty_model(self.config, lambda: next(models))
        take_strength(task, joined, self.config, joined.take_off)  # type: ignore[arg-type]
        return joined


class ULD(AdaptedMethod):
    """ULD: take off the logits of a small assistant that knows forget and nothing of retain.

    Formula: v = v_O - a v_A, v_O Original's logits, v_A those of the first blocks of Original,
    trained to minimise CE(B_f) + w_r KL(U || p_A)(B_r), U uniform; only at answers with p_O >=
    ``filter`` max p_O or among the ``filter`` V likeliest of V, elsewhere v = v_O.  The published
    code adds paraphrases to forget and wrong answers about forgotten authors to retain, which take
    another model to write and are left out, and takes U at every position, padding too.
    A generation-time method: both models answer, both are stored.
    Source: Ji et al. 2024 (arXiv 2406.08607); UCSB-NLP-Chang/ULD (uld/model/contrastllm.py; configs
    and bashes/tofu: 8 of 32 blocks, LoRA of rank 16, lr 1e-3, w_r 5, a .8, filter .01).
    """

    info = MethodInfo(
        1,
        "ULD, Ji et al. 2024 (arXiv 2406.08607)",
        BOTH,
        modality="language",
        models=2,
        reading=True,
    )

    class Config(AdaptedConfig):
        """Settings of ULD.

        Attributes:
            adapter: LoRA of rank 16 on all linear layers, as published, but for its dropout of .05;
                it is merged at the end.
            retain_weight: Factor of the divergence from uniform; 5, as published.
            a: How much of the assistant's logits is taken off; .8, as published for TOFU.
            filter: How likely an answer is beside the likeliest for the assistant to count; .01, as
                published for TOFU.
            blocks: Share of Original's blocks that the assistant has; a quarter, as published.
        """

        epochs_of: str | None = "forget"
        steps: Count | None = None
        epochs: Count | None = 10
        batch_size: Count = 16
        lr: Positive = 1e-3
        average: Literal["samples", "tokens"] = "tokens"
        adapter: AdapterConfig | None = AdapterConfig(rank=16, alpha=32, placement="all")
        retain_weight: NonNegative = 5.0
        a: NonNegative = 0.8
        filter: Annotated[float, Field(ge=0, le=1)] = 0.01
        blocks: Annotated[float, Field(gt=0, le=1)] = 0.25

    @classmethod
    def empty_model(cls, config: Any, build: Callable[[], nn.Module]) -> nn.Module:
        """Original and a shortened copy, joined."""
        from stable_forgetting.language.methods.hidden import shortened
        from stable_forgetting.language.models.composite import LogitSubtraction

        assistant = shortened(build(), config.blocks)
        return LogitSubtraction(build(), assistant, config.a, config.filter)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains the assistant, and joins it with what it came from."""
        from stable_forgetting.common.bounded.attach import detach
        from stable_forgetting.language.methods.hidden import shortened
        from stable_forgetting.language.models.composite import LogitSubtraction

        given, config = self.config, self.config.engine()
        original = task.frozen_copy()
        shortened(task.model, given.blocks)
        self._attach(task)
        objective = objectives.ForgetRetain(
            objectives.Mean(objectives.cross_entropy, config.average),
            objectives.Mean(objectives.divergence_from_uniform, config.average),
            retain_weight=given.retain_weight,
        )
        task.train(objective, config, **self._constraints())
        return LogitSubtraction(original, detach(task.model), given.a, given.filter)

"""Methods that act when the model is asked: O3's gate over adapters, and two models as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
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
    import torch
    from torch import Tensor, nn

    from stable_forgetting.language.models.composite import ForgetRequest, Gated


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
        frozenset({"forget"}),
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
        from stable_forgetting.common.objectives.objectives import ForgetRetain
        from stable_forgetting.common.objectives.positions import cross_entropy
        from stable_forgetting.common.objectives.terms import Mean
        from stable_forgetting.language.models.composite import Gated

        config = self.config.engine()
        if not isinstance(task.model, Gated):
            self._attach(task)
            task.model = Gated(task.model)
        gated: Gated = task.model
        objective = ForgetRetain(Mean(cross_entropy, config.average), None)
        loaders = task.loaders(objective.parts, config)
        loaders["forget"].source = refusing(task)
        constraints = self._constraints()
        constraints["penalty"] = self._penalties(gated, constraints["penalty"])
        task.fit(gated.model, objective, loaders, config, **constraints)
        gated.requests.append(self._detector(task, gated))
        return gated

    def _penalties(
        self, gated: Gated, own: Callable[[nn.Module], Tensor] | None
    ) -> Callable[[nn.Module], Tensor] | None:
        """What keeps the adapter away from those of earlier requests, and the config's own."""
        earlier: list[Any] = [request.factors for request in gated.requests]
        if not earlier:
            return own
        weight = self.config.orthogonal / gated.config.num_hidden_layers

        def penalty(model: nn.Module) -> Tensor:
            total = weight * overlap(model, earlier)
            return total if own is None else total + own(model)

        return penalty

    def _detector(self, task: UnlearnTask, gated: Gated) -> ForgetRequest:
        """Fitted on forget questions, but for those that give it its scale."""
        import torch

        from stable_forgetting.common.bounded.layer import adapted_layers
        from stable_forgetting.common.train.telemetry import evaluating
        from stable_forgetting.language.models.composite import ForgetRequest

        batches = list(_questions(task, self.config.batch_size))
        if not len(gated.requests):
            gated.boundary = _common_end([row for rows in batches for row in rows["prompts"]])
        with evaluating(gated):
            found = [gated.features(rows["ids"], rows["mask"]) for rows in batches]
        features = torch.cat(found)
        order = torch.randperm(len(features), generator=task.generator("gate"))
        held = max(1, round(self.config.held * len(features)))
        if len(features) - held < 2:
            raise ConfigError(
                f"o3: {len(features)} forget rows are too few for a gate; give three or more"
            )
        factors = [layer.Bt for _, layer in adapted_layers(gated.model)]
        made = ForgetRequest.fitted(features[order[held:]], features[order[:held]], factors)
        return made.to(features.device)


def overlap(model: nn.Module, earlier: list[list[Tensor]]) -> Tensor:
    """sum_i sum_l ||E_il B_l^T||_F^2 of the down projections now and of earlier ones."""
    import torch

    from stable_forgetting.common.bounded.layer import adapted_layers

    now = [layer.Bt for _, layer in adapted_layers(model)]
    parts = [
        (old.to(new) @ new.T).square().sum()
        for factors in earlier
        for old, new in zip(factors, now, strict=True)
    ]
    return torch.stack(parts).sum()


def _questions(task: UnlearnTask, batch_size: int) -> Iterator[dict[str, Any]]:
    """Forget rows in order: ``ids``, ``mask``, and ``prompts`` without their last token.

    That one may be another where a tokenizer joins it with the answer's first.
    """
    from stable_forgetting.common.data.batch import ordered_batches

    for batch in ordered_batches(task.source, task.indices("forget"), batch_size):
        ids, starts = batch.inputs["input_ids"], batch.inputs["positions"][:, 0].tolist()
        prompts = [row[:start] for row, start in zip(ids.tolist(), starts, strict=True)]
        yield {"ids": ids, "mask": batch.inputs["attention_mask"], "prompts": prompts}


def _common_end(prompts: list[list[int]]) -> torch.Tensor:
    """Tokens with which all prompts end: the template's words between question and answer."""
    import torch

    shared = 0
    while all(len(row) > shared for row in prompts) and (
        len({row[-1 - shared] for row in prompts}) == 1
    ):
        shared += 1
    first = prompts[0]
    return torch.tensor(first[len(first) - shared :], dtype=torch.int64)


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
        frozenset({"forget"}),
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

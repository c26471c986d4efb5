"""Methods that turn hidden states away, or train under an attack on them: RR, LAT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.common import objectives
from stable_forgetting.common.base.numbers import Amount, NonNegative, Positive
from stable_forgetting.common.methods.base import BOTH, MethodInfo
from stable_forgetting.common.methods.forget_retain import ForgetRetainMethod, RetainConfig
from stable_forgetting.common.methods.gradient import AdaptedConfig, GradientMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig, total_steps
from stable_forgetting.language.methods.rmu import only

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import AfterStep


class CircuitBreakers(GradientMethod):
    """RR: hidden states of forget turn orthogonal to Original's, those of retain stay Original's.

    Formula: at step t of T minimise (1 - t / 2T) w_f mean ReLU(cos(h(B_f), h_ref(B_f))) + t / 2T
    w_r mean ||h(B_r) - h_ref(B_r)||_2 over positions and ``layers``, h the output of a layer.  The
    published code compares retain data at every layer, padding too, and trains LoRA alone.  Its
    start is a stationary point, which rounding leaves; here h_ref(B_f) is moved by ``nudge``
    ||h_ref|| along a random unit vector of the run, as rounding differs between machines.
    Source: circuit breakers by representation rerouting, Zou et al. 2024 (arXiv 2406.04313);
    GraySwanAI/circuit-breakers, read in copies of it that others have changed.
    """

    info = MethodInfo(
        1,
        "Circuit breakers, Zou et al. 2024 (arXiv 2406.04313)",
        BOTH,
        modality="language",
        reading=True,
    )

    class Config(AdaptedConfig):
        """Settings of RR.

        Attributes:
            forget_weight: Factor of the cosine, the source's alpha; 10, as published.
            retain_weight: Factor of the distance, the source's alpha; 10, as published.
            layers: Glob patterns, each of one module; when empty the blocks 5/16 and 10/16 of the
                way up, which are the published hidden states 10 and 20 of 32.
            positions: Which positions count: all tokens, as published, or those that predict
                labels.
            nudge: How far Original's states of forget data are moved, in units of their norm; .001
                is ours, 0 leaves them.
        """

        epochs_of: str | None = "forget"
        batch_size: int = 16
        lr: Positive = 1e-4
        average: Literal["samples", "tokens"] = "tokens"
        forget_weight: NonNegative = 10.0
        retain_weight: NonNegative = 10.0
        layers: tuple[str, ...] = ()
        positions: Literal["scored", "all"] = "all"
        nudge: NonNegative = 1e-3

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, at layers of the model and of a frozen copy."""
        import torch

        from stable_forgetting.language.methods.hidden import hidden_size
        from stable_forgetting.language.methods.rerouting import Progress, Rerouting, lower_blocks

        config: Any = self.config
        layers = [only(task.model, pattern) for pattern in config.layers]
        layers = layers or lower_blocks(task.model)
        width, _ = hidden_size(task, layers[0], config.positions, config.micro_batch)
        direction = torch.randn(width, generator=task.generator("direction"))
        self._progress = Progress()
        return Rerouting(
            task.model,
            task.frozen_copy(),
            layers,
            task.forward,
            config.positions,
            config.forget_weight,
            config.retain_weight,
            config.average,
            self._progress,
            config.nudge * direction / direction.norm(),
        )

    def loaders(self, task: UnlearnTask, parts: Sequence[str], config: FitConfig) -> Any:
        """The streams, from which the length of the run follows."""
        streams = super().loaders(task, parts, config)
        self._progress.total = total_steps(config, streams)
        return streams

    def _constraints(self, *after_step: AfterStep) -> dict[str, Any]:
        found = super()._constraints(*after_step, self._progress)
        return {**found, "stateful": {"progress": self._progress}}


class LatentAdversarial(ForgetRetainMethod):
    """LAT: gradient difference while an attack on a layer's hidden states brings forget back.

    Formula: delta = argmin CE(B_f) over shifts of the output of ``layer``, each token's of norm
    <= epsilon, by ``attack_steps`` of AdamW from 0, put back into the ball after each; minimise w_f
    mean -log(1 - p_y) on B_f under delta + w_r CE(B_r) without it.  The published code shifts the
    MLP's output, which is the same where a block adds it last; it takes four steps per attack, here
    one; it also learns retain texts under the attack, and leaves out tokens below probability e^-5;
    here neither.
    Source: Sheshadri et al. 2024 (arXiv 2407.15549); aengusl/latent-adversarial-training
    (latent_at/lat_methods.py, notebooks/unlearning_wmdp.ipynb, whose "ga" has the defaults).
    """

    info = MethodInfo(
        1, "LAT, Sheshadri et al. 2024 (arXiv 2407.15549)", BOTH, modality="language", reading=True
    )

    class Config(RetainConfig):
        """Settings of LAT.

        Attributes:
            retain_weight: Factor of cross-entropy on retain; 4, as published.
            layer: Glob pattern of the one module that is attacked; the lower middle block when
                absent (published: 7 of 32).
            epsilon: Largest norm of a token's shift; 2, as published.
            attack_steps: Steps of the attack; 16, as published.
            attack_lr: Their rate; .05, as published.
        """

        average: Literal["samples", "tokens"] = "tokens"
        retain_weight: NonNegative = 4.0
        layer: str | None = None
        epsilon: Positive = 2.0
        attack_steps: Amount = 16
        attack_lr: Positive = 0.05

    def forget_term(self, task: UnlearnTask) -> objectives.Term:
        """The saturating forget loss."""
        return objectives.pushed_away("unlikelihood", self.over)

    def prepare(self, task: UnlearnTask) -> objectives.Objective:
        """Both terms, the first one under attack."""
        from stable_forgetting.language.methods.hidden import middle_block
        from stable_forgetting.language.methods.rerouting import UnderAttack

        config = self.config
        return UnderAttack(
            task.model,
            self.terms(task),
            only(task.model, config.layer) if config.layer else middle_block(task.model),
            objectives.Mean(objectives.cross_entropy, self.over),
            config.epsilon,
            config.attack_steps,
            config.attack_lr,
        )

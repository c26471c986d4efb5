"""Gradient difference through every kind of adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from common.base.numbers import NonNegative, Positive
from common.bounded.config import AdapterConfig
from common.methods.base import MethodInfo
from common.methods.gradient import PAPER_ADAPTER, PAPER_LITERAL, GradientConfig, GradientMethod
from common.methods.simple import BOTH, PAPER

if TYPE_CHECKING:
    from common.objectives.objectives import Objective


class GradientDifference(GradientMethod):
    """GD: descend on retain and ascend on forget, all parameters trained.

    Formula: minimise CE(B_r) - lambda CE(B_f); B_r and B_f share one forward.
    Source: Liu et al. 2022; the paper's eq. "gradient difference".
    """

    info = MethodInfo(1, "Liu et al. 2022 (arXiv 2203.12817); the paper, eq. 2", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_LITERAL

    class Config(GradientConfig):
        lr: Positive = 1e-4

    def objective(self) -> Objective:
        """The weighted or the two-rate reading."""
        from common.objectives.objectives import GradientDifference as Difference

        config = self.config
        if config.reading == "two_rates":
            return Difference(config.alpha_r, config.alpha_f, config.forget_loss)
        return Difference(1.0, config.lam, config.forget_loss)


def _adapter(**fields: Any) -> AdapterConfig:
    return AdapterConfig(**fields)


class GDLora(GradientDifference):
    """GD + LoRA: h = W0 x + (alpha/r) A B^T x + b.  Unbounded, the paper's antagonist."""

    info = MethodInfo(1, "LoRA, arXiv 2106.09685", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_ADAPTER

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter()


class GDLoraOmega(GradientDifference):
    """GD + LoRA with omega inside: the control for every bounded adapter.

    Same omega, same initial step in weight space as sine and tanh; phi = identity.  What it shares
    with them cannot be due to the bound.
    """

    info = MethodInfo(1, "control (ours)", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(omega=100.0)


class GDTanh(GradientDifference):
    """GD + Tanh: h = W0 x + (alpha/r) tanh(omega A B^T) x + b."""

    info = MethodInfo(1, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_ADAPTER

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="tanh", omega=100.0)


class GDSine(GradientDifference):
    """GD + Sine, the paper's method: h = W0 x + (alpha/r) sin(omega A B^T) x + b."""

    info = MethodInfo(1, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_ADAPTER

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="sine", omega=100.0)


class GDSigmoid(GradientDifference):
    """GD + Sigmoid, centred so that the model is unchanged at the start: 0.5 tanh(z / 2)."""

    info = MethodInfo(1, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_ADAPTER

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="sigmoid", omega=100.0)


class GDRelu(GradientDifference):
    """GD + ReLU, unbounded.  A starts small instead of zero, and phi(Z0) is subtracted.

    With A = 0 its gradient is exactly zero for ever.
    """

    info = MethodInfo(1, PAPER, BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PAPER_ADAPTER

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="relu")


class GDClip(GradientDifference):
    """GD + hard clamp of omega A B^T to [-c, c]: the bound without smoothness."""

    info = MethodInfo(1, PAPER, BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="clip", omega=100.0, clip=1.5)


class GDWeightClip(GradientDifference):
    """GD + LoRA with A and B projected to [-c, c] after each step (c = 1.5 in the paper)."""

    info = MethodInfo(1, PAPER, BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter()
        weight_clip: Positive | None = 1.5


class GDSineWeightClip(GradientDifference):
    """GD + Sine with A and B projected to [-c, c]."""

    info = MethodInfo(1, PAPER, BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="sine", omega=100.0)
        weight_clip: Positive | None = 1.5


class GDPenalty(GradientDifference):
    """GD + LoRA with mu ||A B^T||_F^2 added to the loss: the paper's open question."""

    info = MethodInfo(1, PAPER + " (limitations)", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter()
        penalty: NonNegative = 1e-2


class GDSineRelative(GradientDifference):
    """GD + Sine with the bound scaled to the layer: |dW_ij| <= c rms(W0).  Ours."""

    info = MethodInfo(1, "ours", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="sine", bound="relative")


class GDTanhRelative(GradientDifference):
    """GD + Tanh with the bound scaled to the layer: |dW_ij| <= c rms(W0).  Ours."""

    info = MethodInfo(1, "ours", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter(phi="tanh", bound="relative")


class GDUl(GradientDifference):
    """GD + LoRA with the saturating forget loss -log(1 - p_y) instead of ascent."""

    info = MethodInfo(1, "unlikelihood, arXiv 1908.04319", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter()
        forget_loss: Literal["cross_entropy", "unlikelihood"] = "unlikelihood"
        lam: NonNegative = 1.0


class GDLoraBall(GradientDifference):
    """GD + LoRA kept in the ball ||dW||_F <= c ||W0||_F by projection.  Ours."""

    info = MethodInfo(1, "ours; related: NB-LoRA, arXiv 2501.19050", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter()
        ball: Positive | None = 0.25


class GDBall(GradientDifference):
    """GD-Ball: the saturating forget loss and the ball together.  Ours.

    Formula: minimise CE(B_r) + lambda mean -log(1 - p_y(B_f)); after each step scale A, B so that
    ||dW||_F <= c ||W0||_F.  More forgiving to its hyperparameters on class forgetting in small
    trials, not better at its best, and not erasure.
    """

    info = MethodInfo(1, "ours; related: NB-LoRA arXiv 2501.19050, unlikelihood 1908.04319", BOTH)

    class Config(GradientConfig):
        adapter: AdapterConfig | None = _adapter()
        forget_loss: Literal["cross_entropy", "unlikelihood"] = "unlikelihood"
        lam: NonNegative = 1.0
        ball: Positive | None = 0.25

"""Configs of bounded adapters, and the presets: what is trained in the place of the whole model.

``METHOD_PRESET`` names any method with an adapter through any preset: ``salun_sine``, ``npo_fila``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.bounded.phi import CLIP, PHIS

PhiName = Annotated[str, AfterValidator(lambda name: PHIS[name].name)]
"""Name of a registered activation."""
Placement = Literal["mlp", "attention", "all"]


class AdapterConfig(Grown):
    """A (bounded) low-rank adapter; defaults are those of plain LoRA at the paper's rank.

    Attributes:
        rank: r of A (k x r) and B (d x r).
        alpha: LoRA's alpha; the amplitude of the absolute bound is s = alpha / rank.
        phi: The entrywise function, a name of ``PHIS``; ``identity`` is plain LoRA.
        omega: The absolute bound's frequency.
        bound: ``absolute`` is the paper's s * phi(omega A B^T).  ``relative`` (ours) scales the
            bound to each layer: c * rms(W0) * phi(s * omega * A B^T / (c * rms(W0))), which has
            the same slope at zero.
        c: Size of the relative bound in units of rms(W0).
        clip: Threshold of phi = clip, on omega * A B^T.
        placement: Which of the model's target patterns are adapted.
        targets: Glob patterns that replace the model's own for ``placement``.
        train_head: Train the classifier head too (the paper does not say; off by default).
        trained: Glob patterns of further parameters that are trained as they are, beside the
            adapter: ``norm.*`` is the last LayerNorm of a timm ViT.
        init_std: Standard deviation of A where phi starts at random (relu, without slope at zero).
        mode: ``merged``: one product with W0 + dW.  ``split``: one with W0 and one with dW, a third
            slower, for low-precision weights, whose rounding would swallow a small dW when it is
            merged for good.  A layer's output is rounded in either mode, as with PEFT: in bfloat16
            a sixth of x dW^T arrives where dW has .03 % of W0's norm, nine tenths at .26 %.
            Quantised layers take this mode, and stay adapted.  ``polynomial``: dW as a low-rank
            product of monomials, which costs little more than LoRA where the rank is small; while
            the argument of phi is too large for it, the exact product.  ``auto``: ``polynomial``
            where it takes less work, which is in wide layers.  Both keep dW apart, as ``split``
            does, where the weights are of low precision.
        dropout: Of the adapter's input while it trains; takes mode: split or phi: identity.
        peft: Another adapter in the place of ours.  Of the library of that name: ``lora``,
            ``dora``, ``oft`` (``rank`` blocks), ``delora`` (``alpha`` is where its lambda starts).
            Of a paper: ``nb_lora`` (``alpha`` bounds the singular values of dW, in units of
            the root mean square of W0's).
    """

    later = {"mode": "merged", "dropout": 0.0, "trained": (), "peft": None}
    rank: Count = 8
    alpha: Positive = 16.0
    phi: PhiName = "identity"
    omega: Positive = 1.0
    bound: Literal["absolute", "relative"] = "absolute"
    c: Positive = 0.25
    clip: Positive = CLIP
    placement: Placement = "mlp"
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    train_head: bool = False
    trained: tuple[str, ...] = ()
    init_std: Positive = 1e-3
    mode: Literal["merged", "split", "polynomial", "auto"] = "merged"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    peft: Literal["lora", "dora", "oft", "delora", "nb_lora"] | None = None

    @model_validator(mode="after")
    def _options_fit_together(self) -> AdapterConfig:
        low_rank = PHIS[self.phi].linear
        if self.dropout and self.mode != "split" and not low_rank:
            raise ValueError("dropout takes mode: split (a merged product has no input of its own)")
        if self.mode == "polynomial" and not low_rank and self.phi not in ("sine", "tanh"):
            raise ValueError("mode: polynomial takes phi: sine or tanh; use mode: auto")
        own = {name: getattr(self, name) for name in ("phi", "omega", "bound", "mode", "dropout")}
        for name, value in own.items():
            if self.peft and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of our own adapters; leave it or peft out")
        if self.bound == "relative" and not PHIS[self.phi].relative:
            names = " or ".join(name for name, phi in PHIS.items() if phi.relative)
            raise ValueError(f"bound: relative takes phi: {names}")
        return self

    @property
    def polynomial(self) -> bool:
        """Whether dW may be a low-rank product of monomials."""
        return self.mode in ("polynomial", "auto")

    @property
    def scale(self) -> float:
        """s = alpha / r."""
        return self.alpha / self.rank

    @property
    def slope(self) -> float:
        """Slope of dW in A B^T at zero, in units of s: the effective step under Adam."""
        return self.omega * PHIS[self.phi].slope0


class FilaConfig(Strict):
    """Where adapters start under FILA; see :mod:`common.methods.tools.fila`.

    Attributes:
        batch_size: Samples per gradient of the Fisher pass.  Gradients of batches are squared, not
            those of samples, so it changes the result.
        eps: Added to the retain Fisher before dividing by it.
        compat: ``loku``: the published code's randomised SVD (2 power iterations, no oversampling)
            and its damped row weights.
        damping: Added to the row weights in their inverse, with ``compat: loku``.
        balanced: Give A and B the same norm; the paper's split depends on the Fisher's unit.
    """

    batch_size: Count = 4
    eps: Positive = 1e-5
    compat: Literal["none", "loku"] = "none"
    damping: NonNegative = 1e-5
    balanced: bool = False


LORA = AdapterConfig()
SINE = AdapterConfig(phi="sine", omega=100.0)


@dataclass(frozen=True)
class Preset:
    """One way to parametrise the update.

    Attributes:
        through: What the method goes through, to follow "through".
        params: Defaults of a method's config that it sets.
        reads: Parts that it reads besides those of the method.
        version: Raised as a method's is; it is added to that of the method.
        extra: Of this project, which installs a package that it needs.
    """

    through: str
    params: Mapping[str, Any]
    reads: frozenset[str] = field(default_factory=frozenset)
    version: int = 0
    extra: str = ""


PEFT: tuple[tuple[Any, str, Mapping[str, Any]], ...] = (
    ("lora", "LoRA", {}),
    ("dora", "DoRA", {}),
    ("oft", "OFT", {}),
    ("delora", "DeLoRA", {"alpha": 2.0}),
)

PRESETS: Mapping[str, Preset] = {
    "lora": Preset("plain LoRA: (alpha/r) A B^T, unbounded", {"adapter": LORA}),
    "lora_omega": Preset(
        "LoRA with sine's omega and initial step: the control of every bound",
        {"adapter": AdapterConfig(omega=100.0)},
    ),
    "tanh": Preset(
        "(alpha/r) tanh(omega A B^T)", {"adapter": AdapterConfig(phi="tanh", omega=100.0)}
    ),
    "sine": Preset("(alpha/r) sin(omega A B^T)", {"adapter": SINE}),
    "sigmoid": Preset(
        "a centred sigmoid of omega A B^T", {"adapter": AdapterConfig(phi="sigmoid", omega=100.0)}
    ),
    "relu": Preset("(alpha/r) relu(A B^T), unbounded", {"adapter": AdapterConfig(phi="relu")}),
    "clip": Preset(
        "omega A B^T clamped to [-c, c]", {"adapter": AdapterConfig(phi="clip", omega=100.0)}
    ),
    "weight_clip": Preset(
        "LoRA with A and B projected to [-c, c]", {"adapter": LORA, "weight_clip": 1.5}
    ),
    "sine_weight_clip": Preset(
        "sine with A and B projected to [-c, c]", {"adapter": SINE, "weight_clip": 1.5}
    ),
    "penalty": Preset("LoRA with mu ||A B^T||_F^2", {"adapter": LORA, "penalty": 1e-2}),
    "sine_relative": Preset(
        "sine with the bound scaled to the layer",
        {"adapter": AdapterConfig(phi="sine", bound="relative")},
    ),
    "tanh_relative": Preset(
        "tanh with the bound scaled to the layer",
        {"adapter": AdapterConfig(phi="tanh", bound="relative")},
    ),
    "tanh_tight": Preset(
        "tanh with a bound of the weights' own size, rms(W0) of each layer",
        {"adapter": AdapterConfig(phi="tanh", omega=100.0, bound="relative", c=1.0)},
    ),
    "lora_ball": Preset("LoRA in a ball ||dW|| <= c ||W0||", {"adapter": LORA, "ball": 0.25}),
    "fila": Preset(
        "LoRA that starts on what forget needs most (FILA)",
        {"adapter": LORA, "fila": FilaConfig()},
        frozenset({"retain"}),
        version=1,
    ),
    "nb_lora": Preset(
        "NB-LoRA: the singular values of dW are bounded by those of the layer",
        {"adapter": AdapterConfig(peft="nb_lora", alpha=1.0)},
    ),
    **{
        f"peft_{name}": Preset(
            f"{title} of the library peft",
            {"adapter": AdapterConfig(peft=name, **params)},
            extra="peft",
        )
        for name, title, params in PEFT
    },
}

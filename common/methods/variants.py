"""Methods that differ from another one in defaults alone: a base, an adapter preset, a few params.

:data:`ROWS` describes the named ones.  Any other ``METHOD_PRESET`` is made on demand, for a method
that is registered by a class of its own and has the preset's fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any

from pydantic import ValidationError, create_model

from common.base.config import Strict
from common.base.errors import ConfigError
from common.base.registry import METHODS, Entry
from common.bounded.presets import PRESETS
from common.methods.base import UnlearningMethod
from common.methods.gradient import PAPER_ADAPTER
from common.methods.hinge import LOKU, TOFU_LORA, TOFU_PRESETS
from common.methods.simple import PAPER

ADAPTER_LR = 3e-3
THROUGH_ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "gd": {"lr": ADAPTER_LR},
    "ihl": {"lr": ADAPTER_LR},
}
"""What else changes of a method's defaults where an adapter stands for the whole model."""


@dataclass(frozen=True)
class Variant:
    """A method as another one with other defaults.

    Attributes:
        base: Registered method.
        preset: Row of :data:`common.bounded.presets.PRESETS`.
        paper: Where it comes from.
        doc: What ``unlearn show`` prints.
        params: Further defaults.
        presets: Named overrides in the place of the base's.
    """

    base: str
    preset: str
    paper: str
    doc: str
    params: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] | None = None


ROWS: Mapping[str, Variant] = {
    "gd_lora": Variant(
        "gd",
        "lora",
        "LoRA, arXiv 2106.09685",
        """GD + LoRA: h = W0 x + (alpha/r) A B^T x + b.  Unbounded, the paper's antagonist.""",
        presets=PAPER_ADAPTER,
    ),
    "gd_lora_omega": Variant(
        "gd",
        "lora_omega",
        "control (ours)",
        """GD + LoRA with omega inside: the control for every bounded adapter.

    Same omega, same initial step in weight space as sine and tanh; phi = identity.  What it shares
    with them cannot be due to the bound.
    """,
    ),
    "gd_tanh": Variant(
        "gd",
        "tanh",
        PAPER,
        """GD + Tanh: h = W0 x + (alpha/r) tanh(omega A B^T) x + b.""",
        presets=PAPER_ADAPTER,
    ),
    "gd_sine": Variant(
        "gd",
        "sine",
        PAPER,
        """GD + Sine, the paper's method: h = W0 x + (alpha/r) sin(omega A B^T) x + b.""",
        presets=PAPER_ADAPTER,
    ),
    "gd_sigmoid": Variant(
        "gd",
        "sigmoid",
        PAPER,
        """GD + Sigmoid, centred so that the model is unchanged at the start: 0.5 tanh(z / 2).""",
        presets=PAPER_ADAPTER,
    ),
    "gd_relu": Variant(
        "gd",
        "relu",
        PAPER,
        """GD + ReLU, unbounded.  A starts small instead of zero, and phi(Z0) is subtracted.

    With A = 0 its gradient is exactly zero for ever.
    """,
        presets=PAPER_ADAPTER,
    ),
    "gd_clip": Variant(
        "gd",
        "clip",
        PAPER,
        """GD + hard clamp of omega A B^T to [-c, c]: the bound without smoothness.""",
    ),
    "gd_weight_clip": Variant(
        "gd",
        "weight_clip",
        PAPER,
        """GD + LoRA with A and B projected to [-c, c] after each step (c = 1.5 in the paper).""",
    ),
    "gd_sine_weight_clip": Variant(
        "gd",
        "sine_weight_clip",
        PAPER,
        """GD + Sine with A and B projected to [-c, c].""",
    ),
    "gd_penalty": Variant(
        "gd",
        "penalty",
        PAPER + " (limitations)",
        """GD + LoRA with mu ||A B^T||_F^2 added to the loss: the paper's open question.""",
    ),
    "gd_sine_relative": Variant(
        "gd",
        "sine_relative",
        "ours",
        """GD + Sine with the bound scaled to the layer: |dW_ij| <= c rms(W0).  Ours.""",
    ),
    "gd_tanh_relative": Variant(
        "gd",
        "tanh_relative",
        "ours",
        """GD + Tanh with the bound scaled to the layer: |dW_ij| <= c rms(W0).  Ours.""",
    ),
    "gd_ul": Variant(
        "gd",
        "lora",
        "unlikelihood, arXiv 1908.04319",
        """GD + LoRA with the saturating forget loss -log(1 - p_y) instead of ascent.""",
        params={"forget_loss": "unlikelihood", "lam": 1.0},
    ),
    "gd_lora_ball": Variant(
        "gd",
        "lora_ball",
        "ours; related: NB-LoRA, arXiv 2501.19050",
        """GD + LoRA kept in the ball ||dW||_F <= c ||W0||_F by projection.  Ours.""",
    ),
    "gd_ball": Variant(
        "gd",
        "lora_ball",
        "ours; related: NB-LoRA arXiv 2501.19050, unlikelihood 1908.04319",
        """GD-Ball: the saturating forget loss and the ball together.  Ours.

    Formula: minimise CE(B_r) + lambda mean -log(1 - p_y(B_f)); after each step scale A, B so that
    ||dW||_F <= c ||W0||_F.  More forgiving to its hyperparameters on class forgetting in small
    trials, not better at its best, and not erasure.
    """,
        params={"forget_loss": "unlikelihood", "lam": 1.0},
    ),
    "ihl_lora": Variant(
        "ihl",
        "lora",
        LOKU,
        """IHL + LoRA: the inverted hinge through h = W0 x + (alpha/r) A B^T x + b.""",
        presets=TOFU_LORA,
    ),
    "ihl_lora_omega": Variant(
        "ihl",
        "lora_omega",
        "control (ours)",
        """IHL + LoRA with omega inside: the control for ``ihl_sine`` and ``ihl_tanh`` (ours).""",
    ),
    "ihl_tanh": Variant(
        "ihl",
        "tanh",
        LOKU,
        """IHL + Tanh: the inverted hinge through h = W0 x + (alpha/r) tanh(omega A B^T) x + b.""",
    ),
    "ihl_sine": Variant(
        "ihl",
        "sine",
        LOKU + "; Stable Forgetting, ablation of IHL",
        """IHL + Sine: the inverted hinge through h = W0 x + (alpha/r) sin(omega A B^T) x + b.""",
    ),
    "loku": Variant(
        "ihl",
        "fila",
        LOKU,
        """LoKU: the inverted hinge and retain cross-entropy through LoRA that starts by FILA.

    Formula: minimise IHL(B_f) + CE(B_r) over A, B of W - s B0 A0 + s B A, with s B0 A0 the
    Fisher-weighted rank-r optimum of W (see :mod:`common.methods.tools.fila`).  Presets hold the
    repository's settings for Phi-1.5 and LLaMA-2-7B on TOFU.
    Source: arXiv 2408.06621; the repository csm9493/efficient-llm-unlearning.
    """,
        params={"lr": 1e-3},
        presets=TOFU_PRESETS,
    ),
}


def variant(name: str) -> type[UnlearningMethod] | None:
    """The class of a variant, made from its base; None where the name says none.

    Raises:
        ConfigError: The base's config does not take the preset's params together.
    """
    row = ROWS.get(name) or _crossed(name)
    if row is None:
        return None
    base: Any = METHODS[row.base]
    return _made(name, base)


@cache
def _made(name: str, base: Any) -> type[UnlearningMethod]:
    row = ROWS.get(name) or _crossed(name)
    assert row is not None, "asked for by variant alone"
    preset = PRESETS[row.preset]
    defaults = {**preset.params, **THROUGH_ADAPTERS.get(row.base, {}), **row.params}
    members = {
        "__doc__": inspect.cleandoc(row.doc),
        "__module__": base.__module__,
        "Config": _config(base.Config, defaults, name),
        "info": replace(base.info, paper=row.paper, access=base.info.access | preset.reads),
        "presets": base.presets if row.presets is None else row.presets,
    }
    return type("".join(part.capitalize() for part in name.split("_")), (base,), members)


def _config(base: type[Strict], defaults: Mapping[str, Any], name: str) -> type[Strict]:
    """``base`` with other defaults."""
    fields: dict[str, Any] = {}
    for key, value in defaults.items():
        info = base.model_fields[key]
        kind: Any = info.annotation
        fields[key] = (Annotated[(kind, *info.metadata)] if info.metadata else kind, value)
    config = create_model("Config", __base__=base, __module__=base.__module__, **fields)
    try:
        config()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"method '{name}': {problem}") from None
    return config


def _crossed(name: str) -> Variant | None:
    """``METHOD_PRESET`` of a method that no row describes; the longest preset's name wins."""
    for preset in sorted(PRESETS, key=len, reverse=True):
        base = name.removesuffix(f"_{preset}")
        if base == name or base not in METHODS.names() or base in ROWS:
            continue
        cls: type[UnlearningMethod] = METHODS[base]
        if PRESETS[preset].params.keys() <= cls.Config.model_fields.keys():
            doc = f"{inspect.getdoc(cls)}\n\nHere through {PRESETS[preset].through}."
            return Variant(base, preset, cls.info.paper, doc)
    return None


def crossed_entry(name: str) -> Entry | None:
    """What a registry says of a ``METHOD_PRESET`` that is not registered."""
    cls = variant(name)
    row = _crossed(name)
    if cls is None or row is None:
        return None
    base = METHODS.entry(row.base)
    summary = f"{base.summary}; through {PRESETS[row.preset].through}"
    return Entry(name, cls, summary, base.origin)


def __getattr__(name: str) -> type[UnlearningMethod]:
    """The class of a row, for the registry's ``module:attribute`` targets."""
    cls = variant(name) if name in ROWS else None
    if cls is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return cls

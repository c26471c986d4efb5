"""Bounded adapters: attach, constrain, merge.

``h = W0 x + (alpha/r) phi(omega A B^T) x + b`` on chosen linear layers of a frozen model (the
paper's eq. "bounded low rank approach"); phi = identity is plain LoRA.  Linear layers are
``nn.Linear`` and 1x1 convolutions (:mod:`common.bounded.quantised`).  A layer keeps its ``weight``
and ``bias`` under their old state-dict keys and gains ``A`` and ``Bt`` (= B^T), and ``A0`` and
``Bt0`` where it has a start, whose dW is subtracted.  A quantised layer lies whole under
``base`` instead (:mod:`common.bounded.quantised`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.eager import gram_norm
from stable_forgetting.common.bounded.layer import (
    BoundedLinear,
    adapted_layers,
    keep_called,
    move_hooks,
    warn_of_loss,
)
from stable_forgetting.common.bounded.norm_bounded import attach_norm_bounded
from stable_forgetting.common.bounded.peft import attach_peft, merge_peft
from stable_forgetting.common.bounded.quantised import (
    BoundedPointwise,
    QuantisedBoundedLinear,
    is_pointwise,
    is_quantised,
    outside_quantised,
    weight_count,
)


def attach(
    model: nn.Module,
    targets: Sequence[str],
    config: AdapterConfig,
    generator: torch.Generator,
    *,
    trainable: Sequence[str] = (),
) -> list[str]:
    """Freezes ``model`` and adapts every module that a pattern matches, in place.

    Args:
        targets: Glob patterns on module names, such as ``blocks.*.mlp.fc1``.
        config: Rank, bound and scales; the same for all layers.
        generator: Draws the initial factors.
        trainable: Glob patterns on parameter names that stay trainable (the head, if asked for);
            W0 and b of an adapted layer never do.  With a head that is tied to the embedding, the
            embedding is trained too.

    Returns:
        Names of the adapted layers, in the model's order.

    Raises:
        ConfigError: A pattern matches nothing, or something that is not a linear layer; or the
            layer is quantised and the mode is ``merged``.
    """
    modules = outside_quantised(model)
    names = chosen_layers(model, targets)
    for name in names:
        if is_quantised(modules[name]) and config.mode == "merged":
            raise ConfigError(
                f"adapter target '{name}' is a quantised {type(modules[name]).__name__}, whose "
                "rounding would swallow a merged update; use mode: split"
            )
    _remember_trained(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if config.peft:
        attach = attach_norm_bounded if config.peft == "nb_lora" else attach_peft
        attach(model, names, config, generator)
    for name in names if not config.peft else ():
        _replace(model, name, _adapted(modules[name], config, generator))
    for name in names:
        keep_called(model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name))
    inside = tuple(f"{name}." for name in names)
    # a head that is tied to the embedding goes by both names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(inside) and any(
            fnmatch.fnmatch(name, pattern) for pattern in trainable
        ):
            parameter.requires_grad_(True)
    return names


_TRAINED = "trained_before_adapters"


def _remember_trained(model: nn.Module) -> None:
    """Notes which parameters require a gradient, for :func:`detach`."""
    named = model.named_parameters(remove_duplicate=False)
    trained = frozenset(name for name, parameter in named if parameter.requires_grad)
    vars(model)[_TRAINED] = vars(model).get(_TRAINED, frozenset()) | trained


def chosen_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the layers that patterns match, in the model's order.

    Raises:
        ConfigError: A pattern matches nothing, something that is not a linear layer, or a layer
            that goes by two names.
    """
    modules = outside_quantised(model)
    chosen: dict[str, None] = {}
    for pattern in targets:
        hits = fnmatch.filter(modules, pattern)
        if not hits:
            linear = [name for name, module in modules.items() if _adaptable(module)]
            listed = ", ".join(linear[:6]) + (" ..." if len(linear) > 6 else "")
            raise ConfigError(
                f"adapter target '{pattern}' matches no layer; linear layers here: "
                f"{listed or 'none'}; name some of them in adapter.targets, or choose a method "
                "without an adapter"
            )
        chosen.update(dict.fromkeys(hits))
    for name in chosen:
        kind = type(modules[name]).__name__
        if kind in ("Linear", "Conv2d") and "weight" not in modules[name]._parameters:
            kind += " whose weight a hook makes (prune, weight_norm, spectral_norm: remove it)"
        if not _adaptable(modules[name]) or not name:
            raise ConfigError(
                f"adapter target '{name or '(the whole model)'}' is a {kind}, not an nn.Linear "
                "or a 1x1 convolution inside the model; choose patterns that match such layers "
                "only, or a method without an adapter"
            )
    names = {modules[name]: name for name in chosen}
    for other, module in model.named_modules(remove_duplicate=False):
        if names.get(module, other) != other:
            raise ConfigError(
                f"adapter target '{names[module]}' is also '{other}', and only one of the two "
                "would be adapted; give each place a layer of its own, or choose a method without "
                "an adapter"
            )
    return [name for name in modules if name in chosen]


def _adaptable(module: nn.Module) -> bool:
    plain = type(module) is nn.Linear or is_pointwise(module)
    return (plain and "weight" in module._parameters) or is_quantised(module)


def _adapted(module: nn.Module, config: AdapterConfig, generator: torch.Generator) -> BoundedLinear:
    if is_quantised(module):
        return QuantisedBoundedLinear(module, config, generator)
    if is_pointwise(module):
        assert isinstance(module, nn.Conv2d), "it is a 1x1 convolution"
        return BoundedPointwise(module, config, generator)
    assert isinstance(module, nn.Linear), "only linear layers are adapted"
    return BoundedLinear(module, config, generator)


def merges_exactly(model: nn.Module) -> bool:
    """Whether :func:`detach` keeps what the model computes, up to float32's rounding.

    It does not where an adapter of ``mode: split`` lies on weights of lower precision, which would
    round off the small update that the mode is there to keep.
    """
    return not any(
        isinstance(layer, QuantisedBoundedLinear)
        or (layer.config.mode != "merged" and layer.weight.element_size() < 4)
        for _, layer in adapted_layers(model)
    )


def detach(model: nn.Module) -> nn.Module:
    """Merges every adapter in place: the original architecture and state-dict keys.

    What required a gradient before :func:`attach` requires one again.

    Where bfloat16 or float16 weights round away more than a tolerated share of the update
    (:data:`common.bounded.layer.TOLERATED_LOSS`), one warning per model says how large the update
    is and how much of it is lost.

    Raises:
        ConfigError: A layer is quantised; the model is left as it was.
    """
    layers = list(adapted_layers(merge_peft(model)))
    for name, layer in layers:
        if isinstance(layer, QuantisedBoundedLinear):
            raise ConfigError(
                f"the adapter on quantised layer '{name}' cannot be merged; keep it attached, or "
                "write it with save_adapter"
            )
    total = torch.zeros(3, dtype=torch.float64)
    for name, layer in layers:
        merged, squares = layer.merge()
        _replace(model, name, merged)
        total += squares
    warn_of_loss(total)
    trained = vars(model).pop(_TRAINED, None)
    if trained is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(name in trained)
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    if not isinstance(module, QuantisedBoundedLinear):  # it calls the layer, whose hooks it has
        move_hooks(model.get_submodule(name), module)
    model.set_submodule(name, module)


def trainable_share(model: nn.Module) -> tuple[int, int]:
    """(trainable parameters, base parameters); the base excludes A and B.

    A quantised layer counts with its k d weights, however they are packed.
    """
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    factors = sum(layer.A.numel() + layer.Bt.numel() for _, layer in adapted_layers(model))
    quantised = [module for module in model.modules() if is_quantised(module)]
    packed = {p for module in quantised for p in module.parameters()}
    total = sum(p.numel() for p in model.parameters() if p not in packed)
    return trainable, total - factors + sum(map(weight_count, quantised))


Factors = Any
"""An adapted layer, or K of them on one frozen weight: A is (k, r) or (K, k, r), Bt likewise."""


@torch.no_grad()
def clip_layer_(layer: Factors, threshold: float) -> None:
    """Projects every entry of A and B of one layer to [-threshold, threshold]."""
    layer.A.clamp_(-threshold, threshold)
    layer.Bt.clamp_(-threshold, threshold)


def ball_radius(layer: Factors, c: float) -> float:
    """``c ||W0||_F``."""
    return c * float(torch.linalg.vector_norm(layer.weight.float()))


@torch.no_grad()
def project_layer_(layer: Factors, radius: float) -> Tensor:
    """Scales A and B of one layer so that ``||dW||_F <= radius``; 0 is no ball.

    Returns:
        () or (K,): whether it was outside.  A norm that is not finite stays: the divergence guard
        reports it.
    """
    norm = layer.bound.amplitude * layer.bound.frequency * gram_norm(layer.A, layer.Bt)
    outside: Tensor = (norm > radius) & norm.isfinite() & (radius > 0)
    factor = torch.where(outside, (radius / norm).sqrt() * (1 - 1e-6), 1.0)
    for parameter in (layer.A, layer.Bt):
        parameter.mul_(factor.to(parameter.dtype)[..., None, None])
    return outside


@torch.no_grad()
def clip_factors_(model: nn.Module, threshold: float) -> None:
    """Weight clipping: projects every entry of A and B to [-threshold, threshold]."""
    for _, layer in adapted_layers(model):
        clip_layer_(layer, threshold)


@torch.no_grad()
def project_ball_(model: nn.Module, c: float) -> float:
    """Scales A and B of each layer so that ``||dW||_F <= c ||W0||_F``; ours, not the paper's.

    phi is 1-Lipschitz with phi(0) = 0, so ``amplitude * frequency * ||A B^T||_F`` bounds
    ``||dW||_F`` (with equality for plain LoRA).  Layers with ``W0 = 0`` are skipped.  Related:
    norm-bounded LoRA (arXiv 2501.19050).

    Returns:
        Share of layers that were outside their ball.

    Raises:
        ConfigError: A layer has a start: scaling A and B does not shrink what is left of it.
    """
    outside = total = 0
    for _, layer in adapted_layers(model):
        if layer.start is not None:
            raise ConfigError("ball: no certificate for an adapter with a start; start from zero")
        radius = ball_radius(layer, c)
        total += radius > 0
        outside += int(project_layer_(layer, radius))
    return outside / max(total, 1)


def factor_penalty(model: nn.Module) -> Tensor:
    """``sum over layers of ||A B^T||_F^2``, differentiable (the paper's open question)."""
    terms = [((la.A.mT @ la.A) * (la.Bt @ la.Bt.mT)).sum() for _, la in adapted_layers(model)]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()

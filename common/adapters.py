"""Bounded adapters: attach, measure, constrain, merge, save, load.

``h = W0 x + (alpha/r) phi(omega A B^T) x + b`` on chosen ``nn.Linear`` layers of a frozen model
(the paper's eq. "bounded low rank approach"); phi = identity is plain LoRA.  A layer keeps its
``weight`` and ``bias`` under their old state-dict keys and gains ``A`` and ``Bt`` (= B^T), and
``A0`` and ``Bt0`` where it has a start, whose dW is subtracted.  A quantised layer lies whole under
``base`` instead (:mod:`common.quantised`).
"""

from __future__ import annotations

import fnmatch
import glob
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Size, Tensor, nn

from common.bounded import BOUNDED, gram_norm
from common.bounded_layer import BoundedLinear, adapted_layers, warn_of_loss
from common.errors import CheckpointError, ConfigError
from common.quantised import (
    QuantisedBoundedLinear,
    base_weight,
    is_quantised,
    layer_shape,
    outside_quantised,
    weight_count,
)
from common.schemas import AdapterConfig

ADAPTER_WEIGHTS = "adapter.safetensors"
ADAPTER_CONFIG = "adapter.json"
FACTORS = ("A", "Bt")
START = ("A0", "Bt0")


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
        model: Any module.
        targets: Glob patterns on module names, such as ``blocks.*.mlp.fc1``.
        config: Rank, bound and scales; the same for all layers.
        generator: Draws the initial factors.
        trainable: Glob patterns on parameter names that stay trainable (the head, if asked for);
            W0 and b of an adapted layer never do.

    Returns:
        Names of the adapted layers, in the model's order.

    Raises:
        ConfigError: A pattern matches nothing, or something that is not a linear layer; or the
            layer is quantised and the mode is not ``split``.
    """
    modules = outside_quantised(model)
    chosen: dict[str, None] = {}
    for pattern in targets:
        hits = fnmatch.filter(modules, pattern)
        if not hits:
            linear = [name for name, module in modules.items() if _adaptable(module)]
            raise ConfigError(
                f"adapter target '{pattern}' matches no layer; linear layers here: "
                f"{', '.join(linear[:6])}{' ...' if len(linear) > 6 else ''}"
            )
        chosen.update(dict.fromkeys(hits))
    for name in chosen:
        kind = type(modules[name]).__name__
        if not _adaptable(modules[name]) or not name:
            raise ConfigError(
                f"adapter target '{name or '(the whole model)'}' is a {kind}, not an "
                "nn.Linear inside the model; choose patterns that match linear layers only"
            )
        if is_quantised(modules[name]) and config.mode != "split":
            raise ConfigError(
                f"adapter target '{name}' is a quantised {kind}, whose rounding would swallow a "
                "merged update; use mode: split"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    names = [name for name in modules if name in chosen]
    for name in names:
        _replace(model, name, _adapted(modules[name], config, generator))
    inside = tuple(f"{name}." for name in names)
    for name, parameter in model.named_parameters():
        if not name.startswith(inside) and any(
            fnmatch.fnmatch(name, pattern) for pattern in trainable
        ):
            parameter.requires_grad_(True)
    return names


def _adaptable(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_quantised(module)


def _adapted(module: nn.Module, config: AdapterConfig, generator: torch.Generator) -> BoundedLinear:
    if is_quantised(module):
        return QuantisedBoundedLinear(module, config, generator)
    assert isinstance(module, nn.Linear), "only linear layers are adapted"
    return BoundedLinear(module, config, generator)


def merges_exactly(model: nn.Module) -> bool:
    """Whether :func:`detach` keeps what the model computes, up to float32's rounding.

    It does not where an adapter of ``mode: split`` lies on weights of lower precision, which would
    round off the small update that the mode is there to keep.
    """
    return not any(
        isinstance(layer, QuantisedBoundedLinear)
        or (layer.config.mode == "split" and layer.weight.element_size() < 4)
        for _, layer in adapted_layers(model)
    )


def detach(model: nn.Module) -> nn.Module:
    """Merges every adapter in place: the original architecture and state-dict keys.

    Where bfloat16 or float16 weights round away more than a tolerated share of the update
    (:data:`common.bounded_layer.TOLERATED_LOSS`), one warning per model says how large the update
    is and how much of it is lost.

    Raises:
        ConfigError: A layer is quantised; the model is left as it was.
    """
    layers = list(adapted_layers(model))
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
    warn_of_loss("the model", total)
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent_name, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child, module)


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


# Constraints, applied after optimizer steps ------------------------------------------------------


@torch.no_grad()
def clip_factors_(model: nn.Module, threshold: float) -> None:
    """Weight clipping: projects every entry of A and B to [-threshold, threshold]."""
    for _, layer in adapted_layers(model):
        layer.A.clamp_(-threshold, threshold)
        layer.Bt.clamp_(-threshold, threshold)


@torch.no_grad()
def project_ball_(model: nn.Module, c: float) -> float:
    """Scales A and B of each layer so that ``||dW||_F <= c ||W0||_F``; ours, not the paper's.

    phi is 1-Lipschitz with phi(0) = 0, so ``outer * inner * ||A B^T||_F`` bounds ``||dW||_F``
    (with equality for plain LoRA).  Layers with ``W0 = 0`` are skipped.  Related: norm-bounded
    LoRA (arXiv 2501.19050).

    Returns:
        Share of layers that were outside their ball.

    Raises:
        ConfigError: A layer has a start: scaling A and B does not shrink what is left of it.
    """
    outside = total = 0
    for _, layer in adapted_layers(model):
        if layer.start is not None:
            raise ConfigError("ball: no certificate for an adapter with a start; start from zero")
        radius = c * float(torch.linalg.vector_norm(layer.weight.float()))
        if radius == 0.0:
            continue
        total += 1
        norm = layer.outer * layer.inner * gram_norm(layer.A, layer.Bt)
        if not torch.isfinite(norm):
            continue  # the divergence guard reports it
        if norm > radius:
            outside += 1
            factor = (radius / norm).sqrt() * (1 - 1e-6)
            layer.A.mul_(factor)
            layer.Bt.mul_(factor)
            after = layer.outer * layer.inner * gram_norm(layer.A, layer.Bt)
            assert after <= radius * (1 + 1e-4), f"projection left the ball: {after} > {radius}"
    return outside / max(total, 1)


def check_ball(config: AdapterConfig) -> None:
    """Raises :class:`ConfigError` where a ball would not be a certificate."""
    if config.phi not in BOUNDED | {"identity"}:
        raise ConfigError(f"ball: not a certificate for phi: {config.phi}; use identity or a bound")


def factor_penalty(model: nn.Module) -> Tensor:
    """``sum over layers of ||A B^T||_F^2``, differentiable (the paper's open question)."""
    terms = [((la.A.mT @ la.A) * (la.Bt @ la.Bt.mT)).sum() for _, la in adapted_layers(model)]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


# Saving and loading ------------------------------------------------------------------------------


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Writes the factors as safetensors, plus a JSON config.

    Every other trainable parameter is written too, and every persistent buffer, as running
    statistics move while an adapter trains.  Nothing of a quantised base is written.
    """
    from safetensors.torch import save_file

    layers = dict(adapted_layers(model))
    assert layers, "nothing is attached"
    kept = {f"{name}.{key}" for name in layers for key in FACTORS}
    kept |= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept
    bases = tuple(
        f"{name}.base." for name, la in layers.items() if isinstance(la, QuantisedBoundedLinear)
    )
    tensors = {
        name: value
        for name, value in _tensors(model).items()
        if name not in frozen and not name.startswith(bases)
    }
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    save_file(copies, folder / ADAPTER_WEIGHTS)
    first = next(iter(layers.values()))
    meta = {
        "format": 1,
        "config": first.config.model_dump(mode="json"),
        "layers": {name: _fingerprint(layer) for name, layer in layers.items()},
        "starts": [name for name, layer in layers.items() if layer.start is not None],
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without what packed layers put there beside tensors."""
    return {name: v for name, v in model.state_dict().items() if isinstance(v, Tensor)}


def _fingerprint(layer: nn.Module) -> list[float]:
    """[rows, columns, ||W0||_F]: tells whether an adapter meets the weight it was trained on.

    Without the norm for a quantised layer that gives no dense weight.
    """
    weight = base_weight(layer)
    if weight is None:
        return [*layer_shape(layer.base if isinstance(layer, QuantisedBoundedLinear) else layer)]
    return [*weight.shape, round(float(torch.linalg.vector_norm(weight.detach().double())), 6)]


def load_adapter(model: nn.Module, folder: Path) -> list[str]:
    """Attaches a saved adapter to ``model`` in place; the base weights must be the same.

    Raises:
        CheckpointError: Files are missing or damaged, or the model is another one.
    """
    config, expected, starts, tensors = _read_adapter(folder)
    modules = dict(model.named_modules())
    for name, fingerprint in expected.items():
        layer = modules.get(name)
        if layer is None or not _adaptable(layer):
            raise CheckpointError(f"{folder}: the model has no linear layer '{name}'; wrong model?")
        found = _fingerprint(layer)
        same = found[:2] == fingerprint[:2] and len(found) == len(fingerprint)
        if not same or not math.isclose(found[-1], fingerprint[-1], rel_tol=1e-4, abs_tol=1e-6):
            raise CheckpointError(
                f"{folder}: layer '{name}' is not the one that this adapter was trained on "
                f"(shape and norm {found} instead of {fingerprint}); use the same base model"
            )
    factors = _factor_shapes(config.rank, expected, starts)
    others = {key: value for key, value in tensors.items() if key not in factors}
    shapes = {name: value.shape for name, value in _tensors(model).items()} | factors
    for key in [*factors, *others]:
        if key not in tensors or shapes.get(key) != tensors[key].shape:
            raise CheckpointError(
                f"{folder}: tensor '{key}' is missing or does not fit; wrong model or damaged file"
            )
    trainable = [glob.escape(key) for key in others]
    targets = [glob.escape(name) for name in expected]
    names = attach(model, targets, config, torch.Generator(), trainable=trainable)
    for name in starts:
        layer = model.get_submodule(name)
        assert isinstance(layer, BoundedLinear)
        layer.set_start_(layer.A, layer.Bt)
    state = _tensors(model)
    with torch.no_grad():  # load_state_dict would ask packed layers for keys that are not here
        for key, value in tensors.items():
            state[key].copy_(value)
    return names


def _read_adapter(
    folder: Path,
) -> tuple[AdapterConfig, dict[str, list[float]], list[str], dict[str, Tensor]]:
    """(config, layer -> fingerprint, layers with a start, tensors) of a saved adapter."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        meta = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        config = AdapterConfig.model_validate(meta["config"])
        layers = {name: [float(value) for value in row] for name, row in meta["layers"].items()}
        if not layers or any(len(row) not in (2, 3) for row in layers.values()):
            raise ValueError("no layers")
        starts = list(meta.get("starts", layers if config.phi == "relu" else []))
        if not set(starts) <= set(layers):
            raise ValueError("starts of other layers")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no adapter here (missing {error.filename})") from None
    except (OSError, SafetensorError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder}: damaged adapter ({type(error).__name__})") from None
    return config, layers, starts, tensors


def _factor_shapes(
    rank: int, layers: Mapping[str, Sequence[float]], starts: Sequence[str]
) -> dict[str, Size]:
    """Shape of every tensor that the adapted layers themselves need."""
    shapes: dict[str, Size] = {}
    for name, (rows, columns, *_) in layers.items():
        pair = Size([int(rows), rank]), Size([rank, int(columns)])
        for keys in (FACTORS, START) if name in starts else (FACTORS,):
            shapes |= {f"{name}.{key}": shape for key, shape in zip(keys, pair, strict=True)}
    return shapes


def adapter_statistics(model: nn.Module) -> dict[str, float]:
    """How far each adapter has moved, and whether the bound acts.

    Returns:
        ``delta_ratio``: ||dW||_F / ||W0||_F over all adapted layers together; ``delta_ratio_max``:
        of the worst layer; ``max_argument``: max |inner A B^T|; ``bound_active``: share of entries
        with |argument| > 0.5; ``certificate``: ||dW||_F over the bound's own ceiling (0 if none).
        The two ratios to W0 are left out where a quantised layer gives no dense weight.
    """
    delta2 = base2 = active = entries = ceiling2 = 0.0
    worst = largest = 0.0
    known = True
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            moved = float(layer.delta().float().square().sum())
            weight = base_weight(layer)
            known = known and weight is not None
            base = 0.0 if weight is None else float(weight.float().square().sum())
            arguments = layer.arguments().abs()
            delta2, base2 = delta2 + moved, base2 + base
            worst = max(worst, math.sqrt(moved / base) if base else 0.0)
            largest = max(largest, float(arguments.max()))
            active += float((arguments > 0.5).sum())
            entries += arguments.numel()
            ceiling2 += layer.entry_bound**2 * arguments.numel()
    ratios = {
        "delta_ratio": math.sqrt(delta2 / base2) if base2 else 0.0,
        "delta_ratio_max": worst,
    }
    return (ratios if known else {}) | {
        "max_argument": largest,
        "bound_active": active / max(entries, 1.0),
        "certificate": math.sqrt(delta2 / ceiling2) if math.isfinite(ceiling2) else 0.0,
    }

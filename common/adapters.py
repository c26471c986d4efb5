"""Bounded adapters: attach, measure, constrain, merge, save, load.

``h = W0 x + (alpha/r) phi(omega A B^T) x + b`` on chosen ``nn.Linear`` layers of a frozen model
(the paper's eq. "bounded low rank approach"); phi = identity is plain LoRA.  A layer keeps its
``weight`` and ``bias`` under their old state-dict keys and gains ``A`` and ``Bt`` (= B^T), and
``A0`` and ``Bt0`` where it has a start, whose dW is subtracted.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Size, Tensor, nn

from common.bounded import BOUNDED, bounded_delta, bounded_linear, gram_norm, phi_bound
from common.bounded_function import build_weight, gemm_dtype
from common.bounded_phi import Bound
from common.errors import CheckpointError, ConfigError
from common.reuse import shared_weight
from common.schemas import AdapterConfig

logger = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter.safetensors"
ADAPTER_CONFIG = "adapter.json"
FACTORS = ("A", "Bt")
START = ("A0", "Bt0")


class BoundedLinear(nn.Module):
    """``nn.Linear`` with a frozen weight (k, d) and a (bounded) low-rank update.

    Args:
        base: The layer to adapt; its parameters are shared, not copied, and frozen.
        config: Rank, bound and scales.
        generator: Draws B ~ U(+-1/sqrt d) (and A for phi = relu, else A = 0).
    """

    def __init__(self, base: nn.Linear, config: AdapterConfig, generator: torch.Generator):
        super().__init__()
        k, d = base.weight.shape
        self.weight = base.weight.requires_grad_(False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        self.config = config
        self.outer, self.inner = _scales(config, self.weight)
        bound = 1.0 / math.sqrt(d)
        Bt = (torch.rand(config.rank, d, generator=generator) * 2 - 1) * bound
        A = torch.zeros(k, config.rank)
        if config.phi == "relu":
            A = torch.randn(k, config.rank, generator=generator) * config.init_std
        self.A = nn.Parameter(A.to(self.weight.device))
        self.Bt = nn.Parameter(Bt.to(self.weight.device))
        if config.phi == "relu":
            self.set_start_(self.A, self.Bt)
        self.train(base.training)

    @torch.no_grad()
    def set_start_(self, A: Tensor, Bt: Tensor) -> None:
        """Sets the factors, and subtracts their dW from now on: any phi may start anywhere.

        ``dW = outer phi(inner A Bt) - outer phi(inner A0 Bt0)`` is zero right after this call.
        The start is saved, loaded and merged with the adapter; it doubles :attr:`entry_bound`.

        Args:
            A: (k, r).
            Bt: (r, d).
        """
        assert A.shape == self.A.shape and Bt.shape == self.Bt.shape, (
            "a start has A's and Bt's shape"
        )
        self.A.copy_(A)
        self.Bt.copy_(Bt)
        self.register_buffer("A0", self.A.detach().clone())
        self.register_buffer("Bt0", self.Bt.detach().clone())

    @property
    def start(self) -> tuple[Tensor, Tensor] | None:
        """(A0, Bt0) whose dW is subtracted, if there is one."""
        if "A0" not in self._buffers:
            return None
        return self.get_buffer("A0"), self.get_buffer("Bt0")

    def _bounded(self, A: Tensor, Bt: Tensor) -> Tensor:
        return bounded_delta(
            A, Bt, phi=self.config.phi, outer=self.outer, inner=self.inner, clip=self.config.clip
        )

    def delta(self) -> Tensor:
        """Dense dW (k, d); zero at the start, |dW_ij| <= :attr:`entry_bound`."""
        delta = self._bounded(self.A, self.Bt)
        return delta if self.start is None else delta - self._bounded(*self.start)

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """What x is multiplied with, (k, d), without a graph: W0 + dW, or dW alone if split."""
        assert self.config.phi != "identity", "the low-rank path has no effective weight"
        bound = Bound(self.config.phi, self.outer, self.inner, self.config.clip)
        base = None if self.config.mode == "split" else self.weight
        return build_weight(base, self.A, self.Bt, bound, start=self.start, dtype=dtype)

    @property
    def entry_bound(self) -> float:
        """Entrywise bound on dW: (alpha/r) sup|phi|, or c rms(W0) sup|phi|; may be infinite.

        Twice that where a start is subtracted.
        """
        bound = self.outer * phi_bound(self.config.phi, self.config.clip)
        return bound if self.start is None else 2 * bound

    def arguments(self) -> Tensor:
        """The argument of phi, ``inner * A B^T`` (k, d): how far into the bound the layer is."""
        return self.inner * (self.A @ self.Bt)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k)."""
        config = self.config
        low_rank = config.phi == "identity"
        return bounded_linear(
            x,
            self.weight,
            self.bias,
            self.A,
            self.Bt,
            phi=config.phi,
            outer=self.outer,
            inner=self.inner,
            clip=config.clip,
            start=self.start,
            split=config.mode == "split",
            dropout=config.dropout if self.training else 0.0,
            grad_gemm_dtype=torch.bfloat16 if config.grad_gemm_dtype else None,
            built=None if low_rank else shared_weight(self, gemm_dtype(x, self.weight)),
        )

    def merged(self) -> nn.Linear:
        """A plain layer with W0 + dW; added in float32 or wider, cast to the weight's dtype.

        Warns where that dtype loses the update; see :func:`detach`.
        """
        layer, squares = self._merged()
        _warn_of_loss("this layer", squares)
        return layer

    @torch.no_grad()
    def _merged(self) -> tuple[nn.Linear, Tensor]:
        """The merged layer, and the squared norms of W0, dW and of what rounding took of dW."""
        k, d = self.weight.shape
        layer = nn.Linear(d, k, bias=self.bias is not None, device="meta")
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        base, delta = self.weight.to(wide), self.delta().to(wide)
        layer.weight = nn.Parameter((base + delta).to(self.weight.dtype))
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone())
        squares = torch.zeros(3, dtype=torch.float64)
        if wide != self.weight.dtype:
            lost = base + delta - layer.weight.to(wide)
            squares = torch.stack([t.square().sum().double() for t in (base, delta, lost)]).cpu()
        return layer.train(self.training), squares

    def extra_repr(self) -> str:
        """Sizes and bound, for ``print(model)``."""
        k, d = self.weight.shape
        return f"{d}, {k}, r={self.config.rank}, phi={self.config.phi}, inner={self.inner:g}"


def _scales(config: AdapterConfig, weight: Tensor) -> tuple[float, float]:
    """(outer, inner) of dW = outer * phi(inner * A B^T)."""
    if config.bound == "absolute":
        return config.scale, config.omega
    rms = float(weight.detach().float().square().mean().sqrt())
    if rms == 0.0:
        raise ConfigError("bound: relative needs weights that are not all zero")
    outer = config.c * rms
    return outer, config.scale * config.omega / outer


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, BoundedLinear]]:
    """(name, layer) of every adapted layer."""
    for name, module in model.named_modules():
        if isinstance(module, BoundedLinear):
            yield name, module


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
        ConfigError: A pattern matches nothing, or something that is not an ``nn.Linear``.
    """
    modules = dict(model.named_modules())
    chosen: dict[str, None] = {}
    for pattern in targets:
        hits = fnmatch.filter(modules, pattern)
        if not hits:
            linear = [name for name, module in modules.items() if type(module) is nn.Linear]
            raise ConfigError(
                f"adapter target '{pattern}' matches no layer; linear layers here: "
                f"{', '.join(linear[:6])}{' ...' if len(linear) > 6 else ''}"
            )
        chosen.update(dict.fromkeys(hits))
    for name in chosen:
        kind = type(modules[name])
        if kind is not nn.Linear or not name:
            raise ConfigError(
                f"adapter target '{name or '(the whole model)'}' is a {kind.__name__}, not an "
                "nn.Linear inside the model; choose patterns that match linear layers only"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    names = [name for name in modules if name in chosen]
    for name in names:
        _replace(model, name, BoundedLinear(modules[name], config, generator))
    for name, parameter in model.named_parameters():
        adapted = name.rpartition(".")[0] in chosen
        if not adapted and any(fnmatch.fnmatch(name, pattern) for pattern in trainable):
            parameter.requires_grad_(True)
    return names


def detach(model: nn.Module) -> nn.Module:
    """Merges every adapter in place: the original architecture and state-dict keys.

    Where bfloat16 or float16 weights round away more than :data:`TOLERATED_LOSS` of the update,
    one warning per model says how large the update is and how much of it is lost.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for name, layer in list(adapted_layers(model)):
        merged, squares = layer._merged()
        _replace(model, name, merged)
        total += squares
    _warn_of_loss("the model", total)
    return model


TOLERATED_LOSS = 0.05


def _warn_of_loss(what: str, squares: Tensor) -> None:
    base, delta, lost = squares.sqrt().tolist()
    if delta > 0 and lost > TOLERATED_LOSS * delta:
        logger.warning(
            "merging rounds off part of the update of %s: ||dW|| / ||W0|| is %.1e, and %.0f %% of "
            "||dW|| is lost; merge in float32, or keep the adapter",
            what,
            delta / base if base else math.inf,
            100 * lost / delta,
        )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent_name, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child, module)


def trainable_share(model: nn.Module) -> tuple[int, int]:
    """(trainable parameters, base parameters); the base excludes A and B."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    factors = sum(layer.A.numel() + layer.Bt.numel() for _, layer in adapted_layers(model))
    total = sum(p.numel() for p in model.parameters())
    return trainable, total - factors


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
    return torch.stack(terms).sum()


# Saving and loading ------------------------------------------------------------------------------


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Writes the factors as safetensors, plus a JSON config.

    Every other trainable parameter is written too, and every persistent buffer, as running
    statistics move while an adapter trains.
    """
    from safetensors.torch import save_file

    layers = dict(adapted_layers(model))
    assert layers, "nothing is attached"
    kept = {f"{name}.{key}" for name in layers for key in FACTORS}
    kept |= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept
    tensors = {name: value for name, value in model.state_dict().items() if name not in frozen}
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    save_file(copies, folder / ADAPTER_WEIGHTS)
    first = next(iter(layers.values()))
    meta = {
        "format": 1,
        "config": first.config.model_dump(mode="json"),
        "layers": {name: _fingerprint(layer.weight) for name, layer in layers.items()},
        "starts": [name for name, layer in layers.items() if layer.start is not None],
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")


def _fingerprint(weight: Tensor) -> list[float]:
    """[rows, columns, ||W0||_F]: tells whether an adapter meets the weight it was trained on."""
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
        if type(layer) is not nn.Linear:
            raise CheckpointError(f"{folder}: the model has no linear layer '{name}'; wrong model?")
        found = _fingerprint(layer.weight)
        if found[:2] != fingerprint[:2] or not math.isclose(
            found[2], fingerprint[2], rel_tol=1e-4, abs_tol=1e-6
        ):
            raise CheckpointError(
                f"{folder}: layer '{name}' is not the one that this adapter was trained on "
                f"(shape and norm {found} instead of {fingerprint}); use the same base model"
            )
    factors = _factor_shapes(config.rank, expected, starts)
    others = {key: value for key, value in tensors.items() if key not in factors}
    shapes = {name: value.shape for name, value in model.state_dict().items()} | factors
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
    model.load_state_dict(tensors, strict=False)
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
        if not layers or any(len(row) != 3 for row in layers.values()):
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
    for name, (rows, columns, _) in layers.items():
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
    """
    delta2 = base2 = active = entries = ceiling2 = 0.0
    worst = largest = 0.0
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            moved = float(layer.delta().float().square().sum())
            base = float(layer.weight.float().square().sum())
            arguments = layer.arguments().abs()
            delta2, base2 = delta2 + moved, base2 + base
            worst = max(worst, math.sqrt(moved / base) if base else 0.0)
            largest = max(largest, float(arguments.max()))
            active += float((arguments > 0.5).sum())
            entries += arguments.numel()
            ceiling2 += layer.entry_bound**2 * arguments.numel()
    return {
        "delta_ratio": math.sqrt(delta2 / base2) if base2 else 0.0,
        "delta_ratio_max": worst,
        "max_argument": largest,
        "bound_active": active / max(entries, 1.0),
        "certificate": math.sqrt(delta2 / ceiling2) if math.isfinite(ceiling2) else 0.0,
    }

"""The adapted layer itself: ``nn.Linear`` with a (bounded) low-rank update beside its weight.

Building W0 + dW costs as much as some hundred tokens.  Where several forward passes meet the same
factors (micro-batches of one optimizer step, an evaluation), :func:`reuse_weights` pays that once,
for one k x d matrix per adapted layer as long as its scope lasts.  Nothing is keyed on tensor
versions alone: fused AdamW and ``p.data.copy_()`` do not raise them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.polynomial import OddPolynomial, choose
from stable_forgetting.common.bounded.product import (
    bounded_linear,
    build_weight,
    gemm_dtype,
    whole_delta,
)


class Shared:
    """What the open scopes around one layer share."""

    def __init__(self) -> None:
        self.scopes = 0
        self.lock = threading.Lock()
        self.weights: dict[torch.dtype, Tensor] = {}
        self.factors: list[tuple[int, int | None]] | None = None
        self.certified: tuple[OddPolynomial | None] | tuple[()] = ()


OPEN: WeakKeyDictionary[nn.Module, Shared] = WeakKeyDictionary()
LOCK = threading.Lock()


def shared_weight(
    layer: nn.Module,
    factors: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    build: Callable[[torch.dtype], Tensor],
) -> Tensor | None:
    """The layer's effective weight (k, d) in ``dtype``, built on first use; None outside a scope.

    Raises:
        RuntimeError: The factors changed inside the scope.
    """
    shared = OPEN.get(layer)
    if shared is None:
        return None
    with shared.lock:
        places = [_place(factor) for factor in factors]
        if shared.factors is None:
            shared.factors = places
        elif shared.factors != places:
            raise RuntimeError("A or Bt changed inside reuse_weights; step after the with block")
        if dtype not in shared.weights:
            with torch.inference_mode(False):  # an evaluation may build what a training step saves
                shared.weights[dtype] = build(dtype)
        return shared.weights[dtype]


def _place(tensor: Tensor) -> tuple[int, int | None]:
    """Where a tensor's values are, and how often torch saw them change there."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


logger = logging.getLogger(__name__)

TOLERATED_LOSS = 0.05
"""Share of ||dW|| that merging may round off without a warning."""


class BoundedLinear(nn.Module):
    """``nn.Linear`` with a frozen weight (k, d) and a (bounded) low-rank update.

    Args:
        base: The layer to adapt; its parameters are shared, not copied, and frozen.
        generator: Draws B ~ U(+-1/sqrt d) (and A where phi starts at random, else A = 0).
    """

    def __init__(self, base: nn.Linear, config: AdapterConfig, generator: torch.Generator):
        super().__init__()
        k, d = base.weight.shape
        self.weight = base.weight.requires_grad_(False)
        self.bias: Tensor | None = None if base.bias is None else base.bias.requires_grad_(False)
        self._make_factors(k, d, self.weight.device, config, generator)
        self.train(base.training)

    def _make_factors(
        self,
        k: int,
        d: int,
        device: torch.device,
        config: AdapterConfig,
        generator: torch.Generator,
    ) -> None:
        self.config = config
        self.bound = bound_of(
            config, lambda: float(self.weight.detach().float().square().mean().sqrt())
        )
        reach = 1.0 / math.sqrt(d)
        Bt = (torch.rand(config.rank, d, generator=generator) * 2 - 1) * reach
        A = torch.zeros(k, config.rank)
        starts_at_random = self.bound.record.start == "random"
        if starts_at_random:
            A = torch.randn(k, config.rank, generator=generator) * config.init_std
        self.A = nn.Parameter(A.to(device))
        self.Bt = nn.Parameter(Bt.to(device))
        if starts_at_random:
            self.set_start_(self.A, self.Bt)

    @torch.no_grad()
    def set_start_(self, A: Tensor, Bt: Tensor) -> None:
        """Sets the factors, and subtracts their dW from now on: any phi may start anywhere.

        ``dW = amplitude * (phi(frequency * A Bt) - phi(frequency * A0 Bt0))`` is zero right after
        this call.  The start is saved, loaded and merged with the adapter; it doubles
        :attr:`entry_bound`.
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

    def delta(self) -> Tensor:
        """Dense dW (k, d); zero at the start, |dW_ij| <= :attr:`entry_bound`."""
        return whole_delta(self._update())

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """What x is multiplied with, (k, d), without a graph: W0 + dW, or dW alone if split."""
        assert not self.bound.record.linear, "the low-rank path has no effective weight"
        base = None if self.split else self.weight
        return build_weight(base, self._update(), dtype)

    def _update(self) -> Update:
        return Update(self.A, self.Bt, self.bound, self.start)

    @property
    def split(self) -> bool:
        """Whether an exact dW is multiplied apart from W0."""
        if self.config.polynomial:
            return self.weight.element_size() < 4
        return self.config.mode == "split"

    def polynomial(self) -> OddPolynomial | None:
        """What stands for phi at the factors as they are; None where phi itself is computed.

        Certified anew at every call, but once within :func:`reuse_weights`.  (Torch does not tell
        whether a fused optimizer or FSDP has changed the factors.)
        """
        if not self.config.polynomial or self.bound.record.linear:
            return None
        shared = OPEN.get(self)
        if shared is None:
            return self._certified()
        with shared.lock:
            if not shared.certified:
                shared.certified = (self._certified(),)
            return shared.certified[0]

    def _certified(self) -> OddPolynomial | None:
        by_cost = self.config.mode == "auto"
        return choose(self._update(), by_cost=by_cost)

    @property
    def entry_bound(self) -> float:
        """Entrywise bound on dW: (alpha/r) sup|phi|, or c rms(W0) sup|phi|; may be infinite.

        Twice that where a start is subtracted.
        """
        ceiling = self.bound.amplitude * self.bound.limit
        return ceiling if self.start is None else 2 * ceiling

    def arguments(self) -> Tensor:
        """The argument of phi, ``frequency * A B^T`` (k, d): how far the layer is in the bound."""
        return self.bound.frequency * (self.A @ self.Bt)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k): ``x (W0 + dW)^T + b``."""
        update = (self.A, self.Bt, self.bound)
        return bounded_linear(x, self.weight, self.bias, *update, **self._how(x, self.weight))

    def _how(self, x: Tensor, weight: Tensor | None) -> dict[str, Any]:
        """Keywords of :func:`bounded_linear` for a product with ``weight``, or with dW alone."""
        config = self.config
        built = None
        fitted = self.polynomial()
        exact = not self.bound.record.linear and fitted is None
        if exact and not torch.compiler.is_compiling():  # a graph builds its own
            factors = (self.A, self.Bt)
            built = shared_weight(self, factors, gemm_dtype(x, weight), self.effective_weight)
        return {
            "start": self.start,
            "split": self.split,
            "dropout": config.dropout if self.training else 0.0,
            "built": built,
            "fitted": fitted,
        }

    @torch.no_grad()
    def merge(self) -> tuple[nn.Module, Tensor]:
        """A plain layer with W0 + dW, and squared norms of W0, dW and of what rounding took of dW.

        The sum is taken in float32 or wider, and cast to the weight's dtype.
        """
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
        k, d = len(self.A), self.Bt.shape[1]
        shape = f"{d}, {k}, r={self.config.rank}"
        return f"{shape}, phi={self.config.phi}, frequency={self.bound.frequency:g}"


def keep_called(parent: nn.Module, layer: nn.Module) -> None:
    """Has torch's encoder layer call an adapter: in eval mode it takes the plain weight from it.

    It calls its parts where one of them has a hook.
    """
    if isinstance(parent, nn.TransformerEncoderLayer) and not isinstance(layer, nn.Linear):
        layer.register_forward_pre_hook(_refuse_nested)


def _refuse_nested(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args[0].is_nested:
        raise ConfigError(
            "an adapter takes no nested tensor, which nn.TransformerEncoder makes of a padded "
            "batch in eval mode; set its use_nested_tensor to False, or detach the adapter first"
        )


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
"""Where torch keeps what is called around a module."""


def move_hooks(layer: nn.Module, other: nn.Module) -> None:
    """What a user registered on a layer goes on around what takes its place.

    Its handle still removes it.  The hook of :func:`keep_called` ends with its adapter.
    """
    vars(other).update({key: vars(layer)[key] for key in _HOOKS})
    hooks = other._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _refuse_nested]:
        del hooks[key]


def bound_of(config: AdapterConfig, size: Callable[[], float]) -> Bound:
    """The form of a layer's dW; ``size`` gives rms(W0), which a relative bound needs."""
    if config.bound == "absolute":
        return Bound(config.phi, config.scale, config.omega, config.clip)
    rms = size()
    if rms == 0.0:
        raise ConfigError("bound: relative needs weights that are not all zero")
    amplitude = config.c * rms
    return Bound(config.phi, amplitude, config.scale * config.omega / amplitude, config.clip)


def warn_of_loss(squares: Tensor) -> None:
    """Warns, once, where merging the model rounds off more than :data:`TOLERATED_LOSS` of dW.

    ``squares`` are (3,) of :meth:`BoundedLinear.merge`, summed over layers.
    """
    base, delta, lost = squares.sqrt().tolist()
    if delta > 0 and lost > TOLERATED_LOSS * delta:
        logger.warning(
            "merging rounds off part of the update of the model: ||dW|| / ||W0|| is %.1e, and "
            "%.0f %% of ||dW|| is lost; merge in float32, or keep the adapter",
            delta / base if base else math.inf,
            100 * lost / delta,
        )


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, BoundedLinear]]:
    """(name, layer) of every adapted layer."""
    for name, module in model.named_modules():
        if isinstance(module, BoundedLinear):
            yield name, module


@contextlib.contextmanager
def reuse_weights(model: nn.Module) -> Iterator[None]:
    """Builds the effective weight of each adapted layer once inside the ``with`` block.

    A and Bt must not change between the first forward pass inside and the end of the block: step
    the optimizer after the last forward pass.  (Other tensors in their place raise, and so does a
    change that torch counts; one that it does not count, such as fused AdamW's, would go unseen.)
    The shared weights are dropped when the outermost block around a layer ends, also on an
    exception.  Threads that open a scope on one model share its weights.  A graph made inside can
    be differentiated after the block, and holds its weight until then; with gradient checkpointing,
    differentiate inside.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    with LOCK:
        for layer in layers:
            OPEN.setdefault(layer, Shared()).scopes += 1
    try:
        yield
    finally:
        with LOCK:
            for layer in layers:
                OPEN[layer].scopes -= 1
                if not OPEN[layer].scopes:
                    del OPEN[layer]

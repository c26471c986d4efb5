"""Adapters on other linear layers: 1x1 convolutions, and layers whose weight is quantised.

A 1x1 convolution is the linear map over the channels that each position gets.  Of a quantised layer
the base runs as it is, ``h = base(x) + x dW^T``; only dW, in floating point, is trained.  Adding dW
to a quantised weight would round most of it off, so such a layer is never merged.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear
from stable_forgetting.common.bounded.product import bounded_linear


class BoundedPointwise(BoundedLinear):
    """A 1x1 convolution with a frozen weight and a (bounded) low-rank update.

    It is :class:`BoundedLinear` over the channels: ``weight`` is (k, d) while an adapter is
    attached, a view of the convolution's (k, d, 1, 1).
    """

    def __init__(self, base: nn.Conv2d, config: AdapterConfig, generator: torch.Generator):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(base.weight.detach().flatten(1), requires_grad=False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        k, d = self.weight.shape
        self._make_factors(k, d, self.weight.device, config, generator)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d, H, W) -> (..., k, H, W)."""
        return super().forward(x.movedim(-3, -1)).movedim(-1, -3)

    def merge(self) -> tuple[nn.Module, Tensor]:
        """As :meth:`BoundedLinear.merge`; the layer is a 1x1 convolution again."""
        linear, squares = super().merge()
        k, d = self.weight.shape
        layer = nn.Conv2d(d, k, 1, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(linear.get_parameter("weight").detach()[..., None, None])
        if self.bias is not None:
            layer.bias = linear.get_parameter("bias")
        return layer.train(self.training), squares


def is_pointwise(module: nn.Module) -> bool:
    """Whether ``module`` is a 1x1 convolution that maps each position by itself, on one grid."""
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride == (1, 1)
        and module.groups == 1
        and module.padding in ((0, 0), "same", "valid")
    )


class QuantisedBoundedLinear(BoundedLinear):
    """A quantised linear layer, run by its own forward, with a (bounded) low-rank update beside it.

    The update is computed in the activations' dtype (autocast's under autocast), and added in the
    base's.  The gradient of x passes through the base's own backward; torch's quantised modules
    drop it, so there it is taken through their dequantised weight.

    Raises:
        ConfigError: ``bound: relative`` on a base without a dense weight.
    """

    def __init__(self, base: nn.Module, config: AdapterConfig, generator: torch.Generator):
        nn.Module.__init__(self)
        assert config.mode != "merged", "a quantised weight is not merged"
        self.base = base.requires_grad_(False)
        stored = _stored(base)
        self._drops_gradient = stored is not None and stored.is_quantized
        own = next(chain(base.parameters(), base.buffers()), torch.empty(0))
        k, d = layer_shape(base)
        self._make_factors(k, d, own.device, config, generator)
        self.train(base.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W0 dequantised, (k, d): made anew on each access, for measures and bounds alone.

        Raises:
            ConfigError: The base has no way to give it.
        """
        weight = dense_weight(self.base)
        if weight is None:
            raise ConfigError(
                f"a {type(self.base).__name__} gives no dense weight, which norms of W0 need; use "
                "bound: absolute, no ball and probe_every: 0"
            )
        return weight

    @property
    def split(self) -> bool:
        """dW is always multiplied apart."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., k), in the dtype of the base's output."""
        if self._drops_gradient and x.requires_grad and torch.is_grad_enabled():
            h = _FrozenProduct.apply(x, self.base)
        else:
            h = self.base(x)
        update = (self.A, self.Bt, self.bound)
        dW = bounded_linear(x, None, None, *update, **self._how(x, None))
        y: Tensor = h + dW.to(h.dtype)
        return y

    def merge(self) -> tuple[nn.Linear, Tensor]:
        """Refuses: see :func:`common.bounded.attach.detach`."""
        raise ConfigError(
            f"an adapter on a quantised {type(self.base).__name__} cannot be merged; keep it "
            "attached, or write it with save_adapter"
        )


class _FrozenProduct(torch.autograd.Function):
    """``base(x)``, whose gradient in x is taken through the dequantised weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Module) -> Tensor:
        ctx.base = base
        output: Tensor = base(x)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = dense_weight(ctx.base)
        assert weight is not None, "torch's quantised tensors dequantise"
        return grad @ weight.to(grad.dtype), None


def is_quantised(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer in a quantised form.

    That is an ``nn.Linear`` whose weight holds codes, a subclass of it with a forward of its own
    and no plain matrix as its weight, or another module with ``in_features`` and ``out_features``
    and no dense matrix as a parameter.
    """
    if isinstance(module, nn.Linear):
        weight, shape = module.weight, (module.out_features, module.in_features)
        plain = type(weight) is nn.Parameter and tuple(weight.shape) == shape
        own = type(module).forward is not nn.Linear.forward
        return _holds_codes(weight) or (own and not plain)
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return not any(p.dim() > 1 and not _holds_codes(p) for p in module.parameters())


def layer_shape(module: nn.Module) -> tuple[int, int]:
    """(k, d) of a linear layer, whatever its weight is stored as, or of a 1x1 convolution."""
    if is_pointwise(module):
        rows, columns, *_ = module.get_parameter("weight").shape
        return rows, columns
    k, d = module.out_features, module.in_features
    assert isinstance(k, int) and isinstance(d, int), "a linear layer has sizes"
    return k, d


def weight_count(module: nn.Module) -> int:
    """Weights and biases of a linear layer, however many of them a stored element packs."""
    k, d = layer_shape(module)
    bias = getattr(module, "bias", None)
    if callable(bias) and not isinstance(bias, Tensor):
        bias = bias()
    return k * d + (0 if bias is None else k)


@torch.no_grad()
def dense_weight(module: nn.Module) -> Tensor | None:
    """The weight in floating point, (k, d), or None where the layer does not offer it.

    Asked for, in this order: a floating ``weight``, its ``dequantize()``, the module's own
    ``dequantize()``; ``weight`` may be a method, as torch's quantised modules have it.
    """
    if is_pointwise(module):
        return module.get_parameter("weight").detach().flatten(1)
    if type(module) is nn.Linear and not is_quantised(module):
        return module.weight.detach()
    weight = _stored(module)
    if weight is not None and (weight.is_quantized or _dequantises(weight)):
        weight = weight.dequantize()
    if weight is None or _holds_codes(weight):
        unpack = getattr(module, "dequantize", None)
        weight = unpack() if callable(unpack) else None
    if not isinstance(weight, Tensor) or _holds_codes(weight):
        return None
    return weight.detach() if tuple(weight.shape) == layer_shape(module) else None


def base_weight(layer: nn.Module) -> Tensor | None:
    """W0 of a layer, adapted or not, in floating point if it has that."""
    if isinstance(layer, QuantisedBoundedLinear):
        return dense_weight(layer.base)
    return layer.weight if isinstance(layer, BoundedLinear) else dense_weight(layer)


def outside_quantised(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name, without what quantised layers are made of."""
    modules = dict(model.named_modules())
    inside = tuple(f"{name}." for name, module in modules.items() if name and is_quantised(module))
    return {name: module for name, module in modules.items() if not name.startswith(inside)}


def _stored(module: nn.Module) -> Tensor | None:
    weight = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, Tensor):
        weight = weight()
    return weight if isinstance(weight, Tensor) else None


def _holds_codes(weight: Tensor) -> bool:
    return _dequantises(weight) or not weight.is_floating_point() or weight.element_size() == 1


def _dequantises(weight: Tensor) -> bool:
    """Whether it is a tensor subclass with a dequantisation of its own."""
    return type(weight).dequantize is not Tensor.dequantize

"""What tests of losses, gradients and configs make: values, a loss, and the line of an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.data.batch import Batch


def stream(seed: int = 0) -> torch.Generator:
    """A generator of a seed."""
    return torch.Generator().manual_seed(seed)


def noise(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal values in float32."""
    return scale * torch.randn(*shape, generator=stream(seed))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal values in float64."""
    return values_of(*shape, seed=seed, scale=1.0)


def values_of(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Normal values in float64."""
    return scale * torch.randn(*shape, generator=stream(seed), dtype=torch.float64)


def loss_of(model, batch) -> torch.Tensor:
    """Cross-entropy of a model on what a batch calls x."""
    return F.cross_entropy(model(batch.inputs["x"]), batch.labels)


def trained_factors_(model, scale: float = 0.3):
    """The model with an arbitrary A in each adapter, as if trained."""
    for index, (_, layer) in enumerate(adapted_layers(model)):
        layer.A.data.copy_(noise(index, *layer.A.shape, scale=scale))
    return model


def batch_of(labels: torch.Tensor) -> Batch:
    """A batch of labels alone."""
    return Batch({}, labels, torch.arange(len(labels)))


def assert_same_gradient(ours, theirs, z: torch.Tensor, *, values: bool = True) -> None:
    """Values, unless told, and gradients by the logits of two functions."""
    z = z.clone().requires_grad_()
    a, b = ours(z), theirs(z)
    if values:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    got, wanted = (torch.autograd.grad(x, z, retain_graph=True)[0] for x in (a, b))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def complaint(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The one line of the config error that a call ends with."""
    with pytest.raises(ConfigError) as error:
        function(*args, **kwargs)
    text = str(error.value)
    assert text and "\n" not in text
    return text

"""Weight masks: which entries of a model may move, kept to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn


def top_share(saliency: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Boolean masks of the globally largest entries, by ONE sort over all tensors.

    Args:
        saliency: Name -> non-negative tensor.  A tensor of zeros ranks nothing and gets no mask
            (an adapter's B has no gradient while A is zero).
        density: Share of the ranked entries to keep, in (0, 1]; entries that tie with the smallest
            one kept are kept too.

    Returns:
        Name -> mask of the tensor's shape.
    """
    ranked = {name: values for name, values in saliency.items() if bool(values.any())}
    if not ranked:
        return {}
    flat = torch.cat([values.flatten() for values in ranked.values()])
    count = max(1, round(density * len(flat)))
    threshold = flat.sort().values[len(flat) - count]  # kthvalue: not deterministic on CUDA
    return {name: values >= threshold for name, values in ranked.items()}


class MaskedWeights:
    """Keeps the masked-out entries of a model's parameters at the values that they have now.

    Their gradients are zeroed, and they are put back after every optimizer step: weight decay and
    momentum move entries without a gradient too.  Names without a mask are free.

    Args:
        model: Whose parameters are masked.
        masks: Parameter name -> True where it may move.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor]):
        self.masks = dict(masks)
        parameters = dict(model.named_parameters())
        self.parameters = {name: parameters[name] for name in self.masks}
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}

    @contextlib.contextmanager
    def gradients(self, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Zeroes the gradients of masked-out entries while ``when()`` holds."""

        def hook(mask: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda grad: grad * mask if when() else grad

        handles = [p.register_hook(hook(self.masks[n])) for n, p in self.parameters.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Puts masked-out entries back; called after each optimizer step."""
        for name, parameter in self.parameters.items():
            parameter.copy_(torch.where(self.masks[name], parameter, self.start[name]))

    @property
    def density(self) -> float:
        """Share of the masked tensors' entries that may move."""
        total = sum(mask.numel() for mask in self.masks.values())
        return sum(int(mask.sum()) for mask in self.masks.values()) / max(total, 1)

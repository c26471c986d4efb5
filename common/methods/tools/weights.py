"""What methods do to weights: masks that hold entries, rewinding, wider and narrower heads."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.data.loader import ChainedLoader
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.tools.passes import labels_of, wrong


def top_share(saliency: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Boolean masks of the globally largest entries, by ONE sort over all tensors.

    Args:
        saliency: Name -> non-negative tensor.  A tensor of zeros ranks nothing and gets no mask
            (an adapter's B has no gradient while A is zero).
        density: Share of the ranked entries to keep, in (0, 1]; entries that tie with the smallest
            one kept are kept too.
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

        with contextlib.ExitStack() as hooks:
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:  # a frozen one has no gradient
                    hooks.enter_context(parameter.register_hook(hook(self.masks[name])))
            yield

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Puts masked-out entries back; called after each optimizer step."""
        for name, parameter in self.parameters.items():
            parameter.copy_(torch.where(self.masks[name], parameter, self.start[name]))


def damped(gradient: Tensor, components: int) -> Tensor:
    """The gradient with its first singular directions divided by s_i / s_min, on both sides."""
    u, s, v = torch.linalg.svd(gradient.float(), full_matrices=False)
    count = min(components, int((s > s[0] * 1e-6).sum()))
    if count == 0:
        return gradient
    keep = 1 - s[count - 1] / s[:count]
    for vectors, right in ((v[:count].mT, True), (u[:, :count], False)):
        matrix = gradient if right else gradient.mT
        vectors = vectors.to(gradient)
        matrix = matrix - (matrix @ vectors * keep.to(gradient)) @ vectors.mT
        gradient = matrix if right else matrix.mT
    return gradient


HELD_OUT = ("validation", "validation_forget")


def class_shares(task: UnlearnTask) -> Tensor:
    """Shares of the classes in D_f, (C,), each of which must have held-out samples.

    Raises:
        DataError: One has none.
    """
    labels = labels_of(task, "forget")
    shares = labels.bincount(minlength=task.family.num_classes) / len(labels)
    held_out = _held_out(task)
    counts = torch.zeros(len(shares))
    if held_out:
        counts = labels_of(task, *held_out).bincount(minlength=len(shares))
    lacking = torch.where((counts == 0) & (shares > 0))[0].tolist()
    if lacking:
        raise DataError(
            f"scrub_r compares with held-out data of the forgotten classes, and class {lacking[0]} "
            "has none; give the data validation samples or take scrub"
        )
    return shares


def _held_out(task: UnlearnTask) -> list[str]:
    return [part for part in HELD_OUT if len(task.split.parts.get(part, ()))]


def reference_error(task: UnlearnTask, shares: Tensor) -> float:
    """Error of the model on held-out data, reweighted to the given class shares (C,)."""
    labels, errors = wrong(task, *_held_out(task))
    counts = labels.bincount(minlength=len(shares))
    misses = labels[errors].bincount(minlength=len(shares))
    return float((shares * misses / counts.clamp_min(1)).sum())


class Rewind:
    """Keeps what is trained, and its forget error, whenever the loader reaches an end.

    Raises:
        DataError: A class of the forget set has no held-out sample.
    """

    def __init__(self, task: UnlearnTask, loader: ChainedLoader, ends: Sequence[int]):
        self.task, self.loader, self.ends = task, loader, list(ends)
        self.shares = class_shares(task)
        self.errors: list[float] = []
        self.copies: list[list[Tensor]] = []

    def _tensors(self) -> list[Tensor]:
        model: nn.Module = self.task.model
        return [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]

    def __call__(self, model: nn.Module) -> dict[str, float] | None:
        """After each step: keeps the weights if an end was reached."""
        if len(self.errors) == len(self.ends) or self.loader.count < self.ends[len(self.errors)]:
            return None
        _, errors = wrong(self.task, "forget")
        self.errors.append(float(errors.double().mean()))
        self.copies.append([tensor.detach().clone() for tensor in self._tensors()])
        return {"rewind/forget_error": self.errors[-1]}

    @torch.no_grad()
    def choose(self) -> int:
        """Puts the chosen weights into the model; returns their place."""
        assert self.errors, "no epoch was completed"
        reference = reference_error(self.task, self.shares)
        gaps = [abs(error - reference) for error in self.errors]
        chosen = max(place for place, gap in enumerate(gaps) if gap == min(gaps))
        for tensor, value in zip(self._tensors(), self.copies[chosen], strict=True):
            tensor.copy_(value)
        return chosen

    def state(self) -> dict[str, Tensor]:
        """Errors and weights so far."""
        state = {"errors": torch.tensor(self.errors, dtype=torch.float64)}
        for place, tensors in enumerate(self.copies):
            state |= {f"{place}-{k}": tensor for k, tensor in enumerate(tensors)}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.errors = state["errors"].tolist()
        width = len(self._tensors())
        device = self._tensors()[0].device
        self.copies = [
            [state[f"{place}-{k}"].to(device) for k in range(width)]  # never written in place
            for place in range(len(self.errors))
        ]


def head_name(task: UnlearnTask) -> str:
    """Name of the linear layer that makes the logits.

    Raises:
        ConfigError: There is none, or several, or it shares its weight with another layer.
    """
    names: list[str] = [
        name
        for name, module in task.model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == task.family.num_classes
        and any(fnmatch.fnmatch(f"{name}.weight", pattern) for pattern in task.family.head)
    ]
    if len(names) != 1:
        heads = ", ".join(names) or "none"
        raise ConfigError(
            f"this method needs one linear head of {task.family.num_classes} logits "
            f"(found: {heads}); choose another method for this model"
        )
    weight = task.model.get_submodule(names[0]).weight
    if sum(getattr(module, "weight", None) is weight for module in task.model.modules()) > 1:
        raise ConfigError(
            f"this method changes the size of {names[0]}, whose weight is that of another layer "
            "too (tied); choose another method for this model"
        )
    return names[0]


@torch.no_grad()
def widen_head(model: nn.Module, name: str, generator: torch.Generator) -> None:
    """Gives a linear head one more row, drawn from U(+-1/sqrt d) as torch draws a layer's."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    bound = 1 / math.sqrt(old.in_features)

    def extended(tensor: Tensor) -> Tensor:
        row = torch.rand(1, *tensor.shape[1:], generator=generator) * 2 * bound - bound
        return torch.cat([tensor, row.to(tensor)])

    _replace(model, name, extended(old.weight), None if old.bias is None else extended(old.bias))


@torch.no_grad()
def narrow_head(model: nn.Module, name: str, width: int) -> None:
    """Keeps the first ``width`` rows of a linear head."""
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    bias = None if old.bias is None else old.bias[:width].clone()
    _replace(model, name, old.weight[:width].clone(), bias)


def _replace(model: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    model.set_submodule(name, layer.train(model.get_submodule(name).training))

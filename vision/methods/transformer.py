"""What single methods need of a vision transformer: attention over its patches, and class keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.objectives import ObjectiveValue
from stable_forgetting.common.objectives.positions import wide


def patch_attention(model: nn.Module, inputs: Tensor, block: int = -1) -> Tensor:
    """Attention that the classified token pays to each patch, averaged over heads.

    Args:
        model: A timm vision transformer: ``blocks[i].attn`` with ``fused_attn`` and ``attn_drop``.
        inputs: (N, C, S, S).

    Returns:
        (N, patches): the class token's row; without a class token (mean pooling), the mean over the
        patches' own rows, since their mean is what is classified.

    Raises:
        ConfigError: The model has no such attention (Swin, a CNN).
    """
    attention = _attention(model, block)
    maps: list[Tensor] = []
    fused, attention.fused_attn = attention.fused_attn, False
    hook = attention.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    try:
        with hook, torch.no_grad():
            model(inputs)
    finally:
        attention.fused_attn = fused
    prefix: int = getattr(model, "num_prefix_tokens", 1)
    weights = maps[0].mean(1)[:, :, prefix:]
    has_class_token = getattr(model, "cls_token", None) is not None
    return weights[:, 0] if has_class_token else weights[:, prefix:].mean(1)


def _attention(model: nn.Module, block: int) -> Any:
    blocks = getattr(model, "blocks", None)
    try:
        attention = blocks[block].attn  # type: ignore[index]
        _ = attention.fused_attn, attention.attn_drop
    except (TypeError, IndexError, AttributeError):
        raise ConfigError(
            f"{type(model).__name__} has no blocks[{block}].attn of timm's vision transformer; "
            "choose a ViT or DeiT (or another block)"
        ) from None
    return attention


def patch_mask(chosen: Tensor, side: int) -> Tensor:
    """(N, patches) booleans, row by row, as a pixel mask (N, 1, side, side)."""
    grid = math.isqrt(chosen.shape[1])
    assert grid * grid == chosen.shape[1], f"{chosen.shape[1]} patches are no square grid"
    square = chosen.view(-1, 1, grid, grid).float()
    return F.interpolate(square, (side, side), mode="nearest").bool()


class MaskedContrast:
    """The objective of phase 1; random masks come from torch's stream, which the engine seeds."""

    parts = ("forget",)

    def __init__(self, task: UnlearnTask, config: Any):
        self.config = config
        # a model, not task.reference(): its attention is needed too
        self.teacher = copy.deepcopy(task.model).requires_grad_(False).eval()
        self.forward = task.forward
        blank = task.source.blank_inputs
        if "x" not in blank:
            raise ConfigError(
                "lethevit masks patches with black, and tensors do not tell what black is; give "
                "images"
            )
        self.black: Tensor = blank["x"]

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """softplus((s- - s+) / tau), which is the formula of ``LetheViT``."""
        batch = batches["forget"]
        logits = forward(batch)
        with torch.no_grad():
            near = self.forward(self.teacher, self.masked(batch))
            far = self.forward(self.teacher, batch)
        positive, negative = (F.cosine_similarity(logits, other) for other in (near, far))
        loss = F.softplus((negative - positive) / self.config.temperature).mean()
        return ObjectiveValue(loss, {"contrast": loss})

    def masked(self, batch: Batch) -> Batch:
        """The images with their chosen patches black."""
        x = batch.inputs["x"]
        scores = patch_attention(self.teacher, x, self.config.block)
        if self.config.mask == "random":
            scores = torch.rand(scores.shape).to(scores)
        count = math.ceil(self.config.masked * scores.shape[1])
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(count, dim=1).indices, True)
        inputs = {"x": torch.where(patch_mask(chosen, x.shape[-1]), self.black, x)}
        return Batch(inputs, batch.labels, batch.indices)


class KeyedViT(nn.Module):
    """A ViT whose position embedding is shifted by the keys of the classes that are shown.

    Args:
        net: A timm vision transformer with a learnt position embedding of width d.
        num_classes: C.

    Raises:
        ConfigError: The network has no position embedding to carry the keys.
    """

    def __init__(self, net: nn.Module, num_classes: int):
        super().__init__()
        embedding = getattr(net, "pos_embed", None)
        if not isinstance(embedding, nn.Parameter):
            raise ConfigError(f"novo: {type(net).__name__} has no pos_embed; choose a timm ViT")
        self.net, self.num_classes = net, num_classes
        shape = (num_classes, embedding.shape[-1])
        self.keys = nn.Parameter(torch.zeros(shape, device=embedding.device))
        self.shown: Tensor
        self.register_buffer("shown", torch.ones(num_classes, device=embedding.device))

    def draw(self, std: float, stream: torch.Generator) -> None:
        """Starts the keys from N(0, std^2)."""
        with torch.no_grad():
            self.keys.copy_(std * torch.randn(self.keys.shape, generator=stream))

    def show(self, classes: Tensor) -> None:
        """Shows the keys where ``classes`` (C,) is true, in all later forwards."""
        self.shown.copy_(classes)

    def _embedding(self) -> Tensor:
        embedding: Tensor = self.net.pos_embed  # type: ignore[assignment]
        return embedding + self.shown @ self.keys / self.num_classes**0.5

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, S, S) -> logits under the keys that are shown."""
        return functional_call(self.net, {"pos_embed": self._embedding()}, (x,))

    def folded(self, deleted: Sequence[int]) -> dict[str, Tensor]:
        """State dict of the plain network after the keys of ``deleted`` classes are gone."""
        shown = torch.ones(self.num_classes)
        shown[list(deleted)] = 0
        self.show(shown)
        return {**self.net.state_dict(), "pos_embed": self._embedding().detach()}


class ProxyForgetting:
    """Learn the classes whose keys are shown, know nothing of the others.

    The draw comes from torch's stream, which the engine seeds and checkpoints.
    """

    parts = ("train",)

    def __init__(self, keyed: KeyedViT, *, beta: float, hide: float):
        self.keyed, self.beta, self.hide = keyed, beta, hide

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Cross-entropy on shown classes and KL to uniform on hidden ones."""
        batch = batches["train"]
        shown = torch.rand(self.keyed.num_classes) >= self.hide
        self.keyed.show(shown)
        log_p = wide(forward(batch)).log_softmax(-1)
        visible = shown.to(batch.labels.device)[batch.labels]
        own = -log_p.gather(1, batch.labels.unsqueeze(1)).squeeze(1)
        uniform = -log_p.mean(1) - math.log(log_p.shape[1])
        loss = torch.where(visible, own, 0).sum() / visible.sum().clamp_min(1)
        hidden = torch.where(visible, 0, uniform).sum() / (~visible).sum().clamp_min(1)
        return ObjectiveValue(loss + self.beta * hidden, {"shown_loss": loss, "hidden_kl": hidden})

"""Images of one set into which those of another are blended."""

from __future__ import annotations

import torch
from torch import Tensor

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import Source, class_labels, ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.methods.tools.passes import EVALUATION_BATCH
from stable_forgetting.common.methods.tools.streams import WithExtras
from stable_forgetting.common.train.telemetry import evaluating

MASKS = 4


class Blends(WithExtras):
    """A source with blends at negative indices: -1 - j is the j-th, made when it is fetched.

    Args:
        inner: Where both images come from.
        first: (M,) int64, CPU: the images that the masks weigh.
        second: (M,) int64, CPU: the other ones, whose labels are taken.
        kinds: (M,) int64, CPU: which mask.
        shift: Added to the masks.
    """

    def __init__(self, inner: Source, first: Tensor, second: Tensor, kinds: Tensor, shift: float):
        super().__init__(inner, {}, torch.empty(0))
        self.first, self.second, self.kinds, self.shift = first, second, kinds, shift

    def __len__(self) -> int:
        return len(self.first)

    def extras(self, places: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The blends, and the labels of the second images."""
        one, other = (self.inner.fetch(part[places]) for part in (self.first, self.second))
        (name,) = one.inputs
        x, y = one.inputs[name], other.inputs[name]
        weights = masks(x.shape[-2], x.shape[-1], self.shift)[self.kinds[places]].to(x)
        return {name: weights * x + (1 - weights) * y}, other.labels

    @classmethod
    def drawn(cls, task: UnlearnTask, shift: float) -> Blends:
        """Each forget image with retain images of the classes that Original ranks next."""
        retain = torch.as_tensor(task.indices("retain"))
        labels = torch.from_numpy(class_labels(task.source, retain.numpy()))
        first, wanted, kinds = _ranked(task, labels.unique())
        second, stream = torch.empty_like(wanted), task.generator("blends")
        for label in wanted.unique():
            pool, places = retain[labels == label], wanted == label
            picks = torch.randint(len(pool), (int(places.sum()),), generator=stream)
            second[places] = pool[picks]
        return cls(task.source, first, second, kinds, shift)


@torch.no_grad()
def _ranked(task: UnlearnTask, known: Tensor) -> list[Tensor]:
    """Forget image, class and rank (M,) of the first ``known`` classes but its own, on the CPU."""
    found = []
    with evaluating(task.model):
        for batch in ordered_batches(task.source, task.indices("forget"), EVALUATION_BATCH):
            logits = task.forward(task.model, batch).cpu()
            scores = torch.full_like(logits, -torch.inf)
            scores[:, known] = logits[:, known]
            scores.scatter_(1, batch.labels.cpu().unsqueeze(1), -torch.inf)
            top = scores.topk(min(MASKS, scores.shape[1]), dim=1)
            kept = top.values.isfinite()
            if not bool(kept.any(1).all()):
                raise ConfigError(
                    "a forget image is blended with other classes, and the retain images have none "
                    "but its own; add retain images of other classes"
                )
            ranks = torch.arange(kept.shape[1]).expand_as(kept)
            images = batch.indices.unsqueeze(1).expand_as(kept)
            found.append((images[kept], top.indices[kept], ranks[kept]))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def masks(height: int, width: int, shift: float) -> Tensor:
    """(4, 1, H, W) weights in [0, 1]: rows, columns that rise to the middle; that fall to it."""
    kinds = []
    for falls in (False, True):
        kinds.append(_ramp(height, falls).view(-1, 1).expand(height, width))
        kinds.append(_ramp(width, falls).expand(height, width))
    return (torch.stack(kinds).unsqueeze(1) + shift).clamp(0, 1)


def _ramp(size: int, falls: bool) -> Tensor:
    half = -(-size // 2)
    rise = torch.arange(half) / half
    sides = [rise.flip(0), rise] if falls else [rise, rise.flip(0)]
    return torch.cat(sides)[:size]

"""Over-unlearning: what happened to the retained classes close to what was forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stable_forgetting.common.audits.base import (
    AuditInfo,
    AuditTask,
    Measures,
    ModelAudit,
    NotApplicable,
)
from stable_forgetting.common.audits.intervals import bootstrap_mean
from stable_forgetting.common.audits.pairs import over_retained
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, NonNegative
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.measure.answers import kl_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.data.batch import Batch


class OverUnlearning(ModelAudit):
    """OU@eps: damage in the neighbourhood of the forgotten classes.

    Formula: x' = x + eps sign(grad_x CE(Original(x), y)) for forget inputs x (one step of the fast
    gradient sign, to the retained side of the boundary); OU@eps = mean_x' KL(r(p_O(x')) ||
    r(p_U(x'))) in nats, r = softmax renormalised over the retained classes, O = Original.  eps is
    in units of the model's input; eps = 0 is the forget inputs themselves.  Retrain has a positive
    value too: it is the yardstick.  The published definition is not in our sources (abstract
    only), so numbers of its paper do not compare.
    Source: after Ha et al. 2026 (arXiv 2506.01318); the sign step, Goodfellow et al. 2015.
    """

    info = AuditInfo(1, "minutes", "nats", scenario="class")

    class Config(Strict):
        """Config of the neighbourhood.

        Attributes:
            eps: Radii, in the largest norm.
            samples: At most this many forget inputs.
        """

        eps: tuple[NonNegative, ...] = (0.03, 0.1)
        samples: Count = 500

    def measure(self, task: AuditTask) -> Measures:
        """One mean per radius, with a bootstrap over inputs."""
        from stable_forgetting.common.data.batch import ordered_batches

        gone = task.forgotten_classes()
        indices = task.draw("forget", self.config.samples, "boundary")
        original, model = task.load_original().eval(), task.load().eval()
        values: dict[float, list[np.ndarray]] = {eps: [] for eps in self.config.eps}
        for batch in ordered_batches(task.source, indices, task.batch_size):
            signs = input_signs(task, original, batch)
            for eps, rows in values.items():
                near = moved(batch, signs, eps)
                before, after = (softmax_rows(task, m, near) for m in (original, model))
                kl = kl_rows(over_retained(before, gone), over_retained(after, gone))
                rows.append(np.maximum(kl, 0.0))
        return {
            f"OU@{eps:g}": bootstrap_mean(np.concatenate(rows), derive(task.seed, "ou", str(eps)))
            for eps, rows in values.items()
        }


def input_signs(task: AuditTask, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Sign of the loss's gradient with respect to every floating input, by name.

    Raises:
        NotApplicable: No input is a floating tensor (tokens have no neighbourhood).
    """
    import torch
    import torch.nn.functional as F

    from stable_forgetting.common.data.batch import Batch as Samples

    floating = {
        k: v.clone().requires_grad_() for k, v in batch.inputs.items() if v.is_floating_point()
    }
    if not floating:
        raise NotApplicable("no floating-point input to perturb")
    with torch.enable_grad():
        probe = Samples({**batch.inputs, **floating}, batch.labels, batch.indices)
        logits = task.family.forward(model, probe).float()
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        grads = torch.autograd.grad(loss, list(floating.values()))
    return {name: grad.sign() for name, grad in zip(floating, grads, strict=True)}


def moved(batch: Batch, signs: dict[str, Tensor], eps: float) -> Batch:
    """The batch with every signed input moved by ``eps``."""
    from stable_forgetting.common.data.batch import Batch as Samples

    inputs = {k: v + eps * signs[k] if k in signs else v for k, v in batch.inputs.items()}
    return Samples(inputs, batch.labels, batch.indices)


def softmax_rows(task: AuditTask, model: nn.Module, batch: Batch) -> np.ndarray:
    """(N, C) float64 softmax."""
    import torch

    with torch.inference_mode():
        return task.family.forward(model, batch).double().softmax(dim=1).cpu().numpy()

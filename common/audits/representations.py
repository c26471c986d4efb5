"""Is the forgotten class still in the features, whatever the head says?

Features are what enters the classifier head.  A benchmark may give its own with a method
``features(model, batch) -> (N, d)``; else the head's linear layer is found by its patterns.

Over-unlearning looks the other way: what happened to retained classes close to what was forgotten.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stable_forgetting.common import data
from stable_forgetting.common.audits.base import (
    PERCENT,
    AuditInfo,
    AuditTask,
    Measure,
    Measures,
    ModelAudit,
    NotApplicable,
    TooFew,
)
from stable_forgetting.common.audits.intervals import bootstrap_mean, proportion, spread
from stable_forgetting.common.audits.pairs import over_retained
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.base.seeding import derive, hash_order
from stable_forgetting.common.measure.answers import kl_rows

if TYPE_CHECKING:
    from torch import Tensor, nn


def head_layer(model: nn.Module, patterns: Sequence[str], num_classes: int) -> nn.Module:
    """The last linear layer with ``num_classes`` outputs whose weight matches a head pattern.

    Raises:
        NotApplicable: There is none.
    """
    from torch import nn

    hits = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == num_classes
        and any(fnmatch.fnmatchcase(f"{name}.weight", pattern) for pattern in patterns)
    ]
    if not hits:
        raise NotApplicable(
            "no linear head with one output per class; give the benchmark features(model, batch)"
        )
    return hits[-1]


def collect_features(task: AuditTask, model: nn.Module, indices: np.ndarray) -> np.ndarray:
    """(N, d) float64 penultimate features, in the order of ``indices``.

    Raises:
        NotApplicable: The features are not one vector per sample.
    """
    import torch

    model.eval()
    caught: list[Tensor] = []
    rows: list[np.ndarray] = []
    hook: Any = nullcontext()
    if task.features is None:
        layer = head_layer(model, task.family.head, task.family.num_classes)
        hook = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with hook, torch.inference_mode():
        for batch in data.ordered_batches(task.source, indices, task.batch_size):
            if task.features is not None:
                caught.append(task.features(model, batch))
            else:
                task.family.forward(model, batch)
            values = caught.pop()
            if values.ndim != 2 or len(values) != len(batch):
                raise NotApplicable("the head does not read one vector per sample")
            rows.append(values.double().cpu().numpy())
    return np.concatenate(rows)


def per_class(task: AuditTask, indices: np.ndarray, count: int, *names: str | int) -> np.ndarray:
    """Up to ``count`` indices of every class, by hash order, sorted."""
    labels = task.labels(indices)
    chosen = []
    for label in np.unique(labels):
        members = indices[labels == label]
        order = hash_order(range(len(members)), task.seed, "audit", *names, int(label))
        chosen.append(members[order[:count]])
    return np.sort(np.concatenate(chosen))


def held_out(task: AuditTask) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Forget samples to learn from, and what is held out: ``forgotten``, ``retained`` if any.

    Held-out forgotten samples are ``test_forget`` and what ``test`` has of the forgotten classes;
    where there is neither, half of the forget set.

    Raises:
        NotApplicable: The forget set is not whole classes.
        TooFew: It is too small.
    """
    gone, parts = task.forgotten_classes(), task.split.parts
    if "test" not in parts:
        raise NotApplicable("no test samples")
    forget, test = parts["forget"], parts["test"]
    mixed = np.isin(task.labels(test), gone)
    forgotten = np.union1d(parts.get("test_forget", forget[:0]), test[mixed])
    if not len(forgotten):
        if len(forget) < 2:
            raise TooFew("too few forget samples to hold any out")
        half = task.draw("forget", len(forget) // 2, "held-out")
        forget, forgotten = half, np.setdiff1d(forget, half)
    kinds = {"forgotten": forgotten, "retained": test[~mixed]}
    return forget, {kind: indices for kind, indices in kinds.items() if len(indices)}


class LinearProbe(ModelAudit):
    """Linear separability of the forgotten classes in the penultimate features.

    Formula: multinomial logistic regression (L2, standardised features) on up to ``per_class``
    training samples of every class, forgotten ones included; accuracy on held-out samples of the
    forgotten (and, for scale, of the retained) classes.  Retrain's features separate unseen
    classes too: only a value above Retrain's is residual knowledge.
    Source: Alain and Bengio 2016 (arXiv 1610.01644), applied to forgotten classes.
    """

    info = AuditInfo(1, "minutes", "%", scenario="class")
    leaks: ClassVar[str] = "forgotten"

    class Config(Strict):
        """Config of the probe.

        Attributes:
            per_class: Training samples of each class.
            C: Inverse strength of the L2 penalty.
        """

        per_class: Count = 100
        C: Positive = 1.0

    def measure(self, task: AuditTask) -> Measures:
        """Held-out accuracy on forgotten and on retained classes, Clopper-Pearson."""
        from sklearn.linear_model import LogisticRegression

        forget, parts = held_out(task)
        pool = np.union1d(forget, task.split.parts["retain"])
        train = per_class(task, pool, self.config.per_class, "probe")
        model = task.load()
        x, y = collect_features(task, model, train), task.labels(train)
        center, scale = x.mean(axis=0), x.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        probe = LogisticRegression(C=self.config.C, max_iter=1000).fit((x - center) / scale, y)
        result: Measures = {}
        for name, part in parts.items():
            values = (collect_features(task, model, part) - center) / scale
            result[name] = proportion(probe.predict(values) == task.labels(part))
        return result


class Prototype(ModelAudit):
    """Prototypical relearning: class means of a few samples as the new classifier.

    Formula: c_k = mean of the unit-length features of ``shots`` training samples of class k,
    forgotten classes included; predict argmax_k cos(h(x), c_k); accuracy on held-out samples.
    No training at all.  The paper's own update of the head is not in our sources (abstract only).
    Source: Ha et al. 2026 (arXiv 2506.01318); nearest prototypes, Snell et al. 2017.
    """

    info = AuditInfo(1, "minutes", "%", scenario="class")
    leaks: ClassVar[str] = "forgotten"

    class Config(Strict):
        """Config of the attack.

        Attributes:
            shots: Samples per class that the attacker has.
            repeats: Draws of these samples.
        """

        shots: Count = 5
        repeats: Count = 5

    def measure(self, task: AuditTask) -> Measures:
        """Mean accuracy over the draws, with its range over them."""
        forget, parts = held_out(task)
        pool = np.union1d(forget, task.split.parts["retain"])
        model = task.load()
        tests = {
            name: (unit(collect_features(task, model, ids)), task.labels(ids))
            for name, ids in parts.items()
        }
        accuracies: dict[str, list[float]] = {name: [] for name in parts}
        for repeat in range(self.config.repeats):
            shots = per_class(task, pool, self.config.shots, "prototype", repeat)
            classes, centers = prototypes(collect_features(task, model, shots), task.labels(shots))
            for name, (x, y) in tests.items():
                guess = classes[(x @ centers.T).argmax(axis=1)]
                accuracies[name].append(100.0 * float(np.mean(guess == y)))
        result: Measures = {}
        for name, values in accuracies.items():
            low, high, interval = spread(values, "draws")
            n = len(parts[name])
            result[name] = Measure(
                sum(values) / len(values), low, high, interval, n, bounds=PERCENT
            )
        return result


def unit(x: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a zero row stays zero."""
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(length > 0, length, 1.0)


def prototypes(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((K,) classes, (K, d) unit prototypes) of (N, d) features with (N,) labels."""
    classes = np.unique(y)
    return classes, unit(np.stack([unit(x[y == label]).mean(axis=0) for label in classes]))


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
    leaks: ClassVar[str] = ""

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
        gone = task.forgotten_classes()
        indices = task.draw("forget", self.config.samples, "boundary")
        original, model = task.load_original().eval(), task.load().eval()
        values: dict[float, list[np.ndarray]] = {eps: [] for eps in self.config.eps}
        for batch in data.ordered_batches(task.source, indices, task.batch_size):
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


def input_signs(task: AuditTask, model: nn.Module, batch: data.Batch) -> dict[str, Tensor]:
    """Sign of the loss's gradient with respect to every floating input, by name.

    Raises:
        NotApplicable: No input is a floating tensor (tokens have no neighbourhood).
    """
    import torch
    import torch.nn.functional as F

    floating = {
        k: v.clone().requires_grad_() for k, v in batch.inputs.items() if v.is_floating_point()
    }
    if not floating:
        raise NotApplicable("no floating-point input to perturb")
    with torch.enable_grad():
        probe = data.Batch({**batch.inputs, **floating}, batch.labels, batch.indices)
        logits = task.family.forward(model, probe).float()
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        grads = torch.autograd.grad(loss, list(floating.values()))
    return {name: grad.sign() for name, grad in zip(floating, grads, strict=True)}


def moved(batch: data.Batch, signs: dict[str, Tensor], eps: float) -> data.Batch:
    """The batch with every signed input moved by ``eps``."""
    inputs = {k: v + eps * signs[k] if k in signs else v for k, v in batch.inputs.items()}
    return data.Batch(inputs, batch.labels, batch.indices)


def softmax_rows(task: AuditTask, model: nn.Module, batch: data.Batch) -> np.ndarray:
    """(N, C) float64 softmax."""
    import torch

    with torch.inference_mode():
        return task.family.forward(model, batch).double().softmax(dim=1).cpu().numpy()

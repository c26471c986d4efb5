"""Methods that change the classifier's head alone, in closed form: Linear Filtration, Newton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stable_forgetting.common import data
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError, DataError, Diverged
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import Tensor, nn

Filtration = Literal["normalization", "randomization", "zeroing", "naive"]


class LinearFiltration(UnlearningMethod):
    """Linear filtration: a linear map on the logits that hides the forgotten classes; no training.

    Formula: W <- F W, b <- F b, F = B A^-1; column c of A is the mean of Original's logits over all
    samples of class c, B is A without the rows of the forgotten classes, and their columns v become
        normalization:  v - mean(v) + the mean of all entries of the other columns
        randomization:  draws from N(0, 1)       zeroing:  0
        naive:          stay, so that F drops the rows and does nothing else
    A^-1 is the pseudo-inverse where A has none; classes without a sample stay as they are.  The
    published classifier is narrower afterwards; here a forgotten class keeps a row, the mean of the
    others' with ``margin`` taken off its bias, so that its probability is below exp(-margin).
    Source: Baumhauer et al. 2022 (arXiv 2002.02730); th-b/linear_filtration (filtration.py).
    """

    info = MethodInfo(
        1, "Baumhauer et al. 2022 (arXiv 2002.02730)", BOTH, scenarios=frozenset({"class"})
    )

    class Config(Strict):
        """Settings of linear filtration.

        Attributes:
            filtration: What the forgotten classes' mean logits become; ``normalization``, the
                code's default.
            margin: How far a forgotten logit lies below the mean of the others; 20 is ours.
        """

        filtration: Filtration = "normalization"
        margin: Positive = 20.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Maps the head's rows."""
        import torch

        config: Any = self.config
        head, theta, features, labels = _head(task, task.indices("forget", "retain"))
        gone = data.forgotten_classes(task.source, task.indices("forget"), task.indices("retain"))
        if not gone:
            raise DataError(
                "linear_filtration forgets whole classes, but all are retained; remove the row"
            )
        known = labels.unique()
        members = (labels.unsqueeze(1) == known).to(theta)
        means = theta[known] @ (features.mT @ members / members.sum(0))
        lost = [place for place, label in enumerate(known.tolist()) if label in gone]
        kept = [place for place in range(len(known)) if place not in lost]
        noise = torch.randn(len(kept), len(lost), generator=task.generator("filtration"))
        new = filtered(means, lost, config.filtration, noise.to(means)) @ theta[known]
        theta[known[kept]] = new
        theta[known[lost]] = new.mean(0)
        theta[known[lost], -1] -= config.margin
        _write(head, theta)
        return task.model


def filtered(means: Tensor, gone: Sequence[int], kind: Filtration, noise: Tensor) -> Tensor:
    """F (kept, C) of mean logits (C, C), one class a column; ``noise`` (kept, gone) may be used."""
    import torch

    kept = [label for label in range(len(means)) if label not in gone]
    if kind == "naive":
        dropped: Tensor = torch.eye(len(means)).to(means)[kept]
        return dropped
    target = means[kept]
    columns = target[:, gone]
    target[:, gone] = {
        "normalization": columns - columns.mean(0) + target[:, kept].mean(),
        "randomization": noise,
        "zeroing": torch.zeros_like(columns),
    }[kind]
    mapped: Tensor = target @ torch.linalg.pinv(means)
    return mapped


class NewtonRemoval(UnlearningMethod):
    """Newton removal: takes samples out of a linear head by one Newton step, on fixed features.

    Formula: theta <- theta + H^-1 (sum over D_f of grad l + n_f lambda theta), l the cross-entropy
    of softmax(theta [h, 1]), h Original's input of the head, H = sum over D_r of hess l + n_r
    lambda I, lambda = ``ridge`` mean ||[h, 1]||^2 over D_r; H^-1 by conjugate gradients (float64).
    From the minimum of the loss over D_f and D_r this is a Newton step to that over D_r.  The paper
    certifies it for features that never saw D_f and a head trained to its minimum under noise;
    neither holds here, so nothing is certified.  Its code takes one-versus-rest regression on
    features of norm 1, a sample at a time; here softmax, and all samples at once, as in the paper's
    batch form.  The less ``ridge``, the further a head goes that was trained without it: sweep 1e-3
    to 1e-1.
    Memory: (n_f + n_r) x d x 8 bytes.
    Source: Guo et al. 2020 (arXiv 1911.03030); facebookresearch/certified-removal
    (test_removal.py).
    """

    info = MethodInfo(1, "Guo et al. 2020 (arXiv 1911.03030)", BOTH, reading=True)

    class Config(Strict):
        """Settings of Newton removal.

        Attributes:
            ridge: Weight of the squared norm of theta per sample, as a multiple of the mean
                squared norm of the inputs; .01 is ours (2e-4, the code's on SVHN).
            iterations: Most steps of conjugate gradients; 500 is ours.
        """

        ridge: Positive = 0.01
        iterations: Count = 500

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Takes the one step."""
        import torch

        config: Any = self.config
        head, theta, gone, labels = _head(task, task.indices("forget"))
        kept = _head(task, task.indices("retain"))[2]
        residual = (gone @ theta.mT).softmax(1) - torch.eye(len(theta)).to(theta)[labels]
        decay = config.ridge * float(kept.square().sum(1).mean())
        pull = residual.mT @ gone + len(gone) * decay * theta
        shares = (kept @ theta.mT).softmax(1)

        def curvature(step: Tensor) -> Tensor:
            change = kept @ step.mT
            change = shares * (change - (shares * change).sum(1, keepdim=True))
            turned: Tensor = change.mT @ kept + len(kept) * decay * step
            return turned

        _write(head, theta + conjugate_gradients(curvature, pull, config.iterations))
        return task.model


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], target: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """x with ``product(x) = target``, for a symmetric positive definite product."""
    x: Tensor = target * 0
    residual = direction = target
    square, goal = target.square().sum(), tolerance**2 * target.square().sum()
    for _ in range(iterations):
        if bool(square <= goal):
            break
        moved = product(direction)
        length = square / (direction * moved).sum()
        x.add_(length * direction)
        residual = residual - length * moved
        before, square = square, residual.square().sum()
        direction = residual + square / before * direction
    return x


def _head(task: UnlearnTask, indices: Any) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """The head, [W, b] (C, d + 1) and inputs with a 1 behind (N, d + 1) in float64, labels (N,)."""
    import torch

    name = tools.head_name(task)
    head = task.model.get_submodule(name)
    if getattr(head, "bias", None) is None:
        raise ConfigError(f"this method needs a bias in {name}; choose another for this model")
    given, labels = tools.head_inputs(task, name, indices)
    features = given.double()
    theta = torch.cat([head.get_parameter("weight"), head.get_parameter("bias").unsqueeze(1)], 1)
    ones = torch.ones_like(features[:, :1])
    return head, theta.detach().double(), torch.cat([features, ones], 1), labels


def _write(head: nn.Module, theta: Tensor) -> None:
    if not bool(theta.isfinite().all()):
        raise Diverged(1, "the update is not finite")
    head.get_parameter("weight").data.copy_(theta[:, :-1])
    head.get_parameter("bias").data.copy_(theta[:, -1])

"""Methods that look at the space which a layer's inputs span: Kodge et al.'s SVD, and PGU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stable_forgetting.common import objectives
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, Length, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig, Optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn


class Kodge(UnlearningMethod):
    """Gradient-free class unlearning: takes out of the weights what forget inputs alone span.

    Formula: for each linear layer and convolution, with U, s the left singular vectors and values
    of its inputs at Original on ``samples`` of S, one column per position,
        M_S = U diag(l) U^T,   l_i = a_S r_i / ((a_S - 1) r_i + 1),   r_i = s_i^2 / sum_j s_j^2
        W <- W (I - (M_f - M_f M_r))^T
    for all layers at once.  The published code draws as many retain samples of each class, and
    10000 positions of a layer; here samples are drawn from the whole set, and all positions count.
    Memory: d x d x 8 bytes for each layer of d inputs; time: d^3, minutes on a CPU where d is 4608.
    Source: Kodge et al. 2024 (arXiv 2312.00761, TMLR); sangamesh-kodge/class_forgetting (main.py).
    """

    info = MethodInfo(
        1, "Kodge et al. 2024 (arXiv 2312.00761)", BOTH, scenarios=frozenset({"class"})
    )

    class Config(Strict):
        """Settings of the gradient-free method.

        Attributes:
            alpha_retain: How much of weak retain directions counts; 100, the code's.
            alpha_forget: The same of forget directions; 3, the code's.
            samples: Of each part that its space is measured on; 900, the code's.
            layers: Glob patterns of the layers that are changed; all of them.
        """

        alpha_retain: Positive = 100.0
        alpha_forget: Positive = 3.0
        samples: Count = 900
        layers: tuple[str, ...] = ("*",)

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Measures both spaces of every layer, then changes all weights."""
        import torch

        config: Any = self.config
        layers = tools.matrix_layers(task.model, config.layers)
        forget, retain = (
            tools.input_moments(task, layers, task.drawn(part, config.samples, "samples", part))
            for part in ("forget", "retain")
        )
        with torch.no_grad():
            for name, moment in forget.items():
                kept = importance(retain[name], config.alpha_retain)
                gone = importance(moment, config.alpha_forget)
                weight = layers[name].get_parameter("weight")
                matrix = weight.flatten(1).double()
                weight.copy_((matrix - matrix @ (gone - gone @ kept).mT).view_as(weight))
        return task.model


def importance(moment: Tensor, alpha: float) -> Tensor:
    """U diag(alpha r / ((alpha - 1) r + 1)) U^T of a moment matrix (d, d), r the shares."""
    values, vectors = tools.spectrum(moment)
    shares = values / values.sum().clamp_min(1e-300)  # a layer may be given nothing but zeros
    scaled: Tensor = (vectors * (alpha * shares / ((alpha - 1) * shares + 1))) @ vectors.mT
    return scaled


class PGU(UnlearningMethod):
    """PGU: forgets by steps that leave every layer's answers to retain inputs alone.

    Formula: minimise mean [-log(1 + offset - p_y) - w H(p)] on B_f, p the softmax and H its
    entropy; each gradient G of a layer's weight becomes G (I - U U^T), U the first left singular
    vectors of its inputs on D_r at Original, one column per position, as few as hold more than
    ``retained`` of the sum of the singular values. Here the whole way from Original is projected
    after each step, which is the same under SGD and holds under any optimizer. Biases, norms and
    embeddings stay, but for those that are tied to a trained head; batch statistics, which the code
    holds, move. The published rate falls from .05 to .01 along an exponential, until forget data
    look like validation data. No adapters: their factors have no such projection.
    Memory: d x d x 8 bytes for each layer of d inputs.
    Source: Hoang et al., WACV 2024 (arXiv 2312.04095); hnanhtuan/projected_gradient_unlearning
    (unlearn_class.py).
    """

    info = MethodInfo(1, "PGU, Hoang et al. 2024 (arXiv 2312.04095)", BOTH)

    class Config(FitConfig):
        """Settings of PGU.

        Attributes:
            retained: Share of the singular values that the protected space holds; .95, the code's
                on CIFAR-10 with a small VGG (.9 with an AllCNN).
            offset: Keeps the loss bounded; .05, the code's.
            entropy_weight: w; .2, the code's.
            layers: Glob patterns of the layers that are trained; all of them.
        """

        epochs: Count | None = 5
        batch_size: Count = 64
        optimizer: Optimizer = "sgd"
        lr: Positive = 0.05
        retained: Annotated[float, Field(gt=0, lt=1)] = 0.95
        offset: Positive = 0.05
        entropy_weight: NonNegative = 0.2
        layers: tuple[str, ...] = ("*",)

    @classmethod
    def within(cls, config: Any, unit: Length, amount: int) -> dict[str, Any]:
        """Its training reads forget data alone, so passes over the retain set are no length."""
        return {unit: amount} if unit == "steps" else {}

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Measures the retain spaces, then trains off them."""
        config: Any = self.config
        layers = tools.matrix_layers(task.model, config.layers)
        moments = tools.input_moments(task, layers, task.indices("retain"))
        spaces = {name: core_space(m, config.retained) for name, m in moments.items()}
        task.model.requires_grad_(False)
        weights = {name: layers[name].get_parameter("weight") for name in spaces}
        start = {name: w.requires_grad_().detach().clone() for name, w in weights.items()}

        def project(model: nn.Module) -> None:
            for name, weight in weights.items():
                moved = (weight.detach() - start[name]).flatten(1)
                space = spaces[name].to(moved)
                moved = moved - (moved @ space) @ space.mT
                weight.data.copy_(start[name] + moved.view_as(weight))

        engine = FitConfig.of(config)
        term = objectives.Mean(self._loss, engine.average)
        task.train(objectives.ForgetRetain(term), engine, after_step=[project])
        return task.model

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        config: Any = self.config
        return tools.less_certain(logits, labels, config.offset, config.entropy_weight)


def core_space(moment: Tensor, share: float) -> Tensor:
    """(d, k) first eigenvectors of a moment matrix, the fewest whose roots exceed a share."""
    values, vectors = tools.spectrum(moment)
    roots = values.sqrt()
    held = roots.cpu().cumsum(0) / roots.cpu().sum()  # cumsum: not deterministic on CUDA
    return vectors[:, : int((held <= share).sum()) + 1]

"""Methods that train on retain data alone: the last blocks, a sparse model, a distant one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stable_forgetting.common import objectives
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Amount, Count, NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import RETAIN, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig, total_steps

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stable_forgetting.common.train.protocols import AfterStep

PAPER = "Goel et al. 2022 (arXiv 2201.06640)"


def last_parameters(
    names: Sequence[str], k: int, *, blocks: str | None, head: Sequence[str]
) -> list[str]:
    """Names of the parameters in the last ``k`` blocks and of all that come after the blocks.

    Args:
        names: All parameter names, in the model's order.
        k: Number of blocks; 0 is what comes after them only (final norm and head).
        blocks: Name of the list of blocks, such as ``blocks``, or ``stages.2.blocks`` of a list
            inside another; the outermost numbered list with most parameters when absent.  Lists
            that differ in a number behind their name (``layer1`` to ``layer4`` of a ResNet) are one
            then.
        head: Patterns of head parameters; always chosen, wherever they are registered.

    Raises:
        ConfigError: There is no such list, or it is shorter than ``k``.
    """
    called = ".+?" if blocks is None else f"{re.escape(blocks)}|.+?"
    numbered: dict[str, list[int]] = {}
    for name in names:
        if block := re.match(rf"({called})\.(\d+)\.", name):
            numbered.setdefault(block[1], []).append(int(block[2]))
    if not numbered or (blocks is not None and blocks not in numbered):
        lists = ", ".join(numbered) or "none"
        raise ConfigError(
            f"blocks: {blocks} is no numbered list of blocks; this model has: {lists}"
        )
    stages: dict[str, list[str]] = {}
    for prefix in numbered:
        stages.setdefault(prefix.rstrip("0123456789"), []).append(prefix)
    largest = max(stages.values(), key=lambda lists: sum(len(numbered[prefix]) for prefix in lists))
    chosen = largest if blocks is None else [blocks]
    ids = [f"{prefix}.{number}." for prefix in chosen for number in sorted(set(numbered[prefix]))]
    if k > len(ids):
        some = ", ".join(chosen)
        raise ConfigError(f"k: {k} is more than the {len(ids)} blocks of {some}; take fewer")
    inside = [name.startswith(tuple(f"{prefix}." for prefix in chosen)) for name in names]
    end = len(names) - inside[::-1].index(True)
    last = tuple(ids[len(ids) - k :])
    return [
        name
        for place, name in enumerate(names)
        if place >= end
        or name.startswith(last)
        or any(fnmatch.fnmatch(name, pattern) for pattern in head)
    ]


class RepairConfig(FitConfig):
    """A few passes over retain data."""

    epochs: Count | None = 3
    batch_size: Count = 64
    lr: Positive = 1e-3


def repaired(
    task: UnlearnTask,
    config: FitConfig,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    after_step: Sequence[AfterStep] = (),
) -> nn.Module:
    """The task's model, trained on retain data, and on a penalty where given."""
    engine = FitConfig.of(config)
    objective = objectives.CrossEntropy("retain", engine.average)
    task.train(objective, engine, penalty=penalty, after_step=after_step)
    return task.model


class CFk(UnlearningMethod):
    """CF-k: fine-tune the last k blocks on retain, freeze the rest, count on forgetting.

    Formula: minimise CE(B_r) over the last ``k`` blocks, the final norm and the head; ``k: 0``
    trains norm and head only.  Never reads forget data.  With ``k: 1`` these are 24 % of the
    weights of a small ViT of four blocks, and 8 % of those of a ViT-S of twelve.  The stages of a
    ResNet (``layer1`` to ``layer4``) are one list of blocks.  Batch normalisation in frozen blocks
    keeps its running statistics, in training too.

    Source: Goel et al. 2022, arXiv 2201.06640; the ERASURE repository (SGD, lr 0.01, weight decay
    0.1, 10 epochs).  Sweep k in {0, 1, 2, 4} and lr.
    """

    info = MethodInfo(2, PAPER, RETAIN)

    class Config(RepairConfig):
        """Settings of CF-k.

        Attributes:
            k: Blocks at the end that are trained; 1, the least with a block in it.
            blocks: Name of the list of blocks, such as ``stages.2.blocks``; the outermost numbered
                list with most parameters when absent.
        """

        epochs: Count | None = 5
        lr: Positive = 3e-4
        weight_decay: NonNegative = 0.1
        k: Amount = 1
        blocks: str | None = None

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Trains the end of the network on retain."""
        config: Any = self.config
        names = [name for name, _ in task.model.named_parameters()]
        chosen = last_parameters(names, config.k, blocks=config.blocks, head=task.family.head)
        self._start(task, chosen)
        for name, parameter in task.model.named_parameters():
            parameter.requires_grad_(name in chosen)
        with tools.frozen_statistics(task.model):
            return repaired(task, config)

    def _start(self, task: UnlearnTask, chosen: Sequence[str]) -> None:
        """CF-k starts from Original's weights."""


class EUk(CFk):
    """EU-k, exact unlearning of the last k blocks: re-initialise these, train them on retain.

    Formula: as CF-k, but the last ``k`` blocks, the final norm and the head first go back to what
    they were before Original saw data (with pretrained weights: those; the head anew).  What the
    frozen blocks learnt from the forget set stays.  Never reads forget data.  The share of the
    weights is CF-k's: with ``k: 1`` 24 % of a ViT of four blocks, 8 % of a ViT-S of twelve.

    Source: Goel et al. 2022, arXiv 2201.06640; the ERASURE repository (SGD, lr 0.01, weight decay
    0.1, 10 epochs).  Sweep k in {0, 1, 2, 4} and lr.
    """

    info = MethodInfo(2, PAPER, RETAIN | {"initial"})

    class Config(CFk.Config):
        epochs: Count | None = 10
        lr: Positive = 1e-3

    def _start(self, task: UnlearnTask, chosen: Sequence[str]) -> None:
        import torch

        model, layers = task.fresh_model(), {name.rpartition(".")[0] for name in chosen}
        fresh = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, parameter in task.model.named_parameters():
                if name in chosen:
                    parameter.copy_(fresh[name])
            for name, buffer in task.model.named_buffers():
                if name.rpartition(".")[0] in layers:
                    buffer.copy_(fresh[name])


class L1Sparse(UnlearningMethod):
    """l1-sparse: keep training on retain under an l1 penalty that fades out.

    Formula: minimise CE(B_r) + a_e ||theta||_1 with a_e = a max(0, 1 - e / E) in epoch e of E (from
    0); the norm runs over all parameters, norms and biases included.  All parameters are trained.

    Source: Jia et al. 2023, arXiv 2304.04934; the Unlearn-Sparse repository (there SGD, lr 0.01,
    10 epochs, no epochs without the penalty; ``a`` from 1e-6 to 1e-4).  Deviation: AdamW, under
    which ``a`` is another quantity.  Where CE has no gradient left, Adam makes a whole step of any
    penalty, and beyond some ``a`` a larger one changes nothing.  A small ViT on digits, default
    length and rate: the norm falls by 0.5, 5, 15 and 17 % for ``a`` 1e-6, 1e-5, 1e-4 and 1e-3.
    So sweep ``a`` from 1e-7 to 1e-4, and lr.
    """

    info = MethodInfo(1, "Jia et al. 2023 (arXiv 2304.04934)", RETAIN)

    class Config(RepairConfig):
        """Settings of l1-sparse.

        Attributes:
            a: Weight of the l1 norm in the first epoch; 1e-5, the middle of the published range.
        """

        lr: Positive = 1e-4
        a: NonNegative = 1e-5

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes with the fading penalty."""
        import torch

        config: Any = self.config
        engine = FitConfig.of(config)
        loader = task.loaders(["retain"], engine)["retain"]
        batches = total_steps(engine, {"retain": loader}) * engine.accumulation
        epochs = max(1, round(batches / loader.batches_per_epoch))

        def penalty(model: nn.Module) -> torch.Tensor:
            weight: float = config.a * max(0.0, 1 - loader.epoch / epochs)
            norm = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
            return weight * norm

        objective = objectives.CrossEntropy("retain", engine.average)
        task.fit(task.model, objective, {"retain": loader}, engine, penalty=penalty)
        return task.model


EPS = 1e-8
"""Below the root: the distance has a gradient where it is 0."""


class WeightDistance(UnlearningMethod):
    """Weight Dist Reg: keep training on retain while the weights go away from Original's.

    Formula: minimise CE(B_r) - a sqrt(mean((theta - theta_0)^2) + 1e-8); the mean runs over all
    parameters, norms and biases included, and theta_0 is Original.  Never reads forget data: what
    is not trained on is what gets lost.  It is the opposite of a bound on ||dW||: the distance to
    Original is what predicts resistance to relearning.

    Source: Siddiqui et al. 2025, arXiv 2505.22310 (there ``weight_dist_reg``, a = 1; its
    ``weight_distortion`` is noise on the weights instead); the vision_relearning repository.
    Deviation: AdamW's rates here suit small models from scratch; sweep lr from 1e-4 to 1e-2, and a.
    """

    info = MethodInfo(1, "Siddiqui et al. 2025 (arXiv 2505.22310)", RETAIN)

    class Config(RepairConfig):
        """Settings of Weight Dist Reg.

        Attributes:
            a: Weight of the distance; 1, as published.
        """

        a: NonNegative = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes with the distance as a reward."""
        start = [parameter.detach().clone() for parameter in task.model.parameters()]
        return repaired(task, self.config, lambda model: -self.config.a * distance(model, start))


def distance(model: nn.Module, start: list[Tensor]) -> Tensor:
    """sqrt(mean((theta - theta_0)^2) + eps) over all parameters."""
    import torch

    parameters = list(model.parameters())
    squares = [(p - s).square().sum() for p, s in zip(parameters, start, strict=True)]
    return (torch.stack(squares).sum() / sum(p.numel() for p in parameters) + EPS).sqrt()


class WeightDistortion(UnlearningMethod):
    """Weight distortion: noise on all weights, then keep training on retain.

    Formula: theta <- theta_0 + sigma sd(theta_0) n, n standard normal, sd that of each tensor; then
    minimise CE(B_r).  Never reads forget data: what is not trained on does not come back.
    Source: Siddiqui et al. 2025, arXiv 2505.22310 (``weight_distortion``; there sigma .02 in units
    of the weights); the vision_relearning repository.
    """

    info = MethodInfo(1, "Siddiqui et al. 2025 (arXiv 2505.22310)", RETAIN)

    class Config(RepairConfig):
        """Settings of weight distortion.

        Attributes:
            sigma: Size of the noise, in standard deviations of each tensor; .3 is ours.
        """

        sigma: NonNegative = 0.3

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Adds the noise, then fine-tunes."""
        import torch

        stream = task.generator("distortion")
        with torch.no_grad():
            for parameter in (p for p in task.model.parameters() if p.requires_grad):
                noise = torch.randn(parameter.shape, generator=stream).to(parameter)
                size = parameter.std() if parameter.numel() > 1 else parameter.abs().sum()
                parameter.add_(self.config.sigma * size * noise)
        return repaired(task, self.config)


class WeightNegation(UnlearningMethod):
    """NoT: the sign of the first layers' weights is turned, then keep training on retain.

    Formula: W <- -W for the first ``layers`` weights of two or more dimensions; then minimise
    CE(B_r).  Never reads forget data.  The embeddings of a text model are its first weight, and a
    head that is tied to them turns with them.
    Source: Khalil et al. 2025 (arXiv 2503.05657, CVPR), NoT, there for federated learning.
    """

    info = MethodInfo(1, "NoT, Khalil et al. 2025 (arXiv 2503.05657)", RETAIN)

    class Config(RepairConfig):
        """Settings of NoT.

        Attributes:
            layers: Weights that are negated, from the input on; 1, as in the source.
        """

        layers: Count = 1

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Negates, then fine-tunes."""
        import torch

        weights = [
            parameter
            for name, parameter in task.model.named_parameters()
            if parameter.ndim >= 2 and name.endswith("weight") and parameter.requires_grad
        ]
        with torch.no_grad():
            for weight in weights[: self.config.layers]:
                weight.neg_()
        return repaired(task, self.config)

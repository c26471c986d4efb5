"""Methods that choose weights by their importance to the forget set: SalUn, SFR-on, SSD."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common import data
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, FORGET, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.gradient import AdaptedMethod, ShortConfig
from stable_forgetting.common.methods.relabelling import RandomLabel
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import total_steps

if TYPE_CHECKING:
    from torch import Tensor, nn


class SalUn(RandomLabel):
    """SalUn: random-label unlearning of the most salient weights; all others stay Original's.

    Formula:
        g = |sum over batches of D_f of grad CE(theta0)|     eval mode, ALL trained parameters
        m = 1 on the global top share ``density`` of g, by one threshold; ties are kept
        random-label training (``mode``: mixed or sequential); each step's gradient times m
        after every step: theta = m theta + (1 - m) theta0

    The last line is the point: weight decay and momentum move weights without a gradient, and the
    repository's masked weights drifted until 2026.  The mask covers norms, biases and embeddings.

    With ``adapter`` (not in the paper) the factors are masked instead: A by its saliency; B, whose
    gradient is zero while A = 0, ranks nothing and stays free.

    Source: Fan et al. 2024, arXiv 2310.12508; its repository (Classification), whose settings for a
    CNN on CIFAR-10 are the preset ``repository_cnn``.  Sweep ``density`` in {0.1, ..., 1} and lr.
    """

    info = MethodInfo(2, "Fan et al. 2024 (arXiv 2310.12508)", BOTH)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "repository_cnn": {
            "optimizer": "sgd",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "lr": 0.013,
            "schedule": "constant",
            "epochs": 10,
            "batch_size": 256,
            "mode": "sequential",
        },
    }

    class Config(ShortConfig, RandomLabel.Config):
        """Settings of SalUn.

        Attributes:
            density: Share of the weights that are trained, the most salient ones; .5, the middle of
                the sweep.
            saliency_batch_size: Forget samples per batch while weights are ranked; 64, as in
                training.
        """

        density: Annotated[float, Field(gt=0, le=1)] = 0.5
        saliency_batch_size: Count = 64

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Ranks the weights, then trains the chosen ones on random labels."""
        self._attach(task)
        batches = tools.one_pass(task, "forget", batch_size=self.config.saliency_batch_size)
        saliency = {name: g.abs() for name, g in tools.summed_gradients(task, batches).items()}
        weights = tools.MaskedWeights(task.model, tools.top_share(saliency, self.config.density))
        with weights.gradients():
            self._train(task, weights.restore)
        return task.model


class SFRon(AdaptedMethod):
    """SFR-on: forget steps on the weights that forget data own, each followed by retain steps.

    Formula: F_S = mean over batches of S of (grad CE)^2 at Original, in eval mode,
        m = F_f >= ``threshold`` F_r                               entry by entry
        repeat: step on -alpha_t sum_i w_i CE_i over B_f, gradient times m,
                    w_i = CE_i^-lam / sum_j CE_j^-lam (no gradient),  alpha_t = alpha * cosine to 0
                ``retain_steps`` steps on CE(B_r), unmasked
    One optimizer for both.  The gradient norm is clipped at ``max_grad_norm`` in every step (the
    repository clips forget steps only).  Its interpolation of slow weights is off in the released
    configs (weight 1) and left out here.

    Of the newest methods this one is here because it is published with code (NeurIPS 2024), with a
    transformer (Swin-T) among its settings, and sets the ViT defaults that others are run with.

    Source: Huang et al. 2024, arXiv 2409.19732; the Unified-Unlearning-w-Remain-Geometry
    repository (``repository_swin``: its settings for Swin-T on Tiny-ImageNet; ``repository_cnn``:
    for a CNN on CIFAR-10).  The default's alpha 1 is ours, for small models from scratch, and far
    below the published 500 and 25; suites have the preset as a row of its own.  Sweep alpha and lr.
    """

    info = MethodInfo(1, "Huang et al. 2024 (arXiv 2409.19732)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "repository_swin": {"lr": 2e-5, "steps": 1000, "alpha": 500.0, "batch_size": 128},
        "repository_cnn": {
            "optimizer": "sgd",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "lr": 0.01,
            "steps": 1800,
            "alpha": 25.0,
            "retain_steps": 5,
            "batch_size": 128,
        },
    }

    class Config(ShortConfig):
        """Settings of SFR-on.

        Attributes:
            alpha: Weight of the ascent at its start; 1 is ours, for small models (published: 25 and
                500).
            lam: How much a sample's weight falls with its loss; .5 of the loss's power, 0 for equal
                weights.
            threshold: Least ratio of forget to retain importance of a weight that ascends; 1: no
                less.
            retain_steps: Steps on retain after each forget step; 1, as for the published Swin-T.
        """

        alpha: Positive = 1.0
        lam: NonNegative = 0.5
        threshold: NonNegative = 1.0
        retain_steps: Count = 1
        max_grad_norm: Positive | None = 7.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Masks, then alternates."""
        config: Any = self.config
        self._attach(task)
        engine = config.engine()
        streams: Mapping[str, data.Loader] = task.loaders(["forget", "retain"], engine)
        order = [streams["forget"], *[streams["retain"]] * config.retain_steps]
        turns = tools.Interleaved(order, repeat=engine.accumulation)
        batches = total_steps(engine, {"turns": turns}) * engine.accumulation
        objective = tools.AlternatingAscent(turns, batches, alpha=config.alpha, lam=config.lam)
        size = config.batch_size
        forget = tools.mean_gradients(task, "forget", batch_size=size, power=2)
        retain = tools.mean_gradients(task, "retain", batch_size=size, power=2)
        masks = {name: forget[name] >= config.threshold * retain[name] for name in forget}
        weights = tools.MaskedWeights(task.model, masks)
        with weights.gradients(lambda: objective.forgetting):
            task.fit(task.model, objective, {"turns": turns}, engine, **self._constraints())
        return task.model


class SelectiveSynapticDampening(UnlearningMethod):
    """SSD: dampen weights by their importance to forget against that to all; no training.

    Formula: I_S = mean over batches of S of (grad CE)^2, in eval mode, for S = D_f and
    S = D = D_f u D_r.  Where I_f > alpha I_D: theta <- theta * min(lam I_D / I_f, 1).

    Source: Foster et al. 2024, arXiv 2308.07707; its repository (lam 1; alpha 10 for random
    forgetting and CNNs; for ViTs 5 for whole classes, 25 for subclasses: the presets).

    Which samples share a batch is part of the method, as a batch's mean gradient is squared: size
    and order.  For whole classes the repository reads retain class by class, then forget, and its
    alpha belongs to that: batches of one class make I_D several times larger than mixed ones.
    """

    info = MethodInfo(2, "Foster et al. 2024 (arXiv 2308.07707)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "class": {"alpha": 5.0, "order": "class"},
        "subclass": {"alpha": 25.0},
    }

    class Config(Strict):
        """Settings of SSD.

        Attributes:
            alpha: Ratio of importances from which a weight is dampened; 10, published for random
                forgetting.
            lam: How strongly; 1, as published.
            batch_size: Samples whose mean gradient is squared, which changes the importances; 64,
                as published.
            order: Of the retain samples: shuffled, or class by class as published for whole
                classes.
        """

        alpha: Positive = 10.0
        lam: Positive = 1.0
        batch_size: Count = 64
        order: Literal["shuffled", "class"] = "shuffled"

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Two passes for importances, then one multiplication."""
        import torch

        config: Any = self.config
        forget = self.importance(task, "forget")
        by_class = config.order == "class"
        everything = self.importance(task, "forget", "retain", by_class=by_class)
        with torch.no_grad():
            parameters = dict(task.model.named_parameters())
            for name, mine in forget.items():
                all_, parameter = everything[name], parameters[name]
                factor = (config.lam * all_ / mine.clamp_min(1e-30)).clamp_max(1.0)
                parameter.mul_(torch.where(mine > config.alpha * all_, factor, 1.0))
        return task.model

    def importance(
        self, task: UnlearnTask, *parts: str, by_class: bool = False
    ) -> Mapping[str, Tensor]:
        """Name -> importance of a tensor's entries to the parts."""
        size = self.config.batch_size
        return tools.mean_gradients(task, *parts, batch_size=size, by_class=by_class, power=2)


class RepSelect(UnlearningMethod):
    """RepSelect: one gradient of ascent on forget, without the directions that all texts share.

    Formula: theta' = theta after one pass of SGD descent on forget, which elicits what is hidden;
    G = sum over batches of -grad CE(B_f) at theta', for the weights of MLPs; of G's first
    ``components`` singular vectors each one's share is divided by s_i / s_min, on both sides; W <-
    W - lr G.  The source elicits through LoRA, here all weights are moved, and put back.
    Source: RepSelect 2026 (arXiv 2606.17168); filyp/RepSelect (repselect_simple.py, "soft").
    """

    info = MethodInfo(1, "RepSelect 2026 (arXiv 2606.17168)", FORGET, reading=True)

    class Config(Strict):
        """Settings of RepSelect.

        Attributes:
            lr: Length of the step along the summed gradient; .03 is ours, for small models.
            elicit_lr: Rate of the descent before; .01 is ours.
            components: Directions that are damped; 8 is ours.
            batch_size: Forget samples per batch.
        """

        lr: Positive = 0.03
        elicit_lr: NonNegative = 0.01
        components: Count = 8
        batch_size: Count = 64

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Elicits, measures the gradient, puts the weights back, takes the damped step."""
        import torch

        config = self.config
        parameters = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
        patterns = [f"{pattern}.weight" for pattern in task.family.targets.get("mlp", ())]
        chosen = [n for n in parameters if any(fnmatch.fnmatch(n, p) for p in patterns)]
        if not chosen:
            raise ConfigError(
                "repselect moves the weights of MLPs, and none of this model's are known as such; "
                "choose another method"
            )
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for batch in tools.one_pass(task, "forget", batch_size=config.batch_size):
            for name, gradient in tools.summed_gradients(task, [batch]).items():
                parameters[name].data.sub_(config.elicit_lr * gradient)
        batches = tools.one_pass(task, "forget", batch_size=config.batch_size)
        raised = tools.summed_gradients(task, batches)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name])
            for name in chosen:
                step = tools.damped(-raised[name].flatten(1), config.components)
                parameters[name].sub_(config.lr * step.view_as(parameters[name]))
        return task.model

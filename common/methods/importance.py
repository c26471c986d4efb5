"""Methods that choose weights without a loss, by two losses, or by size: LFSSD, WAGLE, pruning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, RETAIN, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.finetuning import RepairConfig, repaired
from stable_forgetting.common.methods.saliency import SelectiveSynapticDampening
from stable_forgetting.common.methods.simple import GradientDifference
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import Tensor, nn


class LossFreeDampening(SelectiveSynapticDampening):
    """LFSSD: SSD with importances that need no label.

    Formula: I_S = mean over batches of S of |grad mean ||z||^2|, z the logits, in eval mode, for
    S = D_f and S = D = D_f u D_r.  Where I_f > alpha I_D: theta <- theta * min(lam I_D / I_f, 1).
    On text the positions count that have a label.
    Source: Foster et al. 2024 (arXiv 2402.19308, ICLR tiny papers); if-loops/selective-synaptic-
    dampening (README: the two lines of ``calc_importance`` that change).
    """

    info = MethodInfo(1, "LFSSD, Foster et al. 2024 (arXiv 2402.19308)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    class Config(SelectiveSynapticDampening.Config):
        """Settings of LFSSD.

        Attributes:
            alpha: Ratio of importances from which a weight is dampened; 3 is ours, about the root
                of SSD's 10, as these importances are no squares.
        """

        alpha: Positive = 3.0

    def importance(
        self, task: UnlearnTask, *parts: str, by_class: bool = False
    ) -> Mapping[str, Tensor]:
        """By the squared length of the logits."""
        return tools.mean_gradients(
            task,
            *parts,
            batch_size=self.config.batch_size,
            by_class=by_class,
            power=1,
            loss=tools.squared_norm,
        )


class WAGLE(GradientDifference):
    """WAGLE: gradient difference on the weights whose removal would move the forget loss most.

    Formula: s = |g_f (theta_0 - g_r / gamma)|, entry by entry, g_S = mean over batches of D_S of
    grad CE(theta_0), in eval mode; m = 1 on the global top share ``density`` of s; minimise
    CE(B_r) - lambda CE(B_f), each step's gradient times m, all other weights stay Original's.
    g_r / gamma is how training on D_r would answer, gamma in the place of its Hessian's diagonal.
    The published code adds gradients up, those on D_r over as many batches as D_f has.
    Source: Jia et al. 2024 (arXiv 2410.17509, NeurIPS); OPTML-Group/WAGLE (generate_mask.py,
    ``snip_advanced``; there with NPO and preference optimisation, too).
    """

    info = MethodInfo(1, "WAGLE, Jia et al. 2024 (arXiv 2410.17509)", BOTH)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    class Config(GradientDifference.Config):
        """Settings of WAGLE.

        Attributes:
            density: Share of the weights that are trained, those of the largest scores; .95, the
                repository's for gradient difference on TOFU.
            gamma: Diagonal of the retain loss's Hessian; 1e-6, the repository's on TOFU.
            score_batch_size: Samples per batch while weights are ranked; 64 is ours.
        """

        density: Annotated[float, Field(gt=0, le=1)] = 0.95
        gamma: Positive = 1e-6
        score_batch_size: Count = 64

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Ranks the weights, then trains the chosen ones."""
        self._attach(task)
        weights = tools.MaskedWeights(
            task.model, tools.top_share(self.scores(task), self.config.density)
        )
        objective, engine = self.prepare(task), self.config.engine()
        with weights.gradients():
            task.train(objective, engine, **self._constraints(weights.restore))
        return task.model

    def scores(self, task: UnlearnTask) -> dict[str, Tensor]:
        """Name -> score of a tensor's entries."""
        size, parameters = self.config.score_batch_size, dict(task.model.named_parameters())
        forget = tools.mean_gradients(task, "forget", batch_size=size)
        retain = tools.mean_gradients(task, "retain", batch_size=size)
        return {
            name: (g * (parameters[name].detach() - retain[name] / self.config.gamma)).abs()
            for name, g in forget.items()
        }


class PruneFirst(UnlearningMethod):
    """Prune first: set the smallest weights to zero for good, then keep training on retain.

    Formula: m = 0 on the global share ``sparsity`` of the smallest |theta| among matrices and
    kernels, embeddings left out; theta <- m theta; then minimise CE(B_r), each step's gradient
    times m.  Never reads forget data.  The source trains the pruned model on all data again before
    it forgets, and prunes convolutions alone.
    Source: Jia et al. 2023 (arXiv 2304.04934, NeurIPS), one-shot magnitude pruning and FT;
    OPTML-Group/Unlearn-Sparse (pruner/omp.py, unlearn/FT.py).
    """

    info = MethodInfo(1, "Jia et al. 2023 (arXiv 2304.04934), prune first", RETAIN, reading=True)

    class Config(RepairConfig):
        """Settings of prune first.

        Attributes:
            sparsity: Share of the weights that become zero; .5 is ours (published: up to .95, with
                training on all data after it).
        """

        sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Prunes, then fine-tunes what is left."""
        import torch

        kinds = dict(task.model.named_modules())
        sizes = {
            name: parameter.detach().abs()
            for name, parameter in task.model.named_parameters()
            if parameter.ndim >= 2
            and name.endswith("weight")
            and not isinstance(kinds[name.rpartition(".")[0]], torch.nn.Embedding)
        }
        masks = tools.top_share(sizes, 1 - self.config.sparsity)
        with torch.no_grad():
            for name, parameter in task.model.named_parameters():
                if name in masks:
                    parameter.mul_(masks[name])
        weights = tools.MaskedWeights(task.model, masks)
        with weights.gradients():
            return repaired(task, self.config, after_step=[weights.restore])

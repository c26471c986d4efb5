"""NegGrad+: one weighted sum of descent and ascent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import GradientMethod, ShortConfig
from stable_forgetting.common.methods.simple import BOTH

if TYPE_CHECKING:
    from stable_forgetting.common.objectives.objectives import Objective


class NegGradPlus(GradientMethod):
    """NegGrad+: descend on retain and ascend on forget with weights that add up to one.

    Formula: minimise a CE(B_r) - (1 - a) CE(B_f); an epoch is a pass over D_r, D_f is cycled.
    It is gradient difference with lambda = (1 - a) / a and a rate scaled by a.

    Source: Kurmanji et al. 2023, arXiv 2302.09880; the SCRUB and RUM repositories.  Sweep ``a`` in
    0.9 to 0.999.
    """

    info = MethodInfo(1, "Kurmanji et al. 2023 (arXiv 2302.09880)", BOTH)

    class Config(ShortConfig):
        """Settings of NegGrad+.

        Attributes:
            a: Weight of the retain loss, 1 - a that of the forget loss; .95 is inside the published
                sweep.
        """

        a: Annotated[float, Field(gt=0, lt=1)] = 0.95

    def objective(self) -> Objective:
        """Both terms, in one forward."""
        from stable_forgetting.common.objectives.objectives import gradient_difference

        return gradient_difference(self.config.a, 1 - self.config.a)

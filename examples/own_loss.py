"""A forget loss of one's own: a plugin, which any suite may name."""

import math

from stable_forgetting.common import (
    METHODS,
    ForgetRetainMethod,
    Mean,
    MethodInfo,
    RetainConfig,
    cross_entropy,
)


def above_chance(logits, labels):
    """max(0, log(C p_y)) of each position: zero where the label is as unlikely as a guess."""
    return (math.log(logits.shape[-1]) - cross_entropy(logits, labels)).clamp_min(0)


@METHODS.register("down_to_chance")
class DownToChance(ForgetRetainMethod):
    """Ascent that ends at guessing: the forgotten label is to be no likelier than chance.

    Formula: minimise w_f mean max(0, log(C p_y)) on B_f + w_r CE(B_r); C classes or tokens.
    Source: this example.
    """

    info = MethodInfo(1, "this example", frozenset({"forget", "retain"}))

    class Config(RetainConfig):
        """Rates of the example's suite."""

        lr: float = 3e-4

    def forget_term(self, task):
        """Averaged over samples or tokens, as the config says."""
        return Mean(above_chance, self.over)

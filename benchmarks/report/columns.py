"""What the columns of reports show that are no metric: one sentence each, said once."""

from __future__ import annotations

from collections.abc import Mapping

BOARD_DOCS: Mapping[str, str] = {
    "n": "counts the seeds in the means",
    "rank": "is the place by the distance as shown; in brackets its range in 95 % of draws of "
    "seeds and trials",
    "worst": "is the largest multiple of the second Retrain's distance in any column, and which",
    "worst attack": "is how many points more of the forgotten than Retrain the worst attack shows, "
    "and which",
    "reached": "counts the seeds that reach every goal",
    "steps": "counts optimizer steps, mean over seeds",
    "trials": "counts the configs that tuning tried for the row",
    "retain passes": "counts every sample of the retain set that the method was given, over the "
    "set's size",
    "retain samples": "counts the samples of the retain set that it was given",
    "forget samples": "counts the samples of the forget set that it was given",
    "seconds": "is the time of one unlearning, mean over seeds, on the machine of the records",
    "trained %": "is the share of the model's parameters that were trained",
    "chosen by tuning": "holds the settings of the best trial; all others are the suite's",
    "‖dW‖/‖W0‖": "is the norm of the update over that of the weights",
    "max |arg|": "is the largest |omega A B^T| (the argument of phi) at the end of training, mean "
    "over seeds",
    "bound active": "is the share of entries above 0.5, where sine, tanh and identity begin to "
    "differ (of a clip, above its threshold), at the end of training, mean over seeds",
    "logit spread": "is the standard deviation of the last forward's logits",
    "chosen": "holds the settings of the trial that was chosen",
    "tuning gap": "is its distance on the tuning seeds",
    "next": "is the smallest distance of the other trials",
    "last": "is their largest",
    "verdict": "says whether the row differs from a retrained model",
}
"""Head of a leaderboard's column -> the rest of a sentence that begins with it."""

SWEEP_DOCS: Mapping[str, str] = {
    "accepted %": "is the share of a grid's cells that the rule accepts, mean over seeds",
    "strict %": "is the same with half of the rule's tolerances",
    "loose %": "is the same with twice the rule's tolerances",
    "band": "is the width of the accepted learning rates, in decades",
    "of": "is the width of the learning rates that were tried, in decades",
    "✗": "counts cells in which a number was not finite or a loss exceeded the cap (10,000)",
    "of ceiling": "is the highest share of Original's cross-entropy ceiling that a cell's forget "
    "loss has, in %; about 100 where ascent ended at it",
    "lower edge": "is the rate below the accepted ones at which every cell fails",
    "upper edge": "is the rate above the accepted ones at which every cell fails",
    "best cell": "is the accepted cell with the best utility",
    "seeds": "counts the seeds on which the best cell is accepted",
}
"""The same of sweeps."""

NAMED_DOCS: Mapping[str, str] = {
    "worst RA": "is the lowest RA over the grid's cells",
    "median RA": "is the median RA over the grid's cells, mean over seeds",
    "its TA": "is the best cell's",
    "worst retain P": "is the lowest retain P over the grid's cells",
    "median retain P": "is the median retain P over the grid's cells, mean over seeds",
    "its MU6": "is the best cell's",
    "0.001, 0.003, ...": "is the accepted share in %, or what the table says, at this rate",
}
"""The same of sweeps' columns that are called after a metric (on text: others) or a rate."""

DOCS: Mapping[str, str] = {**BOARD_DOCS, **SWEEP_DOCS}
"""Of both, by head."""

"""Audits: what else tells an unlearned model from a retrained one, and what brings knowledge back.

Three kinds, by what they read: *pair* audits compare the stored scores of two models, *population*
audits those of many models per side, *model* audits probe or attack one stored model.  The
registrations are lazy, and neither they nor the classes import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stable_forgetting.common.audits.base import Audit
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.registry import Registry

AUDITS: Registry[Any] = Registry("attack", "stable_forgetting.common.audits.base:Audit")

for _name, _target, _summary in (
    ("js", "pairs:JensenShannon", "Jensen-Shannon divergence of the softmax from Retrain's"),
    ("disagreement", "pairs:Disagreement", "share of samples with another prediction"),
    ("ks", "pairs:KolmogorovSmirnov", "largest distance between the margins' distributions"),
    ("c2st", "pairs:ClassifierTwoSample", "can a classifier tell whose outputs these are?"),
    ("retained_kl", "pairs:RetainedKL", "forgotten classes: KL(Retrain || U) over the others"),
    ("cmia", "pairs:NeighbourClass", "forgotten classes: attack on the neighbour class"),
    ("klom", "populations:KLoM", "binned KL of each sample's margins over many models"),
    ("epsilon", "attacks:EpsilonScore", "forgetting quality of the NeurIPS 2023 challenge"),
    ("ulira", "attacks:ULira", "likelihood-ratio attack with per-sample Gaussians"),
    ("relearn", "recovery:RelearnTime", "steps until forget is known again; anamnesis index"),
    ("relearn_retain", "recovery:RelearnFromRetain", "the same, trained on retain data alone"),
    ("relearn_few", "recovery:RelearnFew", "the same, from 16 forgotten samples"),
    ("relearn_elsewhere", "recovery:RelearnElsewhere", "the same, from data of another domain"),
    ("prototype", "representations:Prototype", "class means of a few samples as classifier"),
    ("linear_probe", "representations:LinearProbe", "forgotten classes read from the features"),
    ("remove_adapter", "weights:RemoveAdapter", "take the adapter off and measure again"),
    ("scale_adapter", "weights:ScaleAdapter", "scale the adapter's update and measure again"),
    ("requantise", "weights:Requantise", "round the weights to int8 and measure again"),
    ("nf4", "weights:NormalFloat", "round the weights to the 4 bits of NF4 and measure again"),
    ("prune", "weights:Prune", "set the smallest weights to zero and measure again"),
    ("logit_lens", "leak:LogitLens", "read the forgotten from the layers before the last"),
    ("leak", "leak:Leak", "leak@k: the best of k draws at a temperature"),
    ("min_k_pp", "members:MinKPlusPlus", "Min-K++: forgotten or never seen, by the least likely"),
    ("reference", "members:ReferenceModel", "forgotten or never seen, beside another Retrain"),
    ("snapshots", "members:Snapshots", "forgotten or never seen, by what changed since Original"),
    ("sequential", "sequential:Sequential", "forget requests in turn, measured after each"),
    ("rounding", "twins:Rounding", "what rounding alone does to a row, beside what seeds do"),
    (
        "unlearning_seed",
        "twins:UnlearningSeed",
        "parts of unlearning and evaluation in the spread",
    ),
    (
        "over_unlearning",
        "representations:OverUnlearning",
        "damage close to the forget set (OU@eps)",
    ),
):
    AUDITS.register(_name, f"stable_forgetting.common.audits.{_target}", summary=_summary)


def make_audit(name: str, settings: Mapping[str, Any] | None, origin: str) -> Audit:
    """An audit with its config.

    Raises:
        ConfigError: An unknown attack or setting.
    """
    cls = AUDITS[name]
    audit: Audit = cls(validate(cls.Config, settings or {}, origin))
    return audit

"""What docs/metrics.md says that a collapsed text model scores, held against one that is scored."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.answers import js_rows
from stable_forgetting.language.metrics.tofu import sequential_metrics
from tests.language.made import benchmark

WORDS = {
    "language": {"name": "fictitious", "authors": 2, "forget_authors": 3, "questions": 4},
    "tdec": {
        "name": "tdec",
        "max_length": 24,
        "rows": 4,
        "sets": 2,
        "retain_rows": 4,
        "unseen_rows": 3,
        "test_rows": 3,
    },
    "muse": {"name": "muse", "max_length": 64, "qa_pairs": 3},
}
TOKEN = 40


def collapsed(model, *, sure: bool):
    """The model with the same logits everywhere: one token's far above the others, or all alike."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("Norm")]
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        norms[-1].weight.zero_()
        norms[-1].bias.copy_(20 * head[TOKEN] / head[TOKEN].square().sum() if sure else 0 * head[0])
    return model.eval()


@pytest.fixture(scope="module", params=sorted(WORDS))
def world(request):
    """Values of both kinds of collapsed model, and of a comparison with a model that is not."""
    cls = BENCHMARKS[request.param]
    evaluation = {"max_new_tokens": 8} if request.param == "language" else {}
    made = benchmark(request.param, data=WORDS[request.param], evaluation=evaluation)
    parts = made.parts(made.split(1), trial=False, seed=1)
    reference = made.score(made.build(2).eval(), parts, trial=False)
    values = {}
    for sure in (False, True):
        model = collapsed(made.build(1), sure=sure)
        scores = made.score(model, parts, trial=False)
        metrics = made.evaluate(scores, trial=False, seed=1)
        metrics |= made.compare(made.config, scores, reference)
        if request.param == "language":
            metrics |= sequential_metrics(scores)
        values[sure] = metrics
    own = made.evaluate(reference, trial=False, seed=1)
    shares = [q for part in reference.values() if (q := made.choices(part)) is not None]
    return SimpleNamespace(
        specs=cls.metrics, values=values, own=own, vocabulary=len(head(made)), shares=shares
    )


def head(made):
    return made.build(1).get_output_embeddings().weight


def few(world, sure, value):
    return 0 <= value <= 15


def nothing(world, sure, value):
    return value == 0


def near(center, width):
    return lambda world, sure, value: abs(value - center) <= width


def below(limit):
    return lambda world, sure, value: value <= limit


def ratio(world, sure, value):
    return 0 < value < 100 if sure else value == pytest.approx(0, abs=0.1)


def closeness(world, sure, value):
    return 0 < value < 100 if sure else value == pytest.approx(100, abs=0.1)


def odds(world, sure, value):
    least = -math.log(world.vocabulary - 1)
    return value < least if sure else value == pytest.approx(least, abs=1e-3)


def loss(world, sure, value):
    unsure = math.log(world.vocabulary)
    return value > 1.5 * unsure if sure else value == pytest.approx(unsure, abs=1e-3)


def probability(world, sure, value):
    return value < 0.1 if sure else value == pytest.approx(100 / world.vocabulary, rel=1e-3)


def equal_shares(world, sure, value):
    """The divergence of equal shares from what some part of the other model says."""
    far = [js_rows(np.full_like(q, 1 / q.shape[1]), q).mean() for q in world.shares]
    return 0 < value <= math.log(2) if sure else value in map(partial(pytest.approx, abs=1e-4), far)


def leak(world, sure, value):
    return abs(value) < 60 or abs(world.own["min_k_auc"] - 50) > 20


CHANCE = "about chance, one in the number of answers, or less, as a tie counts as wrong"
SHARED = "about 0; shared common words make some per cent"
FIXED = "about 0; one fixed answer reaches some per cent by shared words"
COMMON = "about 0; one fixed common answer reaches some per cent by shared words"
CLAIMS = {
    "usually far below 0: its truth ratios are alike, Retrain's are spread": below(-0.3),
    "usually near 0, as log10 FQ": below(0.5),
    "large: its truth ratios are alike, Retrain's are spread": lambda w, sure, v: v >= 0.4,
    "0: one of its parts is 0": nothing,
    "near 0: one of its parts is": below(0.05),
    "near 0: right and wrong answers are about equally likely": near(0, 1.0),
    "far below 0: -ln(vocabulary) where it is unsure, less where it is sure": odds,
    "0": nothing,
    "the share of its one token, a few per cent": few,
    "ln(vocabulary) where it is unsure, far more where it is sure of another token": loss,
    "near 50": near(50, 25),
    "near 0 where Retrain's own AUC is near 50: it then looks retrained": leak,
    CHANCE: below(60),
    "as S.U.": below(60),
    "0, or 100 / n-grams where its one n-gram is in the text": few,
    "it is of Original: the threshold": few,
    "all or few tokens: it is a count of work": lambda w, sure, v: 0 < v <= 100,
    SHARED: few,
    FIXED: few,
    COMMON: few,
    "about 0 where it is sure of its one token, 100 / vocabulary where it is unsure": probability,
    "100 where it is unsure; less where it is sure, as r varies with the words": closeness,
    "0 where it is unsure; more where it is sure, as r varies with the words": ratio,
    "where it is unsure, the divergence of equal shares from Retrain's": equal_shares,
    "above 0: which of its answers, about equally likely, comes first says nothing": (
        lambda w, sure, v: 0 < v <= 100
    ),
    "near 100 / answers: right and wrong ones are about equally likely": near(25, 15),
}
"""What the document says -> whether a measured value is so."""


def test_a_collapsed_model_scores_what_is_said(world):
    wrong = {}
    for sure, values in world.values.items():
        for spec in world.specs:
            value = values.get(spec.name)
            if value is not None and not CLAIMS[spec.collapsed](world, sure, value):
                wrong[spec.name, sure] = (spec.collapsed, value)
    assert wrong == {}


def test_every_metric_was_measured(world):
    names = {spec.name for spec in world.specs} - {"su_earlier", "du", "log10_fq_300"}
    absent = {name for name in names if world.values[True].get(name) is None}
    assert absent == set()


def test_what_is_said_is_said_of_a_metric():
    specs = [spec for name in WORDS for spec in BENCHMARKS[name].metrics]
    assert set(CLAIMS) == {spec.collapsed for spec in specs}

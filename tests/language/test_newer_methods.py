"""Newer methods on language models: their formulas by value and gradient, and golden losses.

``test_methods.py`` runs each of them at its defaults, too.  Golden losses are written anew with

    SF_REGENERATE=1 python -m pytest tests/language/test_newer_methods.py -k golden
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import IGNORE
from stable_forgetting.common.methods.base import resolve_config, train_reference
from stable_forgetting.common.objectives.positions import cross_entropy, divergence_from_uniform
from stable_forgetting.common.objectives.terms import (
    LogLikelihoods,
    Mean,
    divergence_from,
    token_preference,
)
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.methods.hidden import shortened
from stable_forgetting.language.methods.preference import AgainstMean, AscentAndMismatch
from stable_forgetting.language.models.composite import LogitSubtraction
from tests.common.made import assert_same_gradient, batch_of, values_of
from tests.language.made import log_p
from tests.language.test_methods import (  # noqa: F401 - fixtures
    SINE,
    Causal,
    golden_text,
    losses,
    make_task,
    split,
    task_of,
    text,
    tiny_model,
    trained,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "newer_language_methods.json"
VARIANTS = {
    "tnpo": ("tnpo", {"beta": 1.0}),
    "tnpo-sine": ("tnpo", SINE),
    "wtnpo": ("wtnpo", {"alpha": 0.5}),
    "llmu": ("llmu", {"mismatch_weight": 0.3}),
    "llmu-sine": ("llmu", SINE),
    "rmu_adaptive": ("rmu_adaptive", {"positions": "all"}),
    "circuit_breakers": ("circuit_breakers", {"layers": ["*.h.0", "*.h.2"], "positions": "scored"}),
    "circuit_breakers-sine": ("circuit_breakers", SINE),
    "latent_adversarial": ("latent_adversarial", {"epsilon": 0.3, "retain_weight": 1.0}),
    "latent_adversarial-sine": ("latent_adversarial", SINE),
    "uld": ("uld", {"blocks": 0.7, "adapter": None}),
    "uld-sine": ("uld", {**SINE, "a": 2.0}),
    "kto": ("kto", {"beta": 0.5}),
}
TRAINING, STEPS = 40, 4


LABELS = torch.tensor([[1, 0, 2], [3, IGNORE, IGNORE]])
OTHERS = torch.tensor([[4, 2, IGNORE], [0, 0, 1]])
COUNTED = LABELS != IGNORE


# Losses of answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_tnpo_is_npo_of_each_token_and_its_gradient_is_the_published_weight(alpha):
    reference, beta = values_of(2, 3, 5, seed=1), 4.0
    term = token_preference(lambda batch: reference, beta, alpha)
    ours = lambda z: term(z, batch_of(LABELS))  # noqa: E731

    def formula(z):
        p, fixed = log_p(z, LABELS).exp(), log_p(reference, LABELS).exp()
        loss = -(2 / beta) * torch.sigmoid(-beta * torch.log(p / fixed)).log()
        return (p.detach() ** alpha * loss)[COUNTED].mean()

    def published(z):  # ascent on each token, weighted without gradient
        p, fixed = log_p(z, LABELS).exp().detach(), log_p(reference, LABELS).exp()
        weight = 2 * p ** (beta + alpha) / (p**beta + fixed**beta)
        return (weight * log_p(z, LABELS))[COUNTED].mean()

    assert_same_gradient(ours, formula, values_of(2, 3, 5))
    assert_same_gradient(ours, published, values_of(2, 3, 5), values=False)


def test_tnpo_starts_as_ascent():
    z = values_of(2, 3, 5)
    term = token_preference(lambda batch: z, 4.0)
    ascent = Mean(cross_entropy, "tokens", sign=-1.0)
    assert_same_gradient(
        lambda x: term(x, batch_of(LABELS)), lambda x: ascent(x, batch_of(LABELS)), z, values=False
    )
    assert float(term(z, batch_of(LABELS))) == pytest.approx(math.log(2) / 2)


def test_llmu_ascends_on_answers_learns_others_and_stays_near_original():
    teacher = values_of(2, 3, 5, seed=2)
    llmu = AscentAndMismatch(
        refusals=SimpleNamespace(fetch=lambda indices: batch_of(OTHERS)),
        retain=divergence_from(lambda batch: teacher, "tokens"),
        retain_weight=1.0,
    )

    def ours(z):  # the logits of each batch, by its labels
        forward = {id(LABELS): z[0], id(OTHERS): z[1], id(COUNTED): z[2]}
        keep = batch_of(torch.zeros(2, 3, dtype=torch.int64))
        logits = lambda b: forward.get(id(b.labels), z[2])  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            module = "stable_forgetting.language.methods.preference"
            patch.setattr(f"{module}.joint_logits", lambda f, batches: [f(b) for b in batches])
            return llmu(logits, {"forget": batch_of(LABELS), "retain": keep}).total

    def answer(z, labels):  # a mean per text, then over texts
        counted = labels != IGNORE
        return (-(log_p(z, labels) * counted).sum(1) / counted.sum(1)).mean()

    def published(z):
        away = -(teacher.softmax(-1) * z[2].log_softmax(-1)).sum(-1).mean()
        return -0.5 * answer(z[0], LABELS) + answer(z[1], OTHERS) + away

    assert_same_gradient(ours, published, values_of(3, 2, 3, 5), values=False)
    entropy = -(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1).mean()
    z = values_of(3, 2, 3, 5)
    torch.testing.assert_close(ours(z), published(z) - entropy)


def test_kto_takes_the_refusals_mean_as_reference_point():
    indices, beta = torch.arange(2), 0.4
    known, refused = values_of(2, seed=3), values_of(2, seed=4)
    pairs = AgainstMean(
        refusals=None,
        answer_reference=LogLikelihoods(indices, known),
        refusal_reference=LogLikelihoods(indices, refused),
        beta=beta,
        factor=2 / beta,
    )

    def likelihood(z, labels):
        return (log_p(z, labels) * (labels != IGNORE)).sum(1)

    def ours(z):
        return pairs.term(batch_of(LABELS), z[0], batch_of(OTHERS), z[1])

    def published(z):  # but for the constant 1
        level = (likelihood(z[1], OTHERS) - refused).mean().detach()
        ratio = likelihood(z[0], LABELS) - known
        return (-F.logsigmoid(level - beta * ratio).mean() * 2 / beta) + 0 * z.sum()

    assert_same_gradient(ours, published, values_of(2, 2, 3, 5))


# Two models --------------------------------------------------------------------------------------


def test_uld_takes_the_assistant_off_where_the_published_filter_lets_it():
    one, two = values_of(3, 40, scale=3), values_of(3, 40, seed=1)
    joined = LogitSubtraction(nn.Identity(), nn.Identity(), 0.8, 0.1)
    scores = one.log_softmax(-1)
    at_least = scores.sort(descending=True).values[..., int(0.1 * 40) - 1]
    threshold = torch.min(at_least, scores.max(-1).values + np.log(0.1))
    other = two.clone()
    other[scores < threshold[:, None]] = 0
    assert 0 < int((other == 0).sum()) < other.numel()
    torch.testing.assert_close(joined._combined(one, two), one - 0.8 * other)
    everywhere = LogitSubtraction(nn.Identity(), nn.Identity(), 0.8, 0.0)
    torch.testing.assert_close(everywhere._combined(one, two), one - 0.8 * two)


def test_ulds_assistant_learns_forget_and_uniform_on_retain():
    def published(z):
        soft = z.softmax(-1).view(-1, 5)
        return F.kl_div(soft.log(), torch.full_like(soft, 1 / 5), reduction="batchmean")

    labels = torch.zeros(2, 3, dtype=torch.int64)
    term = Mean(divergence_from_uniform, "tokens")
    assert_same_gradient(lambda z: term(z, batch_of(labels)), published, values_of(2, 3, 5))


def test_uld_keeps_original_and_its_assistant_is_short(text, split, trained, make_task):  # noqa: F811
    cls = METHODS["uld"]
    config = cls.Config(epochs=60, batch_size=6, lr=1e-2, blocks=0.34, adapter=None)
    before = copy.deepcopy(trained.state_dict())
    joined = cls(config).unlearn(make_task(copy.deepcopy(trained), cls.info.access))
    assert len(joined.reinforced.transformer.h) == 1
    assert all(torch.equal(v, joined.baseline.state_dict()[k]) for k, v in before.items())
    assistant, both = (losses(text, split, model) for model in (joined.reinforced, joined))
    assert assistant["forget"] < 1 < assistant["retain"]
    start = losses(text, split, trained)
    assert both["forget"] - start["forget"] > both["retain"] - start["retain"]


@pytest.mark.parametrize("kind", ["gpt_neo", "llama"])
def test_uld_continues_texts_with_a_short_assistant(kind):
    models = [tiny_model(kind, 60) for _ in range(2)]
    joined = LogitSubtraction(models[0], shortened(models[1], 0.34), 3.0, 0.0).eval()
    for parameter in joined.parameters():
        parameter.data.mul_(3)
    (written,) = generate(joined, [np.array([3, 9, 27, 8])], stop=[0], max_new_tokens=5)
    ids, slow = torch.tensor([[3, 9, 27, 8]]), []
    while len(slow) < 5:
        with torch.no_grad():
            best = int(joined(ids).logits[0, -1].argmax())
        if best == 0:
            break
        slow.append(best)
        ids = torch.cat([ids, torch.tensor([[best]])], 1)
    assert written.tolist() == slow


# All of them -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(golden, golden_text, split):  # noqa: F811
    """Each variant after some steps from a trained model, in float64."""
    found = {}
    with golden.float64():
        model = golden.set_(Causal(golden_text.vocab_size))
        access = frozenset({"forget", "retain", "initial"})
        task = task_of(golden_text, split, model, access, steps=TRAINING)
        found["original"] = train_reference(task, ["forget", "retain"])
        for variant, (name, params) in VARIANTS.items():
            cls = METHODS[name]
            given = {"lr": 2e-3, "batch_size": 3, "steps": STEPS, **params}
            config = resolve_config(name, None, given, origin="test")
            start = copy.deepcopy(found["original"])
            task = task_of(golden_text, split, start, cls.info.access)
            found[variant] = cls(config).unlearn(task)
    return found


def test_golden_losses(golden_text, split, models, check_golden):  # noqa: F811
    found = {name: losses(golden_text, split, model) for name, model in models.items()}
    check_golden(GOLDEN, found)
    gone = {name for name in VARIANTS if found[name]["forget"] > found["original"]["forget"]}
    assert gone == set(VARIANTS)


def test_no_two_methods_are_the_same(golden_twins):
    assert golden_twins(GOLDEN) == set()

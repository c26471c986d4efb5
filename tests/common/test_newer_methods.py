"""The methods of 2023 to 2026: their formulas by value and gradient, and golden losses.

Those of test_conflict_methods.py and test_importance_methods.py have their golden losses here too.

The golden losses guard ``MethodInfo.version``; where a change of numbers is meant, raise it and run

    SF_REGENERATE=1 python -m pytest tests/common/test_newer_methods.py -k golden
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.task_vector import agreed
from stable_forgetting.common.objectives.objectives import ForgetRetain
from stable_forgetting.common.objectives.positions import cross_entropy
from stable_forgetting.common.objectives.terms import Mean, self_distillation
from stable_forgetting.language.methods.preference import (
    JensenShannon,
    MeanPreference,
    cycled,
    divergence_from_token,
)
from stable_forgetting.vision.methods.adversarial import Adversarial, Sensitivity
from tests.common.made import assert_same_gradient, batch_of, loss_of, values_of

GOLDEN = Path(__file__).parents[1] / "golden" / "newer_methods.json"
VARIANTS = {
    "npo_sam": {"lr": 3e-3, "rho": 0.1},
    "ilu": {"lr": 3e-3},
    "uam": {"lr": 3e-3, "rho": 1.0},
    "pdu": {"lr": 3e-3},
    "rfe": {"lr": 3e-3, "first": 3},
    "delete": {"lr": 3e-3},
    "repselect": {"lr": 0.3, "components": 2},
    "negmerge": {"lr": 3e-3, "epochs": 2},
    "weight_distortion": {},
    "weight_negation": {},
    "amun": {"lr": 3e-3},
    "mumis": {"lr": 3e-3},
    "munba": {"lr": 3e-3},
    "ngdiff": {"lr": 3e-3},
    "gru": {"lr": 3e-3},
    "gdr_gma": {"lr": 3e-3, "gamma": 3.0, "level": 0.2},
    "orthograd": {"lr": 3e-3},
    "lfssd": {"alpha": 1.5},
    "wagle": {"lr": 3e-3, "density": 0.5, "forget_weight": 1.0},
    "prune_first": {},
    "undo": {"steps": 20, "unlearn_lr": 3e-3, "forget_weight": 1.0},
    "langevin": {},
}
UNMOVED = {"weight_distortion", "weight_negation", "uam", "mumis", "prune_first", "langevin"}
"""Forget loss need not rise in so few steps."""
STEPS, NOISE = 6, 1.0


# Losses by the published formulas ----------------------------------------------------------------


def test_pdu_flattens_logits_as_open_unlearning_does():
    def published(z):
        flat = z.reshape(-1, z.size(-1))
        return ((flat.max(dim=-1)[0] - flat.mean(dim=-1)) ** 2).mean()

    term = Mean(tools.logit_spread, "tokens")
    labels = torch.zeros(3, 4, dtype=torch.int64)
    assert_same_gradient(lambda z: term(z, batch_of(labels)), published, values_of(3, 4, 5))
    assert tools.logit_spread(torch.ones(2, 5), torch.zeros(2).long()).tolist() == [0, 0]


def test_pdus_multiplier_rises_while_the_level_is_broken_and_is_never_negative():
    dual = tools.Multiplier(1.0, 0.5)
    dual.note(torch.tensor(2.0))
    dual(model=None)
    assert float(dual) == 2.0
    other = tools.Multiplier(0.0, 0.5)
    other.load_state(dual.state())
    other.note(torch.tensor(-9.0))
    other(model=None)
    assert float(other) == 0 and float(dual) == 2.0


def test_pdu_weighs_the_retain_loss_by_the_multiplier_before_it_rises():
    z, labels = values_of(4, 5), torch.tensor([0, 1, 2, 3])
    terms = ForgetRetain(Mean(tools.logit_spread), Mean(cross_entropy))
    dual = tools.Multiplier(3.0, 1.0)
    batches = {part: Batch({"z": z}, labels, torch.arange(4)) for part in ("forget", "retain")}
    value = tools.PrimalDual(terms, 0.5, dual)(lambda batch: batch.inputs["z"], batches)
    loss = F.cross_entropy(z, labels)
    wanted = tools.logit_spread(z, labels).mean() + 3 * (loss - 0.5)
    torch.testing.assert_close(value.total, wanted)
    dual.note(loss + 1)
    dual(model=None)
    assert float(dual) == pytest.approx(3 + float(loss) - 0.5 + 0.75)


def test_ilus_penalty_is_the_squared_slope_by_a_factor_on_the_logits():
    labels = torch.tensor([0, 2, 4])

    def published(z):
        scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        slope = torch.autograd.grad(F.cross_entropy(z * scale, labels), scale, create_graph=True)[0]
        return F.cross_entropy(z, labels) + 0.7 * slope**2

    assert_same_gradient(
        lambda z: tools.Invariant(0.7)(z, batch_of(labels)), published, values_of(3, 5)
    )


def test_delete_distils_originals_other_answers():
    labels, teacher = torch.tensor([1, 0, 3]), values_of(3, 5, seed=1)

    def published(z):  # softmax of the teacher with the label's logit at minus infinity
        masked = teacher.scatter(1, labels.unsqueeze(1), -math.inf).softmax(1)
        return -(masked * z.log_softmax(1)).sum(1).mean()

    term = self_distillation(lambda batch: teacher, math.inf, "samples")
    assert_same_gradient(lambda z: term(z, batch_of(labels)), published, values_of(3, 5))


def jensen_shannon(p, q):
    middle = (p + q) / 2
    parts = [(torch.xlogy(x, x) - torch.xlogy(x, middle)).sum(-1) for x in (p, q)]
    return sum(parts) / 2


def test_jensun_is_the_jensen_shannon_divergence_from_a_token_and_from_original():
    labels = torch.tensor([[1, 0], [3, IGNORE]])
    hot = F.one_hot(labels.clamp_min(0), 5).double()
    counted = labels != IGNORE

    def forget(z):
        return (jensen_shannon(z.softmax(-1), hot) * counted).sum()

    assert_same_gradient(
        lambda z: divergence_from_token(z, labels).sum(), forget, values_of(2, 2, 5)
    )
    teacher = values_of(2, 2, 5, seed=3)

    def retain(z):
        return (jensen_shannon(z.softmax(-1), teacher.softmax(-1)) * counted).sum() / 3

    term = JensenShannon(lambda batch: teacher, "tokens")
    assert_same_gradient(lambda z: term(z, batch_of(labels)), retain, values_of(2, 2, 5))
    assert divergence_from_token(values_of(9, 2, 5, scale=50), torch.ones(9, 2).long()).max() <= 0.7


def test_a_refusals_tokens_begin_anew_where_the_answer_is_longer():
    refusals = torch.tensor([[7, 8, IGNORE], [5, IGNORE, IGNORE]])
    answers = torch.tensor([[1, 1, 1, 1, 1], [1, 1, IGNORE, IGNORE, IGNORE]])
    wanted = [[7, 8, 7, 8, 7], [5, 5, IGNORE, IGNORE, IGNORE]]
    assert cycled(refusals, answers).tolist() == wanted


def test_simdpo_is_simpos_loss_on_mean_log_probabilities():
    answers, refusals = torch.tensor([[1, 0, 2]]), torch.tensor([[3, 4, IGNORE]])
    other = values_of(1, 3, 5, seed=2)

    def mean(z, labels):
        counted = labels != IGNORE
        own = z.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return (own * counted).sum(-1) / counted.sum(-1)

    def published(z):
        margin = 2.0 * (mean(other, refusals) - mean(z, answers)) - 0.3
        return -(2 / 2.0) * F.logsigmoid(margin).mean()

    pairs = MeanPreference(refusals=None, beta=2.0, gamma=0.3)
    ours = lambda z: pairs.term(batch_of(answers), z, batch_of(refusals), other)  # noqa: E731
    assert_same_gradient(ours, published, values_of(1, 3, 5))


# Gradients taken elsewhere -----------------------------------------------------------------------


def moved_along(model, batch, rho):
    """A copy of the model after the published step of ascent."""
    found = torch.autograd.grad(loss_of(model, batch), [*model.parameters()])
    norm = torch.norm(torch.stack([g.norm(2) for g in found]), 2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, gradient in zip(other.parameters(), found, strict=True):
            parameter.add_(rho / norm * gradient)
    return other


def gradient_of(model, objective, batches):
    before = [p.detach().clone() for p in model.parameters()]
    value = objective(lambda batch: model(batch.inputs["x"]), batches)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return value.total, torch.autograd.grad(value.total, [*model.parameters()])


def test_uam_takes_retains_gradient_one_step_of_ascent_away(line):
    model, batches = line
    total, ours = gradient_of(model, tools.AscentFirst(model, 0.3), batches)
    other = moved_along(model, batches["forget"], 0.3)
    loss = loss_of(other, batches["retain"])
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(ours, torch.autograd.grad(loss, [*other.parameters()]))


def test_sam_takes_forgets_gradient_at_the_worst_weights_and_retains_where_they_are(line):
    model, batches = line
    terms = ForgetRetain(Mean(cross_entropy), Mean(cross_entropy), 2.0, 3.0)
    total, ours = gradient_of(model, tools.Sharpness(model, terms, 0.3), batches)
    other = moved_along(model, batches["forget"], 0.3)
    worst, kept = loss_of(other, batches["forget"]), loss_of(model, batches["retain"])
    torch.testing.assert_close(total, 2 * worst + 3 * kept)
    sides = (2 * worst, [*other.parameters()]), (3 * kept, [*model.parameters()])
    forget, retain = (torch.autograd.grad(*side) for side in sides)
    torch.testing.assert_close(ours, tuple(a + b for a, b in zip(forget, retain, strict=True)))


def test_rfes_distance_leaves_out_what_has_no_label(line):
    model, _ = line
    z, reference = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    labels = torch.tensor([[1, 2, IGNORE], [3, IGNORE, IGNORE]])
    batch = Batch({"x": z}, labels, torch.arange(2))
    dual = tools.Multiplier(1.0, 0.05)
    objective = tools.Entangled(model, 0.05, 1.0, dual, 0, lambda _: reference, 2.0)
    squares = (z.softmax(-1) - reference.softmax(-1)).square().sum(-1)
    wanted = squares[0, :2].mean() + squares[1, 0]  # 2 times the mean over the two samples
    torch.testing.assert_close(objective._away(z, batch), wanted)


def test_rfe_ascends_under_a_bound_and_then_never_against_retain(line):
    model, batches = line
    dual = tools.Multiplier(1.0, 0.05)
    frozen = copy.deepcopy(model)
    objective = tools.Entangled(
        model, 0.05, 1.0, dual, 1, lambda batch: frozen(batch.inputs["x"]).detach(), 1.0
    )
    total, _ = gradient_of(model, objective, batches)
    gone, kept = (loss_of(model, batches[part]) for part in ("forget", "retain"))
    torch.testing.assert_close(total, -gone - 0.05)  # the retain loss is its own level
    objective.after_step(model)
    assert float(dual) == pytest.approx(1 - 0.05 * 0.05)
    _, ours = gradient_of(model, objective, batches)
    held = torch.autograd.grad(kept, [*model.parameters()])
    overlap = sum((a * b).sum() for a, b in zip(ours, held, strict=True))
    assert overlap >= -1e-9
    again = tools.Entangled(model, 0.05, 1.0, tools.Multiplier(0.0, 0.05), 1, None, 1.0)
    objective.after_step(model)
    again.load_state(objective.state())
    assert (again.steps, float(again.level)) == (2, float(objective.level))


# Weights -----------------------------------------------------------------------------------------


def test_negmerge_keeps_the_entries_on_which_all_agree():
    one, two = torch.tensor([1.0, -2.0, 3.0, 0.0]), torch.tensor([3.0, -4.0, -1.0, 5.0])
    assert agreed([one, two]).tolist() == [2.0, -3.0, 0.0, 0.0]


def test_repselect_damps_the_first_directions_to_the_last_of_them():
    u, v = (torch.linalg.qr(values_of(4, 4, seed=s)).Q for s in (1, 2))
    matrix = u @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)) @ v.mT
    found = u.mT @ tools.damped(matrix, 3) @ v
    wanted = torch.diag(torch.tensor([8 / 16, 4 / 4, 2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_repselect_takes_a_convolution_as_a_matrix_and_no_model_without_mlps(tiny):
    source, linear, convolution = tiny.Source(), nn.Linear(6, 4), nn.Conv2d(6, 4, 1)
    with torch.no_grad():
        convolution.weight.copy_(linear.weight[..., None, None])
        convolution.bias.copy_(linear.bias)
    method = METHODS["repselect"](resolve_config("repselect", None, {"lr": 0.3}, origin="test"))

    def unlearn(layer, shape, **fields):
        def logits(model, batch):
            return model(batch.inputs["x"].view(-1, 6, *shape)).flatten(1)

        family = tiny.family(forward=logits, **fields)
        model, split = nn.Sequential(layer), tiny.split(source)
        options = {"access": frozenset({"forget"}), "model": model, "family": family}
        method.unlearn(tiny.task(source, split, **options))

    before = linear.weight.detach().clone()
    for layer, shape in ((linear, ()), (convolution, (1, 1))):
        unlearn(layer, shape, targets={"mlp": ("0",)})
    torch.testing.assert_close(convolution.weight.flatten(1), linear.weight)
    assert not torch.equal(linear.weight, before)
    with pytest.raises(ConfigError, match="repselect moves the weights of MLPs"):
        unlearn(linear, (), targets={})


# Inputs ------------------------------------------------------------------------------------------


def test_amun_moves_each_sample_no_further_than_it_takes(line):
    model, batches = line
    batch = batches["forget"]
    right = Batch(batch.inputs, model(batch.inputs["x"]).argmax(-1), batch.indices)
    attack = Adversarial(lambda m, b: m(b.inputs["x"]), model, 0.01, 12, 3, 1.0)
    moved, answers = attack.attacked(right)
    assert (answers != right.labels).all()
    assert torch.equal(answers, model(moved.inputs["x"]).argmax(-1))
    lengths = (moved.inputs["x"] - batch.inputs["x"]).norm(dim=1)
    shorter = Adversarial(lambda m, b: m(b.inputs["x"]), model, 0.01, 0, 3, 1.0)
    assert (lengths > 0).all() and (shorter.attacked(right)[1] == right.labels).any()
    doublings = torch.log2(lengths / 0.01)  # the direction turns a little on the way
    assert (doublings - doublings.round()).abs().max() < 0.05 and doublings.max() <= 12


def test_mumis_is_the_difference_of_squared_gradients_by_the_input(line):
    model, batches = line
    with torch.random.fork_rng():
        torch.manual_seed(0)
        value = Sensitivity(0.5)(lambda batch: model(batch.inputs["x"]), batches)
        torch.manual_seed(0)
        shift = torch.randint(1, 4, (5,))
    squares = model.weight.square().sum(1)  # the gradient of a logit is its row
    labels = batches["forget"].labels
    wanted = (squares[labels] - 0.5 * squares[(labels + shift) % 4]).mean()
    torch.testing.assert_close(value.total, wanted)
    assert torch.autograd.grad(value.total, model.weight)[0].abs().sum() > 0


# All of them -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tiny, golden, baseline):
    """Each method after some steps from a trained model, on a problem that is fixed exactly."""
    with golden.float64():
        source = golden.source(NOISE)
        split = tiny.split(source)
        original = baseline.original(source, split, build=golden.net)
        found = {"original": copy.deepcopy(original)}
        for name, params in VARIANTS.items():
            cls = METHODS[name]
            known = cls.Config.model_fields
            given = {key: 8 for key in ("batch_size",) if key in known}
            if "steps" in known and "epochs" not in params:
                given["steps"] = STEPS
            config = resolve_config(name, None, {**given, **params}, origin="test")
            fields = {"model": copy.deepcopy(original), "recipe": baseline.recipe}
            task = tiny.task(source, split, access=cls.info.access, **fields)
            found[name] = cls(config).unlearn(task)
    return found


def test_golden_losses(tiny, golden, models, baseline, check_golden):
    source = golden.source(NOISE)
    parts = tiny.split(source), ("forget", "retain")
    found = {name: baseline.losses(model, source, *parts) for name, model in models.items()}
    check_golden(GOLDEN, found)
    gone = {name for name in VARIANTS if found[name]["forget"] > found["original"]["forget"]}
    assert gone >= set(VARIANTS) - UNMOVED


def test_no_two_methods_are_the_same(golden_twins):
    assert golden_twins(GOLDEN) == set()

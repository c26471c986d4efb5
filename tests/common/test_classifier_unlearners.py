"""The field's baselines on the tiny problem: golden losses, and the faults of peers by name.

Golden losses guard ``MethodInfo.version``: where a change of numbers is meant, raise the version
and write the file anew with

    SF_REGENERATE=1 python -m pytest tests/common/test_classifier_unlearners.py -k golden
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.checks.methods import check_method
from stable_forgetting.common.data.loader import Loader, RelabelledLoader
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.finetuning import last_parameters
from stable_forgetting.common.methods.tools.objectives import (
    AlternatingAscent,
    ToNeighbours,
    input_bounds,
    learn_noise,
)
from stable_forgetting.common.methods.tools.passes import (
    class_pass,
    mean_gradients,
    one_pass,
    summed_gradients,
)
from stable_forgetting.common.methods.tools.streams import Interleaved, WithExtras
from stable_forgetting.common.methods.tools.weights import (
    MaskedWeights,
    class_shares,
    reference_error,
    top_share,
)
from stable_forgetting.common.objectives.positions import sample_cross_entropy, sample_distillation
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.protocols import Telemetry

GOLDEN = Path(__file__).parents[1] / "golden" / "classifier_unlearners.json"
OWN = (
    *("salun", "neg_grad_plus", "scrub", "scrub_r", "bad_teacher", "l1_sparse", "ssd", "unsir"),
    *("cf_k", "eu_k", "amnesiac", "boundary_shrink", "boundary_expand", "sfron"),
    "weight_dist_reg",
)
ADAPTABLE = [n for n in OWN if "adapter" in METHODS[n].Config.model_fields]
NOISE, EPOCHS, GOLDEN_EPOCHS = 1.0, 3, 2
SINE = {"adapter": {"rank": 2, "phi": "sine", "omega": 10.0}}
SMALL = {"batch_size": 8, "log_every": 1, "checkpoint_every": 4}
FAST = {
    **{name: {"lr": 3e-3} for name in OWN},
    "neg_grad_plus": {"lr": 3e-3, "a": 0.8},
    "scrub": {"lr": 1e-2, "forget_batch_size": 4},
    "scrub_r": {"lr": 1e-2, "forget_batch_size": 4},
    "bad_teacher": {"lr": 3e-3, "retain_share": 1.0},
    "ssd": {"alpha": 1.5},
    "unsir": {"lr": 3e-3, "noise_steps": 5, "noise_repeats": 2, "noise_samples": 8},
}
VARIANTS = {
    **{name: (name, FAST[name]) for name in OWN},
    "salun-sequential": ("salun", {"lr": 3e-3, "mode": "sequential", "density": 0.2}),
    "salun-sgd": ("salun", {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9}),
    "scrub-gentle": ("scrub", {**FAST["scrub"], "max_epochs": 1, "alpha": 0.1}),
    "bad_teacher-few": ("bad_teacher", {"lr": 3e-3, "retain_share": 0.3, "temperature": 2.0}),
    "cf_k-head": ("cf_k", {"lr": 3e-3, "k": 0}),
    "sfron-slow": ("sfron", {"lr": 3e-3, "retain_steps": 3, "accumulation": 2}),
    **{f"{name}-sine": (name, {**FAST[name], **SINE, "lr": 0.05}) for name in ADAPTABLE},
}


@pytest.fixture(scope="module")
def split(tiny):
    """As everywhere, but every class has held-out samples."""
    split = tiny.split(tiny.Source(noise=NOISE))
    rest = np.arange(48, 64)
    parts = {**split.parts, "validation": rest[:8], "test": rest[8:]}
    return ForgetSplit("tiny", parts, split.source_digest)


@pytest.fixture(scope="module")
def trained(tiny, split, baseline):
    """Original: the tiny net, trained on forget and retain; a state dict."""
    return baseline.original(tiny.Source(noise=NOISE), split).state_dict()


def prepared(tiny, name, params, source, split, model, **fields):
    """(method, task) with ``model`` as Original."""
    cls = METHODS[name]
    known = cls.Config.model_fields
    given = {key: value for key, value in {**SMALL, **params}.items() if key in known}
    if "epochs" in known and not {"steps", "epochs"} & given.keys():
        given["epochs"] = EPOCHS
    config = resolve_config(name, None, given, origin="test")
    task = tiny.task(source, split, access=cls.info.access, model=model, **fields)
    return cls(config), task


@pytest.fixture(scope="module")
def make(tiny, split, trained):
    """(name, params) -> (method, task) with Original in the task."""

    def go(name, params, *, dropout=0.0, source=None, **fields):
        model = tiny.net(dropout=dropout)
        model.load_state_dict(trained)
        source = source or tiny.Source(noise=NOISE)
        return prepared(tiny, name, params, source, fields.pop("split", split), model, **fields)

    return go


@pytest.fixture(scope="module")
def run(make):
    def go(name, params, **fields):
        method, task = make(name, params, **fields)
        return method.unlearn(task), task

    return go


@pytest.fixture(scope="module")
def golden_original(golden, split, baseline):
    """Original on a problem that is fixed exactly."""
    with golden.float64():
        return baseline.original(golden.source(NOISE), split, build=golden.net)


@pytest.fixture(scope="module")
def golden_models(tiny, golden, split, golden_original, baseline):
    """Each variant after a pass from a trained model, on a problem that is fixed exactly."""
    models = {}
    with golden.float64():
        source = golden.source(NOISE)
        for variant, (name, params) in VARIANTS.items():
            method, task = prepared(
                tiny,
                name,
                {"epochs": GOLDEN_EPOCHS, **params},
                source,
                split,
                copy.deepcopy(golden_original),
                build=lambda: golden.net("another"),
                recipe=baseline.recipe,
            )
            models[variant] = method.unlearn(task)
    return models


@pytest.fixture(scope="module")
def losses(golden, golden_models, golden_original, split, baseline):
    """Variant, or "original" -> its losses on the fixed problem."""
    models = {**golden_models, "original": golden_original}
    with golden.float64():
        source = golden.source(NOISE)
        return {name: baseline.losses(model, source, split) for name, model in models.items()}


@pytest.fixture
def original(tiny, trained):
    model = tiny.net()
    model.load_state_dict(trained)
    return model.eval()


# -- all of them ----------------------------------------------------------------------------------


def test_golden_losses(losses, check_golden):
    check_golden(GOLDEN, {name: losses[name] for name in VARIANTS})


def test_golden_losses_can_tell_methods_apart(golden_twins):
    """SCRUB+R may choose the last epoch, which is SCRUB's."""
    assert golden_twins(GOLDEN) <= {("scrub", "scrub_r"), ("scrub-sine", "scrub_r-sine")}


@pytest.mark.parametrize(
    "variant",
    [
        "neg_grad_plus",
        "bad_teacher",
        "amnesiac",
        "sfron",
        "ssd",
        "salun",
        "scrub",
        "boundary_expand",
        "boundary_shrink",
        "salun-sine",
        "scrub-sine",
        "neg_grad_plus-sine",
    ],
)
def test_forgetting_costs_forget_more_than_retain(losses, variant):
    rise = {part: losses[variant][part] - value for part, value in losses["original"].items()}
    assert rise["forget"] > 0.05 and rise["forget"] > 2 * rise["retain"]


@pytest.mark.parametrize("variant", ["l1_sparse", "cf_k", "cf_k-head", "eu_k"])
def test_retain_only_methods_keep_learning_retain(tiny, run, split, original, baseline, variant):
    source, unlearned = tiny.Source(noise=NOISE), run(*VARIANTS[variant])[0]
    before, after = (baseline.losses(model, source, split) for model in (original, unlearned))
    assert after["forget"] - after["retain"] > before["forget"] - before["retain"]


@pytest.mark.parametrize("name", ADAPTABLE)
def test_the_contract_holds_through_adapters(name):
    assert not [result for result in check_method(name, SINE) if not result.ok]


@pytest.mark.parametrize(
    "variant", ["salun-sequential", "amnesiac", "scrub", "scrub_r", "bad_teacher", "sfron", "unsir"]
)
def test_killed_methods_resume_bit_for_bit(run, baseline, tmp_path, variant):
    def go(**options):
        return run(*VARIANTS[variant], dropout=0.2, **options)[0]

    steps = baseline.resumes(go, tmp_path)
    assert 9 in steps and 8 not in steps


@pytest.mark.parametrize("name", OWN)
def test_configs_do_not_shadow_the_optimizers(name):
    config = METHODS[name].Config()
    for field in ("eps", "momentum", "accumulation", "loss_cap"):
        if hasattr(config, field):
            assert getattr(config, field) == FitConfig.model_fields[field].default


# -- SalUn ----------------------------------------------------------------------------------------

DECAYS = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1},
}


def masked_run(make, monkeypatch, params):
    """Share of masked-out entries, and the steps after which one of them had moved."""
    held, drifted = {}, []
    start = MaskedWeights.__init__

    def noted(self, model, masks):
        start(self, model, masks)
        held.update(masks)

    monkeypatch.setattr(MaskedWeights, "__init__", noted)
    before = {}

    def look(step, total, loss):
        for name, parameter in task.model.named_parameters():
            if name in held and not torch.equal(
                parameter.detach()[~held[name]], before[name][~held[name]]
            ):
                drifted.append(step)

    method, task = make("salun", params, progress=look)
    before |= {n: p.detach().clone() for n, p in task.model.named_parameters()}
    method.unlearn(task)
    masked = sum(int((~mask).sum()) for mask in held.values())
    return masked / sum(mask.numel() for mask in held.values()), drifted


@pytest.mark.parametrize("mode", ["mixed", "sequential"])
@pytest.mark.parametrize("decay", DECAYS)
def test_masked_weights_are_bit_equal_to_original_after_every_step(make, monkeypatch, decay, mode):
    """The SalUn repository's drifted through weight decay and momentum until 2026."""
    params = {**DECAYS[decay], "mode": mode, "density": 0.3}
    share, drifted = masked_run(make, monkeypatch, params)
    assert share == pytest.approx(0.7, abs=0.01) and drifted == []


def test_the_mask_is_the_top_share_by_one_sort(monkeypatch):
    calls, real = [], torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda self: calls.append(len(self)) or real(self))
    saliency = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor([10.0, 0.5]),
        "c": torch.zeros(4),
    }
    masks = top_share(saliency, 0.5)
    assert calls == [8]
    assert masks["a"].tolist() == [[False, False, False], [True, True, True]]
    assert masks["b"].tolist() == [True, False]
    assert "c" not in masks, "nothing to rank: an adapter's B at A = 0"
    assert all(bool(mask.all()) for mask in top_share(saliency, 1.0).values())
    tied = top_share({"a": torch.ones(8)}, 0.25)
    assert bool(tied["a"].all()), "ties are kept"


def test_saliency_is_the_gradient_over_the_forget_set(make, tiny, split):
    _, task = make("salun", {}, dropout=0.3)
    task.model.train()
    found = summed_gradients(task, one_pass(task, "forget", batch_size=4))
    assert task.model.training
    batches = len(split.parts["forget"]) // 4
    task.model.eval()
    batch = task.source.fetch(torch.as_tensor(split.parts["forget"]))
    cross_entropy(tiny.forward(task.model, batch), batch.labels).backward()
    for name, parameter in task.model.named_parameters():
        assert torch.allclose(found[name] / batches, parameter.grad, atol=1e-5), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_importances_of_low_precision_weights_are_added_up_in_float32(tiny, split, dtype):
    """A sum of 600 in bfloat16 stops at 256; in float16 squares of small gradients are 0."""

    def forward(model, batch):
        return model(batch.inputs["x"].to(dtype))

    source, family = tiny.Source(), tiny.family(forward=forward)
    task = tiny.task(source, split, family=family, model=tiny.net(1).to(dtype))
    batch = source.fetch(torch.arange(8))
    one, many = (summed_gradients(task, [batch] * n, power=2) for n in (1, 600))
    plain = summed_gradients(task, [batch])
    for name, found in many.items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(one[name], plain[name].square())
        torch.testing.assert_close(found, 600 * one[name], rtol=1e-4, atol=0)


def test_density_one_is_random_label(tiny, run):
    params = {"lr": 3e-3, "weight_decay": 0.05, "schedule": "cosine"}
    assert tiny.same(run("salun", {**params, "density": 1.0})[0], run("random_label", params)[0])


def test_the_mask_leaves_no_hooks(run):
    model, _ = run("salun", {})
    assert not any(parameter._backward_hooks for parameter in model.parameters())


# -- amnesiac -------------------------------------------------------------------------------------


def test_amnesiac_labels_are_wrong_and_drawn_once(make, split):
    method, task = make("amnesiac", {})
    loader = method._loader(task)
    labels: dict[int, set[int]] = {int(index): set() for index in split.parts["forget"]}
    for _ in range(3 * loader.batches_per_epoch):
        batch = loader.next()
        for index, label in zip(batch.indices.tolist(), batch.labels.tolist(), strict=True):
            if index in labels:
                labels[index].add(label)
            else:
                assert label == index % 4
    assert all(len(drawn) == 1 and drawn != {index % 4} for index, drawn in labels.items())
    assert len(set.union(*labels.values())) > 1


def test_amnesiac_draws_from_what_is_retained(make):
    """As its sources do: no class that is forgotten as a whole, and never the true one."""
    method, task = make("amnesiac", {})
    assert method._classes(task) == [0, 2, 3], "class 1 is the request"
    loader = method._loader(task)
    batches = [loader.next() for _ in range(loader.batches_per_epoch)]
    labels = torch.cat([batch.labels for batch in batches])
    assert 1 not in labels.tolist()


def relabelled(tiny, members, classes, draws=1500, **options):
    """(draws, members) labels that a request gets, each drawn anew."""
    source = tiny.Source(noise=NOISE)
    inner = Loader(source, members, len(members), torch.Generator().manual_seed(0))
    loader = RelabelledLoader(inner, members, 4, classes=classes, **options)
    rows = []
    for _ in range(draws):
        batch = loader.next()
        rows.append(batch.labels[batch.indices.argsort()])
    return torch.stack(rows)


def test_labels_are_drawn_evenly_from_the_given_classes(tiny):
    members = np.array([1, 2, 5, 6])  # classes 1, 2, 1, 2
    drawn = relabelled(tiny, members, [0, 2, 3], exclude_true=True)
    for place, allowed in enumerate(([0, 2, 3], [0, 3], [0, 2, 3], [0, 3])):
        counts = torch.bincount(drawn[:, place], minlength=4).double() / len(drawn)
        expected = torch.tensor([1 / len(allowed) if c in allowed else 0.0 for c in range(4)])
        assert (counts - expected).abs().max() < 0.05, place
    with_true = relabelled(tiny, members, [0, 2, 3])
    assert set(with_true[:, 1].tolist()) == {0, 2, 3}
    one_left = relabelled(tiny, members[:1], [3], draws=5, exclude_true=True)
    assert set(one_left.flatten().tolist()) == {3}


# -- teachers -------------------------------------------------------------------------------------


def test_distillation_skips_positions_that_do_not_count():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    target = torch.eye(4)[:3].expand(2, 3, 4)
    labels = torch.tensor([[0, 1, -100], [-100, 1, 2]])
    found = sample_distillation(logits, target, labels)
    values = -logits.log_softmax(-1).gather(-1, torch.arange(3).view(1, 3, 1).expand(2, 3, 1))
    expected = torch.stack([values[0, :2].mean(), values[1, 1:].mean()])
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("name", ["scrub", "scrub_r", "bad_teacher"])
def test_teachers_stay_and_students_move(tiny, make, original, name):
    """EasyDUB gave the optimizer the teacher's parameters: its student never moved."""
    method, task = make(name, FAST[name])
    batch = tiny.Source(noise=NOISE).fetch(torch.arange(64))
    teachers, reference = [], task.reference
    task.reference = lambda: teachers.append(reference()) or teachers[-1]
    before = tiny.forward(original, batch)
    model = method.unlearn(task)
    with torch.no_grad():
        assert len(teachers) == 1 and torch.equal(teachers[0](batch), before)
        assert not torch.allclose(tiny.forward(model.eval(), batch), before, atol=1e-3)


def test_scrub_makes_its_passes_in_order(make, split):
    method, task = make("scrub", {**FAST["scrub"], "epochs": 3, "max_epochs": 2})
    forget = set(split.parts["forget"].tolist())
    method.unlearn(task)
    found = [
        "f" if set(indices.tolist()) <= forget else "r"
        for indices in task.raw.log
        if len(indices) <= 8
    ]
    away, close = ["f"] * 3, ["r"] * math.ceil(36 / 8)
    assert found == (away + close) * 2 + close
    assert {"loss/forget_kl", "loss/retain_kl"} <= set(task.results[0].last)


def test_no_step_of_scrub_reads_forget_and_retain(make, split):
    method, task = make("scrub_r", {**FAST["scrub_r"], "epochs": 2, "accumulation": 2})
    forget = set(split.parts["forget"].tolist())
    method.unlearn(task)
    found = [set(indices.tolist()) <= forget for indices in task.raw.log if len(indices) <= 4]
    steps = [found[place : place + 2] for place in range(0, len(found), 2)]
    away, close = [[True, True]] * 3, [[False, False]] * 5
    assert steps == (away + close) * 2


def test_scrub_needs_epochs():
    with pytest.raises(ConfigError, match="give epochs"):
        resolve_config("scrub", None, {"steps": 5}, origin="test")


@pytest.mark.parametrize("name", ["warmup_epochs", "evaluate_epochs", "min_epochs"])
def test_scrub_takes_in_steps_what_would_count_epochs_of_several_lengths(name):
    with pytest.raises(ConfigError, match=f"{name}: .* differ in length; (give|leave)"):
        resolve_config("scrub", None, {name: 1}, origin="test")


def test_bad_teacher_reads_its_share_of_retain(make, split):
    method, task = make("bad_teacher", {"retain_share": 0.25})
    method.unlearn(task)
    forget, retain = (set(split.parts[part].tolist()) for part in ("forget", "retain"))
    assert forget <= task.raw.fetched and len(task.raw.fetched & retain) == 9


# -- SCRUB+R --------------------------------------------------------------------------------------


def test_rewind_takes_the_latest_of_the_closest(make, monkeypatch):
    from stable_forgetting.common.methods.tools import weights as rewind

    _, task = make("scrub_r", {})
    chosen = rewind.Rewind(task, None, [1, 2, 3, 4])
    monkeypatch.setattr(rewind, "reference_error", lambda task, shares: 0.3)
    for error in (0.0, 0.25, 0.35, 0.9):
        chosen.errors.append(error)
        chosen.copies.append([torch.full_like(t, error) for t in chosen._tensors()])
    chosen.errors[2] = 0.35 + 1e-9  # 0.25 and 0.35 differ in their last bits
    assert chosen.choose() == 1
    assert all(bool((tensor == 0.25).all()) for tensor in task.model.parameters())
    chosen.errors[3] = 0.25
    assert chosen.choose() == 3


def test_the_reference_error_has_the_forget_sets_classes(make, split, tiny):
    _, task = make("scrub_r", {})
    batch = task.source.fetch(torch.as_tensor(split.parts["validation"]))
    wrong = (tiny.forward(task.model.eval(), batch).argmax(-1) != batch.labels).float()
    shares = torch.tensor([0.0, 0.25, 0.75, 0.0])
    expected = 0.25 * wrong[batch.labels == 1].mean() + 0.75 * wrong[batch.labels == 2].mean()
    assert reference_error(task, shares) == pytest.approx(float(expected))


def test_held_out_forgotten_classes_count_too(make, split):
    """Class forgetting keeps them in a part of their own."""
    held = split.parts["validation"]
    parts = {**split.parts, "validation": held[held % 4 != 1]}
    parts["validation_forget"] = held[held % 4 == 1]
    _, whole = make("scrub_r", {})
    _, parted = make("scrub_r", {}, split=ForgetSplit("tiny", parts, split.source_digest))
    shares = class_shares(parted)
    assert shares.tolist() == [0, 1, 0, 0]
    assert reference_error(parted, shares) == reference_error(whole, shares)


@pytest.mark.parametrize("held_out", [None, [48, 50, 52]])
def test_scrub_r_says_what_it_lacks_before_it_trains(make, split, held_out):
    parts = {name: ids for name, ids in split.parts.items() if name != "validation"}
    if held_out:  # none of class 1
        parts["validation"] = np.array(held_out)
    method, task = make("scrub_r", {}, split=ForgetSplit("tiny", parts, split.source_digest))
    with pytest.raises(DataError, match="take scrub"):
        method.unlearn(task)
    assert task.results == []


# -- NegGrad+, l1-sparse, SSD ---------------------------------------------------------------------


def test_neg_grad_plus_is_gradient_difference_rescaled(run):
    """Under SGD without decay: lambda = (1 - a) / a, rate a lr."""
    common = {"optimizer": "sgd", "steps": 6, "epochs": None}
    plus, _ = run(
        "neg_grad_plus",
        {**common, "lr": 0.05, "a": 0.8, "weight_decay": 0.0, "schedule": "constant"},
    )
    difference, _ = run("gd", {**common, "lr": 0.05 * 0.8, "forget_weight": 0.25})
    for one, two in zip(plus.parameters(), difference.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_the_l1_penalty_covers_everything_and_fades(make, trained):
    logged = []

    class Sink:
        def scalars(self, step, values):
            logged.append(values)

    a = 1e-3
    method, task = make("l1_sparse", {"a": a, "lr": 1e-9, "epochs": 4}, tracker=Sink())
    method.unlearn(task)
    norm = sum(float(value.abs().sum()) for value in trained.values())
    assert len(logged) == 4 * math.ceil(36 / 8)
    for place, values in enumerate(logged):
        epoch = place // math.ceil(36 / 8)
        assert values["loss/penalty"] == pytest.approx(a * (1 - epoch / 4) * norm, rel=1e-4)


@pytest.fixture
def two_classes(split):
    """Classes 1 and 2 are forgotten."""
    train = split.train
    forget = train[np.isin(train % 4, [1, 2])]
    parts = {**split.parts, "forget": forget, "retain": np.setdiff1d(train, forget)}
    return ForgetSplit("tiny/two", parts, split.source_digest)


@pytest.mark.parametrize("params", [{"alpha": 1.2, "lam": 0.9}, {"alpha": 1.2, "order": "class"}])
def test_ssd_dampens_by_the_ratio_of_importances(make, trained, two_classes, params):
    """A batch of one class has the larger mean gradient."""
    method, task = make("ssd", params, split=two_classes)
    parts = ("forget", "retain")
    forget = mean_gradients(task, "forget", batch_size=8, power=2)
    mixed, grouped = (
        mean_gradients(task, *parts, batch_size=8, by_class=k, power=2) for k in (False, True)
    )
    totals = [sum(float(value.sum()) for value in all_.values()) for all_ in (mixed, grouped)]
    everything = grouped if "order" in params else mixed
    state, dampened = method.unlearn(task).state_dict(), 0
    for name, before in trained.items():
        chosen = forget[name] > 1.2 * everything[name]
        dampened += int(chosen.sum())
        factor = (params.get("lam", 1.0) * everything[name] / forget[name]).clamp(max=1)
        assert torch.equal(state[name][~chosen], before[~chosen])
        assert torch.allclose(state[name][chosen], (before * factor)[chosen])
    assert 0 < dampened < sum(value.numel() for value in trained.values())
    assert totals[1] > totals[0]


def test_ssd_reads_whole_classes_in_the_order_of_its_repository(make, two_classes):
    _, task = make("ssd", {}, split=two_classes)
    batches = list(class_pass(task, 8))
    labels = torch.cat([batch.labels for batch in batches]).tolist()
    retained = len(task.indices("retain"))
    for part, classes in ((labels[:retained], {0, 3}), (labels[retained:], {1, 2})):
        assert part == sorted(part) and set(part) == classes
    read = torch.cat([batch.indices for batch in batches]).tolist()
    assert sorted(read) == task.indices("forget", "retain").tolist()


# -- UNSIR ----------------------------------------------------------------------------------------


def test_unsir_refuses_a_forget_set_without_whole_classes(make, split):
    train = split.train
    parts = {**split.parts, "forget": train[:4], "retain": train[4:]}
    method, task = make("unsir", {}, split=ForgetSplit("tiny/some", parts, split.source_digest))
    with pytest.raises(DataError, match="whole classes"):
        method.unlearn(task)
    assert task.results == []


def test_noise_carries_the_label_of_its_own_class(make, two_classes, tiny):
    """UNSIR's notebook labels the noise of every class 0."""
    _, task = make("unsir", {}, split=two_classes)
    before = tiny.snapshot(task.model)
    config = FitConfig(steps=30, lr=0.1)
    inputs, labels = learn_noise(task, [1, 2], samples=5, config=config, decay=0.0)
    assert labels.tolist() == [1] * 5 + [2] * 5 and inputs["x"].shape == (10, 6)
    loss = cross_entropy(task.model.eval()(inputs["x"]), labels)
    start = torch.cat(
        [torch.randn(5, 6, generator=task.generator("noise", label)) for label in (1, 2)]
    )
    assert loss > cross_entropy(task.model(start), labels) + 1
    assert tiny.same(before, task.model)


def test_extras_come_in_the_order_asked_for(tiny):
    source = tiny.Source()
    extra = torch.arange(12.0).view(2, 6)
    mixed = WithExtras(source, {"x": extra}, torch.tensor([3, 1]))
    batch = mixed.fetch(torch.tensor([5, -2, 7, -1]))
    assert torch.equal(
        batch.inputs["x"], torch.stack([source.x[5], extra[1], source.x[7], extra[0]])
    )
    assert batch.labels.tolist() == [1, 1, 3, 3]
    assert torch.equal(mixed.fetch(torch.tensor([-1, -2])).inputs["x"], extra)


# -- the last blocks ------------------------------------------------------------------------------

NAMES = [
    "cls_token",
    "patch_embed.proj.weight",
    *(f"blocks.{i}.{leaf}" for i in range(12) for leaf in ("norm1.weight", "mlp.fc1.weight")),
    "norm.weight",
    "head.weight",
]


def test_the_last_blocks_are_counted_from_the_end():
    last = last_parameters(NAMES, 2, blocks=None, head=("head.*",))
    assert last == NAMES[-6:] and last[0].startswith("blocks.10.")
    assert last_parameters(NAMES, 0, blocks="blocks", head=()) == NAMES[-2:]
    first = last_parameters(["head.weight", *NAMES[:-1]], 1, blocks=None, head=("head.*",))
    assert first == ["head.weight", *NAMES[-4:-1]], "a head registered first is still the head"
    with pytest.raises(ConfigError, match="this model has: blocks"):
        last_parameters(NAMES, 1, blocks="layers", head=())
    with pytest.raises(ConfigError, match="more than the 12 blocks"):
        last_parameters(NAMES, 13, blocks=None, head=())


def test_a_list_of_blocks_inside_another_is_named_whole():
    names = [
        "stem.weight",
        *(f"stages.{s}.blocks.{i}.fc.weight" for s in (0, 1) for i in range(3)),
        "norm.weight",
        "head.weight",
    ]
    last = last_parameters(names, 2, blocks="stages.1.blocks", head=("head.*",))
    assert last == names[-4:]
    assert last_parameters(names, 1, blocks="stages.0.blocks", head=()) == names[3:]
    assert last_parameters(names, 1, blocks="stages", head=()) == names[4:]
    with pytest.raises(ConfigError, match=r"more than the 3 blocks of stages\.1\.blocks"):
        last_parameters(names, 4, blocks="stages.1.blocks", head=())


def test_the_stages_of_a_resnet_are_one_list_of_blocks():
    blocks = [f"layer{stage}.{i}" for stage in (1, 2, 3, 4) for i in (0, 1)]
    sizes = {"layer2.0": 3, "layer3.0": 3, "layer4.0": 3}  # a stage with a shortcut's convolution
    names = [
        "conv1.weight",
        *(f"{block}.conv{i}.weight" for block in blocks for i in range(sizes.get(block, 2))),
        "fc.weight",
    ]

    def chosen(k, blocks=None):
        last = last_parameters(names, k, blocks=blocks, head=("fc.*",))
        return list(dict.fromkeys(name.rsplit(".", 2)[0] for name in last))

    assert chosen(0) == ["fc"]
    assert chosen(1) == ["layer4.1", "fc"]
    assert chosen(3) == [*blocks[-3:], "fc"]
    assert chosen(8) == [*blocks, "fc"]
    assert chosen(1, "layer4") == ["layer4.1", "fc"]
    with pytest.raises(ConfigError, match="more than the 8 blocks of layer1, layer2"):
        chosen(9)


@pytest.mark.parametrize(("name", "k"), [("cf_k", 1), ("eu_k", 1), ("cf_k", 0), ("eu_k", 2)])
def test_all_but_the_last_blocks_stay_bit_for_bit(run, trained, name, k):
    model, _ = run(name, {"k": k, "lr": 1e-2})
    moved = {
        key for key, value in model.state_dict().items() if not torch.equal(value, trained[key])
    }
    blocks = {f"blocks.{number}" for number in range(2 - k, 2)}
    assert {key.rsplit(".", 1)[0] for key in moved} <= {
        key.rsplit(".", 1)[0]
        for key in trained
        if key.startswith(("norm", "head")) or any(key.startswith(b) for b in blocks)
    }
    assert {"head.weight", "norm.weight"} <= moved
    assert any(key.startswith("blocks.1.") for key in moved) == (k > 0)


def test_eu_k_starts_its_blocks_anew(run, tiny, trained):
    fresh = tiny.net(9)
    params = {"k": 1, "lr": 1e-9, "epochs": 1, "weight_decay": 0.0}
    model, _ = run("eu_k", params, build=lambda: tiny.net(9))
    for name, value in model.named_parameters():
        wanted = fresh.state_dict() if name.startswith(("blocks.1", "norm", "head")) else trained
        assert torch.allclose(value, wanted[name], atol=1e-6), name


# -- boundaries -----------------------------------------------------------------------------------


def test_neighbours_are_one_bounded_step_away(make, tiny, split):
    _, task = make("boundary_shrink", {})
    objective = ToNeighbours.of(task, 0.3)
    batch = task.source.fetch(torch.as_tensor(split.parts["forget"]))
    seen = []

    def spying(given):
        seen.append(given.inputs["x"].detach())
        return tiny.forward(task.model.eval(), given)

    spied = ToNeighbours(spying, objective.bounds, 0.3)
    labels = spied.neighbours(batch)
    low, high = objective.bounds["x"]
    start, moved = seen
    assert torch.equal(start, batch.inputs["x"]) and float(low) == float(start.min())
    x = start.clone().requires_grad_()
    cross_entropy(task.model(x), batch.labels).backward()
    assert torch.equal(moved, (start + 0.3 * (high - low) * x.grad.sign()).clamp(low, high))
    assert torch.equal(labels, task.model(moved).argmax(-1)) and bool(
        (labels != batch.labels).any()
    )


def test_bounds_come_from_the_source_where_it_tells_them(make, tiny):
    source = tiny.Source(noise=NOISE)
    source.input_bounds, source.blank_inputs = {"x": (torch.tensor(-1.0), torch.tensor(2.0))}, {}
    _, task = make("boundary_shrink", {}, source=source)
    assert input_bounds(task) is source.input_bounds


def test_discrete_inputs_are_refused(make, tiny):
    source = tiny.Source(noise=NOISE)
    source.x = source.x.long()
    for name in ("boundary_shrink", "unsir"):
        method, task = make(name, {}, source=source)
        with pytest.raises(ConfigError, match="discrete"):
            method.unlearn(task)


def test_the_shadow_class_is_dropped(make, trained):
    """SalUn's port of Boundary Expand leaves the extra row."""
    method, task = make("boundary_expand", {"lr": 3e-3})
    widths = []
    progress = lambda step, total, loss: widths.append(task.model.head.out_features)  # noqa: E731
    task.telemetry = Telemetry(progress=progress)
    model = method.unlearn(task)
    assert set(widths) == {5} and model.head.weight.shape == (4, 8)
    assert list(model.state_dict()) == list(trained)


def test_boundary_expand_needs_one_linear_head(make, tiny):
    method, task = make("boundary_expand", {})
    task.family = tiny.family(head=("stem.*",))
    with pytest.raises(ConfigError, match="one linear head of 4 logits"):
        method.unlearn(task)


# -- SFR-on ---------------------------------------------------------------------------------------


def test_turns_are_taken_batch_by_batch(tiny):
    source = tiny.Source()
    short, long = tiny.loader(source, range(8)), tiny.loader(source, range(8, 48))
    turns = Interleaved([short, long, long], repeat=2)
    assert turns.batches_per_epoch == 2 * 3 * 2, "5 batches at 4 a round take 2 rounds of 6"
    order = []
    for _ in range(12):
        batch = turns.next()
        order.append(turns.last_turn)
        assert (int(batch.indices.max()) < 8) == (turns.last_turn == 0)
    assert order == [0, 0, 1, 1, 2, 2] * 2


def test_ascent_weighs_samples_and_fades(tiny, split):
    source = tiny.Source(noise=NOISE)
    forget = tiny.loader(source, split.parts["forget"], 12)
    retain = tiny.loader(source, split.parts["retain"], 12)
    turns = Interleaved([forget, retain])
    objective = AlternatingAscent(turns, 8, alpha=2.0, lam=0.5)
    model = tiny.net(3)
    for place in range(8):
        batch = turns.next()
        terms = objective(lambda batch: tiny.forward(model, batch), {"turns": batch})
        losses = sample_cross_entropy(tiny.forward(model, batch), batch.labels)
        assert objective.forgetting == (place % 2 == 0)
        if objective.forgetting:
            weights = losses**-0.5 / (losses**-0.5).sum()
            alpha = 2.0 * 0.5 * (1 + math.cos(math.pi * place / 8))
            assert torch.isclose(terms.total, -alpha * (weights * losses).sum())
        else:
            assert torch.isclose(terms.total, losses.mean())


def test_forget_steps_are_masked_and_retain_steps_are_not(run, tiny):
    """With an empty mask and plain SGD only retain steps count, whatever alpha is."""
    params = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.0, "threshold": 1e30}
    gentle, _ = run("sfron", {**params, "alpha": 1e-6})
    rough, _ = run("sfron", {**params, "alpha": 100.0})
    open_mask, _ = run("sfron", {**params, "alpha": 100.0, "threshold": 0.0})
    assert tiny.same(gentle, rough) and not tiny.same(rough, open_mask)

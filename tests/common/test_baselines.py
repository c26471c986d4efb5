"""Every shipped method on the tiny problem: what it changes, what it leaves, and golden losses.

The golden losses guard ``MethodInfo.version`` and ``ENGINE_VERSION``: where a change of numbers is
meant, raise the version and write the file anew with

    SF_REGENERATE=1 python -m pytest tests/common/test_baselines.py -k golden
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from pathlib import Path

import pytest

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import adapted_layers
from stable_forgetting.common.bounded.statistics import adapter_statistics
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.train.config import FitConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "baselines.json"
OTHERS = ("gd_fila",)
OWN = ["original", "retrain", "finetune", "ascent", "random_label"]
OWN += [name for name in METHODS.names() if name.split("_")[0] == "gd" and name not in OTHERS]
ADAPTERS = [n for n in OWN if getattr(METHODS[n].Config(), "adapter", None) is not None]
STEPS, NOISE = 20, 1.0
VARIANTS = {
    **{name: (name, None, {}) for name in OWN},
    "gd_lora_omega-fast": ("gd_lora_omega", None, {"lr": 0.02}),
    "gd_sine-fast": ("gd_sine", None, {"lr": 0.02}),
    "gd_tanh-fast": ("gd_tanh", None, {"lr": 0.02}),
    "gd_clip-tight": ("gd_clip", None, {"adapter": {"clip": 0.02}}),
    "gd_weight_clip-tight": ("gd_weight_clip", None, {"weight_clip": 0.1}),
    "gd_sine_weight_clip-tight": ("gd_sine_weight_clip", None, {"weight_clip": 0.1}),
    "gd_lora_ball-tight": ("gd_lora_ball", None, {"ball": 0.05}),
    "gd-literal": ("gd", "paper_literal", {}),
    "gd_sine-two-rates": (
        "gd_sine",
        "paper_two_rates",  # its omega of 100 would make SGD of these rates chaotic
        {"retain_weight": 0.1, "lam": 0.05, "adapter": {"omega": 2.0}},
    ),
    "gd-unlikelihood": ("gd", None, {"forget_loss": "unlikelihood"}),
    "random_label-sequential": ("random_label", None, {"mode": "sequential", "exclude_true": True}),
    "gd_sine-everything": (
        "gd_sine",
        None,
        {
            "adapter": {"placement": "all", "train_head": True, "rank": 4},
            "accumulation": 2,
            "schedule": "cosine",
            "warmup_steps": 5,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
        },
    ),
}


@pytest.fixture(scope="module")
def trained(tiny, baseline):
    """Original: the tiny net, trained on forget and retain; a state dict."""
    source = tiny.Source(noise=NOISE)
    return baseline.original(source, tiny.split(source)).state_dict()


def unlearn(tiny, variant, source, model, **fields):
    """(unlearned model, task) of one variant."""
    name, preset, params = VARIANTS[variant]
    cls = METHODS[name]
    given = {**params}
    if "steps" in cls.Config.model_fields:
        given |= {"steps": STEPS, "batch_size": 8, "log_every": 5, "checkpoint_every": 4}
    config = resolve_config(name, preset, given, origin="test")
    task = tiny.task(source, tiny.split(source), access=cls.info.access, model=model, **fields)
    return cls(config).unlearn(task), task


@pytest.fixture(scope="module")
def run(tiny, trained):
    def go(variant, *, dropout=0.0, **fields):
        model = tiny.net(dropout=dropout)
        model.load_state_dict(trained)
        return unlearn(tiny, variant, tiny.Source(noise=NOISE), model, **fields)

    return go


@pytest.fixture(scope="module")
def results(run):
    """Each variant once, shared by the tests below, which only look."""
    return {variant: run(variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def golden_models(tiny, golden, baseline):
    """Each variant in float64, from a trained model, on a problem that is fixed exactly."""
    with golden.float64():
        source = golden.source(NOISE)
        trained = baseline.original(source, tiny.split(source), build=golden.net)
        fields = {
            "build": partial(golden.net, "another"),
            "recipe": FitConfig(steps=STEPS, batch_size=8, lr=1e-2),
        }
        return {
            variant: unlearn(tiny, variant, source, copy.deepcopy(trained), **fields)[0]
            for variant in VARIANTS
        }


@pytest.fixture(scope="module")
def losses(tiny, baseline):
    def go(model, source=None):
        source = source or tiny.Source(noise=NOISE)
        return baseline.losses(model, source, tiny.split(source))

    return go


def test_original_has_learnt(tiny, trained, losses):
    model = tiny.net()
    model.load_state_dict(trained)
    assert all(value < 0.7 for value in losses(model).values())


@pytest.mark.parametrize("name", ADAPTERS)
def test_bounded_methods_stay_in_their_bound(results, name):
    model, _ = results[name]
    statistics = adapter_statistics(model)
    assert 0 < statistics["delta_ratio"] < math.inf
    for _, layer in adapted_layers(model):
        assert layer.delta().abs().max() <= layer.entry_bound * (1 + 1e-6)
    bounded = {"sine", "tanh", "sigmoid", "clip"}
    phi = METHODS[name].Config().adapter.phi
    assert (statistics["certificate"] > 0) == (phi in bounded)


@pytest.mark.parametrize(
    "variant", ["gd_sine", "gd_lora_ball", "random_label-sequential", "retrain"]
)
def test_killed_methods_resume_bit_for_bit(tiny, run, baseline, tmp_path, variant):
    recipe = FitConfig(steps=STEPS, batch_size=8, lr=1e-2, checkpoint_every=4)
    build = {"build": lambda: tiny.net(4, dropout=0.2), "recipe": recipe}

    def go(**options):
        return run(variant, dropout=0.2, **options, **build)[0]

    assert baseline.resumes(go, tmp_path)[0] == 9


def test_directions(results, losses):
    """Ascent raises the forget loss, fine-tuning lowers retain, GD raises forget over retain."""
    values = {name: losses(results[name][0]) for name in VARIANTS}
    original = values["original"]
    assert values["ascent"]["forget"] > original["forget"]
    assert values["finetune"]["retain"] < original["retain"]
    for name in ("gd_lora", "gd_sine", "gd_tanh", "gd_ul", "gd_ball"):
        rise = {part: values[name][part] - original[part] for part in ("forget", "retain")}
        assert rise["forget"] > 0.05 and rise["retain"] < 0.01, name


def test_golden_losses(golden, golden_models, losses, check_golden):
    source = golden.source(NOISE)
    found = {name: losses(model, source) for name, model in golden_models.items()}
    check_golden(GOLDEN, found)


def test_golden_losses_can_tell_methods_apart(golden_twins):
    """Of all pairs only those coincide whose bounds do not bind in 20 steps."""
    free = {"gd_lora", "gd_weight_clip", "gd_lora_ball"}
    wanted = {("gd_sine", "gd_sine_weight_clip"), ("gd_lora_omega", "gd_clip")}
    wanted |= {pair for pair in itertools.combinations(VARIANTS, 2) if free.issuperset(pair)}
    assert golden_twins(GOLDEN) == wanted

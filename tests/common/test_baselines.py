"""Every shipped method on the tiny problem: golden losses, and their directions.

The golden losses guard ``MethodInfo.version`` and ``ENGINE_VERSION``: where a change of numbers is
meant, raise the version and write the file anew with

    SF_REGENERATE=1 python -m pytest tests/common/test_baselines.py -k golden
"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path

import pytest

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.train.config import FitConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "baselines.json"
OTHERS = ("gd_fila",)
OWN = ["original", "retrain", "finetune", "ascent", "random_label"]
OWN += [name for name in METHODS.names() if name.split("_")[0] == "gd" and name not in OTHERS]
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
def losses(tiny, golden, baseline):
    """Of each variant in float64, from a trained model, on a problem that is fixed exactly."""
    found = {}
    with golden.float64():
        source = golden.source(NOISE)
        split = tiny.split(source)
        trained = baseline.original(source, split, build=golden.net)
        fields = {
            "build": partial(golden.net, "another"),
            "recipe": FitConfig(steps=STEPS, batch_size=8, lr=1e-2),
        }
        for variant, (name, preset, params) in VARIANTS.items():
            cls, given = METHODS[name], {**params}
            if "steps" in cls.Config.model_fields:
                given |= {"steps": STEPS, "batch_size": 8}
            config = resolve_config(name, preset, given, origin="test")
            model = copy.deepcopy(trained)
            task = tiny.task(source, split, access=cls.info.access, model=model, **fields)
            found[variant] = baseline.losses(cls(config).unlearn(task), source, split)
    return found


def test_golden_losses(losses, check_golden):
    check_golden(GOLDEN, losses)


def test_directions(losses):
    """Ascent raises the forget loss, fine-tuning lowers retain, GD raises forget over retain."""
    original = losses["original"]
    assert losses["ascent"]["forget"] > original["forget"]
    assert losses["finetune"]["retain"] < original["retain"]
    for name in ("gd_lora", "gd_sine", "gd_tanh", "gd_ul", "gd_ball"):
        rise = {part: losses[name][part] - original[part] for part in ("forget", "retain")}
        assert rise["forget"] > 0.05 and rise["retain"] < 0.01, name


def test_golden_losses_can_tell_methods_apart(golden_twins):
    """Of all pairs only those coincide whose bounds do not bind in 20 steps."""
    free = {"gd_lora", "gd_weight_clip", "gd_lora_ball"}
    wanted = {("gd_sine", "gd_sine_weight_clip"), ("gd_lora_omega", "gd_clip")}
    wanted |= {pair for pair in itertools.combinations(VARIANTS, 2) if free.issuperset(pair)}
    assert golden_twins(GOLDEN) == wanted

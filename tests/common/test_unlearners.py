"""The literature's methods that know no modality: contract, variants, and what configs refuse."""

from __future__ import annotations

import pytest
import torch

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import adapted_layers
from stable_forgetting.common.checks import check_method
from stable_forgetting.common.methods.base import resolve_config

SINE = {"phi": "sine", "omega": 100.0, "rank": 4}
LITERATURE = [
    *("ihl", "loku", "ga_fila", "gd_fila"),
    *("kl", "npo", "npo_gdr", "npo_klr", "simnpo", "me_gd", "undial", "wga", "satimp", "ceu"),
    *("idk", "dpo", "dpo_gdr", "rmu", "mismatch", "flat"),
]
VARIANTS = [
    ("kl", {"compat": "tofu"}),
    ("npo", {"compat": "muse_bench"}),
    ("npo_gdr", {"compat": "muse_bench"}),
    ("npo_klr", {"compat": "openunlearning"}),
    ("npo_klr", {"compat": "muse_bench", "lr": 1e-6}),
    ("simnpo", {"compat": "unlearn_simple"}),
    ("mismatch", {"compat": "flat"}),
    *(("flat", {"divergence": division}) for division in ("tv", "js", "pearson")),
    ("flat", {"compat": "flat", "padded_length": 9}),
    ("task_vector", {"a": 1.0}),
    ("me_gd", {"compat": "published"}),
    ("dpo", {"compat": "tofu"}),
    ("dpo", {"compat": "flat"}),
    ("dpo_gdr", {"compat": "loku"}),
    ("loku", {"fila": {"compat": "loku"}}),
    ("loku", {"fila": {"balanced": True}}),
    ("loku", {"adapter": {"phi": "tanh", "omega": 50.0}}),
    ("ihl_sine", {"fila": {}}),
    ("rmu", {"positions": "all", "coefficient": "absolute"}),
    ("rmu", {"layer": "blocks.0.mlp", "parameters": ["blocks.0.*"]}),
]


def failures(results):
    return {result.name: result.detail for result in results if not result.ok}


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_variants_keep_every_promise(name, params):
    assert failures(check_method(name, params)) == {}


@pytest.mark.parametrize("name", LITERATURE)
def test_every_method_runs_through_any_parametrisation(name):
    """Full, LoRA and bounded are rows of a suite, not other classes."""
    assert failures(check_method(name, {"adapter": SINE, "batch_size": 8})) == {}


def test_methods_without_retain_data_cannot_read_it():
    for name in ("npo", "undial", "ceu", "dpo"):
        assert METHODS[name].info.access == {"forget"}
    for name in ("npo_gdr", "npo_klr", "simnpo", "kl", "loku", "ga_fila", "me_gd", "idk", "rmu"):
        assert METHODS[name].info.access == {"forget", "retain"}


def test_presets_hold_the_repositories_settings():
    config = resolve_config("loku", "tofu_phi", {}, origin="test")
    assert (config.epochs, config.steps, config.batch_size, config.lr) == (5, None, 32, 2e-4)
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.placement) == (4, 8.0, "all")
    assert config.fila.compat == "loku" and config.fila.eps == 1e-5 and config.engine().lr == 2e-4
    assert (config.engine().schedule, config.engine().warmup_epochs) == ("linear", 1.0)
    assert resolve_config("me_gd", "tofu_llama2", {}, origin="test").forget_weight == 0.1
    assert resolve_config("rmu", "wmdp", {}, origin="test").retain_weight == 1200


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("ihl", {"fila": {}}, "give adapter too"),
        ("loku", {"ball": 0.25}, "ball takes adapters that start at zero"),
        ("loku", {"penalty": 0.1}, "penalty takes adapters that start at zero"),
        ("loku", {"weight_clip": 1.5}, "weight_clip takes adapters that start at zero"),
        ("npo", {"beta": 0}, "beta"),
        ("npo", {"compat": "tofu"}, "compat"),
        ("kl", {"lamda": 0.1}, "lamda"),
    ],
)
def test_configs_refuse_what_makes_no_sense(name, params, words):
    with pytest.raises(ConfigError, match=words):
        resolve_config(name, None, params, origin="test")


def test_a_rank_too_large_for_fila_is_a_users_error(tiny):
    cls = METHODS["loku"]
    config = resolve_config("loku", None, {"adapter": {"rank": 9}, "steps": 1}, origin="test")
    source = tiny.Source()
    task = tiny.task(source, tiny.split(source), access=cls.info.access)
    with pytest.raises(ConfigError, match=r"adapter\.rank: 9 is larger"):
        cls(config).unlearn(task)


def test_the_omega_of_fila_changes_the_step_of_a_only_by_what_lr_scaling_takes_back(tiny):
    """omega sits in A: with the rate divided by it, A's steps in weight space are LoRA's."""
    moved = {}
    for omega in (1.0, 100.0):
        given = {"adapter": {"omega": omega, "rank": 4}, "steps": 1, "batch_size": 8}
        cls = METHODS["loku"]
        source = tiny.Source()
        task = tiny.task(source, tiny.split(source), access=cls.info.access)
        model = cls(resolve_config("loku", None, given, origin="test")).unlearn(task)
        moved[omega] = [
            layer.bound.amplitude
            * layer.bound.frequency
            * (layer.A - layer.start[0])
            @ layer.start[1]
            for _, layer in adapted_layers(model)
        ]
    for plain, inside in zip(moved[1.0], moved[100.0], strict=True):
        torch.testing.assert_close(inside, plain, rtol=1e-2, atol=1e-6)

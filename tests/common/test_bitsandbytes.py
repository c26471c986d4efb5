"""Optimizers and packed weights of bitsandbytes, on a module in its place: it is not installed."""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from stable_forgetting.benchmarks.costs.estimate import CARD, estimates
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.models.build import quantisation
from tests.common.train.trained import kill_at, resumed

NAMES = ("adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")
SUITE = "tofu-llama2-7b-forget10"
PACKED = [
    "protocol.model.quantised=nf4",
    "protocol.model.original=published",
    "methods.gd_sine.params.adapter.mode=split",
]


class Signs(torch.optim.Optimizer):
    """Keeps a step that is an integer, as the library's C functions take it, and a moment."""

    def __init__(self, groups, *, lr, betas, eps):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "state1": torch.zeros_like(parameter)}
                assert type(state["step"]) is int
                state["step"] += 1
                state["state1"].lerp_(parameter.grad, 0.5)
                parameter.sub_(state["state1"].sign() * group["lr"] / state["step"])


@pytest.fixture
def library(monkeypatch):
    package, optimizers = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    package.__spec__ = ModuleSpec("bitsandbytes", None)
    made = {name: type(name, (Signs,), {}) for name in ("AdamW8bit", "PagedAdamW32bit")}
    vars(optimizers).update(made, PagedAdamW8bit=type("PagedAdamW8bit", (Signs,), {}))
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optimizers)


def train(tiny, optimizer, checkpoint=None, progress=None):
    model, source = tiny.net(), tiny.Source()
    config = FitConfig(
        steps=6, batch_size=8, lr=1e-2, optimizer=optimizer, checkpoint_every=2, log_every=1
    )
    loaders = {"retain": tiny.loader(source, list(range(32)))}
    options = tiny.wired(progress=progress, checkpoint=checkpoint)
    objective = CrossEntropy("retain")
    fit(model, objective, loaders, config, forward=lambda m, b: m(b.inputs["x"]), seed=3, **options)
    return model.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_training_ends_with_the_same_bits(tiny, library, tmp_path, name):
    whole = train(tiny, name)
    again, _ = resumed(partial(train, tiny, name), tmp_path, kill_at(5))
    assert all(torch.equal(again[key], value) for key, value in whole.items())
    plain = train(tiny, "adamw")
    assert not all(torch.equal(plain[key], value) for key, value in whole.items())


@pytest.mark.parametrize("name", NAMES)
def test_without_the_library_one_line_names_it(tiny, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=f"{name} needs bitsandbytes; .* optimizer: adamw$"):
        train(tiny, name)


def test_moments_in_the_plan():
    """By hand: 8 bytes a parameter for both moments, 2 in 8 bits; paged ones in main memory."""
    held = {}
    for name in ("adamw", *NAMES):
        settings = [f"defaults.optimizer={name}"]
        (line,) = (x for x in estimates(load_suite(SUITE, settings, only=["gd"])) if x.row == "gd")
        held[name] = line.memory, line.read
    count = line.trained
    for name, on_card, paged in (
        ("adamw_8bit", 2, 0),
        ("paged_adamw_32bit", 0, 8),
        ("paged_adamw_8bit", 0, 2),
    ):
        assert held["adamw"][0] - held[name][0] == pytest.approx((8 - on_card) * count)
        assert held[name][1] - held["adamw"][1] == pytest.approx(paged * count)


def test_packed_weights_in_the_plan():
    """By hand: 6.5e9 weights of the blocks in 4 bits and scales, the rest in two bytes."""
    plain, packed = (
        {line.row: line for line in estimates(load_suite(SUITE, settings, only=["gd_sine"]))}
        for settings in ([], PACKED)
    )
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    saved = plain["gd_sine"].memory - packed["gd_sine"].memory
    assert saved == pytest.approx(blocks * (2 - 0.52))
    assert packed["gd_sine"].memory < CARD.gigabytes * 1e9 / 4
    assert packed["original"].stored == 0


def test_how_weights_are_packed(request):
    config = CausalModelConfig(name="m", original="m", dtype="bfloat16", quantised="nf4")
    with pytest.raises(ConfigError, match="nf4 needs bitsandbytes; install it, or leave it out"):
        quantisation(config)
    request.getfixturevalue("library")
    four = quantisation(config)
    assert four.load_in_4bit and four.bnb_4bit_quant_type == "nf4"
    assert four.bnb_4bit_use_double_quant and four.bnb_4bit_compute_dtype == torch.bfloat16
    assert quantisation(config.model_copy(update={"quantised": "int8"})).load_in_8bit
    assert quantisation(config.model_copy(update={"quantised": None})) is None


def test_packed_weights_are_no_whole_training(cli, one_line_error):
    packed = ("--set", "protocol.model.quantised=nf4")
    line = one_line_error(cli("plan", SUITE, *packed))
    assert "name model.original" in line
    assert "quantised" not in CausalModelConfig().model_dump(), "keys stay what they are"

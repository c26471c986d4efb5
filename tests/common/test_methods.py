"""What a method may see, how its config is made, and what its config makes of the engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.config import canonical
from stable_forgetting.common.base.errors import AccessError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.bounded.attach import adapted_layers, detach, factor_penalty
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.methods.base import resolve_config, train_reference
from stable_forgetting.common.methods.gradient import GradientConfig
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.store.hashed import read_metadata
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from tests.common.made import complaint

OTHERS = ("gd_fila",)
OWN = ["original", "retrain", "finetune", "ascent", "random_label"]
OWN += [name for name in METHODS.names() if name.split("_")[0] == "gd" and name not in OTHERS]
SHORT = {"steps": 3, "batch_size": 8}
ONLY_MLP = {"targets": {"mlp": ("blocks.*.mlp.fc*",), "attention": ()}}


def resolve(name, params=None, preset=None):
    return resolve_config(name, preset, params or {}, origin="suite.yaml: row")


@pytest.fixture
def unlearn(tiny, source):
    """Runs a method by name on a fresh copy of the tiny problem."""

    def go(name, params=None, *, source=source, **fields):
        cls = METHODS[name]
        split = tiny.split(tiny.Source())
        task = tiny.task(source, split, access=cls.info.access, **fields)
        given = SHORT if "steps" in cls.Config.model_fields else {}
        config = resolve(name, {**given, **(params or {})})
        return cls(config).unlearn(task), task

    return go


# Access ------------------------------------------------------------------------------------------


def test_declarations_of_the_single_sided_methods(tiny, unlearn):
    declared = {name: METHODS[name].info.access for name in OWN}
    assert declared["original"] == frozenset()
    model, task = unlearn("original")
    assert model is task.model and tiny.same(model, tiny.net(1)) and not task.results
    assert declared["finetune"] == {"retain"}
    assert declared["retrain"] == {"retain", "initial"}
    assert declared["ascent"] == {"forget"}
    assert all(access <= {"forget", "retain", "initial"} for access in declared.values())


@pytest.mark.parametrize(
    "ask",
    [
        lambda task: task.indices("forget"),
        lambda task: task.indices("retain", "forget"),
        lambda task: task.loader("test", batch_size=2),
        lambda task: task.loaders(("retain", "forget"), FitConfig(steps=1)),
        lambda task: task.fresh_model(),
        lambda task: train_reference(task, ["retain"]),
    ],
)
def test_undeclared_requests_raise(tiny, source, ask):
    task = tiny.task(source, tiny.split(source), access=frozenset({"retain"}))
    with pytest.raises(AccessError, match=r"does not declare; .*\(now: retain\)") as error:
        ask(task)
    assert "MethodInfo.access" in str(error.value) and "\n" not in str(error.value)
    assert not source.fetched


def test_declared_requests_are_served(tiny, source):
    split = tiny.split(source)
    task = tiny.task(source, split, access=frozenset({"retain", "forget", "initial"}))
    assert task.indices("retain", "forget").tolist() == split.train.tolist()
    loaders = task.loaders(("retain", "forget"), FitConfig(steps=1, batch_size=8, accumulation=2))
    assert list(loaders) == ["retain", "forget"]
    assert all(len(loader.next()) == 4 for loader in loaders.values())
    assert tiny.same(task.fresh_model(), task.fresh_model())


# The task ----------------------------------------------------------------------------------------


def test_replicates_and_seeds_have_streams_of_their_own(tiny, source):
    def draw(**fields):
        task = tiny.task(source, tiny.split(source), **fields)
        return torch.rand(4, generator=task.generator("x")).tolist()

    draws = [draw(), draw(replicate=1), draw(seed=6), draw(seed=6, replicate=1)]
    assert len({tuple(values) for values in draws}) == 4 and draws[0] == draw()


def test_several_fits_use_checkpoints_and_seeds_of_their_own(tiny, source, tmp_path):
    seen = []
    task = tiny.task(
        source,
        tiny.split(source),
        access=frozenset({"retain"}),
        checkpoint=tmp_path / "c.safetensors",
        progress=lambda step, total, loss: seen.extend(sorted(p.name for p in tmp_path.iterdir())),
    )
    config = FitConfig(steps=3, batch_size=8, checkpoint_every=2)
    for _ in range(2):
        task.fit(task.model, CrossEntropy(), task.loaders(("retain",), config), config)
    first, second = "c.safetensors", "c.training-1.safetensors"
    assert seen == [first] * 2 + [first] + [first, second] * 2
    assert [result.steps for result in task.results] == [3, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [first, second], "the caller's to delete"


def test_the_last_fit_before_the_weights_are_stored_keeps_no_end(tiny, source, tmp_path):
    path = tmp_path / "c.safetensors"
    split, access = tiny.split(source), frozenset({"retain"})
    task = tiny.task(source, split, access=access, checkpoint=path, keeps_last=False)
    config = FitConfig(steps=3, batch_size=8)
    for more in (True, False):
        task.fit(task.model, CrossEntropy(), task.loaders(("retain",), config), config, more=more)
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "that of the first fit"
    assert json.loads(read_metadata(path)["notes"])["step"] == 3


def test_retrain_equals_training_on_retain_from_the_same_start(tiny, unlearn, source):
    model, task = unlearn("retrain")
    reference = task.build()
    retain = tiny.split(source).parts["retain"]
    loader = Loader(tiny.Source(), retain, 8, task.generator("train"))
    seed = derive(task.seed, "engine", 0, 0)
    objective = CrossEntropy("train")
    fit(reference, objective, {"train": loader}, task.recipe, forward=tiny.forward, seed=seed)
    assert tiny.same(model, reference) and not tiny.same(model, task.build())


# resolve_config ----------------------------------------------------------------------------------


def test_defaults_presets_and_params_in_that_order():
    assert resolve("gd_sine").lr == 3e-3
    paper = resolve("gd_sine", preset="paper_literal")
    assert (paper.lr, paper.forget_weight, paper.steps, paper.lr_scaling) == (
        1e-5,
        10.0,
        500,
        "none",
    )
    assert paper.adapter == resolve("gd_sine").adapter, "a preset leaves the adapter alone"
    mine = resolve("gd_sine", {"lam": 2}, "paper_literal")
    assert (mine.lr, mine.forget_weight) == (1e-5, 2.0)
    by_epochs = resolve("gd_sine", {"epochs": 2}, "paper_literal")
    assert (by_epochs.epochs, by_epochs.steps, by_epochs.forget_weight) == (2, None, 10.0)
    own = resolve("ascent")
    assert (own.steps, own.lr) == (50, 1e-5) and np.isclose(resolve("gd").lr, 1e-4)


def test_nested_adapter_params_change_only_what_they_name():
    config = resolve("gd_sine", {"adapter": {"rank": 4}})
    assert config.adapter == AdapterConfig(phi="sine", omega=100.0, rank=4)
    assert resolve("gd", {"adapter": {"rank": 4}}).adapter == AdapterConfig(rank=4)
    assert resolve("gd_sine", {"adapter": None}).adapter is None


@pytest.mark.parametrize("name", ["gd_sine", "finetune", "ascent", "random_label"])
def test_steps_and_epochs_replace_each_other(name):
    by_epochs = resolve(name, {"epochs": 2})
    assert (by_epochs.epochs, by_epochs.steps) == (2, None)
    by_steps = resolve(name, {"steps": 7})
    assert (by_steps.epochs, by_steps.steps) == (None, 7)
    assert "exactly one" in complaint(resolve, name, {"steps": 7, "epochs": 2})
    cls = METHODS[name].Config
    assert cls(steps=7).epochs is None and cls(epochs=2).steps is None


def test_a_resolved_config_resolves_to_itself():
    for name in OWN:
        config = resolve(name)
        again = resolve(name, config.model_dump(mode="json"))
        assert again == config, name


@pytest.mark.parametrize(
    ("name", "params", "preset", "clue"),
    [
        (
            "gd_sine",
            {},
            "paper_litteral",
            "no preset 'paper_litteral'; did you mean 'paper_literal'?",
        ),
        ("finetune", {}, "paper", "method 'finetune' has no preset 'paper'; it has none"),
        ("gd_sin", {}, None, "did you mean 'gd_sine'?"),
        (
            "gd_sine",
            {"forget_wait": 1},
            None,
            "forget_wait: unknown key; did you mean 'forget_weight'?",
        ),
        ("gd_sine", {"adapter": {"omgea": 1}}, None, "adapter.omgea: unknown key; did you mean"),
        ("gd_sine", {"lr": "fast"}, None, "lr: "),
        ("gd_sine", {"lr": float("nan")}, None, "lr: "),
        ("gd_sine", {"steps": 0}, None, "steps: "),
        ("gd_sine", {"adapter": {"phi": "cosine"}}, None, "adapter.phi: "),
        ("original", {"steps": 3}, None, "steps: unknown key"),
        ("gd", {"weight_clip": 1.0}, None, "weight_clip constrains adapters"),
        ("gd", {"ball": 1.0}, None, "ball constrains adapters"),
        ("gd", {"penalty": 1.0}, None, "penalty constrains adapters"),
        ("gd_relu", {"ball": 1.0}, None, "no certificate for phi: relu"),
        ("l1_sparse", {"adapter": {"rank": 2}}, None, "adapter: unknown key"),
    ],
)
def test_bad_params_are_one_line(name, params, preset, clue):
    message = complaint(resolve, name, params, preset)
    assert clue in message
    if name != "gd_sin":
        assert message.startswith("suite.yaml: row")


# From config to engine ---------------------------------------------------------------------------


def test_the_rate_is_divided_by_the_slope():
    adapter = AdapterConfig(phi="sigmoid", omega=100.0)
    config = GradientConfig(adapter=adapter, lr=0.5)
    assert config.engine().lr == pytest.approx(0.5 / 25)
    sgd = GradientConfig(adapter=adapter, lr=0.5, optimizer="sgd")
    assert sgd.engine().lr == pytest.approx(0.5 / 25**2)
    assert GradientConfig(adapter=adapter, lr=0.5, lr_scaling="none").engine().lr == 0.5
    assert GradientConfig(lr=0.5).engine().lr == 0.5


def test_two_rates_is_plain_sgd_of_rate_one():
    config = resolve("gd_sine", preset="paper_two_rates")
    engine = config.engine()
    assert (engine.optimizer, engine.lr, engine.momentum) == ("sgd", 1.0, 0.0)
    assert engine.weight_decay == 0.0 and engine.steps == 500
    objective = METHODS["gd_sine"](config).prepare(None)
    assert (objective.retain_weight, objective.forget_weight) == (1e-5, 1e-4)
    weighted = METHODS["gd_sine"](resolve("gd_sine", {"lam": 0.3})).prepare(None)
    assert (weighted.retain_weight, weighted.forget_weight) == (1.0, 0.3)


def test_a_method_runs_through_nb_lora(tiny, unlearn):
    model = detach(unlearn("gd_nb_lora", {"lr": 1e-2})[0])
    start = tiny.task(tiny.Source(), tiny.split(tiny.Source())).model
    changed = {
        n for n, p in model.state_dict().items() if not torch.equal(p, start.state_dict()[n])
    }
    assert changed and all(".mlp.fc" in name and name.endswith(".weight") for name in changed)
    assert model.state_dict().keys() == start.state_dict().keys()


def test_a_config_of_an_earlier_version_is_read_and_has_its_key():
    now = resolve("gd_sine", {"lam": 0.3})
    before = {**canonical(now), "reading": "weighted", "alpha_r": 1e-5, "alpha_f": 1e-4}
    before["lam"] = before.pop("forget_weight")
    del before["retain_weight"]
    assert resolve("gd_sine", before) == now
    assert now.identity() == before
    assert "reading: unknown key" in complaint(resolve, "gd_sine", {"reading": "two_rates"})


def test_the_slope_rule_equalises_the_first_step(unlearn):
    """lr / (omega phi'(0)) under Adam: the first step in weight space is LoRA's."""
    deltas = {}
    for name in (
        "gd_lora",
        "gd_lora_omega",
        "gd_sine",
        "gd_tanh",
        "gd_sigmoid",
        "gd_sine_relative",
        "gd_tanh_tight",
    ):
        model, _ = unlearn(name, {"steps": 1, "eps": 1e-12})
        deltas[name] = next(adapted_layers(model))[1].delta().detach()
    for name, delta in deltas.items():
        torch.testing.assert_close(delta, deltas["gd_lora"], rtol=2e-2, atol=1e-5, msg=name)
    assert deltas["gd_lora"].abs().max() > 1e-3


def test_the_controls_differ_from_their_methods_in_one_thing():
    def differing(one, two):
        first, second = resolve(one).model_dump(), resolve(two).model_dump()
        first |= {f"adapter.{k}": v for k, v in (first.pop("adapter") or {}).items()}
        second |= {f"adapter.{k}": v for k, v in (second.pop("adapter") or {}).items()}
        return {key for key in first if first[key] != second[key]}

    assert differing("gd_lora_omega", "gd_sine") == {"adapter.phi"}
    assert differing("gd_tanh", "gd_sine") == {"adapter.phi"}
    assert differing("gd_lora", "gd_lora_omega") == {"adapter.omega"}
    assert differing("gd_lora", "gd_lora_ball") == {"ball"}
    assert differing("gd_lora", "gd_weight_clip") == {"weight_clip"}
    assert differing("gd_sine", "gd_sine_weight_clip") == {"weight_clip"}
    assert differing("gd_ul", "gd_ball") == {"ball"}
    assert differing("gd_tanh", "gd_tanh_tight") == {"adapter.bound", "adapter.c"}
    assert differing("gd_tanh_tight", "gd_ul_tanh_tight") == {"forget_loss", "forget_weight"}
    assert differing("gd_lora", "gd_ul") == {"forget_loss", "forget_weight"}
    assert differing("gd_lora", "gd_penalty") == {"penalty"}


@pytest.mark.parametrize("name", ["gd_tanh_tight", "gd_ul_tanh_tight"])
def test_a_tight_bound_is_reached_and_never_passed(name, unlearn):
    """|dW_ij| <= rms(W0) of the layer at any rate; without it the same rate goes far beyond."""

    def largest(method):
        model, _ = unlearn(method, {"lr": 3.0, "steps": 20})
        return [
            float(layer.delta().detach().abs().max() / layer.weight.square().mean().sqrt())
            for _, layer in adapted_layers(model)
        ]

    assert all(0.9 < ratio <= 1 + 1e-6 for ratio in largest(name))
    assert max(largest("gd_lora_omega")) > 10


def test_placement_targets_and_head(tiny, unlearn):
    def adapted(adapter):
        model, _ = unlearn("gd_sine", {"steps": 1, "adapter": adapter})
        return model, [name for name, _ in adapted_layers(model)]

    assert len(adapted({"placement": "mlp"})[1]) == 4
    assert adapted({"placement": "attention"})[1] == ["stem"]
    assert len(adapted({"placement": "all"})[1]) == 5
    assert adapted({"targets": ["blocks.0.*fc1"]})[1] == ["blocks.0.mlp.fc1"]
    model, _ = adapted({"train_head": True})
    assert not torch.equal(model.head.weight, tiny.net(1).head.weight)
    assert torch.equal(adapted({})[0].head.weight, tiny.net(1).head.weight)


def test_further_parameters_are_trained_beside_the_adapter(tiny, unlearn):
    def adapted(adapter):
        return unlearn("gd_sine", {"steps": 1, "adapter": adapter})[0]

    before, plain, model = tiny.net(1), adapted({}), adapted({"trained": ["head.bias"]})
    assert not torch.equal(model.head.bias, before.head.bias)
    assert torch.equal(model.head.weight, before.head.weight)
    assert torch.equal(plain.head.bias, before.head.bias)
    assert "trained" not in AdapterConfig().model_dump()


@pytest.mark.parametrize(
    ("family", "adapter", "clues"),
    [
        ({}, {"trained": ["head.*", "last_norm.*"]}, ("adapter.trained", "last_norm.*")),
        ({"head": ("classifier.*",)}, {"train_head": True}, ("classifier.*", "train_head")),
        (ONLY_MLP, {"placement": "attention"}, ("placement: attention", "mlp")),
        (ONLY_MLP, {"placement": "all"}, ("placement: all", "mlp")),
    ],
)
def test_a_model_without_what_an_adapter_names_says_so(tiny, source, family, adapter, clues):
    cls = METHODS["gd_sine"]
    task = tiny.task(source, tiny.split(source), access=cls.info.access)
    task.family = tiny.family(**family)
    message = complaint(cls(resolve("gd_sine", {"adapter": adapter})).unlearn, task)
    assert all(clue in message for clue in clues)
    assert "trained" not in adapter or "head" not in message, "every pattern must find one"


def test_constraints_hold_after_every_step(unlearn):
    rough = {"steps": 6, "lr": 0.5, "lr_scaling": "none", "lam": 0.0}
    free, _ = unlearn("gd_lora", rough)
    clipped, _ = unlearn("gd_weight_clip", {**rough, "weight_clip": 0.2})
    balled, task = unlearn("gd_lora_ball", {**rough, "ball": 0.1})
    for _, layer in adapted_layers(free):
        assert layer.A.abs().max() > 0.2
        assert layer.delta().norm() > 0.1 * layer.weight.norm()
    for _, layer in adapted_layers(clipped):
        assert max(layer.A.abs().max(), layer.Bt.abs().max()) <= 0.2
    for _, layer in adapted_layers(balled):
        assert layer.delta().norm() <= 0.1 * layer.weight.norm() * (1 + 1e-4)
    assert task.results[0].peak["adapter/at_ball"] == 1.0


def test_the_penalty_is_logged_and_holds_factors_back(unlearn):
    sizes = []
    for mu in (1e-9, 10.0):
        model, task = unlearn("gd_penalty", {"steps": 20, "lr": 1e-2, "penalty": mu})
        sizes.append(float(factor_penalty(model).detach()))
        assert "loss/penalty" in task.results[0].last
    assert sizes[1] < 0.5 * sizes[0]


# Random labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mixed", "sequential"])
def test_random_labels_read_what_they_should(tiny, unlearn, mode):
    source = tiny.Source()
    split = tiny.split(source)
    unlearn("random_label", {"mode": mode, "steps": None, "epochs": 1}, source=source)
    assert source.fetched == set(split.train.tolist())
    first = set(torch.cat(source.log[:2]).tolist())
    assert (first <= set(split.parts["forget"].tolist())) == (mode == "sequential")


@pytest.mark.parametrize("name", ["random_label", "salun"])
def test_no_step_of_random_labels_reads_both_parts_in_turn(tiny, unlearn, name):
    source = tiny.Source()
    split = tiny.split(source)
    passes = {"steps": None, "epochs": 1, "schedule": "constant", "batch_size": 8}
    unlearn(name, {"mode": "sequential", "accumulation": 8, **passes}, source=source)
    forget, log = set(split.parts["forget"].tolist()), source.log
    read = [set(indices.tolist()) <= forget for indices in log if len(indices) == 1]
    assert len(read) % 8 == 0 and len(set(read)) == 2
    assert all(len(set(read[start : start + 8])) == 1 for start in range(0, len(read), 8))


def test_the_reference_is_a_frozen_copy_of_the_model_as_it_was(tiny, source):
    task = tiny.task(source, tiny.split(source), access=frozenset({"forget", "retain"}))
    batch = task.loader("retain", batch_size=8, augment=False).next()
    reference = task.reference()
    before = reference(batch)
    assert not before.requires_grad and torch.equal(before, reference(batch))  # no dropout
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(before, reference(batch))
    assert not torch.equal(before, task.reference()(batch))
    assert all(parameter.requires_grad for parameter in task.model.parameters())


class Normed(torch.nn.Module):
    """Three blocks of a linear layer and a batch normalisation."""

    def __init__(self):
        super().__init__()
        pairs = [(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)) for _ in range(3)]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*pair) for pair in pairs)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("name", ["cf_k", "eu_k"])
def test_the_statistics_of_frozen_blocks_stay_as_they_are(tiny, unlearn, name):
    model = Normed()
    before = tiny.snapshot(model)
    after, _ = unlearn(name, {"k": 1}, model=model, build=Normed)
    moved = [key for key in before if not torch.equal(after.state_dict()[key], before[key])]
    assert "blocks.2.1.running_mean" in moved
    assert all(key.startswith(("blocks.2", "head")) for key in moved)
    after.train()(torch.randn(8, 6))
    assert not torch.equal(after.blocks[0][1].running_mean, before["blocks.0.1.running_mean"])


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *(("fisher", {"fisher": "empirical"}), ("influence", {"samples": 16})),
        *((name, {}) for name in ("kodge", "pgu", "undo")),
        *((name, {}) for name in ("weight_distortion", "weight_negation")),
    ],
)
def test_weights_that_are_frozen_stay_as_they_are(tiny, unlearn, name, params):
    model = tiny.net(1)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.fc2" in key)
    before = tiny.snapshot(model)
    after = unlearn(name, params, model=model)[0].state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert moved and all("mlp.fc2" in key for key in moved)

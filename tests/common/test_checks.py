from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import AccessError, ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS, Entry, load_plugins
from stable_forgetting.common.bounded.attach import adapted_layers, attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.checks import CheckResult, check_benchmark, check_method
from stable_forgetting.common.checks.tiny_task import problem_of
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.measure.metric import MetricSpec
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.protocol.benchmark import Runtime, Versions
from stable_forgetting.common.store.weights import tensors_digest
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.vision.benchmark import VisionBenchmark

WITHOUT_GOLDEN = {"o3", "with_contrast"}
SHORT = FitConfig(steps=2, batch_size=8)
RETAIN = MethodInfo(1, "a paper", frozenset({"retain"}))
ON_CPU = Runtime(device="cpu")
"""A label beyond the classes ends CUDA for the whole process."""
PROTOCOL = {
    "train": {"epochs": 1},
    "model": {"name": "scratch", "dim": 16, "depth": 2, "heads": 2},
}
EVERY_CHECK = [
    "info", "docstring", "config", "presets", "declared data", "runs", "output width", "finite",
    "architecture", "change", "adapter start", "frozen weights", "inputs untouched",
    "global state", "determinism", "scenarios",
]  # fmt: skip


def failures(results: list[CheckResult]) -> dict[str, str]:
    return {result.name: result.detail for result in results if not result.ok}


@pytest.fixture
def judged(monkeypatch):
    """Registers a class for the time of one test and checks it."""

    def judge(cls, **params):
        monkeypatch.setitem(METHODS._entries, "broken", Entry("broken", cls, "", "here"))
        return failures(check_method("broken", params))

    return judge


def train(task, model, part="retain"):
    task.fit(model, CrossEntropy(part), task.loaders([part], SHORT), SHORT)
    return model


@pytest.mark.parametrize("name", METHODS.names())
def test_every_registered_method_keeps_every_promise(name):
    results = check_method(name)
    assert not failures(results)
    assert [result.name for result in results] == EVERY_CHECK


def test_every_method_has_golden_values():
    files = (Path(__file__).parents[1] / "golden").glob("*.json")
    held = {name for file in files for name in json.loads(file.read_text(encoding="utf-8"))}
    added = {*METHODS.names()} - held - WITHOUT_GOLDEN
    assert not added, "name each among VARIANTS of a test like test_newer_methods.py"


def test_every_method_but_original_states_formula_and_source():
    for cls in (METHODS[name] for name in METHODS.names() if name != "original"):
        text, paper = f"{cls.__doc__} {cls.__mro__[1].__doc__}", cls.info.paper
        assert "Formula:" in text or "minimise" in text, cls
        assert "Source" in text or "arXiv" in paper or "ours" in paper, cls


def test_checking_leaves_the_global_state_and_the_shared_original_alone():
    def state():
        stream = torch.get_rng_state().tolist(), random.getstate()
        return *stream, tensors_digest(problem_of("").original.state_dict())

    before = state()
    check_method("gd")
    assert state() == before


def test_params_are_used_and_must_fit():
    adapted = check_method("gd", {"adapter": {"rank": 2, "phi": "sine", "omega": 10.0}})
    details = {result.name: result.detail for result in adapted}
    assert not failures(adapted) and "max |dW| = 0" in details["adapter start"]
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        check_method("gd", {"lrr": 1})
    with pytest.raises(ConfigError, match="unknown method"):
        check_method("gdd")


def method(
    unlearn=None, *, base=UnlearningMethod, doc="A method of some words in a test.", **fields
):
    """A class around a function of the task; by default a sound method of a few lines."""
    known = {"info": RETAIN} if base is UnlearningMethod else {}
    run = unlearn or (lambda task: train(task, task.model))
    if unlearn is not None or base is UnlearningMethod:
        known["unlearn"] = lambda self, task: run(task)
    return type("Broken", (base,), {"__doc__": doc, **known, **fields})


def test_a_sound_method_of_a_few_lines_passes(judged):
    assert judged(method()) == {}


# Broken methods: each breaks one promise ----------------------------------------------------------


def changed(change):
    """Trains, then changes the model by hand."""

    def unlearn(task):
        train(task, task.model)
        with torch.no_grad():
            change(task.model)
        return task.model

    return method(unlearn)


def trains_the_teacher(task):
    student = copy.deepcopy(task.model)
    train(task, task.model)
    return student


def goes_around_the_guard(task):
    loader = Loader(task.source, task.split.parts["forget"], 8, task.generator("batches"))
    task.fit(task.model, CrossEntropy("forget"), {"forget": loader}, SHORT)
    return task.model


def swallows_the_error(task):
    with contextlib.suppress(AccessError):
        task.source.fetch(torch.from_numpy(task.split.parts["test"]))
    return train(task, task.model)


def counts(task, _runs=[]):  # noqa: B006 - it counts on purpose
    _runs.append(1)
    with torch.no_grad():
        task.model.head.bias += len(_runs)
    return task.model


def seeds_the_world(task):
    torch.manual_seed(0)
    return train(task, task.model)


def wider(model):
    model.head = nn.Linear(model.head.in_features, 5)


def adapted(change):
    """Attaches adapters, then changes something under them, before the training."""

    def unlearn(task):
        attach(task.model, task.family.targets["mlp"], AdapterConfig(), task.generator("adapter"))
        with torch.no_grad():
            change(task.model)
        return train(task, task.model)

    return method(unlearn)


class _StartsElsewhere(METHODS["gd_sine"]):
    """Moves the adapter before training, so that the model is another one from the start."""

    def _attach(self, task):
        super()._attach(task)
        with torch.no_grad():
            for _, layer in adapted_layers(task.model):
                layer.A += 1e-3


def relabels(task):
    task.source._source._labels.add_(1).remainder_(4)
    return train(task, task.model)


def needs_two_classes(task):
    batch = task.source.fetch(torch.from_numpy(task.indices("forget")))
    assert len(batch.labels.unique()) > 1, "one class only"
    return train(task, task.model)


class _Required(Strict):
    threshold: float


class _Loose(Strict, extra="ignore"):
    pass


def declared(version=1, paper="a paper", access=("retain",), **fields):
    return MethodInfo(version, paper, frozenset(access), **fields)


BROKEN = {
    "no-op": (method(lambda task: task.model), {"change": "bit for bit"}),
    "teacher": (method(trains_the_teacher), {"change": "another model was trained"}),
    "secret": (method(info=declared(changes_model=False)), {"change": "tensors changed"}),
    "asks": (
        method(lambda task: train(task, task.model, "forget")),
        {"declared data": "forget"},
    ),
    "goes-around": (method(goes_around_the_guard), {"declared data": "forget"}),
    "swallows": (method(swallows_the_error), {"declared data": "test"}),
    "global-noise": (
        changed(lambda model: model.head.weight.add_(torch.randn(model.head.weight.shape))),
        {"global state": "torch", "determinism": "same seed"},
    ),
    "counts": (method(counts), {"determinism": "same seed"}),
    "seeds": (method(seeds_the_world), {"global state": "torch"}),
    "renames": (
        changed(lambda model: setattr(model, "head", nn.Sequential(model.head))),
        {"architecture": "keys differ"},
    ),
    "hook": (  # nothing of it is in the weights that are stored
        changed(lambda model: model.head.register_forward_hook(lambda m, inputs, out: -out)),
        {"architecture": "not in its weights"},
    ),
    "trains-the-base": (
        adapted(lambda model: model.blocks[0].mlp.fc1.weight.requires_grad_(True)),
        {"frozen weights": "fc1.weight"},
    ),
    "touches-the-rest": (
        adapted(lambda model: model.norm.weight.mul_(1.5)),
        {"frozen weights": "norm.weight"},
    ),
    "starts-elsewhere": (_StartsElsewhere, {"adapter start": "before training"}),
    "relabels": (method(relabels), {"inputs untouched": "data source"}),
    "needs-images": (
        method(lambda task: train(task, task.model.patch_embed)),
        {"runs": "patch_embed"},
    ),
    "returns-nothing": (method(lambda task: train(task, task.model) and None), {"runs": "None"}),
    "one-scenario": (
        method(needs_two_classes, info=declared(access=("forget", "retain"))),
        {"scenarios": "class: AssertionError"},
    ),
    "required": (method(Config=_Required), {"config": "default"}),
    "loose": (method(Config=_Loose), {"config": "unknown keys"}),
    "preset": (method(presets={"paper": {"threshold": 3}}), {"presets": "threshold"}),
    "version": (method(info=declared(version=0)), {"info": "version"}),
    "paper": (method(info=declared(paper=" ")), {"info": "paper"}),
    "test-data": (method(info=declared(access=("test",))), {"info": "test"}),
    "no-info": (method(info=None), {"info": "MethodInfo"}),
    "title": (method(doc="My method."), {"docstring": "docstring"}),
    "silent": (method(doc=None), {"docstring": "docstring"}),
}


@pytest.mark.parametrize(("cls", "wanted"), BROKEN.values(), ids=BROKEN)
def test_what_a_method_breaks_is_found_and_nothing_else(judged, cls, wanted):
    found = judged(cls)
    assert [*found] == [*wanted]
    assert all(words in found[name] for name, words in wanted.items())


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            lambda model: model.blocks[0].mlp.fc1.bfloat16(),
            {"architecture": "bfloat16", "output width": ""},
        ),
        (wider, {"output width": "(144, 5)", "architecture": "head"}),
        (lambda model: model.head.weight[0, 0].fill_(math.nan), {"finite": "head.weight"}),
    ],
    ids=["number format", "width", "not finite"],
)
def test_what_breaks_several_promises(judged, change, wanted):
    found = judged(changed(change))
    assert all(words in found[name] for name, words in wanted.items())


def test_other_scenarios_are_not_tried(judged):
    access = {"access": ("forget", "retain"), "scenarios": frozenset({"random"})}
    assert judged(method(needs_two_classes, info=declared(**access))) == {}


# Benchmarks ---------------------------------------------------------------------------------------


def test_the_vision_benchmark_keeps_every_promise():
    results = check_benchmark("image_classification", PROTOCOL, ON_CPU)
    assert not failures(results) and len(results) == 10


def test_a_protocol_must_be_valid():
    with pytest.raises(ConfigError, match=r"train: required"):
        check_benchmark("image_classification", {}, ON_CPU)
    with pytest.raises(ConfigError, match="unknown benchmark"):
        check_benchmark("visions", PROTOCOL, ON_CPU)


@pytest.fixture
def benchmarked(monkeypatch):
    def judge(**changes):
        cls = type("Broken", (VisionBenchmark,), changes)
        cls.__module__ = "stable_forgetting.vision.benchmark"
        cls.__qualname__ = "VisionBenchmark"  # what another process imports
        monkeypatch.setitem(BENCHMARKS._entries, "broken", Entry("broken", cls, "", "here"))
        return failures(check_benchmark("broken", PROTOCOL, ON_CPU))

    return judge


def _unseeded(self, seed):
    return VisionBenchmark.build(self, int(torch.randint(10**6, ())))


def _scores_test(self, split, *, trial, seed):
    return dict(split.parts)


def _extra_metric(self, scores, *, trial, seed):
    return VisionBenchmark.evaluate(self, scores, trial=trial, seed=seed) | {"extra": 1.0}


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"versions": Versions(score=0)}, "versions", "score must be from 1"),
        ({"version": 2}, "versions", "give versions"),
        ({"metrics": ()}, "metrics", "MetricSpec"),
        ({"metrics": (MetricSpec("fa", "target", "FA"),)}, "metrics", "doc"),
        ({"identity": classmethod(lambda cls, config, kind: {"x": object()})}, "identity", "hash"),
        ({"split": lambda self, seed: _other_split(self)}, "split", "other index sets"),
        ({"parts": _scores_test}, "parts", "trial scores test"),
        ({"build": _unseeded}, "build", "other weights"),
        ({"forward": lambda self, model, batch: model(batch.inputs["x"])[:, :9]}, "forward", "9"),
        ({"targets": {"mlp": ("layers.*",)}}, "targets", "layers"),
        ({"head": ("fc.*",)}, "targets", "head"),
        ({"recipe": None}, "recipe", "FitConfig"),
        ({"evaluate": _extra_metric}, "evaluate", "'extra' has no MetricSpec"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_broken_benchmarks(benchmarked, changes, name, words):
    found = benchmarked(**changes)
    assert name in found and words in found[name]


def _other_split(benchmark, _count=[0]):  # noqa: B006 - it counts on purpose
    _count[0] += 1
    return VisionBenchmark.split(benchmark, _count[0])


def test_a_benchmark_must_import_without_torch(tmp_path, monkeypatch):
    plugin = tmp_path / "heavy_plugin.py"
    plugin.write_text(
        textwrap.dedent("""
        import torch
        from stable_forgetting.common.base.registry import BENCHMARKS
        from stable_forgetting.vision.benchmark import VisionBenchmark

        @BENCHMARKS.register("heavy")
        class Heavy(VisionBenchmark):
            pass
        """)
    )
    monkeypatch.setattr(BENCHMARKS, "_entries", dict(BENCHMARKS._entries))
    load_plugins([str(plugin)], installed=False)
    found = failures(check_benchmark("heavy", PROTOCOL, ON_CPU))
    assert [*found] == ["identity"] and "torch" in found["identity"]

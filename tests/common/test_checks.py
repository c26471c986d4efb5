from __future__ import annotations

import contextlib
import copy
import random
import textwrap
from typing import ClassVar

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
from stable_forgetting.common.methods.gradient import GradientMethod
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.protocol.benchmark import Runtime, Versions
from stable_forgetting.common.store.weights import tensors_digest
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.vision.benchmark import VisionBenchmark

SHORT = FitConfig(steps=2, batch_size=8)
RETAIN = MethodInfo(1, "a paper", frozenset({"retain"}))
PROTOCOL = {
    "train": {"epochs": 1},
    "model": {"name": "scratch", "dim": 16, "depth": 2, "heads": 2},
}
EVERY_CHECK = [
    "info",
    "docstring",
    "config",
    "presets",
    "declared data",
    "runs",
    "output width",
    "finite",
    "architecture",
    "change",
    "adapter start",
    "frozen weights",
    "inputs untouched",
    "global state",
    "determinism",
    "scenarios",
]


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


def test_every_method_but_original_states_formula_and_source():
    for cls in (METHODS[name] for name in METHODS.names() if name != "original"):
        text, paper = f"{cls.__doc__} {cls.__mro__[1].__doc__}", cls.info.paper
        assert "Formula:" in text or "minimise" in text, cls
        assert "Source" in text or "arXiv" in paper or "ours" in paper, cls


def test_checking_leaves_the_global_state_and_the_shared_original_alone():
    before = (
        torch.get_rng_state(),
        random.getstate(),
        tensors_digest(problem_of("").original.state_dict()),
    )
    check_method("gd")
    after = (
        torch.get_rng_state(),
        random.getstate(),
        tensors_digest(problem_of("").original.state_dict()),
    )
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_params_are_used_and_must_fit():
    adapted = check_method("gd", {"adapter": {"rank": 2, "phi": "sine", "omega": 10.0}})
    details = {result.name: result.detail for result in adapted}
    assert not failures(adapted) and "max |dW| = 0" in details["adapter start"]
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        check_method("gd", {"lrr": 1})
    with pytest.raises(ConfigError, match="unknown method"):
        check_method("gdd")


class _Fine(UnlearningMethod):
    """Trains everything on the retain set for two steps."""

    info = RETAIN

    def unlearn(self, task):
        return train(task, task.model)


def test_a_sound_method_of_a_few_lines_passes(judged):
    assert judged(_Fine) == {}


# Broken methods: each breaks one promise ----------------------------------------------------------


class _NoOp(_Fine):
    """Says that it unlearns and hands back what it was given."""

    def unlearn(self, task):
        return task.model


class _TrainsTheTeacher(_Fine):
    """Copies a student from the teacher and then trains the teacher."""

    def unlearn(self, task):
        student = copy.deepcopy(task.model)
        train(task, task.model)
        return student


class _SecretlyChanging(_Fine):
    """Declares that it changes nothing but trains all the same."""

    info = MethodInfo(1, "a paper", frozenset({"retain"}), changes_model=False)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (_NoOp, "bit for bit"),
        (_TrainsTheTeacher, "another model was trained"),
        (_SecretlyChanging, "tensors changed"),
    ],
)
def test_a_model_that_did_not_change_as_declared(judged, cls, words):
    found = judged(cls)
    assert [*found] == ["change"] and words in found["change"]


class _AsksForForget(_Fine):
    """Asks the task for a part that it does not declare."""

    def unlearn(self, task):
        return train(task, task.model, "forget")


class _GoesAroundTheGuard(_Fine):
    """Reads the index sets and the source behind the task's back."""

    def unlearn(self, task):
        stream = task.generator("batches")
        loader = Loader(task.source, task.split.parts["forget"], 8, stream)
        task.fit(task.model, CrossEntropy("forget"), {"forget": loader}, SHORT)
        return task.model


class _SwallowsTheError(_Fine):
    """Peeks at test data and hides the error."""

    def unlearn(self, task):
        with contextlib.suppress(AccessError):
            task.source.fetch(torch.from_numpy(task.split.parts["test"]))
        return train(task, task.model)


@pytest.mark.parametrize(
    ("cls", "part"),
    [(_AsksForForget, "forget"), (_GoesAroundTheGuard, "forget"), (_SwallowsTheError, "test")],
)
def test_undeclared_data(judged, cls, part):
    found = judged(cls)
    assert [*found] == ["declared data"] and part in found["declared data"]


class _Nondeterministic(_Fine):
    """Adds noise from torch's global stream."""

    def unlearn(self, task):
        train(task, task.model)
        with torch.no_grad():
            task.model.head.weight += torch.randn(task.model.head.weight.shape)
        return task.model


class _Counting(_Fine):
    """Remembers how often it ran."""

    runs: ClassVar[list[int]] = []

    def unlearn(self, task):
        self.runs.append(1)
        with torch.no_grad():
            task.model.head.bias += len(self.runs)
        return task.model


class _SeedsTheWorld(_Fine):
    """Seeds torch's global stream and leaves it so."""

    def unlearn(self, task):
        torch.manual_seed(0)
        return train(task, task.model)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (_Nondeterministic, ["global state", "determinism"]),
        (_Counting, ["determinism"]),
        (_SeedsTheWorld, ["global state"]),
    ],
)
def test_randomness(judged, cls, names):
    assert [*judged(cls)] == names


class _RenamesTheHead(_Fine):
    """Returns another architecture of the same width."""

    def unlearn(self, task):
        train(task, task.model)
        task.model.head = nn.Sequential(task.model.head)
        return task.model


class _HidesBehaviour(_Fine):
    """Leaves a hook on the model: nothing of it is in the weights that are stored."""

    def unlearn(self, task):
        train(task, task.model)
        task.model.head.register_forward_hook(lambda module, inputs, output: -output)
        return task.model


class _HalfPrecision(_Fine):
    """Stores a layer in another number format."""

    def unlearn(self, task):
        train(task, task.model)
        task.model.blocks[0].mlp.fc1.bfloat16()
        return task.model


@pytest.mark.parametrize("cls", [_RenamesTheHead, _HidesBehaviour])
def test_another_architecture(judged, cls):
    assert [*judged(cls)] == ["architecture"]


def test_another_number_format(judged):
    found = judged(_HalfPrecision)
    assert "bfloat16" in found["architecture"] and "output width" in found


class _WiderHead(_Fine):
    """Adds a class for the forgotten samples."""

    def unlearn(self, task):
        train(task, task.model)
        task.model.head = nn.Linear(task.model.head.in_features, 5)
        return task.model


def test_another_width(judged):
    found = judged(_WiderHead)
    assert "(144, 5)" in found["output width"] and "head" in found["architecture"]


class _NotFinite(_Fine):
    """Divides by zero at the end."""

    def unlearn(self, task):
        train(task, task.model)
        with torch.no_grad():
            task.model.head.weight[0, 0] = float("nan")
        return task.model


def test_weights_that_are_not_finite(judged):
    assert "finite" in judged(_NotFinite)


class _TrainsTheBase(_Fine):
    """Attaches adapters and trains the weights under them."""

    def unlearn(self, task):
        attach(task.model, task.family.targets["mlp"], AdapterConfig(), task.generator("adapter"))
        task.model.blocks[0].mlp.fc1.weight.requires_grad_(True)
        return train(task, task.model)


class _TouchesTheRest(_Fine):
    """Attaches adapters and changes a frozen layer by hand."""

    def unlearn(self, task):
        attach(task.model, task.family.targets["mlp"], AdapterConfig(), task.generator("adapter"))
        with torch.no_grad():
            task.model.norm.weight *= 1.5
        return train(task, task.model)


@pytest.mark.parametrize("cls", [_TrainsTheBase, _TouchesTheRest])
def test_the_base_under_adapters_must_stay(judged, cls):
    assert [*judged(cls)] == ["frozen weights"]


class _StartsElsewhere(METHODS["gd_sine"]):
    """Moves the adapter before training, so that the model is another one from the start."""

    def _attach(self, task):
        super()._attach(task)
        with torch.no_grad():
            for _, layer in adapted_layers(task.model):
                layer.A += 1e-3


def test_adapters_must_start_at_zero(judged):
    assert [*judged(_StartsElsewhere)] == ["adapter start"]


class _ChangesTheData(_Fine):
    """Relabels the source in place."""

    def unlearn(self, task):
        task.source._source._labels.add_(1).remainder_(4)
        return train(task, task.model)


def test_the_data_must_stay(judged):
    assert [*judged(_ChangesTheData)] == ["inputs untouched"]


class _NeedsImages(_Fine):
    """Expects something that only one modality has."""

    def unlearn(self, task):
        return train(task, task.model.patch_embed)


class _ReturnsNothing(_Fine):
    """Changes the model in place and forgets to return it."""

    def unlearn(self, task):
        train(task, task.model)


@pytest.mark.parametrize(
    ("cls", "words"), [(_NeedsImages, "patch_embed"), (_ReturnsNothing, "NoneType")]
)
def test_a_run_that_fails_ends_the_checks(judged, cls, words):
    found = judged(cls)
    assert [*found] == ["runs"] and words in found["runs"]


class _OnlyRandom(GradientMethod):
    """Works for a subset of images and breaks when a whole class goes."""

    info = MethodInfo(1, "a paper", frozenset({"forget", "retain"}))

    def objective(self):
        return CrossEntropy("retain")

    def unlearn(self, task):
        batch = task.source.fetch(torch.from_numpy(task.indices("forget")))
        assert len(batch.labels.unique()) > 1, "one class only"
        return super().unlearn(task)


def test_scenarios_are_tried(judged, monkeypatch):
    found = judged(_OnlyRandom)
    assert [*found] == ["scenarios"] and "class: AssertionError" in found["scenarios"]
    honest = MethodInfo(1, "a paper", _OnlyRandom.info.access, frozenset({"random"}))
    monkeypatch.setattr(_OnlyRandom, "info", honest)
    assert judged(_OnlyRandom) == {}


# Broken declarations ------------------------------------------------------------------------------


class _Required(Strict):
    threshold: float


class _BadConfig(_Fine):
    """Has a parameter without a default value."""

    Config = _Required


class _Loose(Strict, extra="ignore"):
    pass


class _LooseConfig(_Fine):
    """Swallows misspelled parameters without a word."""

    Config = _Loose


class _BadPreset(_Fine):
    """Has a preset that its own config refuses."""

    presets: ClassVar = {"paper": {"threshold": 3}}


class _VersionZero(_Fine):
    """Has a version that could never have been raised."""

    info = MethodInfo(0, "a paper", frozenset({"retain"}))


class _NoPaper(_Fine):
    """Does not say where it comes from."""

    info = MethodInfo(1, " ", frozenset({"retain"}))


class _WantsTest(_Fine):
    """Declares that it reads the test set."""

    info = MethodInfo(1, "a paper", frozenset({"test"}))


class _NoInfo(UnlearningMethod):
    """Says nothing at all about itself."""

    def unlearn(self, task):
        return train(task, task.model)


class _Title(_Fine):
    """My method."""


class _Silent(_Fine):
    pass


@pytest.mark.parametrize(
    ("cls", "name", "words"),
    [
        (_BadConfig, "config", "default"),
        (_LooseConfig, "config", "unknown keys"),
        (_BadPreset, "presets", "threshold"),
        (_VersionZero, "info", "version"),
        (_NoPaper, "info", "paper"),
        (_WantsTest, "info", "test"),
        (_NoInfo, "info", "MethodInfo"),
        (_Title, "docstring", "docstring"),
        (_Silent, "docstring", "docstring"),
    ],
)
def test_declarations(judged, cls, name, words):
    found = judged(cls)
    assert [*found] == [name] and words in found[name]


# Benchmarks ---------------------------------------------------------------------------------------


def test_the_vision_benchmark_keeps_every_promise():
    results = check_benchmark("image_classification", PROTOCOL, Runtime())
    assert not failures(results) and len(results) == 10


def test_a_protocol_must_be_valid():
    with pytest.raises(ConfigError, match=r"train: required"):
        check_benchmark("image_classification", {}, Runtime())
    with pytest.raises(ConfigError, match="unknown benchmark"):
        check_benchmark("visions", PROTOCOL, Runtime())


@pytest.fixture
def benchmarked(monkeypatch):
    def judge(**changes):
        cls = type("Broken", (VisionBenchmark,), changes)
        cls.__module__ = "stable_forgetting.vision.benchmark"
        cls.__qualname__ = "VisionBenchmark"  # what another process imports
        monkeypatch.setitem(BENCHMARKS._entries, "broken", Entry("broken", cls, "", "here"))
        return failures(check_benchmark("broken", PROTOCOL, Runtime()))

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
    found = failures(check_benchmark("heavy", PROTOCOL, Runtime()))
    assert [*found] == ["identity"] and "torch" in found["identity"]

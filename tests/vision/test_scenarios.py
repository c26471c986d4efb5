from __future__ import annotations

import copy

import numpy as np
import pytest

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.vision.config import DataConfig, ModelConfig, ScenarioConfig
from stable_forgetting.vision.data.source import InputSpec, load_source
from stable_forgetting.vision.scenarios import (
    forgotten_classes,
    make_split,
    out_of_fold_probabilities,
)

KINDS = ("random", "class", "confusing", "memorised")


@pytest.fixture(scope="module")
def source():
    return load_source(DataConfig(), InputSpec(16, (0.3,), (0.35,)))


@pytest.mark.parametrize("kind", KINDS)
def test_forget_and_retain_are_the_training_pool(source, kind):
    split = make_split(source, ScenarioConfig(kind=kind), 1)
    np.testing.assert_array_equal(split.train, source.train_pool)
    assert split.source_digest == source.digest
    for part, pool in (("validation", source.validation_pool), ("test", source.test_pool)):
        others = split.parts.get(f"{part}_forget", np.empty(0, dtype=np.int64))
        np.testing.assert_array_equal(np.union1d(split.parts[part], others), pool)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_split_and_survives_a_file(source, kind, tmp_path):
    first, again, other = (make_split(source, ScenarioConfig(kind=kind), s) for s in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    first.save(tmp_path / "s.safetensors")
    loaded = ForgetSplit.load(tmp_path / "s.safetensors")
    assert loaded.digest == first.digest and loaded.notes == first.notes


@pytest.mark.parametrize("kind", ["random", "confusing", "memorised"])
def test_fraction(source, kind):
    split = make_split(source, ScenarioConfig(kind=kind, fraction=0.2), 0)
    assert len(split.parts["forget"]) == round(0.2 * len(source.train_pool))


def test_class_forgetting_splits_held_out_images_too(source):
    split = make_split(source, ScenarioConfig(kind="class"), 9)
    assert split.name == "digits/class-2/seed-9"  # (3 + 9) mod 10
    assert split.notes["forgotten"] == "class 2 (2)"
    for part, indices in split.parts.items():
        forgotten = source.labels[indices] == 2
        assert forgotten.all() if "forget" in part else not forgotten.any()
        assert len(indices)


def test_several_classes(source):
    listed = make_split(source, ScenarioConfig(kind="class", classes=(7, 1)), 3)
    assert set(source.labels[listed.parts["forget"]]) == {1, 7}
    drawn = [forgotten_classes(ScenarioConfig(kind="class", num_classes=4), 10, s) for s in (0, 1)]
    assert all(len(set(classes)) == 4 for classes in drawn) and drawn[0] != drawn[1]


def test_the_proxy_finds_what_a_linear_model_gets_wrong(source):
    probabilities = out_of_fold_probabilities(source, 0)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    labels = source.labels[source.train_pool]
    wrong = probabilities.argmax(1) != labels
    assert 0 < wrong.mean() < 0.1
    memorised = make_split(source, ScenarioConfig(kind="memorised"), 0).parts["forget"]
    confusing = make_split(source, ScenarioConfig(kind="confusing"), 0).parts["forget"]
    chosen = np.isin(source.train_pool, memorised)
    assert wrong[chosen].mean() > 5 * wrong.mean()
    true_class = probabilities[np.arange(len(labels)), labels]
    assert true_class[chosen].max() <= true_class[~chosen].min() + 1e-6
    top = np.sort(probabilities, axis=1)
    margin = top[:, -1] - top[:, -2]
    chosen = np.isin(source.train_pool, confusing)
    assert margin[chosen].max() <= margin[~chosen].min() + 1e-6


def test_scenarios_that_do_not_fit_the_data(source):
    for fields, message in (
        ({"classes": (10,)}, "10 is not one of the 10 classes"),
        ({"num_classes": 10}, "leaves none"),
        ({"classes": tuple(range(10))}, "'retain' is empty"),
    ):
        with pytest.raises(DataError, match=message):
            make_split(source, ScenarioConfig(kind="class", **fields), 0)
    with pytest.raises(DataError, match="'forget' is empty"):
        make_split(source, ScenarioConfig(fraction=1e-6), 0)


def test_a_number_that_two_classes_answer_to_is_refused(source):
    """Folders 0 to 8 and 10 in the order of their names: class 2 is the folder 10."""
    folders = copy.copy(source)
    folders.class_names = tuple(sorted(map(str, (*range(9), 10))))
    for fields in ({"classes": (2,)}, {"classes": (1,), "earlier_classes": (2,)}):
        with pytest.raises(DataError, match=r"2 is class '10'.*another is called '2'.*: 02"):
            make_split(folders, ScenarioConfig(kind="class", **fields), 0)
    assert make_split(folders, ScenarioConfig(kind="class", classes=(1,)), 0).parts["forget"].size
    folders.class_names = tuple(map(str, range(2010, 2020)))
    assert make_split(folders, ScenarioConfig(kind="class", classes=(2,)), 0).parts["forget"].size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "random", "classes": [1]}, "only for kind: class"),
        ({"kind": "class", "fraction": 0.1}, "leave it out"),
        ({"kind": "class", "classes": [1], "num_classes": 1}, "one of classes and num_classes"),
        ({"kind": "class", "classes": [1, 1]}, "each class once"),
        ({"kind": "class", "classes": []}, "at least one"),
        ({"kind": "memorised", "fraction": 1.0}, "fraction"),
        ({"kind": "random", "fraction": None}, "needs a number"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(ScenarioConfig, fields, "suite.yaml")


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(),
        DataConfig(name="cifar10", native_size=16),
        ModelConfig(),
        ModelConfig(name="vit_tiny_patch16_224", image_size=32),
        ScenarioConfig(),
        ScenarioConfig(kind="class"),
        ScenarioConfig(kind="class", classes=(3, 1)),
    ],
)
def test_what_is_stored_is_what_is_read(config):
    assert type(config).model_validate(config.model_dump(mode="json")) == config

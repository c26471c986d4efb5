from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from stable_forgetting.common.audits.base import Measure, NotApplicable
from stable_forgetting.common.audits.recovery import (
    RelearnFromRetain,
    RelearnTime,
    anamnesis,
)
from stable_forgetting.common.audits.representations import (
    LinearProbe,
    OverUnlearning,
    Prototype,
    collect_features,
    head_layer,
    input_signs,
    moved,
    prototypes,
    unit,
)
from stable_forgetting.common.audits.weights import (
    RemoveAdapter,
    Requantise,
    change_matrices_,
    requantise,
)
from stable_forgetting.common.data.batch import Batch

# Relearning


def test_original_needs_no_step_and_retrain_some(toy):
    audit = RelearnTime()
    original = audit.measure(toy.task())["steps"]
    retrain = audit.measure(toy.task(toy.retrain))["steps"]
    assert original.value == 0 and 0 < retrain.value < 100
    assert retrain.low <= retrain.value <= retrain.high and "3 batch orders" in retrain.interval
    assert audit.relate({"steps": original}, {"steps": retrain})["AIN"].value == 0
    assert audit.measure(toy.task(toy.retrain))["steps"] == retrain


def test_a_training_that_does_not_arrive_is_said_to_be_cut_off(toy):
    slow = RelearnTime(RelearnTime.Config(max_steps=2, lr=1e-7, repeats=1))
    found = slow.measure(toy.task(toy.retrain))["steps"]
    assert found.value == 2 and "1 of 1 cut off" in found.note


def test_relearning_has_no_warm_up_whatever_originals_recipe_has(toy):
    audit = RelearnTime(RelearnTime.Config(max_steps=40, repeats=1))
    slow = {"warmup_epochs": 5.0, "timing": "transformers"}
    found = []
    for changes in ({}, slow):
        task = toy.task(toy.retrain)
        found.append(audit.measure(replace(task, recipe=task.recipe.model_copy(update=changes))))
    assert found[0] == found[1] and found[0]["steps"].value < 40


@pytest.fixture
def watched(toy, monkeypatch):
    """A task of Retrain, and the samples of each batch that is read."""
    batches, task = [], toy.task(toy.retrain)
    fetch = task.source.fetch

    def noted(indices, *, augment=None):
        batches.append(set(indices.tolist()))
        return fetch(indices, augment=augment)

    monkeypatch.setattr(task.source, "fetch", noted)
    return task, batches


def test_few_shots_relearn_on_few_samples(watched):
    task, batches = watched
    RelearnTime(RelearnTime.Config(shots=3, repeats=1, max_steps=2)).measure(task)
    assert 3 in map(len, batches)


def test_retain_data_alone_are_what_is_trained_on(toy, watched):
    """No forget sample is in a batch; Retrain does not come to know the class."""
    task, batches = watched
    config = RelearnFromRetain.Config(repeats=1, max_steps=4, batch_size=5)
    found = RelearnFromRetain(config).measure(task)["steps"]
    forget, retain = (set(task.split.parts[part].tolist()) for part in ("forget", "retain"))
    trained = [batch for batch in batches if len(batch) == 5]
    assert len(trained) == 4 and all(batch <= retain for batch in trained)
    assert all(batch <= forget for batch in batches if batch not in trained)
    assert found.value == 4 and "cut off at 4" in found.note, "Retrain never knew the class"
    assert RelearnFromRetain(config).measure(toy.task())["steps"].value == 0


def test_anamnesis_by_hand():
    found = anamnesis(Measure(4.0, 3.0, 6.0), Measure(8.0, 6.0, 12.0))
    assert (found.value, found.low, found.high) == (0.5, 0.25, 1.0)
    undefined = anamnesis(Measure(4.0), Measure(0.0))
    assert undefined.value is None and "nothing to relearn" in undefined.note


# Representations


def test_features_are_what_enters_the_head(toy):
    task = toy.task()
    indices = task.split.parts["test"]
    x = collect_features(task, toy.original, indices)
    head = toy.original.head
    logits = torch.as_tensor(x).float() @ head.weight.T + head.bias
    batch = task.source.fetch(torch.as_tensor(indices))
    assert torch.allclose(logits, task.family.forward(toy.original, batch), atol=1e-5)
    assert not toy.original.head._forward_pre_hooks


def test_a_benchmarks_own_features_go_first(toy):
    task = toy.task(features=lambda model, batch: batch.inputs["x"][:, :2])
    assert collect_features(task, toy.original, task.split.parts["test"]).shape[1] == 2


def test_no_head_is_not_applicable(toy):
    with pytest.raises(NotApplicable, match="features"):
        head_layer(toy.original, ("classifier.*",), 4)
    with pytest.raises(NotApplicable, match="features"):
        head_layer(toy.original, ("head.*",), 5)


def test_the_probe_reads_a_class_that_the_head_hides(toy):
    hidden = toy.task().load()
    with torch.no_grad():
        hidden.head.bias[1] = -1e3  # never predicts class 1, forgets nothing
    task = toy.task(hidden)
    assert task.collect(hidden, task.split.parts["forget"]).accuracy == 0
    for audit in (LinearProbe(), Prototype()):
        found = audit.measure(task)
        assert found["forgotten"].value > 80, type(audit)
        assert found == audit.measure(task)


def test_tests_of_the_forgotten_class_alone_say_nothing_of_retained_ones(toy):
    task = toy.task()
    forget, retain = (task.split.parts[part] for part in ("forget", "retain"))
    parts = {"forget": forget[::2], "retain": retain, "test": forget[1::2]}
    task.split = replace(task.split, parts=parts)
    for audit in (LinearProbe(), Prototype()):
        assert [*audit.measure(task)] == ["forgotten"], type(audit)


def test_the_probe_is_for_whole_classes(toy):
    for audit in (LinearProbe(), Prototype(), OverUnlearning()):
        with pytest.raises(NotApplicable, match="whole classes"):
            audit.measure(toy.task(scenario="random"))


def test_prototypes_by_hand():
    x, y = np.array([[3.0, 0.0], [0.0, 4.0], [0.0, -2.0]]), np.array([1, 1, 5])
    classes, centers = prototypes(x, y)
    assert classes.tolist() == [1, 5]
    assert centers == pytest.approx(np.array([[0.5**0.5, 0.5**0.5], [0, -1]]))
    assert unit(np.zeros((1, 2))).tolist() == [[0, 0]]


# Recovery


def test_removing_the_adapter_gives_original_back(toy):
    found = RemoveAdapter().measure(toy.task(toy.retrain, adapted=True))
    assert found["forget"].value == 100 and found["recovered"].value == 100
    nothing = RemoveAdapter().measure(toy.task(adapted=True))
    assert nothing["recovered"].value is None
    with pytest.raises(NotApplicable, match="no adapter"):
        RemoveAdapter().measure(toy.task())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_requantisation_moves_no_entry_by_more_than_half_a_step(bits):
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    rounded = requantise(weight, bits)
    step = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((rounded - weight).abs() <= step / 2 * (1 + 1e-5)).all()
    assert all(len(row.unique()) <= 2**bits - 1 for row in rounded)
    assert torch.allclose(requantise(rounded, bits), rounded)
    block = torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)])
    assert torch.equal(requantise(block, bits), block), "zero rows and shapes are kept"


def test_requantisation_rounds_matrices_only(toy):
    model = toy.task().load()
    before = {name: p.clone() for name, p in model.named_parameters()}
    change_matrices_(model, lambda weight: requantise(weight, 4))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (p.ndim < 2 or not name.endswith("weight")), name


def test_requantise_measures_fa_and_its_change(toy):
    task = toy.task()
    found = Requantise().measure(task)
    assert list(found) == [
        f"int{b} {what}" for b in (8, 4) for what in ("forget", "change", "test")
    ]
    before = task.collect(task.load(), task.split.parts["forget"]).accuracy
    assert found["int8 change"].value == pytest.approx(found["int8 forget"].value - before)


def test_a_split_without_a_test_part_is_measured_without_it(toy):
    task = toy.task(adapted=True)
    parts = {name: ids for name, ids in task.split.parts.items() if name != "test"}
    task.split = type(task.split)("no test", parts, task.split.source_digest)
    assert list(RemoveAdapter().measure(task)) == ["forget", "recovered"]
    assert "int8 test" not in Requantise().measure(task)


# Boundary


def test_over_unlearning_of_original_is_zero_and_of_another_is_not(toy):
    audit = OverUnlearning(OverUnlearning.Config(eps=(0.0, 0.5)))
    assert all(m.value == 0 for m in audit.measure(toy.task()).values())
    found = audit.measure(toy.task(toy.retrain))
    assert list(found) == ["OU@0", "OU@0.5"] and all(m.value > 0 for m in found.values())


def test_the_signed_step_raises_originals_loss(toy):
    task = toy.task()
    batch = task.source.fetch(torch.as_tensor(task.split.parts["forget"]))
    near = moved(batch, input_signs(task, toy.original, batch), 0.3)
    assert (near.inputs["x"] - batch.inputs["x"]).abs().max() <= 0.3 + 1e-6

    def loss(b):
        with torch.no_grad():
            return nn.functional.cross_entropy(task.family.forward(toy.original, b), b.labels)

    assert loss(near) > loss(batch)
    assert all(p.grad is None for p in toy.original.parameters())


def test_tokens_have_no_neighbourhood(toy):
    tokens = Batch(
        {"x": torch.zeros(2, 48, dtype=torch.int64)}, torch.zeros(2).long(), torch.arange(2)
    )
    with pytest.raises(NotApplicable, match="floating-point"):
        input_signs(toy.task(), toy.original, tokens)

"""Evaluation in training, early stopping, and what ends a run."""

from __future__ import annotations

import math
import re

import pytest
import torch

from stable_forgetting.common.base.errors import ConfigError
from tests.common.train.trained import Noisy, Sink, small


def test_watching_changes_nothing(tiny, run, source):
    models = []
    for watch in (None, Noisy()):
        model = tiny.net()
        every = 0 if watch is None else 2
        run(model, small(evaluate_every=every), evaluate_during=watch)
        models.append(model)
    assert tiny.same(*models)
    assert watch.seen == [2, 4, 6] and models[0].training == models[1].training


def test_the_last_step_is_always_evaluated_and_logged(tiny, run):
    watch, sink = Noisy(), Sink()
    run(tiny.net(), small(steps=5, evaluate_every=3), evaluate_during=watch, tracker=sink)
    assert watch.seen == [3, 5]
    assert sink.rows[5] == {"evaluation/forget_prob": 95.0}


def test_early_stopping_needs_every_metric_below_its_limit(tiny, run):
    watch = Noisy(lambda step: {"forget_prob": 100.0 - step, "mu": 5.0 if step > 3 else None})
    config = small(evaluate_every=1, stop_below={"forget_prob": 98.5, "mu": 6})
    result = run(tiny.net(), config, evaluate_during=watch)
    assert (result.steps, result.stopped) == (4, "forget_prob < 98.5, mu < 6")
    nowhere = Noisy(lambda step: {"forget_prob": 1.0, "mu": math.nan})
    assert run(tiny.net(), config, evaluate_during=nowhere).stopped is None
    alike = run(tiny.net(), small(evaluate_every=1), evaluate_during=Noisy())
    assert (alike.steps, alike.stopped) == (6, None)
    unknown = small(evaluate_every=1, stop_below={"forget_porb": 1.0})
    with pytest.raises(ConfigError, match=r"forget_porb.*forget_prob"):
        run(tiny.net(), unknown, evaluate_during=Noisy())
    with pytest.raises(ValueError, match="needs evaluate_every"):
        small(stop_below={"mu": 1.0})
    for limits, mend in (({"mu": "retrian"}, "mu: write a number or retrain"), ("gaol", "or goal")):
        with pytest.raises(ValueError, match=mend):
            small(evaluate_every=1, stop_below=limits)
    unresolved = small(evaluate_every=1, stop_below={"forget_prob": "retrain"})
    with pytest.raises(ConfigError, match="only a row of a suite has a Retrain"):
        run(tiny.net(), unresolved, evaluate_during=Noisy())


def test_a_pattern_gives_parameters_a_rate_of_their_own(tiny, run):
    start = {name: p.detach().clone() for name, p in tiny.net().named_parameters()}
    slow = next(iter(start))

    def trained(**changes):
        model = tiny.net()
        run(model, small(lr=1e-2, schedule="cosine", **changes))
        return {name: p.detach() for name, p in model.named_parameters()}

    plain, alike, apart = trained(), trained(lr_of={"*": 1e-2}), trained(lr_of={slow: 1e-4})
    assert all(torch.equal(plain[name], alike[name]) for name in plain)
    moved = {name: float((apart[name] - start[name]).abs().max()) for name in start}
    assert 0 < moved.pop(slow) < 1e-3 < min(moved.values())


def test_a_pattern_that_matches_no_parameter_is_refused(tiny, run):
    model, names = tiny.net(), [name for name, _ in tiny.net().named_parameters()]
    mend = f"lr_of: no parameter matches 'haed.*'; the model's are called {names[0]} to {names[-1]}"
    with pytest.raises(ConfigError, match=re.escape(mend)):
        run(model, small(lr_of={"*": 1e-2, "haed.*": 1e-2}))
    next(model.parameters()).requires_grad_(False)
    run(model, small(lr_of={names[0]: 1e-2}))  # rows share defaults: what is frozen has a name


def test_a_condition_stops_a_run_and_says_why(tiny, run):
    asked, whole, stopped = [], tiny.net(), tiny.net()

    def stop(model, step):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        asked.append(step)
        return "enough" if step == 4 else None

    run(whole, small(steps=4))
    result = run(stopped, small(), stop_when=stop)
    assert (result.steps, result.stopped, asked) == (4, "enough", [1, 2, 3, 4])
    assert tiny.same(whole, stopped), "asking changes nothing"


def test_a_launcher_with_its_own_loop_is_refused(tiny, run, monkeypatch):
    from accelerate import DistributedType

    monkeypatch.setattr(
        "stable_forgetting.common.train.launch.FOREIGN", {DistributedType.NO}
    )  # what runs here
    with pytest.raises(ConfigError, match=r"accelerate is set to NO.* or FSDP version 2"):
        run(tiny.net(), small())

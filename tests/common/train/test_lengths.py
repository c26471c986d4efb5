"""Lengths and rates: steps, epochs, warm-ups and schedules."""

from __future__ import annotations

import math

import pytest
import torch

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.methods.forget_retain import ForgetConfig
from stable_forgetting.common.methods.gradient import GradientConfig
from stable_forgetting.common.train.config import (
    FitConfig,
    learning_rate,
    total_steps,
    warmup_steps,
)
from tests.common.train.trained import FORGET, RETAIN, Sink, small


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 9]),
        ({"schedule": "linear"}, [1 - k / 12 for k in range(12)]),
        (
            {"schedule": "linear", "warmup_steps": 4},
            [0.25, 0.5, 0.75, 1.0, *(1 - k / 8 for k in range(8))],
        ),
        ({"schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * k / 12)) for k in range(12)]),
        (
            {"schedule": "cosine", "warmup_steps": 4},
            [0.25, 0.5, 0.75, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8))],
        ),
    ],
    ids=str,
)
def test_rates_warm_up_and_follow_their_schedule_to_the_end(fields, expected):
    config = FitConfig(steps=12, lr=0.4, **fields)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates == pytest.approx([0.4 * share for share in expected])
    last = 0.0 if "schedule" in fields else 0.4
    assert learning_rate(config, 12, 12) == pytest.approx(last, abs=1e-12)


def lengths(count, **fields):
    """(steps, warm-up) of a run over so many forget samples and 3,600 retain ones."""

    class Counted:
        def __init__(self, samples, batch):
            self.samples, self.batches_per_epoch = samples, -(-samples // batch)

    config = FitConfig(**{"epochs": 5, "batch_size": 32, "accumulation": 4, **fields})
    loaders = {"retain": Counted(3600, 8), "forget": Counted(count, 8)}
    return total_steps(config, loaders), warmup_steps(config, loaders)


@pytest.mark.parametrize(("count", "steps", "warmup"), [(400, 62, 12), (200, 31, 6), (40, 6, 1)])
def test_steps_are_those_of_tofu_s_code(count, steps, warmup):
    fields = {"epochs_of": "forget", "warmup_epochs": 1, "timing": "transformers"}
    assert lengths(count, **fields) == (steps, warmup)
    assert lengths(count, **{**fields, "timing": "own"}) == (
        math.ceil(count * 5 / 32),
        math.ceil(count / 32),
    )
    assert lengths(count, **{**fields, "epochs_of": "retain"}) == (562, 112)


def test_epochs_count_a_part_that_is_there():
    with pytest.raises(ConfigError, match="reads no part 'forgot'; did you mean 'forget'"):
        lengths(400, epochs_of="forgot")
    for config in (GradientConfig(epochs=2), ForgetConfig(epochs=2)):
        assert config.epochs_of == "forget" and config.model_dump()["epochs_of"] == "forget"
    assert "epochs_of" not in GradientConfig(steps=2).model_dump()


def test_a_warm_up_is_given_once_is_shorter_than_the_run_and_changes_no_other_key():
    for fields, words in (
        ({"steps": 4, "warmup_steps": 4}, "warm-up is as long as the run"),
        ({"epochs": 2, "warmup_epochs": 2}, "warm-up is as long as the run"),
        ({"steps": 9, "warmup_steps": 3, "warmup_epochs": 1.0}, "or warmup_epochs, not both"),
    ):
        with pytest.raises(ValueError, match=words):
            FitConfig(**fields)
    assert "warmup_epochs" not in FitConfig(steps=9).model_dump()
    assert FitConfig(steps=9, warmup_epochs=2).model_dump()["warmup_epochs"] == 2.0
    with pytest.raises(ConfigError, match="warm-up of 113 steps leaves nothing of a run of 100"):
        lengths(400, epochs=None, steps=100, epochs_of="retain", warmup_epochs=1)


def test_a_phase_that_is_too_short_for_the_warm_up_is_refused_in_one_line():
    config = FitConfig(epochs=3, warmup_epochs=1.0)
    with pytest.raises(ConfigError, match=r"^one of the method's trainings: .*as long as the run"):
        FitConfig.of(config, epochs=1)


def test_the_first_rate_of_a_warm_up_is_zero_as_transformers_has_it():
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_linear_schedule_with_warmup(optimizer, 12, 62)
    config = FitConfig(steps=62, lr=0.5, schedule="linear", warmup_steps=12, timing="transformers")
    for step in range(62):
        assert learning_rate(config, step, 62) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_a_warm_up_in_epochs_counts_the_first_loader(tiny, source, run):
    loaders = {"retain": tiny.loader(source, RETAIN, 10), "forget": tiny.loader(source, FORGET, 4)}
    assert warmup_steps(FitConfig(steps=9, warmup_steps=3), loaders) == 3
    per_epoch = loaders["retain"].batches_per_epoch
    assert warmup_steps(FitConfig(steps=9, warmup_epochs=1.0), loaders) == per_epoch > 1
    whole = FitConfig(steps=9, warmup_epochs=0.5, batch_size=8, accumulation=2)
    assert warmup_steps(whole, loaders) == math.ceil(per_epoch / 4)
    sink = Sink()
    config = small(schedule="linear", warmup_epochs=1.0)
    run(tiny.net(), config, tracker=sink, loaders=loaders)
    rates = [learning_rate(config, step, 6, per_epoch) for step in range(6)]
    assert [sink.rows[step + 1]["lr"] for step in range(6)] == rates
    assert rates[0] == config.lr / per_epoch


def test_epochs_count_the_first_loader(tiny, source):
    loaders = {"retain": tiny.loader(source, RETAIN, 10), "forget": tiny.loader(source, FORGET, 4)}
    assert total_steps(FitConfig(epochs=3), loaders) == 12
    assert total_steps(FitConfig(epochs=3, accumulation=8), loaders) == 2
    assert total_steps(FitConfig(steps=5), loaders) == 5

"""Divergence: named at its first step, and the model is given back."""

from __future__ import annotations

import math

import pytest
import torch

from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.objectives.objectives import CrossEntropy, ObjectiveValue
from tests.common.train.trained import small


class Bad(CrossEntropy):
    """A loss that is spoilt from call ``at`` on (counted from 1)."""

    def spoil(self, at, value, part_only=False):
        object.__setattr__(self, "plan", (at, value, part_only))
        object.__setattr__(self, "calls", 0)
        return self

    def __call__(self, forward, batches):
        terms = super().__call__(forward, batches)
        object.__setattr__(self, "calls", self.calls + 1)
        at, value, part_only = self.plan
        if self.calls < at:
            return terms
        if part_only:
            return ObjectiveValue(
                terms.total, {**terms.parts, "extra": terms.total.detach() * 0 + value}
            )
        return ObjectiveValue(terms.total * value, terms.parts)


@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e6])
def test_divergence_names_the_first_bad_step(tiny, run, value, log_every):
    objective = Bad("retain").spoil(4, value)
    with pytest.raises(Diverged) as error:
        run(tiny.net(), small(log_every=log_every), objective=objective)
    assert error.value.step == 4 and "10000" in error.value.reason
    assert objective.calls == 4, "nothing runs after the first bad step"


def test_a_part_counts_too_and_the_cap_is_an_absolute_value(tiny, run):
    for value in (60.0, -60.0):
        with pytest.raises(Diverged) as error:
            run(tiny.net(), small(loss_cap=50), objective=Bad("retain").spoil(2, value, True))
        assert error.value.step == 2 and "50" in error.value.reason
    run(tiny.net(), small(loss_cap=70), objective=Bad("retain").spoil(2, 60.0, True))


def test_a_bad_micro_batch_counts_as_its_step(tiny, run):
    with pytest.raises(Diverged) as error:
        run(tiny.net(), small(accumulation=2), objective=Bad("retain").spoil(6, math.nan))
    assert error.value.step == 3


def test_parameters_that_end_non_finite_diverge(tiny, run):
    def blow(model):
        with torch.no_grad():
            model.head.bias[0] = math.inf

    with pytest.raises(Diverged, match=r"head\.bias") as error:
        run(tiny.net(), small(steps=1), after_step=[blow])
    assert error.value.step == 1


def test_divergence_gives_the_model_back_unwrapped(tiny, run):
    model = tiny.net()
    state = torch.get_rng_state()
    with pytest.raises(Diverged):
        run(model, small(mixed_precision="bf16"), objective=Bad("retain").spoil(1, math.nan))
    assert "forward" not in model.__dict__ and "_original_forward" not in model.__dict__
    assert torch.equal(torch.get_rng_state(), state)

"""Fixtures of the loop's tests."""

from __future__ import annotations

import pytest

from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.train.fit import fit
from tests.common.train.trained import FORGET, RETAIN


@pytest.fixture
def run(tiny, source):
    """fit() on the retain part, or on both with a gradient difference."""

    def go(model, config, *, objective=None, loaders=None, seed=3, **options):
        objective = objective or CrossEntropy("retain")
        if loaders is None:
            loaders = {"retain": tiny.loader(source, RETAIN), "forget": tiny.loader(source, FORGET)}
        options = tiny.wired(**options)
        return fit(model, objective, loaders, config, forward=tiny.forward, seed=seed, **options)

    return go

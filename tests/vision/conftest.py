"""What tests of image methods share: a golden problem, and the losses of a model on its parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.common.checks.tiny_task import CLASSES, PER_CLASS
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.objectives.positions import sample_cross_entropy
from stable_forgetting.vision.tiny import SIDE, GreyImages, TinyImages


@pytest.fixture(scope="module")
def golden_problem(golden):
    """The tiny problem in float64, with images and weights that are fixed exactly."""
    labels = np.arange(CLASSES * PER_CLASS) % CLASSES
    bright = 0.2 + 0.2 * np.arange(CLASSES)[labels, None, None, None]
    bright = bright + 0.15 * golden.values("centres", CLASSES, 1, 4, 4).numpy()[labels].repeat(
        4, axis=2
    ).repeat(4, axis=3)
    bright = bright + 0.3 * golden.values("images", len(labels), 1, SIDE, SIDE).numpy()
    images = torch.from_numpy((255 * bright.clip(0, 1)).astype(np.uint8))

    class Source(GreyImages):
        def __init__(self):
            super().__init__()
            self._images = images

        def fetch(self, indices, *, augment=None):
            batch = super().fetch(indices, augment=augment)
            x = (batch.inputs["x"].double() * 2**12).round() / 2**12  # free of float32's rounding
            return Batch({"x": x}, batch.labels, batch.indices)

    class Problem(TinyImages):
        def source(self):
            return Source()

        def net(self):
            return golden.set_(super().net())

    return Problem()


@pytest.fixture(scope="session")
def losses():
    """Mean cross-entropy of a model on each part of the class request."""

    def losses(problem, model):
        split, source = problem.split("class"), problem.source()
        values = {}
        for part in ("forget", "retain", "test"):
            batch = source.fetch(torch.as_tensor(split.parts[part]))
            with torch.no_grad():
                loss = sample_cross_entropy(problem.forward(model.eval(), batch), batch.labels)
            values[part] = float(loss.double().mean())
        return values

    return losses

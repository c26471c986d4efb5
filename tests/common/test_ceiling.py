from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stable_forgetting.common.measure.ceiling import LastLayers, cross_entropy_ceilings


def random_layers(classes=5, width=12, scale=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    return LastLayers(1 + draw(width), draw(width), draw(classes, width), draw(classes))


def losses(layers, points):
    """(N, C): the cross-entropy of every label at (N, d) inputs of the normalisation."""
    normed = nn.functional.layer_norm(points, points.shape[1:], layers.gain, layers.shift, 0.0)
    return -(normed @ layers.weight.T + layers.bias).log_softmax(1)


def test_no_input_passes_the_ceiling_and_ascent_meets_it():
    layers = random_layers()
    reached, bounds = cross_entropy_ceilings(layers)
    assert (reached <= bounds + 1e-9).all() and (bounds < 1.6 * reached).all()
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(20_000, 12, generator=generator, dtype=torch.float64)
    assert (losses(layers, points).amax(0) <= reached + 1e-9).all()
    for label in range(5):  # plain gradient ascent on what comes before the normalisation
        inputs = torch.randn(16, 12, generator=generator, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([inputs], lr=0.05, maximize=True)
        for _ in range(400):
            optimizer.zero_grad()
            losses(layers, inputs)[:, label].sum().backward()
            optimizer.step()
        best = float(losses(layers, inputs.detach())[:, label].max())
        assert best == pytest.approx(float(reached[label]), rel=1e-3)
        assert best <= float(reached[label]) + 1e-9


def test_two_classes_have_a_closed_form():
    layers = random_layers(classes=2, width=6)
    reached, bounds = cross_entropy_ceilings(layers)
    slope = (layers.weight[1] - layers.weight[0]) * layers.gain
    shift = (layers.weight[1] - layers.weight[0]) @ layers.shift + layers.bias[1] - layers.bias[0]
    top = 6**0.5 * float((slope - slope.mean()).norm())
    expected = [nn.functional.softplus(top + s).item() for s in (shift, -shift)]
    assert reached.tolist() == pytest.approx(expected) == bounds.tolist()


def test_without_centring_the_mean_counts_too():
    layers = replace(random_layers(), centred=False)
    reached, bounds = cross_entropy_ceilings(layers)
    centred, _ = cross_entropy_ceilings(replace(layers, centred=True))
    assert (reached > centred).all() and (reached <= bounds + 1e-9).all()
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(20_000, 12, generator=generator, dtype=torch.float64)
    normed = nn.functional.rms_norm(points, (12,)) * layers.gain + layers.shift
    found = -(normed @ layers.weight.T + layers.bias).log_softmax(1)
    assert (found.amax(0) <= reached + 1e-9).all()


def test_some_labels_have_the_values_they_have_among_all():
    layers = random_layers()
    both = zip(cross_entropy_ceilings(layers), cross_entropy_ceilings(layers, [3, 1]), strict=True)
    for whole, some in both:
        assert some.tolist() == whole[[3, 1]].tolist()

"""The same ascent on a ViT: where its last LayerNorm and head are frozen, the loss has a ceiling.

A ViT ends in z = W (g * x + b) + c with x = (h - mean h) / sqrt(var h + eps), whatever h the blocks
before give.  So |x|^2 = d var h / (var h + eps) < d and sum x = 0: g * x lies in an ellipsoid that
the LayerNorm fixes.  With v_j = g * (W_j - W_y), its mean taken off since sum x = 0, and
o_j = (W_j - W_y) b + c_j - c_y,

    z_j - z_y = v_j x + o_j <= sqrt(d) |v_j| + o_j,    L = log sum_j exp(z_j - z_y),

and the loss is at most log sum_j exp(sqrt(d) |v_j| + o_j), the *bound*, at x = sqrt(d) v_j / |v_j|
for each j alone.  No x does all of them at once; L is convex in x, so that its largest value, the
*ceiling*, lies on the sphere |x| = sqrt(d), where an ascent finds it without the blocks
(:mod:`common.measure.ceiling`).  Adapters on MLPs or attention leave g, b, W and c alone: their
ascent ends below the ceiling, bounded or not, and "the loss did not diverge" says nothing of them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.measure.ceiling import cross_entropy_ceilings
from stable_forgetting.common.train.telemetry import first_nonfinite
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.build import build_model
from stable_forgetting.vision.models.family import last_layers
from tools.theory.mlp import Labelled, batches_of, load_data, optimizer_of, trained

ENDS = ("frozen", "trained")
LAST = ("norm.", "head.")
FIT_RATE, RATE = 5e-3, 1e-2
Row = dict[str, Any]


def fit_vit(data: Labelled, seed: int, epochs: int) -> nn.Module:
    """A ViT of 4 patches, width 32 and two blocks, fitted to 8 x 8 digits."""
    config = ModelConfig(
        name="scratch", image_size=8, patch_size=4, dim=32, depth=2, heads=2, mlp_ratio=2
    )
    start = derive(seed, "theory", "vit")
    model = build_model(config, num_classes=10, in_chans=1, generator_seed=start)
    batches = batches_of(data, epochs, generator(seed, "theory", "vit batches"))
    losses = (F.cross_entropy(logits_of(model, x), y) for x, y in batches)
    deque(trained(losses, optimizer_of(model, "adamw", FIT_RATE)), maxlen=0)
    return model


def logits_of(model: nn.Module, pixels: Tensor) -> Tensor:
    """(n, 10) logits of pixels (n, 64)."""
    logits: Tensor = model(pixels.view(-1, 1, 8, 8))
    return logits


def ascend_vit(fitted: nn.Module, forget: Labelled, end: str, *, seed: int, steps: int) -> Row:
    """Ascent on the forget set's cross-entropy by all parameters, or by all but the last layers.

    Args:
        fitted: Where it starts; left as it is.
        forget: The forgotten class.
        end: ``frozen`` or ``trained``: the last LayerNorm and the head.
        seed: Of the run, for the record.
        steps: Full-batch AdamW steps.

    Returns:
        ``ceiling`` and ``bound`` of the forgotten class at the start, in nats; of single samples
        the largest ``loss`` over all steps; ``above``: steps on which one is above the bound.
    """
    model = copy.deepcopy(fitted)
    layers = last_layers(model)
    assert layers is not None, "a ViT ends in a LayerNorm and a head"
    label = int(forget[1][0])
    ceilings, bounds = (float(values[label]) for values in cross_entropy_ceilings(layers))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(end == "trained" or not name.startswith(LAST))
    trace: list[tuple[float, float]] = []

    def losses() -> Iterator[Tensor]:
        for _ in range(steps + 1):
            logits = logits_of(model, forget[0])
            each = F.cross_entropy(logits, forget[1], reduction="none")
            if not first_nonfinite([("loss", each)]):
                trace.append((float(each.detach().mean()), float(each.detach().max())))
            yield each.mean()

    deque(trained(losses(), optimizer_of(model, "adamw", RATE, ascend=True)), maxlen=0)
    largest = max(most for _, most in trace)
    return {
        "end": end,
        "seed": seed,
        "ceiling": ceilings,
        "bound": bounds,
        "loss_first": trace[0][0],
        "loss_last": trace[-1][0],
        "largest": largest,
        "share": 100 * largest / ceilings,
        "above": sum(most > bounds for _, most in trace),
        "steps": len(trace) - 1,
    }


def ceiling_rows(seeds: int, steps: int, *, epochs: int = 12) -> Iterator[Row]:
    """Both ends for every seed, from one fitted model each."""
    for seed in range(seeds):
        everything, forget, _ = load_data(seed)
        fitted = fit_vit(everything, seed, epochs)
        for end in ENDS:
            yield ascend_vit(fitted, forget, end, seed=seed, steps=steps)

"""The training loop and its steps, against plain PyTorch that does the same work."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import (
    CrossEntropy,
    ForgetRetain,
    Objective,
    ObjectiveValue,
    gradient_difference,
)
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.common.train.protocols import Telemetry
from stable_forgetting.common.train.tracking import Tracker
from stable_forgetting.vision.data.source import ImageSource
from stable_forgetting.vision.models.family import VIT
from tools.perf.augmentation import random_images
from tools.perf.counts import counted, saved_bytes, work
from tools.perf.measure import (
    DIGITS,
    Case,
    Check,
    Size,
    Variant,
    ViTSize,
    adamw_step,
    make_vit,
    relative_difference,
)

TINY = ViTSize(image=16, patch=8, channels=1, dim=16, depth=1, heads=2, batch=8)

# One forward for forget and retain ---------------------------------------------------------------

DIFFERENCE_SIZES: dict[Size, dict[str, ViTSize]] = {
    "full": {"difference_digits": DIGITS, "difference_vit": ViTSize(batch=8)},
    "quick": {"difference_digits": DIGITS},
    "tiny": {"difference_digits": TINY},
}


ONE_FORWARD = gradient_difference()


@dataclass(frozen=True)
class TwoForwards:
    """The same objective with a forward for each batch."""

    one: ForgetRetain

    @property
    def parts(self) -> tuple[str, ...]:
        """Retain and forget."""
        return self.one.parts

    def __call__(self, forward: Forward, batches: Mapping[str, Batch]) -> ObjectiveValue:
        """Descends on retain, ascends on forget."""
        losses = {
            part: F.cross_entropy(forward(batches[part]), batches[part].labels)
            for part in self.parts
        }
        total = (
            self.one.retain_weight * losses["retain"] - self.one.forget_weight * losses["forget"]
        )
        return ObjectiveValue(total, {f"{part}_loss": loss for part, loss in losses.items()})


def difference_steps(size: Size) -> Iterator[Case]:
    """A step of GD + Sine, retain and forget in one forward or in two."""
    for name, vit in DIFFERENCE_SIZES[size].items():
        stream = generator(0, "perf", "difference")
        batches = {part: _random_batch(vit, stream) for part in ("retain", "forget")}
        model = make_vit(vit)
        attach(
            model, VIT.mlp, AdapterConfig(phi="sine", omega=100.0), generator(0, "perf", "factors")
        )
        models = [copy.deepcopy(model) for _ in range(2)]
        objectives: tuple[Objective, ...] = (ONE_FORWARD, TwoForwards(ONE_FORWARD))
        terms = [
            objective(partial(_logits, twin), batches).total
            for objective, twin in zip(objectives, models, strict=True)
        ]
        checks = [Check("same objective (rel.)", relative_difference(*terms), 1e-5)]
        variants = [
            _difference_variant("ours, one forward", ONE_FORWARD, models[0], batches),
            _difference_variant("two forwards", TwoForwards(ONE_FORWARD), models[1], batches),
        ]
        pairs = [("ours, one forward", "two forwards")]
        title = f"GD + Sine step, retain and forget each: {vit}"
        yield Case(name, title, variants, pairs, checks, unit="step", share=0.6)


def _random_batch(vit: ViTSize, stream: torch.Generator) -> Batch:
    x = torch.randn(vit.batch, vit.channels, vit.image, vit.image, generator=stream)
    labels = torch.randint(0, vit.classes, (vit.batch,), generator=stream)
    return Batch({"x": x}, labels, torch.arange(vit.batch))


def _difference_variant(
    name: str, objective: Objective, model: nn.Module, batches: Mapping[str, Batch]
) -> Variant:
    def forward() -> Tensor:
        return objective(partial(_logits, model), batches).total

    run = adamw_step(model, forward)
    with counted(model) as seen:
        run()
    operands = [*(b.inputs["x"] for b in batches.values()), *model.parameters(), *model.buffers()]
    counts = {
        "forwards": seen.calls,
        "saved MB": saved_bytes(forward, operands) / 1e6,
        **work(run),
    }
    return Variant(name, run, counts)


# The engine's loop -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopSize:
    """A model, the images it sees (a tenth of them to forget) and the steps of one run."""

    vit: ViTSize
    images: int
    steps: int


LOOP_SIZES: dict[Size, LoopSize] = {
    "full": LoopSize(DIGITS, 1000, 40),
    "quick": LoopSize(DIGITS, 1000, 10),
    "tiny": LoopSize(TINY, 20, 6),
}
ENGINE, QUIET, BARE = "engine, log every 10", "engine, log twice", "bare loop"
RATE = 1e-3


def loop(size: Size) -> Iterator[Case]:
    """Whole short runs from the same weights on the same batches, set-up included.

    Training of all weights on one part, and GD + Sine on two, whose log reads the adapters too.
    """
    chosen = LOOP_SIZES[size]
    ids = np.arange(chosen.images)
    everything, tenth = {"retain": ids}, chosen.images // 10
    two = {"retain": ids[tenth:], "forget": ids[:tenth]}
    scratch, adapted = make_vit(chosen.vit), make_vit(chosen.vit)
    attach(
        adapted, VIT.mlp, AdapterConfig(phi="sine", omega=100.0), generator(0, "perf", "factors")
    )
    with tempfile.TemporaryDirectory(prefix="perf-loop-") as folder:
        log = Path(folder) / "scalars.jsonl"
        title = f"{chosen.steps} steps: {chosen.vit}"
        yield _loop_case(
            "engine_loop", f"training, {title}", chosen, scratch, everything, CrossEntropy(), log
        )
        if size == "quick":
            return
        yield _loop_case(
            "engine_loop_sine",
            f"GD + Sine, retain and forget each, {title}",
            chosen,
            adapted,
            two,
            ONE_FORWARD,
            log,
        )


def _loop_case(
    name: str,
    title: str,
    chosen: LoopSize,
    initial: nn.Module,
    parts: Mapping[str, np.ndarray],
    objective: Objective,
    log: Path,
) -> Case:
    source = random_images(chosen.images, chosen.vit)
    batch = chosen.vit.batch

    def engine(log_every: int) -> nn.Module:
        model = copy.deepcopy(initial)
        config = FitConfig(steps=chosen.steps, batch_size=batch, lr=RATE, log_every=log_every)
        loaders = {
            part: Loader(source, ids, batch, generator(0, "perf", part))
            for part, ids in parts.items()
        }
        with Tracker(log) as tracker:
            looks = Telemetry(tracker=tracker)
            run = partial(fit, forward=_logits, seed=0, lr_scaling="none")
            run(model, objective, loaders, config, telemetry=looks)
        return model

    runs: dict[str, Callable[[], nn.Module]] = {
        ENGINE: lambda: engine(10),
        QUIET: lambda: engine(10 * chosen.steps),
        BARE: lambda: _bare_loop(copy.deepcopy(initial), source, parts, batch, chosen.steps),
    }
    variants = [_loop_variant(label, run, initial, chosen.steps) for label, run in runs.items()]
    apart = _apart(runs[ENGINE](), runs[BARE]())
    checks = [Check("same weights at the end (rel.)", apart, 1e-3)]
    pairs = [(ENGINE, BARE), (QUIET, BARE)]
    return Case(name, title, variants, pairs, checks, "step", chosen.steps, share=2.0)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.inputs["x"])


def _bare_loop(
    model: nn.Module, source: ImageSource, parts: Mapping[str, np.ndarray], batch: int, steps: int
) -> nn.Module:
    """A plain loop without guard, log and wrapper; all tensors are in memory."""
    pixels, labels, mean, std = source._images, source._targets, source._mean, source._std
    weights = {"retain": 1.0, "forget": -ONE_FORWARD.forget_weight}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    streams = {part: _shuffled(torch.from_numpy(ids), batch, part) for part, ids in parts.items()}
    model.train()
    for _ in range(steps):
        chosen = {part: next(stream) for part, stream in streams.items()}
        x = (pixels[torch.cat([*chosen.values()])].float() / 255 - mean) / std
        logits = model(x).split([len(ids) for ids in chosen.values()])
        losses = [
            weights[part] * F.cross_entropy(z, labels[ids])
            for z, (part, ids) in zip(logits, chosen.items(), strict=True)
        ]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _shuffled(ids: Tensor, batch: int, part: str) -> Iterator[Tensor]:
    stream = generator(0, "perf", part)
    while True:
        yield from ids[torch.randperm(len(ids), generator=stream)].split(batch)


def _loop_variant(
    name: str, run: Callable[[], nn.Module], initial: nn.Module, steps: int
) -> Variant:
    # deepcopy copies hooks too, so the copies that a run trains are counted
    with counted(initial) as seen:
        calls = work(run)["calls"]
    counts = {"forwards/step": seen.calls / steps, "calls/step": calls / steps}
    return Variant(name, run, counts)


def _apart(first: nn.Module, second: nn.Module) -> float:
    flat = [nn.utils.parameters_to_vector(model.parameters()) for model in (first, second)]
    return relative_difference(*flat)

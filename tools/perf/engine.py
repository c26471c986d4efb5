"""The training loop, its steps and its batches of images, beside plain PyTorch and torchvision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import transforms as T
from torchvision.transforms.functional import to_pil_image

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.data.batch import Batch, Forward
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import (
    CrossEntropy,
    Objective,
    gradient_difference,
)
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.vision.config import DataConfig
from stable_forgetting.vision.data.source import ImageSource, PreparedImages
from tools.perf.layers import SINE, VIT_MLP
from tools.perf.timing import (
    CLASSES,
    TINY,
    Case,
    ViTSize,
    adamw_step,
    apart,
    forwards_of,
    make_vit,
    mflop,
    saved_mb,
)

DIGITS = ViTSize(image=16, patch=8, channels=1, dim=64, heads=4, batch=64)
ONE_FORWARD = gradient_difference()
ONE, TWO = "ours, one forward", "two forwards"
ENGINE, QUIET, BARE = "engine, log every 10", "engine, log twice", "bare loop"
RATE = 1e-3
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """(n, classes) logits of a batch."""
    logits: Tensor = model(batch.inputs["x"])
    return logits


def _sine_vit(size: ViTSize) -> nn.Module:
    model = make_vit(size)
    attach(model, VIT_MLP[0], SINE, generator(0, "perf", "factors"))
    return model


# One forward for forget and retain ---------------------------------------------------------------


def _one(forward: Forward, batches: Mapping[str, Batch]) -> Tensor:
    return ONE_FORWARD(forward, batches).total


def _two(forward: Forward, batches: Mapping[str, Batch]) -> Tensor:
    """The same objective with a forward for each batch."""
    losses = {
        part: F.cross_entropy(forward(batches[part]), batches[part].labels)
        for part in ONE_FORWARD.parts
    }
    kept, forgotten = ONE_FORWARD.retain_weight, ONE_FORWARD.forget_weight
    return kept * losses["retain"] - forgotten * losses["forget"]


def difference(quick: bool) -> Iterator[Case]:
    """A step of GD + Sine, retain and forget in one forward or in two."""
    sizes = {"difference_digits": TINY if quick else DIGITS}
    sizes |= {} if quick else {"difference_vit": ViTSize(batch=8)}
    for name, size in sizes.items():
        stream = generator(0, "perf", "difference")
        batches = {part: _random_batch(size, stream) for part in ("retain", "forget")}
        adapted = _sine_vit(size)
        runs, counts, terms = {}, {}, []
        for label, objective in ((ONE, _one), (TWO, _two)):
            model = copy.deepcopy(adapted)
            loss = partial(objective, partial(logits_of, model), batches)
            terms.append(loss())
            runs[label] = adamw_step(model, loss)
            with forwards_of(model) as seen:
                runs[label]()
            known = [*(batch.inputs["x"] for batch in batches.values()), *model.parameters()]
            saved = saved_mb(loss, [*known, *model.buffers()])
            counts[label] = {"forwards": len(seen), "saved MB": saved, "MFLOP": mflop(runs[label])}
        checks = {"same objective (rel.)": (apart(*terms), 1e-5)}
        title = f"GD + Sine step, retain and forget each: {size}"
        yield Case(name, title, runs, [(ONE, TWO)], checks, counts, "step")


def _random_batch(size: ViTSize, stream: torch.Generator) -> Batch:
    x = torch.randn(size.batch, size.channels, size.image, size.image, generator=stream)
    labels = torch.randint(0, CLASSES, (size.batch,), generator=stream)
    return Batch({"x": x}, labels, torch.arange(size.batch))


# The engine's loop -------------------------------------------------------------------------------


def loop(quick: bool) -> Iterator[Case]:
    """Whole short runs from the same weights on the same batches, set-up included.

    Training of all weights on one part, and GD + Sine on two, whose log reads the adapters too.
    """
    size, images, steps = (TINY, 20, 6) if quick else (DIGITS, 1000, 40)
    ids, tenth = np.arange(images), images // 10
    two = {"retain": ids[tenth:], "forget": ids[:tenth]}
    title = f"{steps} steps: {size}"
    plain, adapted = make_vit(size), _sine_vit(size)
    one = {"retain": ids}
    yield _loop_case("engine_loop", f"training, {title}", size, steps, plain, one, CrossEntropy())
    both = f"GD + Sine, retain and forget each, {title}"
    yield _loop_case("engine_loop_sine", both, size, steps, adapted, two, ONE_FORWARD)


def _loop_case(
    name: str,
    title: str,
    size: ViTSize,
    steps: int,
    initial: nn.Module,
    parts: Mapping[str, np.ndarray],
    objective: Objective,
) -> Case:
    source = random_images(sum(map(len, parts.values())), size)

    def engine(log_every: int) -> nn.Module:
        model = copy.deepcopy(initial)
        config = FitConfig(steps=steps, batch_size=size.batch, lr=RATE, log_every=log_every)
        loaders = {
            part: Loader(source, ids, size.batch, generator(0, "perf", part))
            for part, ids in parts.items()
        }
        fit(model, objective, loaders, config, forward=logits_of, seed=0, lr_scaling="none")
        return model

    def bare() -> nn.Module:
        return _bare_loop(copy.deepcopy(initial), source, parts, size.batch, steps)

    runs: dict[str, Callable[[], nn.Module]] = {
        ENGINE: partial(engine, 10),
        QUIET: partial(engine, 10 * steps),
        BARE: bare,
    }
    counts = {}
    for label, run in runs.items():
        with forwards_of(initial) as seen:  # a copy keeps the hook
            run()
        counts[label] = {"forwards/step": len(seen) / steps}
    vectors = [nn.utils.parameters_to_vector(run().parameters()) for run in (runs[ENGINE], bare)]
    checks = {"same weights at the end (rel.)": (apart(*vectors), 1e-3)}
    pairs = [(ENGINE, BARE), (QUIET, BARE)]
    return Case(name, title, runs, pairs, checks, counts, "step", steps)


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


# Batches of images -------------------------------------------------------------------------------


def random_images(count: int, size: ViTSize, *, input_size: int | None = None) -> ImageSource:
    """Random images at native size, as the vision benchmark holds them."""
    stream = generator(0, "perf", "images")
    shape = (count, size.channels, size.image, size.image)
    images = torch.randint(0, 256, shape, generator=stream, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (count,), generator=stream).numpy()
    pools = {"train": np.arange(count), "validation": np.arange(0), "test": np.arange(0)}
    names = tuple(map(str, range(CLASSES)))
    return ImageSource(
        PreparedImages(images, labels, pools, None, names, "random", "random"),
        DataConfig(name="cifar10" if size.channels == 3 else "digits"),
        input_size=input_size or size.image,
        mean=MEAN[: size.channels],
        std=STD[: size.channels],
    )


def augmentation(quick: bool) -> Iterator[Case]:
    """Crop, flip, bicubic resize and normalisation of a batch; the peers loop over its images.

    At 64 images of 224 px every intermediate is above the size that glibc maps anew each time, so
    the ratio depends on the allocator.
    """
    count, side = (4, 48) if quick else (64, 224)
    source = random_images(count, ViTSize(), input_size=side)
    ids, stream = torch.arange(count), generator(0, "perf", "augment")
    # PIL resizes 8-bit pixels; tensors are resized as floats and clamped, as ours are
    resize = T.Resize(side, T.InterpolationMode.BICUBIC, antialias=True)
    clamp = T.Lambda(lambda image: image.clamp(0, 1))
    random, last = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()], T.Normalize(MEAN, STD)
    pixels = [T.ConvertImageDtype(torch.float32), resize, clamp, last]
    from_tensor, plain = T.Compose([*random, *pixels]), T.Compose(pixels)
    from_pil = T.Compose([*random, resize, T.ToTensor(), last])
    pictures = [to_pil_image(image) for image in source._images]
    runs = {
        "ours, batched": lambda: source.fetch(ids, augment=stream),
        "torchvision, PIL": lambda: torch.stack([from_pil(each) for each in pictures]),
        "torchvision, tensors": lambda: torch.stack([from_tensor(each) for each in source._images]),
    }
    without = torch.stack([plain(image) for image in source._images])
    far = float((source.fetch(ids).inputs["x"] - without).abs().max())
    title = f"crop, flip, resize 32 -> {side} px, normalise, batch {count}"
    checks = {"same pixels without augmentation (largest difference)": (far, 1e-4)}
    ours, *peers = runs
    yield Case("augmentation", title, runs, [(ours, peer) for peer in peers], checks, unit="batch")

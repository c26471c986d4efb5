"""The stages of what methods start from: a pretraining, Original and Retrain.

Original and Retrain are trained or published; what both start from may be pretrained here, once for
all seeds and for every suite with the same pretraining.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stable_forgetting.benchmarks.pipeline.context import StageContext
from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.stage import (
    ASSUMED,
    PRETRAINED,
    REFERRED,
    ModelSpec,
    StageSpec,
)
from stable_forgetting.benchmarks.pipeline.unlearning import training
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import DataError, Diverged, GateError
from stable_forgetting.common.data.splits import ForgetSplit, ids_digest
from stable_forgetting.common.measure.scores import percent
from stable_forgetting.common.methods.base import train_reference
from stable_forgetting.common.protocol.pretraining import Pretrainable
from stable_forgetting.common.store.weights import save_weights, weights_digest

if TYPE_CHECKING:
    from torch import nn


FINGERPRINTS = "fingerprints.safetensors"


class Pretrain(StageKind[StageSpec]):
    """Trains a model on other data; its protocol has these as its own."""

    Spec = StageSpec
    order = 0
    trains = True
    events = True
    facts = ("status", "held_out")

    def work(self, context: StageContext, spec: StageSpec) -> None:
        """Stores the model, hashes of what it has seen, and its accuracy on what it has not."""
        from safetensors.numpy import save_file

        benchmark = context.benchmark
        assert isinstance(benchmark, Pretrainable), "it named a pretraining"
        split = context.cut(benchmark.pretraining_split())
        with context.writing() as folder:
            context.about["held_out"] = None
            model = _train(context, folder, split, split.train_parts)
            if model is None or not processes.is_main():
                return
            save_file({"train": benchmark.fingerprints(split.train)}, folder / FINGERPRINTS)
            try:
                held_out = benchmark.collect(model, split.parts["test"])
            except Diverged as error:
                context.about |= {"status": "diverged", "status_detail": str(error)}
                return
            context.about["held_out"] = (
                f"{benchmark.provenance}, {len(split.train):,} samples: accuracy "
                f"{held_out.accuracy:.1f} % and loss {held_out.loss.mean():.2f} on "
                f"{len(held_out):,} held-out ones"
            )


class Original(StageKind[ModelSpec]):
    """Trains on everything; a shadow on all that its own split says."""

    Spec = ModelSpec
    order = 1
    trains = True
    events = True
    facts = ("status", "trained_on", "data")

    def work(self, context: StageContext, spec: ModelSpec) -> None:
        """Trains on the union of the split's training parts."""
        own = "split" in context.stage.parents
        split = context.split() if own else context.cut(context.benchmark.split(spec.seed))
        _check_pretraining(context, split)
        with context.writing() as folder:
            _train(context, folder, split, split.train_parts)


class Retrain(StageKind[ModelSpec]):
    """Trains on what nobody asked to forget so far: the retain set, and later requests if any."""

    Spec = ModelSpec
    order = 2
    trains = True
    events = True

    def work(self, context: StageContext, spec: ModelSpec) -> None:
        """Trains on the union of the split's kept parts."""
        split = context.split()
        _check_pretraining(context, split)
        with context.writing() as folder:
            _train(context, folder, split, split.kept_parts)


def _check_pretraining(context: StageContext, split: ForgetSplit) -> None:
    """Refuses a pretraining that came to nothing, or has seen what is to be learnt or measured."""
    if PRETRAINED not in context.stage.parents:
        return
    from safetensors.numpy import load_file

    facts = context.facts(PRETRAINED)
    if facts["status"] != "ok":
        raise GateError(
            f"{context.stage.name}: the pretraining diverged; change protocol.pretrain.train"
        )
    context.about[PRETRAINED] = facts["held_out"]
    benchmark, indices = context.benchmark, np.concatenate([*split.parts.values()])
    assert isinstance(benchmark, Pretrainable), "it named a pretraining"
    own = benchmark.fingerprints(indices)
    shared = np.intersect1d(own, load_file(context.folder(PRETRAINED) / FINGERPRINTS)["train"])
    if len(shared):
        raise DataError(
            f"{context.stage.name}: protocol.pretrain.data holds {len(shared)} of the {len(own)} "
            f"{benchmark.compared} of this suite; pretrain without them"
        )


def _train(
    context: StageContext, folder: Path, split: ForgetSplit, parts: Sequence[str]
) -> nn.Module | None:
    """Trains on parts, or takes the role's published model; notes what it was trained on."""
    published = context.benchmark.published(context.stage.kind)
    ids = split.union(parts)
    trained_on = ids_digest(ids) if published is None else _claimed(context, ids_digest(ids))
    task = context.task(split, frozenset({*parts, "initial"}), model=published)
    with context.recording(task, folder), training(task) as outcome:
        outcome.model = train_reference(task, parts, task.model) if published is None else published
    context.about |= outcome.facts() | {
        "published": published is not None,
        "trained_on": trained_on,
        "data": split.source_digest,
    }
    if outcome.model is not None and processes.is_main():
        if published is None:
            save_weights(outcome.model, folder)
        else:  # not copied: it is read again from where it came
            context.about[REFERRED] = weights_digest(outcome.model)
        try:
            correct = context.benchmark.collect_correct(outcome.model, ids)
            context.about["train_accuracy"] = percent(correct)
        except Diverged as error:
            context.about |= {"status": "diverged", "status_detail": str(error)}
    return outcome.model


def _claimed(context: StageContext, wanted: str) -> str:
    """What a published model claims as its training data: the right ones, or nothing."""
    role = context.stage.kind
    claim = context.benchmark.published_claim(role) or ASSUMED
    if claim not in (ASSUMED, wanted):
        raise DataError(
            f"model.{role}: the published model claims other training data ({claim[:12]}, here"
            f" {wanted[:12]}); use the data and split that it was trained on, or another model"
        )
    return claim

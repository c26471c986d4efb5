"""The ``original`` and ``retrain`` stages: reference models, trained or published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.pipeline.kinds import StageKind
from benchmarks.pipeline.stage import ASSUMED, ModelSpec
from benchmarks.pipeline.unlearning import trained
from common.base import processes
from common.base.errors import DataError, Diverged
from common.base.registry import METHODS
from common.store.weights import save_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from benchmarks.pipeline.worksite import Worksite
    from common.data.splits import ForgetSplit
    from common.methods.task import UnlearnTask


class Original(StageKind[ModelSpec]):
    """Trains on everything; a shadow on all that its own split says."""

    Spec = ModelSpec
    order = 1
    trains = True
    events = True
    facts = ("status", "trained_on", "data")

    def work(self, site: Worksite, spec: ModelSpec) -> None:
        """Trains on the union of the split's training parts."""
        from common.methods.base import train_reference

        own = "split" in site.stage.parents
        split = site.split() if own else site.cut(site.benchmark.split(spec.seed))
        access = frozenset({*split.train_parts, "initial"})
        _train(site, split, access, lambda task: train_reference(task, split.train_parts))


class Retrain(StageKind[ModelSpec]):
    """Trains on the retain set alone."""

    Spec = ModelSpec
    order = 2
    trains = True
    events = True

    def work(self, site: Worksite, spec: ModelSpec) -> None:
        """Runs the method ``retrain``."""
        method = METHODS["retrain"]
        _train(site, site.split(), method.info.access, method(method.Config()).unlearn)


def _train(
    site: Worksite,
    split: ForgetSplit,
    access: frozenset[str],
    train: Callable[[UnlearnTask], nn.Module],
) -> None:
    """Trains, or takes the published model of the role, and notes what it was trained on.

    Raises:
        DataError: The published model claims other training data.
    """
    from benchmarks.pipeline.worksite import ids_digest

    with site.writing() as folder:
        published = site.benchmark.published(site.stage.kind, split)
        ids = split.train if "forget" in access else split.parts["retain"]
        trained_on = ids_digest(ids) if published is None else _claimed(site, ids_digest(ids))
        task = site.task(split, access, model=published)
        with site.recording(task, folder):
            outcome = trained(train if published is None else lambda _: published, task)
        site.about |= outcome.facts() | {
            "published": published is not None,
            "trained_on": trained_on,
            "data": split.source_digest,
        }
        if outcome.model is not None and processes.is_main():
            save_weights(outcome.model, folder)
            try:
                site.about["train_accuracy"] = site.benchmark.collect(outcome.model, ids).accuracy
            except Diverged as error:
                site.about |= {"status": "diverged", "status_detail": str(error)}


def _claimed(site: Worksite, wanted: str) -> str:
    """What a published model claims as its training data: the right ones, or nothing."""
    role = site.stage.kind
    claim = site.benchmark.published_claim(role) or ASSUMED
    if claim not in (ASSUMED, wanted):
        raise DataError(
            f"model.{role}: the published model claims other training data ({claim[:12]}, here"
            f" {wanted[:12]}); use the data and split that it was trained on, or another model"
        )
    return claim

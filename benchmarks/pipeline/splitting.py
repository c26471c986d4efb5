"""The ``split`` stage: the frozen index sets of a seed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.stage import Placed, StageSpec
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.worksite import Worksite
    from stable_forgetting.common.data.splits import ForgetSplit

SPLIT_FILE = "split.safetensors"


class SplitSpec(StageSpec):
    """Which split of a seed.

    Attributes:
        half: Number of a random half of the forget set, the other half being unseen.
        request: Number of one of several forget requests that together are the forget set.
    """

    half: int | None = None
    request: int | None = None
    requests: int | None = None


class Split(StageKind[SplitSpec]):
    """Freezes the index sets."""

    Spec = SplitSpec
    order = 0

    def work(self, site: Worksite, spec: SplitSpec) -> None:
        """Writes the index sets, with their digest and sizes as facts."""
        split = self._split(site, spec)
        with site.writing() as folder:
            split.save(folder / SPLIT_FILE)
            site.about |= {
                "split": split.digest,
                "data": split.source_digest,
                "sizes": {part: len(ids) for part, ids in split.parts.items()},
            }

    def _split(self, site: Worksite, spec: SplitSpec) -> ForgetSplit:
        from stable_forgetting.common.data.batch import class_labels
        from stable_forgetting.common.data.splits import half_split, request_split

        split = site.benchmark.split(spec.seed)
        if spec.half is not None:
            return half_split(split, spec.seed, spec.half)
        if spec.request is not None and spec.requests is not None:
            labels = functools.partial(class_labels, site.benchmark.source)
            return request_split(split, labels, spec.seed, spec.request, spec.requests)
        return split


def read_split(store: StageStore, stage: Placed) -> ForgetSplit | None:
    """The index sets of a split stage; None while it is not done."""
    from stable_forgetting.common.data.splits import ForgetSplit

    if store.done(stage.kind, stage.key) is None:
        return None
    return ForgetSplit.load(store.folder(stage.kind, stage.key) / SPLIT_FILE)

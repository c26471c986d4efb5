"""What the work of a stage may touch: its parents, its folder, its benchmark, heavy libraries."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.measuring import SPLIT_FILE
from stable_forgetting.benchmarks.pipeline.models import benchmark_of, stored_model
from stable_forgetting.benchmarks.pipeline.stage import (
    ASSUMED,
    PRETRAINED,
    ModelSpec,
    Stage,
    foreign_code,
)
from stable_forgetting.benchmarks.pipeline.unlearning import TRAJECTORY
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import DataError, GateError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.data.splits import ForgetSplit, ids_digest
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.benchmark import (
    Benchmark,
    Runtime,
    pick_device,
)
from stable_forgetting.common.protocol.pretraining import Pretrainable
from stable_forgetting.common.store.records import environment
from stable_forgetting.common.store.stages import DONE, StageStore
from stable_forgetting.common.store.weights import WEIGHTS
from stable_forgetting.common.train.rehearsal import Ends
from stable_forgetting.common.train.tracking import Tracker, copy_scalars

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.train.protocols import EvaluateDuring, Progress

SCALARS = "scalars.jsonl"


def require_learnt(original: Stage, done: Mapping[str, Any], minimum: float) -> None:
    """Refuses an Original that diverged, or is right on less than ``minimum`` % of its own data.

    Raises:
        GateError: Nothing can be unlearned from it.
    """
    if done["status"] != "ok":
        raise GateError(f"{original.name}: Original diverged; change protocol.train")
    if done["train_accuracy"] < minimum:
        reached = int(10 * done["train_accuracy"]) / 10  # rounded up it may be the minimum
        raise GateError(
            f"{original.name}: Original reaches {reached} % on its own training data, below "
            f"minimum_train_accuracy {minimum:g}; train it longer or lower the gate"
        )


class StageContext:
    """Where one stage is done.

    Attributes:
        about: Facts for ``done.json``; the work adds to them.
    """

    def __init__(
        self,
        stage: Stage,
        runtime: Runtime,
        *,
        events: Path | None = None,
        progress: Progress | None = None,
    ):
        code = foreign_code(stage.kind, stage.spec)
        if code.get("plugin_code") != stage.identity.get("plugin_code"):
            raise DataError(f"{stage.name}: its plugin was edited while the run went on; run again")
        self.stage, self.runtime = stage, runtime
        self._store = StageStore(runtime.store)
        self._events, self._progress = events, progress
        self.about: dict[str, Any] = {"status": "ok", "name": stage.name, "seed": stage.spec.seed}
        self._ends: Ends | None = None

    @property
    def benchmark(self) -> Benchmark:
        """The stage's benchmark, made once per process."""
        return benchmark_of(self.stage, self.runtime)

    # What is read --------------------------------------------------------------------------------

    def facts(self, role: str) -> dict[str, Any]:
        """What a parent says of itself.

        Raises:
            DataError: It is not done, or lacks a fact that its kind promises.
        """
        return self.facts_of(self.stage.parents[role])

    def facts_of(self, stage: Stage) -> dict[str, Any]:
        """The same of any stage."""
        done = self._store.done(stage.kind, stage.key)
        if done is None:
            raise DataError(f"{self.stage.name}: its stage {stage.name} is not done; run it first")
        folder = self._store.folder(stage.kind, stage.key)
        for fact in KINDS[stage.kind].facts:
            if fact not in done:
                raise DataError(f"{folder / DONE}: has no '{fact}'; delete {folder} and rerun")
        return done

    def folder(self, role: str) -> Path:
        """The files of a parent, which is complete and undamaged."""
        parent = self.stage.parents[role]
        self.facts_of(parent)
        return self._store.checked(parent.kind, parent.key)

    def split(self) -> ForgetSplit:
        """The parent's index sets.

        Raises:
            DataError: They were made on other data.
        """
        split = self.cut(ForgetSplit.load(self.folder("split") / SPLIT_FILE))
        digest = self.benchmark.source.digest
        if split.source_digest != digest:
            raise DataError(
                f"the data changed: split {split.name} was made on {split.source_digest[:12]}, "
                f"this is {digest[:12]} ({self.benchmark.provenance}); use the same data or "
                "another --store"
            )
        return split

    def cut(self, split: ForgetSplit) -> ForgetSplit:
        """The split; in a rehearsal a few samples of each of its parts."""
        if self.stage.spec.rehearsal is not None:
            split, self._ends = self.stage.spec.rehearsal.cut(split, self.benchmark.source)
        return split

    def model(self, role: str, *, exact: bool = False) -> nn.Module:
        """A parent's stored model, adapters merged: methods and audits take plain layers.

        ``exact`` leaves an adapter unmerged where merging would round its update off.
        """
        self.facts(role)
        return stored_model(self.stage.parents[role], self._store, self.benchmark, exact=exact)

    @contextmanager
    def scoring(self, role: str) -> Iterator[nn.Module]:
        """A parent's model as it is measured: in eval mode, float32 products in TF32 on a card."""
        from stable_forgetting.common.train.precision import tensor_float

        model = self.model(role, exact=True).eval()
        with tensor_float(pick_device(self.runtime.device)):
            yield model

    # What is checked -----------------------------------------------------------------------------

    def check_applicable(self, method: str) -> None:
        """Raises DataError where the method says nothing about this benchmark."""
        scenario, modality = self.benchmark.scenario, self.benchmark.modality
        reason = METHODS[method].info.inapplicable(scenario=scenario, modality=modality)
        if reason is not None:
            raise DataError(f"method '{method}' is {reason}; remove the row")

    def check_original(self, split: ForgetSplit) -> None:
        """Refuses to unlearn an Original that has not learnt, or has learnt other data."""
        root, minimum = self.stage.first, self.benchmark.minimum_train_accuracy
        done = self.facts_of(root)
        require_learnt(root, done, minimum)
        if done["data"] != split.source_digest:
            raise DataError(
                f"the data changed: {root.name} was trained on "
                f"{done['data'][:12]}, this is {split.source_digest[:12]} "
                f"({self.benchmark.provenance}); use the same data or another --store"
            )
        rehearsed = self.stage.spec.rehearsal is not None  # its few samples differ by request
        assert rehearsed or done["trained_on"] in (ids_digest(split.train), ASSUMED), (
            "Original was not trained on the union of forget, retain and earlier requests"
        )

    # What is written -----------------------------------------------------------------------------

    @property
    def scratch(self) -> Path:
        """A folder that outlives a kill and goes when the stage is complete."""
        return self._store.scratch(self.stage.kind, self.stage.key)

    @property
    def hardware(self) -> dict[str, Any]:
        """What may move bits between two runs of a stage, besides packages."""
        device = pick_device(self.runtime.device)
        here = {"threads": self.runtime.threads, "device": device}
        card = device.startswith("cuda")
        return here | ({"scored_float32_as": "tf32"} if card else {})

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The stage's new folder; for processes that do not write, one that is thrown away."""
        if not processes.is_main():
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
            return
        started = time.perf_counter()
        with self._store.writing(self.stage.kind, self.stage.key, self.about) as written:
            yield written
            self.about["stage_seconds"] = round(time.perf_counter() - started, 3)
            self.about["environment"] = environment() | self.hardware

    def task(
        self,
        split: ForgetSplit,
        access: frozenset[str],
        model: nn.Module | None = None,
        *,
        method: str = "",
    ) -> UnlearnTask:
        """The task that a method works on; it starts from a fresh model unless one is given.

        ``access`` are the parts that it may read, ``method`` is its name for errors.
        """
        from stable_forgetting.common.data.access import DataAccess

        spec, benchmark, request = self.stage.spec, self.benchmark, self.stage.request
        replicate = spec.replicate if isinstance(spec, ModelSpec) else 0
        fresh = derive(spec.seed, "replicate", replicate) if replicate else spec.seed
        if self.stage.kind == "retrain":  # no Retrain starts where Original did
            fresh = derive(spec.seed, "retrain", replicate)
        build = functools.partial(self._fresh, fresh)
        return UnlearnTask(
            model=build() if model is None else model,
            data=DataAccess(benchmark.source, split, access, method or self.stage.kind),
            family=benchmark,
            recipe=benchmark.recipe,
            build=build,
            seed=derive(spec.seed, "request", request) if request else spec.seed,
            replicate=replicate,
            paired_with=benchmark.paired_with,
            ends=self._ends,
        )

    def _fresh(self, seed: int) -> nn.Module:
        """A model before training, from the suite's pretraining where it has one."""
        benchmark, source = self.benchmark, self.stage.first.parents.get(PRETRAINED)
        model = benchmark.build(seed)
        if source is not None:
            assert isinstance(benchmark, Pretrainable), "it named a pretraining"
            benchmark.transfer(model, self._store.checked(source.kind, source.key) / WEIGHTS)
        return model

    @contextmanager
    def recording(
        self, task: UnlearnTask, folder: Path, evaluate: EvaluateDuring | None = None
    ) -> Iterator[None]:
        """Gives a task its log, checkpoints and progress while it trains.

        The log, and what ``evaluate`` measures in training, end in the stage's folder.
        """
        from stable_forgetting.common.train.protocols import Telemetry

        log = self.scratch / SCALARS
        task.checkpoint = self.scratch / "checkpoint.safetensors"
        task.keeps_last = False  # the stage stores the weights next
        task.telemetry = Telemetry(progress=self._progress, evaluate_during=evaluate)
        if not processes.is_main():
            yield
            return
        for leftover in self.scratch.glob(".*"):  # half a checkpoint of a killed run
            leftover.unlink(missing_ok=True)
        # the log lies beside the checkpoint: a resumed run continues both
        tracker = Tracker(log, self._events)
        task.telemetry = replace(task.telemetry, tracker=tracker)
        try:
            yield
        finally:
            tracker.close()
        # copies: a kill before the stage is complete resumes with what lies in the scratch
        if log.is_file():
            copy_scalars(log, folder / SCALARS)
        if (self.scratch / TRAJECTORY).is_dir():
            shutil.copytree(self.scratch / TRAJECTORY, folder / TRAJECTORY)

"""What happens inside one stage.  Everything heavy is imported here, in the process that works."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pipeline.stage import Stage
from common.base import processes
from common.base.config import validate
from common.base.errors import ConfigError, DataError, Diverged, GateError
from common.base.registry import BENCHMARKS, METHODS
from common.data.splits import ForgetSplit
from common.data.variants import half_split, request_split
from common.methods.base import UnlearningMethod
from common.methods.task import UnlearnTask
from common.protocol.benchmark import Benchmark, Runtime, pick_device
from common.store.records import RunRecord, clean_metrics, environment
from common.store.stages import DONE, StageStore, write_json
from common.store.weights import WEIGHTS, load_weights, save_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from common.train.protocols import EvaluateDuring

logger = logging.getLogger(__name__)
SCALARS = "scalars.jsonl"
TRAJECTORY = "trajectory"
FACTS = {"original": ("status", "trained_on", "data")}
"""What a complete stage must say of itself, where that is more than its status."""
ALONE = ("split", "evaluate")
"""Kinds that train nothing: of several processes the first one does them."""
Progress = Callable[[int, int], None]


def run_stage(
    stage: Stage, runtime: Runtime, *, board: Path | None = None, progress: Progress | None = None
) -> str:
    """Makes a stage complete unless it is; returns its status.

    Of several processes, which must all call it, the first one writes; the others return when the
    stage is complete.

    Args:
        stage: What to do; its parents must be complete.
        runtime: Where and on what.
        board: TensorBoard folder for live scalars.
        progress: Called with (steps done, steps in all) during training.
    """
    store = StageStore(runtime.store)
    done = store.done(stage.kind, stage.key)
    complete = done is not None
    if processes.count() > 1:
        complete = _agreed(stage, complete, runtime)
    if not complete and (processes.is_main() or stage.kind not in ALONE):
        benchmark = _benchmark(stage.spec["benchmark"], json.dumps(stage.spec["protocol"]), runtime)
        work = _Work(stage, benchmark, store, board, progress)
        {
            "split": work.split,
            "original": work.original,
            "retrain": work.retrain,
            "unlearn": work.unlearn,
            "evaluate": work.evaluate,
            "audit": work.audit,
            "map": work.map,
        }[stage.kind]()
    if not complete:
        processes.wait_for_all()
        done = store.done(stage.kind, stage.key)
    if done is None:
        assert not processes.is_main()
        raise DataError(
            f"--store {store.root}: process {processes.index()} does not see {stage.name}, which "
            "is complete; use a folder that all processes share"
        )
    return done["status"]


def _agreed(stage: Stage, complete: bool, runtime: Runtime) -> bool:
    """What the first process says of ``complete``, once all processes are at this stage.

    Raises:
        DataError: The processes are not at the same stage.
    """
    import torch

    from common.train.launch import join_processes

    _check_device(runtime.device)
    join_processes(torch.device(pick_device(runtime.device)))
    said = processes.announce(f"{int(complete)}{stage.key}")
    if said[1:] != stage.key:
        raise DataError(
            f"--store {runtime.store}: it changed while the processes planned; run again"
        )
    return said[0] == "1"


@functools.lru_cache(maxsize=4)
def _benchmark(name: str, protocol: str, runtime: Runtime) -> Benchmark:
    cls = BENCHMARKS[name]
    _check_device(runtime.device)
    return cls(validate(cls.Config, json.loads(protocol), f"protocol of {name}"), runtime)


def _check_device(name: str) -> None:
    if name == "auto":
        return
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        raise ConfigError(
            f"--device {name}: not a device that torch has here; use auto, cpu, cuda or cuda:N"
        ) from None


class _Work:
    """One stage being done."""

    def __init__(
        self,
        stage: Stage,
        benchmark: Benchmark,
        store: StageStore,
        board: Path | None,
        progress: Progress | None,
    ):
        self.stage, self.benchmark, self.store = stage, benchmark, store
        self.board, self.progress = board, progress
        self.seed: int = stage.spec["seed"]
        self.replicate: int = stage.spec.get("replicate", 0)
        self.about: dict[str, Any] = {"status": "ok", "name": stage.name, "seed": self.seed}

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """The stage's new folder; for processes that do not write, one that is thrown away."""
        if not processes.is_main():
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
            return
        started = time.perf_counter()
        with self.store.writing(self.stage.kind, self.stage.key, self.about) as folder:
            yield folder
            self.about["stage_seconds"] = round(time.perf_counter() - started, 3)
            self.about["environment"] = environment()

    def _parent(self, role: str) -> tuple[Path, dict[str, Any]]:
        parent = self.stage.parents[role]
        return self.store.folder(parent.kind, parent.key), self._facts(parent)

    def _facts(self, parent: Stage) -> dict[str, Any]:
        done = self.store.done(parent.kind, parent.key)
        if done is None:
            raise DataError(f"{self.stage.name}: its stage {parent.name} is not done; run it first")
        folder = self.store.folder(parent.kind, parent.key)
        for fact in FACTS.get(parent.kind, ("status",)):
            if fact not in done:
                raise DataError(f"{folder / DONE}: has no '{fact}'; delete {folder} and rerun")
        return done

    def _load_split(self) -> ForgetSplit:
        folder, _ = self._parent("split")
        split = ForgetSplit.load(folder / "split.safetensors")
        found = self.benchmark.source.digest
        if split.source_digest != found:
            raise DataError(
                f"the data changed: split {split.name} was made on {split.source_digest[:12]}, "
                f"this is {found[:12]} ({self.benchmark.provenance}); use the same data or another "
                "--store"
            )
        return split

    # Stages --------------------------------------------------------------------------------------

    def split(self) -> None:
        """Freezes the index sets."""
        split = self._variant(self.benchmark.split(self.seed))
        with self._writing() as folder:
            split.save(folder / "split.safetensors")
            self.about |= {
                "split": split.digest,
                "data": split.source_digest,
                "sizes": {part: len(ids) for part, ids in split.parts.items()},
            }

    def _variant(self, split: ForgetSplit) -> ForgetSplit:
        """The split itself, or what an audit makes of it."""
        spec = self.stage.spec
        if "half" in spec:
            return half_split(split, self.seed, spec["half"])
        if "request" in spec:
            from common.data.labels import class_labels

            labels = functools.partial(class_labels, self.benchmark.source)
            return request_split(split, labels, self.seed, spec["request"], spec["requests"])
        return split

    def original(self) -> None:
        """Trains on everything; a shadow on what its own split says."""
        from common.methods.base import train_reference

        own = "split" in self.stage.parents
        split = self._load_split() if own else self.benchmark.split(self.seed)
        access = frozenset({*split.train_parts, "initial"})
        self._train(split, access, lambda task: train_reference(task, split.train_parts))

    def retrain(self) -> None:
        """Trains on the retain set alone."""
        method = METHODS["retrain"]
        self._train(self._load_split(), method.info.access, method(method.Config()).unlearn)

    def _train(
        self, split: ForgetSplit, access: frozenset[str], train: Callable[[UnlearnTask], nn.Module]
    ) -> None:
        with self._writing() as folder:
            published = self.benchmark.published(self.stage.kind, split)
            task = self._task(split, access, model=published)
            self.about["published"] = published is not None
            model = self._guarded(train if published is None else lambda _: published, task, folder)
            trained = split.train if "forget" in access else split.parts["retain"]
            self.about |= {"trained_on": _ids_digest(trained), "data": split.source_digest}
            if model is not None and processes.is_main():
                save_weights(model, folder)
                try:
                    accuracy = self.benchmark.collect(model, trained).accuracy
                    self.about["train_accuracy"] = accuracy
                except Diverged as error:
                    self._diverged(error)

    def unlearn(self) -> None:
        """Runs the method on a copy of Original."""
        from common.bounded.attach import adapted_layers, trainable_share
        from common.bounded.files import save_adapter

        cls = METHODS[self.stage.spec["method"]]
        reason = cls.info.inapplicable(
            scenario=self.benchmark.scenario, modality=self.benchmark.modality
        )
        if reason is not None:
            raise DataError(f"method '{self.stage.spec['method']}' is {reason}; remove the row")
        split = self._load_split()
        self._gate(split)
        _, start = self._parent("original")
        if start["status"] != "ok":
            with self._writing():
                detail = f"an earlier request diverged: {start.get('status_detail', '')}"
                self.about |= {"status": "diverged", "status_detail": detail}
            return
        config = validate(cls.Config, self.stage.spec["params"], self.stage.name)
        method: UnlearningMethod = cls(config)
        with self._writing() as folder:
            original = self._load_model("original")
            task = self._task(split, cls.info.access, model=original)
            reset_peak()
            model = self._guarded(method.unlearn, task, folder)
            if model is None or not processes.is_main():
                return
            trainable, base = trainable_share(model)
            self.about["cost"] |= {"trainable_parameters": trainable, "base_parameters": base}
            if any(True for _ in adapted_layers(model)):
                save_adapter(model, folder)
            else:
                save_weights(model, folder)

    def map(self) -> None:
        """Runs one block of a stability map."""
        from benchmarks.maps.work import run_block

        split = self._load_split()
        self._gate(split)
        with self._writing() as folder:
            original = self._load_model("original")

            def task(access: frozenset[str]) -> UnlearnTask:
                made = self._task(split, access, model=copy.deepcopy(original))
                self._close_log()
                made.telemetry = made.checkpoint = None
                return made

            run_block(self.stage.spec, self.benchmark, split, original, task, folder)

    def _gate(self, split: ForgetSplit) -> None:
        root = self.stage.parents["original"]
        while root.kind != "original":  # a request that follows others
            root = root.parents["original"]
        done = self._facts(root)
        minimum = self.benchmark.minimum_train_accuracy
        if done["status"] == "ok" and done["train_accuracy"] < minimum:
            raise GateError(
                f"{self.stage.name}: Original reaches {done['train_accuracy']:.1f} % on its own "
                f"training data, below minimum_train_accuracy {minimum:g}; train it longer or "
                "lower the gate"
            )
        if done["status"] != "ok":
            raise GateError(f"{self.stage.name}: Original diverged; change protocol.train")
        if done["data"] != split.source_digest:
            raise DataError(
                f"the data changed: {root.name} was trained on "
                f"{done['data'][:12]}, this is {split.source_digest[:12]} "
                f"({self.benchmark.provenance}); use the same data or another --store"
            )
        assert done["trained_on"] == _ids_digest(split.train), (
            "Original was not trained on the union of forget, retain and earlier requests"
        )

    def evaluate(self) -> None:
        """Scores every part once and measures."""
        from common.measure.scores import save_scores

        split = self._load_split()
        trial: bool = self.stage.spec["trial"]
        _, model_done = self._parent("model")
        with self._writing() as folder:
            status, detail = model_done["status"], model_done.get("status_detail", "")
            metrics: dict[str, float | None] = {}
            if status == "ok":
                try:
                    parts = self.benchmark.parts(split, trial=trial, seed=self.seed)
                    self._parent("model")
                    model = self._stored(self.stage.parents["model"], exact=True)
                    model.eval()
                    scores = self.benchmark.score(model, parts)
                    metrics = self.benchmark.evaluate(scores, trial=trial, seed=self.seed)
                    if not trial:
                        save_scores(scores, folder / "scores.safetensors")
                except Diverged as error:
                    status, detail = "diverged", error.reason
            self.about |= {"status": status, "status_detail": detail}
            self._record(split, model_done, metrics).save(folder / "record.json")

    def audit(self) -> None:
        """Probes one stored model."""
        from benchmarks.audits.work import measure
        from common.bounded.files import ADAPTER_CONFIG

        split, model = self._load_split(), self.stage.parents["model"]
        adapted = (self._parent("model")[0] / ADAPTER_CONFIG).is_file()
        adapted = adapted and model.parents["original"].kind == "original"
        with self._writing() as folder:
            result = measure(self.stage, self.benchmark, split, self._load_model, adapted=adapted)
            write_json(folder / "audit.json", result)

    def _record(
        self, split: ForgetSplit, model_done: Mapping[str, Any], metrics: Mapping[str, float | None]
    ) -> RunRecord:
        spec, cls = self.stage.spec, METHODS[self.stage.spec["method"]]
        keys: dict[str, str] = {str(self.stage.kind): self.stage.key}
        keys |= {role: parent.key for role, parent in self.stage.parents.items()}
        return RunRecord(
            status=self.about["status"],
            status_detail=self.about["status_detail"],
            benchmark=spec["benchmark"],
            benchmark_version=type(self.benchmark).version,
            protocol=spec["protocol"],
            method=spec["method"],
            method_version=cls.info.version,
            params=spec["params"],
            seed=self.seed,
            replicate=self.replicate,
            trial=spec["trial"],
            metrics=clean_metrics(metrics),
            dynamics=clean_metrics(model_done.get("dynamics", {})),
            cost=clean_metrics(model_done.get("cost", {})),
            split={"digest": split.digest, "name": split.name, **split.notes},
            data={"digest": split.source_digest, "provenance": self.benchmark.provenance},
            stages=keys,
            environment=environment(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    # Helpers -------------------------------------------------------------------------------------

    def _task(
        self, split: ForgetSplit, access: frozenset[str], model: nn.Module | None
    ) -> UnlearnTask:
        from common.data.access import DataAccess
        from common.train.protocols import Telemetry
        from common.train.tracking import Tracker

        benchmark = self.benchmark
        builds = (self.seed,) if self.replicate == 0 else (self.seed, "replicate", self.replicate)
        seed = builds[0] if len(builds) == 1 else _derived(*builds)
        if model is None:
            model = benchmark.build(seed)
        scratch = self.store.scratch(self.stage.kind, self.stage.key)
        checkpoint = scratch / "checkpoint.safetensors"
        self._tracker = None
        if processes.is_main():
            # the log lives beside the checkpoint, so that a resumed run continues both
            _rewind(scratch / SCALARS, checkpoint)
            self._tracker = Tracker(scratch / SCALARS, self.board)
        method = self.stage.spec.get("method", self.stage.kind)
        evaluate = self._evaluation(split, scratch) if self.stage.kind == "unlearn" else None
        return UnlearnTask(
            model=model,
            data=DataAccess(benchmark.source, split, access, method),
            family=benchmark,
            recipe=benchmark.recipe,
            build=lambda: benchmark.build(seed),
            seed=self._task_seed(),
            replicate=self.replicate,
            telemetry=Telemetry(self._tracker, self.progress, evaluate),
            checkpoint=checkpoint,
        )

    def _evaluation(self, split: ForgetSplit, scratch: Path) -> EvaluateDuring:
        """Scores of the model in training, kept beside the model: its trajectory."""
        from common.measure.scores import save_scores

        trajectory = scratch / TRAJECTORY

        def evaluate(model: nn.Module, step: int) -> Mapping[str, float | None]:
            parts = self.benchmark.parts(split, trial=False, seed=self.seed)
            scores = self.benchmark.score(model, parts)
            if processes.is_main():
                trajectory.mkdir(parents=True, exist_ok=True)
                save_scores(scores, trajectory / f"{step:06d}.safetensors")
            return self.benchmark.evaluate(scores, trial=False, seed=self.seed)

        return evaluate

    def _task_seed(self) -> int:
        """The run's seed; a later request of a sequence draws afresh."""
        request, start = 0, self.stage.parents.get("original")
        while start is not None and start.kind == "unlearn":
            request, start = request + 1, start.parents["original"]
        return _derived(self.seed, "request", request) if request else self.seed

    def _guarded(
        self, work: Callable[[UnlearnTask], nn.Module], task: UnlearnTask, folder: Path
    ) -> nn.Module | None:
        """Runs ``work``; divergence becomes a status. Notes cost and dynamics."""
        started = time.perf_counter()
        model: nn.Module | None = None
        try:
            model = work(task)
        except Diverged as error:
            self._diverged(error)
        finally:
            self._close_log()
        self.about["cost"] = cost_of(task, time.perf_counter() - started)
        self.about["dynamics"] = dynamics_of(task)
        scratch = self.store.scratch(self.stage.kind, self.stage.key)
        for made in (SCALARS, TRAJECTORY) if processes.is_main() else ():
            if (scratch / made).exists():
                os.replace(scratch / made, folder / made)
        return model

    def _close_log(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    def _diverged(self, error: Diverged) -> None:
        self.about |= {"status": "diverged", "status_detail": str(error), "step": error.step}

    def _load_model(self, role: str) -> nn.Module:
        """The stored model of a parent, adapters merged: methods and audits take plain layers."""
        self._parent(role)
        return self._stored(self.stage.parents[role])

    def _stored(self, stage: Stage, *, exact: bool = False) -> nn.Module:
        """A stage's model; an adapter lies on the model that its own stage started from.

        Adapters are merged; if ``exact``, only where that does not round their update off.
        """
        from common.bounded.attach import detach, merges_exactly
        from common.bounded.files import ADAPTER_CONFIG, load_adapter

        folder = self.store.folder(stage.kind, stage.key)
        if (folder / ADAPTER_CONFIG).is_file():
            model = self._stored(stage.parents["original"])
            load_adapter(model, folder)
            return model if exact and not merges_exactly(model) else detach(model)
        model = self.benchmark.blank()
        load_weights(model, folder / WEIGHTS)
        return model


def _rewind(log: Path, checkpoint: Path) -> None:
    """Drops the rows that training will write again: those after the checkpoint, or all."""
    if not log.is_file():
        return
    last = 0
    if checkpoint.is_file():
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(checkpoint, framework="np") as file:
                last = int((file.metadata() or {})["step"])
        except (SafetensorError, OSError, LookupError, ValueError):
            return  # the engine says what is wrong with it
    from common.train.tracking import read_scalars

    rows = [row for row in read_scalars(log) if row["step"] <= last]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _derived(*parts: Any) -> int:
    from common.base.seeding import derive

    return derive(*parts)


def _ids_digest(ids: Any) -> str:
    import hashlib

    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(np.sort(ids), dtype="<i8").tobytes()).hexdigest()


def cost_of(task: UnlearnTask, seconds: float) -> dict[str, float | None]:
    """Seconds, optimizer steps and peak bytes of a finished task."""
    steps = float(sum(result.steps for result in task.results))
    return {"seconds": round(seconds, 3), "steps": steps, "peak_bytes": peak_bytes()}


def dynamics_of(task: UnlearnTask) -> dict[str, float | None]:
    """Last and largest value of everything that the task's runs logged."""
    dynamics: dict[str, float] = {}
    for result in task.results:
        dynamics |= {f"last/{k}": v for k, v in result.last.items()}
        dynamics |= {f"max/{k}": v for k, v in result.peak.items()}
    return clean_metrics(dynamics)


def reset_peak() -> None:
    """Starts a new measurement of peak memory."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> float | None:
    """Peak memory on the accelerator; None on a CPU, where a process's peak is not a stage's."""
    import torch

    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None

"""When a run's checkpoint is written, and which one it takes up again."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import CheckpointError
from stable_forgetting.common.base.files import sync
from stable_forgetting.common.train.checkpoint import Notes, TrainingState, written
from stable_forgetting.common.train.parts import is_part, remove_parts

if TYPE_CHECKING:
    from stable_forgetting.common.train.loop import TrainingRun

logger = logging.getLogger(__name__)


def due_at(run: TrainingRun, step: int) -> bool:
    """Whether it is time for a checkpoint after this step; all processes say the same."""
    every = run.config.checkpoint_every
    if isinstance(every, int):
        return (step + 1) % every == 0
    late = time.perf_counter() - run.saved > 60 * float(every.removesuffix("min"))
    return any(processes.gathered(late))


def save(run: TrainingRun, path: Path, step: int, stopped: str | None = None) -> None:
    """Writes everything needed to continue; all processes must call it."""
    last = {name: v for name, v in run.instruments.last.items() if math.isfinite(v)}
    notes = Notes(step, last, run.instruments.peak, run.seconds, stopped)
    if run.accelerator.is_main_process:
        files = [*path.parent.glob("*.jsonl"), *path.parent.glob("*/*.safetensors")]
        files = [file for file in files if not is_part(file)]
        sync({e: None for file in files for e in (file, file.parent, path.parent)})  # before it
        notes.beside = {str(file.relative_to(path.parent)): written(file) for file in files}
    _state(run).save(path, notes, writes=run.accelerator.is_main_process)
    run.saved = time.perf_counter()


def resume(run: TrainingRun, path: Path | None) -> tuple[int, str | None]:
    """Loads a checkpoint of this very run if there is one that can be used.

    Returns:
        The next step, and why the run had stopped early, if it had.
    """
    if path is None:
        return 0, None
    state, notes = _state(run), Notes()
    if path.is_file():
        try:
            notes = state.check(path)
        except CheckpointError as error:
            logger.warning("%s; this training starts again", error)
    if len(set(processes.gathered(notes.step))) > 1:
        notes = Notes()  # some process cannot read its part
    if notes.step:
        state.restore(path, notes)
    elif run.accelerator.is_main_process:
        _forget_later(path)
    run.instruments.last, run.instruments.peak = notes.last, notes.peak
    run.earlier = notes.seconds
    tracker, complete = run.telemetry.tracker, notes.stopped or notes.step == run.total
    if tracker is not None and not complete and run.accelerator.is_main_process:
        tracker.rewind(notes.step)
    return notes.step, notes.stopped


def _forget_later(path: Path) -> None:
    """Removes the checkpoints of a stage's later trainings: the log is about to lose their rows."""
    base, _, number = path.stem.partition("-")
    if number and not number.isdigit():
        return
    for other in path.parent.glob(f"{base}-*{path.suffix}"):
        later = other.stem.removeprefix(f"{base}-")
        if later.isdigit() and int(later) > int(number or 0):
            other.unlink()
            remove_parts(other)


def _state(run: TrainingRun) -> TrainingState:
    device, scaler = run.device, run.accelerator.scaler
    shapes = {name: list(parameter.shape) for name, parameter in run.trained.items()}
    config = run.config.model_dump(mode="json", exclude={"checkpoint_every"})
    identity = json.dumps([run.seed, shapes, sorted(run.stateful), config], sort_keys=True)
    return TrainingState(
        run.model, run.trained, run.raw_optimizer, run.stateful, device, scaler, identity
    )

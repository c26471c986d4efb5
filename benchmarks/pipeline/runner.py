"""Does one stage, in one process or in several launched ones."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from stable_forgetting.benchmarks.pipeline.context import StageContext
from stable_forgetting.benchmarks.pipeline.kinds import KINDS
from stable_forgetting.benchmarks.pipeline.position import PositionFile
from stable_forgetting.benchmarks.pipeline.stage import Stage
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.protocol.benchmark import Runtime, check_device, pick_device
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import Progress

BUSY = "busy"
"""Status of a stage on which another run works."""


def run_stage(
    stage: Stage,
    runtime: Runtime,
    *,
    events: Path | None = None,
    progress: Progress | None = None,
    wait: bool = True,
) -> str:
    """Makes a stage complete unless it is; returns its status.

    Of several processes, which must all call it, the first one writes; the others return when the
    stage is complete.

    Args:
        stage: What to do; its parents must be complete.
        events: TensorBoard folder for live scalars.
        progress: Called after every step of a training; a file in the scratch folder if absent.
        wait: Wait while another run works on the stage; else return :data:`BUSY`.
    """
    store, kind = StageStore(runtime.store), KINDS[stage.kind]
    main, several = processes.is_main(), processes.count() > 1
    done = store.done(stage.kind, stage.key)
    if done is not None and not several:
        return str(done["status"])
    # the first process holds the lease, for all of them
    lease = store.lease(stage.kind, stage.key, wait=wait or several) if main else nullcontext(True)
    with lease as free:
        if not free:
            return BUSY
        complete = store.done(stage.kind, stage.key) is not None
        if several:
            complete = _agreed(stage, complete, runtime)
        if not complete and (main or kind.trains):
            if progress is None and main:
                progress = PositionFile(store.scratch(stage.kind, stage.key))
            context = StageContext(stage, runtime, events=events, progress=progress)
            try:
                kind().work(context, stage.spec)
            except SystemExit as error:
                raise RuntimeError(f"its code called sys.exit({error.code!r})") from error
            except GeneratorExit as error:
                raise RuntimeError("its code raised GeneratorExit") from error
        if not complete:
            processes.wait_for_all()
        done = store.done(stage.kind, stage.key)
    if done is None:
        assert not main
        raise DataError(
            f"--store {store.root}: process {processes.index()} does not see {stage.name}, which "
            "is complete; use a folder that all processes share"
        )
    return str(done["status"])


def _agreed(stage: Stage, complete: bool, runtime: Runtime) -> bool:
    """What the first process says of ``complete``, once all processes are at this stage."""
    import torch

    from stable_forgetting.common.train.launch import join_processes

    check_device(runtime.device)
    join_processes(torch.device(pick_device(runtime.device)))
    message = processes.gathered(f"{int(complete)}{stage.key}")[0]
    if message[1:] != stage.key:
        raise DataError(
            f"--store {runtime.store}: it changed while the processes planned; run again"
        )
    return message[0] == "1"

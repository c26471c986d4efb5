"""The one place that writes TensorBoard and other trackers, and the JSON-lines log beside it.

The JSON-lines file in a stage folder is the source; TensorBoard event files are written under a
readable name (suite / row / seed) and can be replayed from it at any time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.files import write_text


class Tracker:
    """Writes scalars as JSON lines and, if asked, as TensorBoard events.

    Args:
        log: JSON-lines file; appended to, so that a resumed run continues its log.
        board: Folder for TensorBoard events, or None.
    """

    def __init__(self, log: Path, board: Path | None = None):
        log.parent.mkdir(parents=True, exist_ok=True)
        torn = log.is_file() and log.read_bytes()[-1:] not in (b"", b"\n")
        self._path = log
        self._log = log.open("a", encoding="utf-8")
        if torn:  # by a kill: the next row must not be lost with it
            self._log.write("\n")
        self._board = None
        if board is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(board))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named values at a step; non-finite values are logged as null."""
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._log.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")
        self._log.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Drops the rows after a step: a resumed training writes them again."""
        self._log.close()
        copy_scalars(self._path, self._path, step)
        self._log = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Flushes and closes everything."""
        self._log.close()
        if self._board is not None:
            self._board.close()


def copy_scalars(log: Path, target: Path, last: float = math.inf) -> None:
    """Writes the rows of a log up to a step, one line per step, and nothing else that is in it."""
    rows = [row for row in read_scalars(log) if row["step"] <= last]
    write_text(target, "".join(json.dumps(row) + "\n" for row in rows))


def read_scalars(log: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines log, one per step; of what was written twice the last counts."""
    if not log.is_file():
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            rows[int(row["step"])] = {**rows.get(int(row["step"]), {}), **row}
        except (ValueError, LookupError, TypeError):
            continue  # the last line of a killed run, or a damaged one
    return [rows[step] for step in sorted(rows)]


@dataclass(frozen=True)
class Run:
    """One finished run, as TensorBoard shows it.

    Attributes:
        config: Nested; written whole as text, and flattened for HParams.
        metrics: Tag -> final value, in the order of HParams' columns; None is left out.
        curves: Rows of a log, each with its ``step`` and its ``time`` (seconds since the epoch).
    """

    config: Mapping[str, Any]
    metrics: Mapping[str, float | None]
    curves: Sequence[Mapping[str, Any]] = ()


FIRST = ("row", "seed", "seeds", "lr", "forget_weight", "steps", "epochs")
"""The columns that HParams begins with, as far as a run has them; of the others those that vary."""


def timed_rows(log: Path, seconds: float) -> list[dict[str, Any]]:
    """The rows of a log with the time of each.

    The log was closed when its training ended; steps are taken to last equally long.
    """
    rows = read_scalars(log)
    if not rows:
        return []
    ended, last = log.stat().st_mtime, max(row["step"] for row in rows)
    return [{**row, "time": ended - seconds * (1 - row["step"] / max(last, 1))} for row in rows]


def export_runs(root: Path, runs: Mapping[str, Run]) -> None:
    """Writes finished runs to TensorBoard: curves, config as text, final values and HParams.

    With HParams, TensorBoard's own table shows the leaderboard.  Every run declares the same
    columns, as TensorBoard takes those of any one run for all.
    """
    settings = {name: flat(run.config) for name, run in runs.items()}
    columns = _columns(list(settings.values()))
    tags = list(dict.fromkeys(tag for run in runs.values() for tag in run.metrics))
    for name, run in runs.items():
        writer = events_writer(root / name)
        for row in run.curves:
            for tag, value in row.items():
                if tag not in ("step", "time") and value is not None:
                    writer.add_scalar(tag, value, row["step"], walltime=row["time"])
        writer.add_text("config", "```\n" + json.dumps(run.config, indent=1) + "\n```")
        values = {key: value for key, value in settings[name].items() if key in columns}
        _add_hparams(writer, columns, values, tags)
        ended = run.curves[-1]["time"] if run.curves else None
        for tag, number in run.metrics.items():
            if number is not None:
                writer.add_scalar(tag, number, 0, walltime=ended)
        writer.close()


TRACKERS: Mapping[str, str] = {"mlflow": "run_name", "trackio": "name", "wandb": "name"}
"""accelerate's tracker -> its argument that names a run."""


def check_tracker(name: str) -> None:
    """Raises :class:`ConfigError` where runs cannot be sent to a tracker."""
    if name not in TRACKERS:
        raise ConfigError(f"no tracker '{name}'; there are: {', '.join(TRACKERS)}")
    from accelerate.tracking import get_available_trackers

    if name not in map(str, get_available_trackers()):
        raise ConfigError(f"{name} is not installed; run: pip install {name}")


def send_runs(tracker: str, project: str, runs: Mapping[str, Run]) -> None:
    """Sends finished runs to a tracker: config, curves, and the final values at the last step.

    Where they go is the tracker's own setting, such as ``WANDB_MODE`` or ``MLFLOW_TRACKING_URI``.

    Args:
        tracker: One of :data:`TRACKERS`.
        project: Its project or experiment.
        runs: Name -> run.
    """
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # their logger asks for it
    for name, run in runs.items():
        sent = LOGGER_TYPE_TO_CLASS[tracker](project, **{TRACKERS[tracker]: name})
        sent.start()
        sent.store_init_configuration(flat(run.config))
        last = 0
        for row in run.curves:
            last = row["step"]
            values = {tag: value for tag, value in row.items() if tag not in ("step", "time")}
            sent.log(_known(values), step=last)
        sent.log(_known(run.metrics), step=last)
        sent.finish()


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {tag: value for tag, value in values.items() if value is not None}


def _columns(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Column -> a value of its type: the first ones, then those of which there are two values."""
    union: dict[str, Any] = {}
    varied = set()
    for key, value in (pair for config in configs for pair in config.items()):
        if union.setdefault(key, value) != value:
            varied.add(key)
    names = [*(n for n in FIRST if n in union), *(n for n in union if n in varied - {*FIRST})]
    return {name: union[name] for name in names}


def events_writer(folder: Path) -> Any:
    """A TensorBoard writer in the place of what the folder holds."""
    from torch.utils.tensorboard import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    return SummaryWriter(str(folder))


def _add_hparams(
    writer: Any, columns: Mapping[str, Any], values: Mapping[str, Any], tags: Sequence[str]
) -> None:
    """HParams into the run's own folder (``add_hparams`` would make a folder of its own)."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    make: Any = hparams  # torch does not type it
    keys = {_sorted_name(name): name for name in columns}
    declared, _, _ = make({key: columns[name] for key, name in keys.items()}, dict.fromkeys(tags))
    _, started, ended = make({_sorted_name(name): value for name, value in values.items()}, {})
    shown = declared.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(shown.content)
    for info in data.experiment.hparam_infos:
        info.display_name = keys[info.name]
    shown.content = data.SerializeToString()
    for event in (declared, started, ended):
        writer.file_writer.add_summary(event)


def _sorted_name(column: str) -> str:
    """TensorBoard sorts columns by this name; it shows another."""
    return f"{FIRST.index(column)} {column}" if column in FIRST else column


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings -> one level, dots between names; None is left out, lists are JSON."""
    pairs: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs |= flat(value, name + ".")
        elif isinstance(value, bool | int | float | str):
            pairs[name] = value
        elif value is not None:
            pairs[name] = json.dumps(value)
    return pairs

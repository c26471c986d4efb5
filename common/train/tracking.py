"""The one place that writes TensorBoard, and the JSON-lines log beside it.

The JSON-lines file in a stage folder is the source; TensorBoard event files are written under a
readable name (suite / row / seed) and can be replayed from it at any time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.base.files import write_text


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
        self._board = _writer(board)

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

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def export_run(
    board: Path,
    logs: Mapping[str, Path],
    config: Mapping[str, Any],
    metrics: Mapping[str, float | None],
) -> None:
    """Writes one finished run to TensorBoard: scalars, config as text, and HParams.

    With HParams, TensorBoard's own table shows the leaderboard.

    Args:
        board: Folder of the run, such as ``tensorboard/digits-class/gd_sine/seed-1``.
        logs: Tag prefix -> JSON-lines log to replay.
        config: Nested config; flattened for HParams and written whole as text.
        metrics: Final metrics; None is left out.
    """
    for old in board.glob("events.out.tfevents.*"):
        old.unlink()
    writer = _writer(board)
    assert writer is not None
    for prefix, log in logs.items():
        for row in read_scalars(log):
            for name, value in row.items():
                if name != "step" and value is not None:
                    writer.add_scalar(f"{prefix}{name}", value, row["step"])
    writer.add_text("config", "```\n" + json.dumps(config, indent=1) + "\n```")
    scalars = {f"final/{name}": value for name, value in metrics.items() if value is not None}
    _add_hparams(writer, flat(config), scalars)
    writer.close()


def _writer(board: Path | None) -> Any:
    if board is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(board))


def _add_hparams(writer: Any, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """HParams into the run's own folder (``add_hparams`` would make a folder of its own)."""
    from torch.utils.tensorboard.summary import hparams

    make: Any = hparams  # torch does not type it
    for event in make(dict(config), dict(metrics)):
        writer.file_writer.add_summary(event)
    for name, value in metrics.items():
        writer.add_scalar(name, value, 0)


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

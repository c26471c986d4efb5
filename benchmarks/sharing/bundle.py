"""A bundle: all that a suite's table follows from, in one folder or zip, and nothing else.

It holds the suite as resolved, every record with its config, digests and environment, the scores
per sample (numbers and positions, never a text, an image or a weight), what probes measured, and
the table that its maker had.  ``bundle.json`` names every file with its SHA-256.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from stable_forgetting.benchmarks.audits.stored import FILE as PLAN
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.write import RECORDS, records_text
from stable_forgetting.benchmarks.pipeline.measuring import SCORES, read_table
from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.files import json_text, reading
from stable_forgetting.benchmarks.suite.remembered import FILE, suite_files
from stable_forgetting.common.base.errors import ConfigError, DataError, one_line
from stable_forgetting.common.base.files import beside, file_digest, json_digest, publish
from stable_forgetting.common.base.registry import plugin_code
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import KEY_LENGTH, StageStore, check_writable, digests

SCHEMA = "bundle-1"
MANIFEST, TABLE, PROBED, PAGE = "bundle.json", "table.json", "probes.json", "LEADERBOARD.md"
SCORED = "scores"
MOST_FILES, MOST_BYTES = 100_000, 16 << 30
_NAME = re.compile(r"(?:[\w+=()-][\w .+=()-]*/)?[\w+=()-][\w.+=()-]*")


def write_bundle(board: Leaderboard, store: StageStore, out: Path) -> int:
    """Writes a complete table's bundle; returns the number of its files.

    Args:
        out: A folder that is not there yet, or a file called ``*.zip``.

    Raises:
        ConfigError: ``out`` is taken or cannot be written, or records are missing.
    """
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; name another")
    check_writable(out, "--out")
    if not board.complete:
        raise ConfigError(
            f"{board.suite.name}: {board.missing} records are missing; complete it with unlearn "
            "run first"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    folder, packed = beside(out), beside(out)
    folder.mkdir()
    try:
        _fill(folder, board, store)
        files = digests(folder)
        manifest = _manifest(board, files)
        (folder / MANIFEST).write_text(json_text(manifest), encoding="utf-8")
        if out.suffix == ".zip":
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in (MANIFEST, *files):
                    archive.write(folder / name, name)
            publish(packed, out)
        else:
            publish(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        packed.unlink(missing_ok=True)
    return len(files) + 1


def _fill(folder: Path, board: Leaderboard, store: StageStore) -> None:
    for name, text in suite_files(board.suite).items():
        spec = yaml.safe_load(text)
        spec.pop("plugins", None)  # paths of the maker's machine
        text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True)
        (folder / name).write_text(text, encoding="utf-8")
    texts = {
        RECORDS: records_text(board),
        TABLE: json_text(to_json(board)),
        PAGE: markdown.write(sections(board)),
        PROBED: json_text(_probed(board, store)),
    }
    if board.plan is not None:
        texts[PLAN] = board.plan.text()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / SCORED).mkdir()
    for label, record in board.records:
        if record.status == "ok":
            scores = board.stage(label, record).parents["scores"]
            source = store.checked(scores.kind, scores.key, SCORES) / SCORES
            shutil.copyfile(source, folder / scores_file(record))


def _probed(board: Leaderboard, store: StageStore) -> list[dict[str, Any]]:
    tables = []
    for entry in board.plan.probes if board.plan else ():
        made = read_table(store, entry.stage)
        run = entry.result
        if made is not None and made.rows:
            place = {"row": run.label, "replicate": run.replicate, "seed": run.seed}
            tables.append({**place, "probe": entry.name, "rows": made.rows, "notes": made.notes})
    return tables


def _manifest(board: Leaderboard, files: dict[str, str]) -> dict[str, Any]:
    rows = [[row.method, row.config.identity()] for row in board.suite.rows]
    content = {
        "schema": SCHEMA,
        "suite": board.suite.name,
        "version": board.suite.spec.version,
        "digest": board.digest,
        "plugins": plugin_code({"benchmark": board.suite.spec.benchmark, "rows": rows}),
        "files": files,
    }
    return {**content, "sha256": json_digest(content)}


def scores_file(record: RunRecord) -> str:
    """Where a bundle keeps the scores of a record.

    Raises:
        ValueError: Its key is none, and would lead out of the bundle.
    """
    if not record.stages.get("scores", "0").isalnum():
        raise ValueError("a record's key of its scores is not one")
    return f"{SCORED}/{record.stages.get('scores', '')[:KEY_LENGTH]}.safetensors"


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The folder of a bundle after its manifest and every hash were checked; a zip is unpacked.

    Raises:
        DataError: It is no bundle, or not what was written.
    """
    if path.is_dir():
        _check(path, path)
        yield path
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with zipfile.ZipFile(path) as archive:
                _check_names(archive, path)
                archive.extractall(folder)
        except DataError:
            raise
        except Exception as error:  # a changed archive raises many unrelated types
            raise DataError(f"{path}: no bundle ({one_line(error)})") from None
        _check(folder, path)
        yield folder


def _check_names(archive: zipfile.ZipFile, path: Path) -> None:
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    names = [entry.filename for entry in entries]
    links = [e.filename for e in entries if stat.S_ISLNK(e.external_attr >> 16)]
    odd = links + [name for name in names if not _NAME.fullmatch(name)]
    if odd or len(set(names)) != len(names):
        raise DataError(f"{path}: no bundle: it holds {odd[0] if odd else 'a file twice'!r}")
    if len(names) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise DataError(f"{path}: larger than a bundle may be ({MOST_BYTES >> 30} GiB)")


def _check(folder: Path, path: Path) -> None:
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"{path}: no bundle (it lacks {MANIFEST}); make one: unlearn submit SUITE --out "
            f"{shlex.quote(str(path))}"
        )
    with reading(f"{path}: {MANIFEST} cannot be read"):
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        stated = manifest.pop("sha256")
        schema, files, _ = manifest["schema"], dict(manifest["files"]), manifest["digest"]
    if schema != SCHEMA:
        raise DataError(f"{path}: of schema {schema}; this version reads {SCHEMA}")
    if stated != json_digest(manifest):
        raise DataError(f"{path}: {MANIFEST} is not what was written")
    if missing := {FILE, RECORDS, TABLE, PROBED} - files.keys():
        raise DataError(f"{path}: it lacks {min(missing)}")
    there = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if not p.is_dir()}
    if extra := there.keys() - files.keys() - {MANIFEST}:
        raise DataError(f"{path}: {min(extra)} is not in {MANIFEST}; remove it")
    for name, digest in files.items():
        file = there.get(name)
        if file is None or file.is_symlink() or file_digest(file) != digest:
            raise DataError(f"{path}: {name} is missing or not what was written")

"""What the tests of benchmarks and tools share: a tiny suite, the command line in this process,
one store that was filled once and is only read, and records made by hand."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from filelock import FileLock

from stable_forgetting import benchmarks  # registers
from stable_forgetting.benchmarks.cli import main as cli_module
from stable_forgetting.benchmarks.cli import session
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import Stage
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.section import Section, Table
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.common.base.config import merge
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import DONE, StageStore

ROOT = Path(benchmarks.__file__).resolve().parents[1]
TINY: dict[str, Any] = {
    "suite": "tiny",
    "protocol": {
        "data": {
            "name": "digits",
            "train_images": 200,
            "validation_images": 60,
            "test_images": 100,
        },
        "model": {
            "name": "scratch",
            "image_size": 16,
            "patch_size": 8,
            "dim": 16,
            "depth": 1,
            "heads": 2,
        },
        "scenario": {"kind": "class"},
        "train": {"epochs": 2, "batch_size": 32, "lr": 3e-3},
        "minimum_train_accuracy": 0,
    },
    "seeds": [1],
    "retrains": 1,
    "methods": {"original": None, "retrain": None},
}
TINY_TEXT: dict[str, Any] = {
    "suite": "tiny-text",
    "benchmark": "tofu",
    "protocol": {
        "data": {"name": "fictitious", "authors": 2, "forget_authors": 3, "questions": 4},
        "model": {
            "name": "tiny",
            "dim": 16,
            "depth": 1,
            "heads": 2,
            "context": 128,
            "tokenizer": 400,
        },
        "train": {"steps": 3, "batch_size": 8, "lr": 1e-3},
        "evaluation": {"max_new_tokens": 4},
        "minimum_train_accuracy": 0,
    },
    "seeds": [1],
    "retrains": 1,
    "columns": ["mu"],
    "defaults": {"steps": 2, "batch_size": 4},
    "methods": {"original": None, "retrain": None, "gd_sine": None},
}
METHOD_ROWS: dict[str, Any] = {
    "original": None,
    "retrain": None,
    "finetune": None,
    "ascent": None,
    "random_label": {"params": {"epochs": 1}},
    "gd": None,
    "gd_lora": None,
    "gd_sine": None,
    "gd_ball": None,
}


@pytest.fixture(scope="session")
def tiny_suite(tmp_path_factory) -> Callable[..., Path]:
    """Writes a tiny suite; keywords are merged over it (``methods`` replaces the rows)."""

    return _writer(TINY, tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_text_suite(tmp_path_factory) -> Callable[..., Path]:
    """The same for a tiny language suite."""
    return _writer(TINY_TEXT, tmp_path_factory)


def _writer(base: Mapping[str, Any], tmp_path_factory) -> Callable[..., Path]:
    def write(folder: Path | None = None, /, **over: Any) -> Path:
        folder = folder or tmp_path_factory.mktemp("suite")
        data = merge(base, over)
        if "methods" in over:
            data["methods"] = over["methods"]
        path = folder / f"{data['suite']}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def cli() -> Callable[..., SimpleNamespace]:
    """Runs ``unlearn ARGS`` in this process, all stages too; gives code, out and err.

    Workers are processes of their own where a test gives ``--workers`` above 1.  ``cli.ok`` also
    asserts that the command succeeds.
    """

    def run(*args: object) -> SimpleNamespace:
        out, err = io.StringIO(), io.StringIO()
        entries, modules, argv = dict(METHODS._entries), set(sys.modules), sys.argv
        workers = session.default_workers
        session.default_workers = lambda device: 1
        environment = os.environ.pop("SF_DATA_ROOT", None)
        sys.argv = ["unlearn", *map(str, args)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    cli_module.main()
                    code: Any = None
                except SystemExit as stop:
                    code = stop.code
        finally:
            sys.argv, session.default_workers = argv, workers
            logging.captureWarnings(False)
            METHODS._entries.clear()
            METHODS._entries.update(entries)
            for name in set(sys.modules) - modules:
                if name.startswith("stable_forgetting_plugin"):
                    del sys.modules[name]
            if environment is not None:
                os.environ["SF_DATA_ROOT"] = environment
        return SimpleNamespace(code=code or 0, out=out.getvalue(), err=err.getvalue())

    def ok(*args: object) -> SimpleNamespace:
        done = run(*args)
        assert done.code == 0, done.out + done.err
        return done

    run.ok = ok  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="session")
def spawn() -> Callable[..., subprocess.Popen]:
    """Starts ``unlearn ARGS`` (or, with ``script``, a script) as a process."""

    def start(*args: object, script: str | None = None, **env: str) -> subprocess.Popen:
        clean = {key: value for key, value in os.environ.items() if key != "SF_DATA_ROOT"}
        head = ["-c", script] if script is not None else ["-m", "stable_forgetting.benchmarks"]
        return subprocess.Popen(
            [sys.executable, *head, *map(str, args)],
            cwd=ROOT,
            env={**clean, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def kill_at_checkpoint() -> Callable[..., list[str]]:
    """Kills a process (and its ``workers``) at a stage's first checkpoint; ids of its children."""

    def kill(
        process: subprocess.Popen, store: Path, stage: Stage, *, workers: bool = False
    ) -> list[str]:
        checkpoint = StageStore(store).scratch(stage.kind, stage.key) / "checkpoint.safetensors"
        limit = time.monotonic() + 240
        while not checkpoint.is_file():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < limit, "no checkpoint appeared"
            time.sleep(0.002)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        children = listed.read_text().split() if listed.exists() else []
        process.kill()
        for child in children if workers else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert StageStore(store).done(stage.kind, stage.key) is None, "too late: it was complete"
        return children

    return kill


@pytest.fixture(scope="session")
def one_line_error() -> Callable[[Any], str]:
    """Asserts that a command failed with one clear line; gives the line."""

    def check(done: Any) -> str:
        lines = done.err.splitlines()
        assert done.code == 2, (done.code, done.out, done.err)
        assert len(lines) == 1, done.err
        assert lines[0].startswith("error: "), done.err
        assert "Traceback" not in done.out + done.err
        return lines[0]

    return check


@pytest.fixture(scope="session")
def nothing_half() -> Callable[[Path], None]:
    """Asserts that a store holds complete stages only."""

    def check(store: Path) -> None:
        folders = list((store / "stages").iterdir()) if (store / "stages").is_dir() else []
        assert not [path.name for path in folders if path.name.startswith(".")]
        assert not [path.name for path in folders if not (path / DONE).is_file()]

    return check


@pytest.fixture(scope="session")
def built_in() -> Callable[[str], ResolvedSuite]:
    """A suite of the project by name, resolved once."""
    return functools.cache(load_suite)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder of this session, the same for all processes that run its tests."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def filled(tiny_suite, cli, shared_folder) -> Iterator[SimpleNamespace]:
    """A store with a class and a random suite, run once.  Read only.

    The class suite has two more rows: ``gd_bad`` diverges at its first steps, ``gd_capped`` meets
    its ``loss_cap`` at once.
    """
    root = shared_folder / "filled"
    noted = root / "done.json"
    with FileLock(shared_folder / "filled.lock"):
        if not noted.is_file():
            root.mkdir()
            done = _fill(root, tiny_suite, cli)
            noted.write_text(json.dumps({kind: vars(each) for kind, each in done.items()}))
    done = {kind: SimpleNamespace(**each) for kind, each in json.loads(noted.read_text()).items()}
    store = root / "store"
    before = sorted(str(path) for path in store.rglob("*"))
    paths = {kind: root / f"tiny-{kind}.yaml" for kind in done}
    yield SimpleNamespace(store=store, paths=paths, done=done)
    assert before == sorted(str(path) for path in store.rglob("*")), "a test wrote into it"


def _fill(root: Path, tiny_suite, cli) -> dict[str, SimpleNamespace]:
    bad = {
        "gd_bad": {"method": "gd", "params": {"lr": 1e6}},
        "gd_capped": {"method": "gd", "params": {"loss_cap": 1e-6}},
    }
    common = {
        "defaults": {"steps": 6, "log_every": 2},
        "retrains": 2,
        "compare": [["gd_sine", "gd_lora"]],
    }
    paths = {
        "class": tiny_suite(root, suite="tiny-class", methods={**METHOD_ROWS, **bad}, **common),
        "random": tiny_suite(
            root,
            suite="tiny-random",
            methods=METHOD_ROWS,
            protocol={"scenario": {"kind": "random", "fraction": 0.2}},
            **common,
        ),
    }
    return {kind: cli("run", path, "--store", root / "store") for kind, path in paths.items()}


@pytest.fixture
def copied(filled, tmp_path) -> SimpleNamespace:
    """A private copy of the filled store."""
    store = tmp_path / "store"
    shutil.copytree(filled.store, store)
    return SimpleNamespace(store=store, paths=filled.paths)


@pytest.fixture(scope="session")
def find_stage() -> Callable[..., Stage]:
    """The stage of a suite by kind and name."""

    def find(path: Path, store: Path, kind: str, name: str, *overrides: str) -> Stage:
        plan = make_plan(load_suite(str(path), overrides), StageStore(store))
        hits = [s for s in plan.stages() if s.kind == kind and s.name == name]
        assert len(hits) == 1, [s.name for s in plan.stages() if s.kind == kind]
        return hits[0]

    return find


@pytest.fixture(scope="session")
def section_pages() -> Callable[[list[Section]], tuple[str, str]]:
    """(Markdown, HTML) of sections, after checking that both hold every one of them, in order."""

    def check(sections: list[Section]) -> tuple[str, str]:
        text, page = markdown.write(sections), html.write(sections)
        code = str.maketrans("", "", "`")
        plain = re.sub("</?code>", "", page)
        for written in (text.replace("\\|", "|").translate(code), unescape(plain)):
            place = 0
            for piece in (piece for section in sections for piece in pieces(section)):
                place = written.find(piece.translate(code), place)
                assert place >= 0, piece
        return text, page

    def pieces(section: Section) -> Iterator[str]:
        yield section.title
        yield from section.text
        if isinstance(section.content, Table):
            yield from section.content.heads
            for row in section.content.rows:
                yield from row
            yield section.content.explanation
        yield from section.lines

    return check


def table_row(label: str, values: Sequence[float], **over: Any) -> dict[str, Any]:
    """A row of ``leaderboard.json`` from its distances by seed; ``over`` replaces keys."""
    row = {"row": label, "method": "gd", "seeds": [*range(len(values))], "diverged": []}
    row |= {"derived": {}, "ag_per_seed": {str(seed): v for seed, v in enumerate(values)}}
    return {**row, **over}


@pytest.fixture(scope="session")
def put_record() -> Callable[..., RunRecord]:
    """Writes the record of an evaluate stage by hand."""

    def put(
        store: StageStore,
        stage: Stage,
        metrics: Mapping[str, float | None] | None,
        **over: Any,
    ) -> RunRecord:
        assert stage.kind == "measure"
        status = "ok" if metrics is not None else "diverged"
        fields: dict[str, Any] = {
            "status": status,
            "status_detail": "" if metrics is not None else "diverged at step 3: loss not finite",
            "benchmark": stage.spec.benchmark,
            "benchmark_version": 1,
            "protocol": stage.spec.protocol,
            "method": stage.spec.method,
            "method_version": 1,
            "params": stage.spec.params,
            "seed": stage.spec.seed,
            "replicate": stage.spec.replicate,
            "trial": stage.spec.trial,
            "metrics": dict(metrics or {}),
            "data": {"digest": "d" * 64, "provenance": "by hand"},
            "stages": {role: parent.key for role, parent in stage.parents.items()},
        }
        record = RunRecord(**{**fields, **over})
        with store.writing("measure", stage.key, {"status": status}) as folder:
            record.save(folder / "record.json")
        return record

    return put


@pytest.fixture(scope="session")
def hand_made(tiny_suite, put_record) -> Callable[..., tuple[ResolvedSuite, StageStore]]:
    """(suite, store) with records given as label -> seed -> (FA, RA, TA, MIA), or None: diverged.

    ``retrain*`` is the second Retrain; what is absent is missing.
    """

    def make(root: Path, table: Mapping[str, Mapping[int, Any]], **over: Any):
        labels = [label for label in table if label != "retrain*"]
        rows = over.pop("methods", {label: None for label in labels})
        seeds = over.pop("seeds", sorted({seed for row in table.values() for seed in row}))
        path = tiny_suite(root, methods=rows, seeds=seeds, retrains=2, **over)
        suite, store = load_suite(str(path)), StageStore(root / "store")
        for result in make_plan(suite, store).results:
            if result.trial is not None:
                continue
            split = result.stage.parents["split"]
            with store.writing("split", split.key, {"sizes": {"forget": 50}}):
                pass
            key = result.label + ("*" if result.replicate else "")
            if result.seed in table.get(key, {}):
                values = table[key][result.seed]
                put_record(store, result.stage, None if values is None else vision(*values))
        return suite, store

    def vision(fa: float, ra: float, ta: float, mia: float | None) -> dict[str, float | None]:
        return {"fa": fa, "ua": 100 - fa, "ra": ra, "ta": ta, "mia": mia, "forget_loss": 1.0}

    return make

"""Rehearsals: a suite's own rows end to end, with stand-ins for its model and data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pipeline.planner import make_plan
from benchmarks.rehearsal.suite import WARNING, rehearsed
from benchmarks.spec.resolve import load_suite
from benchmarks.spec.suite import suite_names
from common.protocol.benchmark import Runtime
from common.store.stages import StageStore
from common.train.rates import learning_rate

SMALL = ("tiny", "scratch")


def stand_in_is_needed(name: str) -> bool:
    """Whether a suite's model or its training has a size for a GPU."""
    protocol = load_suite(name).protocol
    return protocol.model.name not in SMALL or protocol.model.depth == 12


FULL = [name for name in suite_names() if stand_in_is_needed(name)]


def rows_of(out: str) -> dict[str, list[str]]:
    """Row -> cells of the printed table."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 2}


def steps_of(store: Path, row: str) -> list[tuple[int, float]]:
    """(number, rate) of the steps that a row's model took."""
    for done in store.rglob("done.json"):
        log = done.with_name("scalars.jsonl")
        if log.is_file() and json.loads(done.read_text())["name"].split("/")[-2:][0] == row:
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            return [(line["step"], line["lr"]) for line in lines if "lr" in line]
    raise AssertionError(f"no steps of {row}")


def test_the_full_suites_are_known():
    assert len(FULL) >= 23 and "coun-cifar100-scratch" in FULL and "tofu-small" not in FULL


@pytest.mark.parametrize(
    ("suite", "rows", "planned"),
    [
        ("tofu-phi-1.5-forget01", {"idk": 6, "gd_sine": 6}, {"original": 625}),
        ("coun-cifar100-scratch", {"random_label": 1056}, {"retrain": 63400}),
        ("muse-news-llama2-7b", {"npo_gdr": 1020}, {}),
        ("tdec-gpt-neo-125m", {"loku": 20}, {}),
    ],
)
def test_rows_train_their_ends_at_the_whole_schedule(suite, rows, planned, cli, tmp_path):
    shown = cli("rehearse", suite, "--only", ",".join(rows), "--store", tmp_path)
    assert shown.code == 0, shown.out + shown.err
    assert WARNING in shown.out
    table = rows_of(shown.out)
    assert all(cells[-1] == "ok" for cells in table.values() if cells[0] != "steps")
    assert table["report"]
    resolved = load_suite(suite)
    for row, count in rows.items():
        assert table[row][:2] == [str(count), str(min(4, count))]
        config = resolved.row(row).config
        if resolved.row(row).draws:
            config = resolved.row(row).draws[0].config
        engine = config.engine() if hasattr(config, "engine") else config
        warmup = engine.warmup_steps if engine.warmup_epochs is None else 1
        taken = steps_of(tmp_path, row)
        assert [step for step, _ in taken] == sorted({1, 2, count - 1, count})
        wanted = [learning_rate(engine, step - 1, count, warmup) for step, _ in taken]
        assert [rate for _, rate in taken] == pytest.approx(wanted, rel=1e-9)
    for row, count in planned.items():
        assert table[row][0] == str(count)


@pytest.mark.hours
@pytest.mark.parametrize("suite", FULL)
def test_every_full_suite_rehearses(suite, cli):
    shown = cli("rehearse", suite)
    assert shown.code == 0, shown.out + shown.err


def test_a_row_that_fails_hides_no_other(tiny_suite, cli, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from common import METHODS, Finetune\n"
        "@METHODS.register('broken')\n"
        "class Broken(Finetune):\n"
        "    '''Fails.  Formula: none.  Source: none.'''\n"
        "    def unlearn(self, task):\n"
        "        raise RuntimeError('no such layer\\nhere')\n"
    )
    suite = tiny_suite(
        suite="breaks",
        methods={"original": None, "retrain": None, "broken": None, "finetune": None},
    )
    shown = cli("rehearse", suite, "--plugin", plugin)
    assert shown.code == 1
    table = rows_of(shown.out)
    assert table["finetune"][-1] == "ok" and table["report"][-1] == "ok"
    assert "no such layer here" in table["broken"][-1]


def test_a_rehearsed_stage_is_never_a_real_one(tmp_path):
    suite = load_suite("digits-class", only=["finetune"])
    small, _ = rehearsed(suite, Runtime(store=tmp_path), tmp_path)
    same = load_suite("digits-class", only=["finetune"], seeds=suite.spec.seeds[:1])
    keys = [
        {stage.key for stage in make_plan(each, StageStore(tmp_path)).stages()}
        for each in (small, same)
    ]
    assert keys[0] and not keys[0] & keys[1]
    assert small.protocol.train == suite.protocol.train


def test_a_rehearsal_that_is_kept_lies_apart(tiny_suite, cli, tmp_path):
    store = tmp_path / "store"
    shown = cli(
        "rehearse",
        tiny_suite(suite="apart", methods={"original": None, "retrain": None}),
        "--store",
        store,
    )
    assert shown.code == 0
    assert {path.name for path in store.iterdir()} == {"rehearsals"}
    (report,) = store.rglob("LEADERBOARD.md")
    assert WARNING in report.read_text()


def test_a_model_of_unknown_family_is_one_line(cli, one_line_error):
    shown = cli("rehearse", "tofu-phi-1.5-forget01", "--set", "protocol.model.name=someone/model")
    assert "published.yaml" in one_line_error(shown)

"""Rehearsals: a suite's own rows end to end, with stand-ins for its model and data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stable_forgetting.benchmarks.cli import run
from stable_forgetting.benchmarks.paper import rehearsals
from stable_forgetting.benchmarks.paper.rehearsals import full_suites, is_full, is_rehearsed
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.rehearsal.suite import WARNING, rehearsed
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import suite_names
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.train.config import learning_rate


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
    full = full_suites()
    assert len(full) >= 23 and "coun-cifar100-scratch" in full and "tofu-small" not in full


@pytest.mark.parametrize(
    ("suite", "rows", "planned"),
    [
        ("tofu-phi-1.5-forget01", {"idk": 6, "gd_sine": 6}, {"original": 625}),
        pytest.param(
            *("coun-cifar100-scratch", {"random_label": 1056, "scrub_r": 1727}, {"retrain": 63400}),
            marks=pytest.mark.slow,
        ),
        ("muse-news-llama2-7b", {"npo_gdr": 1020}, {}),
        ("tdec-gpt-neo-125m", {"loku": 20}, {}),
    ],
)
def test_rows_train_their_ends_at_the_whole_schedule(suite, rows, planned, cli, tmp_path):
    shown = cli.ok("run", suite, "--rehearse", "--only", ",".join(rows), "--store", tmp_path)
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One store for all suites, which share what is equal in them."""
    return tmp_path_factory.mktemp("rehearsals")


@pytest.fixture
def assert_rehearses(cli, shared, built_in):
    """Whether every row of a full suite goes well; skips what runs here as it is."""

    def check(suite):
        if not is_full(built_in(suite)):
            pytest.skip("it runs here as it is")
        cli.ok("run", suite, "--rehearse", "--store", shared)

    return check


# Two classes, which two processes take apart.
@pytest.mark.slow
class TestFullSuitesOfTofu:
    @pytest.mark.parametrize("suite", [name for name in suite_names() if name.startswith("tofu")])
    def test_rehearse(self, suite, assert_rehearses):
        assert_rehearses(suite)


@pytest.mark.slow
class TestOtherFullSuites:
    @pytest.mark.parametrize(
        "suite", [name for name in suite_names() if not name.startswith("tofu")]
    )
    def test_rehearse(self, suite, assert_rehearses):
        assert_rehearses(suite)


def test_a_record_names_what_was_rehearsed_as_it_is(tiny_suite, cli, tmp_path, monkeypatch):
    rows = {"original": None, "retrain": None, "finetune": None}
    path, record = tiny_suite(suite="noted", methods=rows), tmp_path / "rehearsals.json"
    cli.ok("run", path, "--rehearse", "--record", record, "--store", tmp_path)
    entry = json.loads(record.read_text())["noted"]
    assert entry["rows"] == 3 and entry["cpu_seconds"] > 0
    monkeypatch.setattr(rehearsals.read_rehearsals, "__defaults__", (record,))
    assert is_rehearsed(load_suite(str(path)))
    assert not is_rehearsed(load_suite(str(path), ["methods.finetune.params.lr=0.5"]))
    refused = cli("run", path, "--rehearse", "--record", record, "--only", "finetune")
    assert refused.code == 2 and "rehearsed whole" in refused.err


@pytest.mark.parametrize("text", ["", "[]", '{"digits'])
def test_a_file_that_is_no_record_is_refused_before_the_work(
    tiny_suite, cli, tmp_path, one_line_error, monkeypatch, text
):
    monkeypatch.setattr(run, "_rehearse", lambda *_: pytest.fail("rehearsed"))
    record = tmp_path / "notes.txt"
    record.write_text(text)
    line = one_line_error(cli("run", tiny_suite(), "--rehearse", "--record", record))
    assert "holds no record of rehearsals" in line and record.read_text() == text
    line = one_line_error(cli("run", tiny_suite(), "--rehearse", "--record", record / "below.json"))
    assert f"--record {record}: {record} is not a folder that can be written" in line


def test_a_row_that_fails_is_not_recorded(tiny_suite, cli, tmp_path):
    rows = {"original": None, "retrain": None, "gd": {"params": {"steps": 2, "loss_cap": 1e-9}}}
    record = tmp_path / "rehearsals.json"
    shown = cli("run", tiny_suite(suite="wild", methods=rows), "--rehearse", "--record", record)
    assert shown.code == 1 and not record.exists()


def test_suites_of_one_setting_share_their_stages(cli, tmp_path):
    for rank in ("", "-rank8"):
        suite = f"tofu-phi-1.5-forget01{rank}"
        cli.ok("run", suite, "--rehearse", "--only", "gd,gd_sine", "--store", tmp_path)
    done = [json.loads(path.read_text())["name"] for path in tmp_path.rglob("unlearn-*/done.json")]
    assert sorted(name.split("/")[0] for name in done) == ["gd", "gd_sine", "gd_sine"]
    assert len([*tmp_path.rglob("stand-ins/*/config.json")]) == 1


def test_a_row_that_does_not_apply_is_no_failure(tiny_suite, cli, tmp_path):
    rows = {"original": None, "retrain": None, "novo": None}
    suite = tiny_suite(tmp_path, methods=rows, protocol={"scenario": {"kind": "random"}})
    shown = cli("run", suite, "--rehearse", "--record", tmp_path / "record.json")
    assert shown.code == 0 and "not applicable: for class forgetting only" in shown.out
    assert "3 of 4 went well" in shown.out and "1 do not apply" in shown.out
    assert (tmp_path / "record.json").is_file()


def test_a_row_that_fails_hides_no_other(tiny_suite, cli, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from stable_forgetting.common import METHODS, Finetune\n"
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
    shown = cli("run", suite, "--rehearse", "--plugin", plugin)
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
    cli.ok(
        "run",
        "--rehearse",
        tiny_suite(suite="apart", methods={"original": None, "retrain": None}),
        "--store",
        store,
    )
    assert {path.name for path in store.iterdir()} == {"rehearsals"}
    (report,) = store.rglob("LEADERBOARD.md")
    assert WARNING in report.read_text()


def test_a_model_of_unknown_family_is_one_line(cli, one_line_error):
    shown = cli(
        "run", "tofu-phi-1.5-forget01", "--rehearse", "--set", "protocol.model.name=someone/model"
    )
    assert "published.yaml" in one_line_error(shown)

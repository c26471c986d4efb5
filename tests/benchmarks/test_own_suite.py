"""A suite and a plugin of one's own: what they may say; an edit never shows old numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from stable_forgetting.benchmarks.leaderboard import run
from stable_forgetting.benchmarks.pipeline.context import StageContext
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.stage import foreign_code
from stable_forgetting.benchmarks.suite.remembered import FILE, suite_digest, suite_files
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import suite_names
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.registry import (
    BENCHMARKS,
    METHODS,
    load_plugins,
    plugin_files,
)
from stable_forgetting.common.bounded.phi import PHIS
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.language.data.readers import load_corpus

PLUGIN = """
from stable_forgetting.common import (
    METHODS, GradientConfig, GradientMethod, MethodInfo, gradient_difference
)

FACTOR = 1.0

@METHODS.register("mine")
class Mine(GradientMethod):
    '''Gradient difference times a factor.'''
    info = MethodInfo(1, "here", frozenset({"forget", "retain"}))
    Config = GradientConfig
    def prepare(self, task):
        return gradient_difference(FACTOR, FACTOR)
"""
PHI = """
from stable_forgetting.common import PHIS, Phi

PHIS.register(Phi("cubic", value=lambda z: z**3 + z, slope_of_argument=lambda z, out: out.fill_(1)))
"""


@pytest.fixture
def loaded():
    """Loads plugin files as a new process would; what they register goes with the test."""
    entries = dict(METHODS._entries)

    def forget():
        METHODS._entries.clear()
        METHODS._entries.update(entries)
        PHIS.pop("cubic", None)
        for file in plugin_files():
            del sys.modules[f"stable_forgetting_plugin_{Path(file).stem}"]

    def load(*paths):
        forget()
        load_plugins([str(path) for path in paths], installed=False)

    yield load
    forget()


def suite_of(tmp_path, **keys):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"suite": "own", **keys}, sort_keys=False))
    return path


def keys(path, store):
    plan = make_plan(load_suite(str(path)), StageStore(store))
    return {f"{stage.kind} {stage.name}": stage.key for stage in plan.stages()}


def test_an_edited_plugin_moves_the_keys_of_its_rows_alone(tmp_path, tiny_suite, loaded):
    plugin = tmp_path / "mine.py"
    rows = {"original": None, "retrain": None, "gd": None, "mine": None, "mine_sine": None}
    path = tiny_suite(tmp_path, methods=rows)
    plugin.write_text(PLUGIN)
    loaded(plugin)
    before, own = keys(path, tmp_path), suite_digest(load_suite(str(path)))
    loaded(plugin)
    assert keys(path, tmp_path) == before and suite_digest(load_suite(str(path))) == own
    plugin.write_text(PLUGIN.replace("1.0", "2.0"))
    loaded(plugin)  # within the same second: the file is as long and as old as before
    assert sys.modules["stable_forgetting_plugin_mine"].FACTOR == 2.0
    after = keys(path, tmp_path)
    moved = {name for name in before if after[name] != before[name]}
    rows = {f"{kind} {row}/seed-1" for kind in ("unlearn", "score", "measure") for row in rows}
    assert moved == {name for name in rows if " mine" in name}
    assert suite_digest(load_suite(str(path))) != own


def test_a_plugins_phi_is_part_of_the_keys_too(tmp_path, tiny_suite, loaded):
    plugin = tmp_path / "phi.py"
    rows = {"original": None, "retrain": None, "gd_sine": None}
    rows["cubic"] = {"method": "gd_sine", "params": {"adapter": {"phi": "cubic"}}}
    path, seen = tiny_suite(tmp_path, methods=rows), []
    for text in (PHI, PHI.replace("z**3", "z**5")):
        plugin.write_text(text)
        loaded(plugin)
        seen.append(keys(path, tmp_path))
    moved = {name for name in seen[0] if seen[0][name] != seen[1][name]}
    assert moved == {f"{kind} cubic/seed-1" for kind in ("unlearn", "score", "measure")}


def test_a_plugin_edited_under_a_run_stops_it(tmp_path, tiny_suite, loaded, find_stage):
    plugin = tmp_path / "mine.py"
    path = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "mine": None})
    plugin.write_text(PLUGIN)
    loaded(plugin)
    stage = find_stage(path, tmp_path, "unlearn", "mine/seed-1")
    assert foreign_code(stage.kind, stage.spec)["plugin_code"] == stage.identity["plugin_code"]
    StageContext(stage, Runtime(store=tmp_path))
    plugin.write_text(PLUGIN.replace("1.0", "3.0"))
    loaded(plugin)
    with pytest.raises(DataError, match=r"mine/seed-1: its plugin was edited .*run again"):
        StageContext(stage, Runtime(store=tmp_path))


def test_an_edit_of_texts_is_noticed_and_read(tmp_path, tiny_text_suite):
    for name in ("forget", "retain"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "what {name} says"}}\n')
    files = {name: f"{name}.jsonl" for name in ("forget", "retain")}
    none = dict.fromkeys(("authors", "forget_authors", "questions"))
    data = {"name": "jsonl", "files": files, **none}
    protocol = load_suite(str(tiny_text_suite(protocol={"data": data}))).protocol
    listing = BENCHMARKS["tofu"].listing
    before = listing(protocol, Runtime(data_root=tmp_path))
    read = load_corpus(protocol.data, tmp_path)
    assert before == listing(protocol, Runtime(data_root=tmp_path))
    assert read is load_corpus(protocol.data, tmp_path), "once per process"
    (tmp_path / "forget.jsonl").write_text('{"text": "something else"}\n')
    assert before != listing(protocol, Runtime(data_root=tmp_path))
    assert load_corpus(protocol.data, tmp_path).items[0].answer == "something else"
    assert listing(protocol, Runtime(data_root=tmp_path / "elsewhere")) == "", "none is there"


@pytest.mark.parametrize("kind", ["vision", "tofu"])
def test_an_edit_of_given_weights_is_noticed(tmp_path, tiny_suite, tiny_text_suite, kind):
    weights = tmp_path / "given" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    if kind == "vision":
        path = tiny_suite(protocol={"model": {"checkpoint": str(weights)}})
    else:
        unset = dict.fromkeys(("dim", "depth", "heads", "context", "tokenizer"))
        model = {**unset, "name": str(weights.parent)}
        path = tiny_text_suite(protocol={"model": model})
    protocol, listing = load_suite(str(path)).protocol, BENCHMARKS[kind].listing
    before = listing(protocol, Runtime())
    assert before and before == listing(protocol, Runtime())
    weights.write_bytes(b"other")
    assert before != listing(protocol, Runtime())


def test_a_finished_table_says_that_a_probes_texts_changed(tmp_path, tiny_text_suite, caplog):
    texts = tmp_path / "prose.txt"
    texts.write_text("one two three")
    probes = {"perplexity": {"files": {"prose": "prose.txt"}}}
    suite = load_suite(str(tiny_text_suite(probes=probes)))
    runtime = Runtime(store=tmp_path / "store", data_root=tmp_path)
    for _ in range(2):
        run._compare_listing(suite, runtime)
        assert not caplog.text
    texts.write_text("something else")
    run._compare_listing(suite, runtime)
    assert "texts or given weights changed since its first run" in caplog.text


def test_a_suite_names_its_plugin_beside_itself(tmp_path, tiny_suite, loaded, monkeypatch):
    (tmp_path / "mine.py").write_text(PLUGIN)
    base = {"original": None, "retrain": None, "mine": {"params": {"lr": 1e-3}}}
    tiny_suite(tmp_path, methods=base, plugins=["mine.py"])
    (tmp_path / "below").mkdir()
    child = suite_of(tmp_path / "below", extends="../tiny.yaml")
    monkeypatch.chdir("/")
    suite = load_suite(str(child))
    assert [row.label for row in suite.rows] == [*base] and suite.row("mine").config.lr == 1e-3
    assert plugin_files() == (str(tmp_path / "mine.py"),)
    missing = suite_of(tmp_path, extends="tiny.yaml", plugins=["no.py"])
    with pytest.raises(ConfigError, match=r"mine\.yaml: plugins: .*no\.py: no such file"):
        load_suite(str(missing))


def test_an_unknown_method_asks_for_its_plugin(tmp_path, tiny_suite):
    path = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "mine": None})
    with pytest.raises(ConfigError, match=r"unknown method 'mine'.*under plugins: or with --plu"):
        load_suite(str(path))


def test_extends_takes_a_name_and_null_removes_an_inherited_row(tmp_path):
    whole = {row.label for row in load_suite("digits-class").rows}
    rows = {"ascent": None, "gd_lora": None, "gd_ball": {"params": {"lr": 1e-3}}, "novo": None}
    suite = load_suite(str(suite_of(tmp_path, extends="digits-class", methods=rows)))
    assert {row.label for row in suite.rows} == whole - {"ascent", "gd_lora"} | {"novo"}
    assert "novo" not in whole, "a null row of one's own is a row with the method's defaults"
    assert suite.row("gd_ball").config.lr == 1e-3
    inherited = load_suite("digits-class").spec.compare
    assert any("gd_lora" in pair for pair in inherited)
    assert suite.spec.compare == tuple(p for p in inherited if not {*p} & {"ascent", "gd_lora"})
    dropped = load_suite("digits-class", ["methods.ascent=null"])
    assert {row.label for row in dropped.rows} == whole - {"ascent"}
    with pytest.raises(ConfigError, match="extends: unknown suite 'digits-clas'; did you mean"):
        load_suite(str(suite_of(tmp_path, extends="digits-clas")))


def test_rows_selects_of_what_a_suite_extends(tmp_path):
    path = suite_of(tmp_path, extends="lethevit-cifar10-small", rows=["gd", "gd_sine"])
    suite = load_suite(str(path))
    assert {row.label for row in suite.rows} == {"original", "retrain", "gd", "gd_sine"}
    assert all({*pair} <= {"gd", "gd_sine"} for pair in suite.spec.compare)
    again = tmp_path / "again.yaml"
    more = {"extends": "mine.yaml", "suite": "again", "methods": {"finetune": {"tune": False}}}
    again.write_text(yaml.safe_dump(more))
    assert {row.label for row in load_suite(str(again)).rows} == {
        "original", "retrain", "gd", "gd_sine", "finetune",
    }  # fmt: skip
    lone = suite_of(tmp_path, extends="cifar10-small-all", rows=["influence"])
    (row,) = load_suite(str(lone)).rows[2:]
    assert row.label == "influence", "a default that only others have is no misspelling"
    with pytest.raises(ConfigError, match="rows: no row 'gd_sinus'; did you mean 'gd_sine'"):
        load_suite(str(suite_of(tmp_path, extends="digits-class", rows=["gd_sinus"])))
    dropped = suite_of(
        tmp_path, extends="digits-class", rows=["gd"], methods={"mine": {"method": "gd"}}
    )
    with pytest.raises(ConfigError, match="rows: leaves out mine of methods beside it; add"):
        load_suite(str(dropped))
    with pytest.raises(ConfigError, match="rows: write a list of names"):
        load_suite(str(suite_of(tmp_path, extends="digits-class", rows="gd")))


def test_the_name_of_a_built_in_suite_is_taken(tmp_path):
    for name in ("digits-class", "digits-all"):
        path = suite_of(tmp_path, extends="digits-class")
        path.write_text(path.read_text().replace("own", name))
        mend = f"'{name}' is built in.*another name, such as suite: my-digits"
        with pytest.raises(ConfigError, match=mend):
            load_suite(str(path))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, "gd_sine") for name in ("digits-class", "tofu-small", "tofu-small-seq-3")),
        *((name, "gd_sine") for name in ("tdec-small", "digits-class-sweep")),
        *(("muse-news-small", "task_vector"), ("lethevit-cifar10", "ssd")),
        ("folds", ""),
    ],
)
def test_a_varied_suite_is_remembered_as_it_was(name, row, tmp_path, tiny_suite):
    if name == "folds":
        protocols = [{"train": {"epochs": 1}}, {"scenario": {"classes": [1]}}]
        folds = {"kind": "scalability", "protocols": protocols}
        name = str(tiny_suite(tmp_path, suite="folded", folds=folds))
    suite = load_suite(name, seeds=[71, 72], only=[row] if row else [])
    for file, text in suite_files(suite).items():
        (tmp_path / file).write_text(text)
    again = load_suite(str(tmp_path / FILE))
    assert again.name == suite.name and suite_digest(again) == suite_digest(suite)
    kinds = [{(s.kind, s.key) for s in make_plan(each, StageStore(tmp_path)).stages()}
             for each in (suite, again)]  # fmt: skip
    assert kinds[0] == kinds[1]
    assert suite_digest(load_suite(name)) != suite_digest(suite)


def test_a_run_under_a_name_of_its_own_is_reported_by_it(copied, cli, one_line_error):
    options = ["--only", "gd", "--store", copied.store]
    done = cli("run", copied.paths["class"], *options)
    assert done.code == 0 and done.err == ""
    (folder,) = (copied.store / "suites").glob("tiny-class+*")
    shown = cli("report", folder.name, "--store", copied.store, "--format", "md")
    assert shown.code == 0 and shown.out == (folder / "LEADERBOARD.md").read_text()
    assert "missing" not in shown.out and folder.name not in suite_names()
    cli("report", "tiny-class", "--store", copied.store)
    unknown = cli("report", "tiny-class+000000", "--store", copied.store)
    fault = one_line_error(unknown)
    assert "unknown suite" in fault and "the store that has it" in fault


def test_fresh_rows_are_made_again_and_others_are_not(copied, cli, one_line_error):
    def stamps():
        files = copied.store.glob("stages/*/done.json")
        return {path.parent.name: path.stat().st_mtime_ns for path in files}

    before = stamps()
    run = ["run", copied.paths["class"], "--store", copied.store]
    done = cli(*run, "--fresh", "gd,gd_bad")
    assert done.code == 0 and "stages of gd, gd_bad are made again" in done.out
    again = [name for name, stamp in stamps().items() if before.get(name) != stamp]
    kinds = sorted(name.partition("-")[0] for name in again)
    assert stamps().keys() == before.keys()
    assert kinds == ["measure"] * 2 + ["score"] * 2 + ["unlearn"] * 2
    assert not list((copied.store / "stages").glob(".*"))
    assert "no such row; did you mean 'gd'" in one_line_error(cli(*run, "--fresh", "gdd"))


def test_a_missing_package_is_said_before_anything_is_trained(
    tiny_suite, tmp_path, cli, one_line_error, monkeypatch
):
    monkeypatch.setattr("stable_forgetting.common.methods.base.find_spec", lambda name: None)
    rows = {"original": None, "retrain": None, "gd_delora": None}
    run = ("run", tiny_suite(tmp_path, methods=rows), "--store", tmp_path / "store")
    line = one_line_error(cli(*run))
    assert "'gd_delora' needs peft: pip install 'stable-forgetting[peft]'" in line
    assert not list((tmp_path / "store" / "stages").glob("*-*"))

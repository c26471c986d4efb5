"""Results that leave a store and come back: comparisons, record files, bundles, the site."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import shlex
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stable_forgetting.benchmarks.leaderboard import judge
from stable_forgetting.benchmarks.leaderboard.data import to_json
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.write import records_text, write_report
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.sharing import compare as comparing
from stable_forgetting.benchmarks.sharing import site
from stable_forgetting.benchmarks.sharing.bundle import MANIFEST, write_bundle
from stable_forgetting.benchmarks.sharing.records import board_of, read_records
from stable_forgetting.benchmarks.sharing.verify import verify_bundle
from stable_forgetting.benchmarks.suite.remembered import suite_files
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.files import json_digest
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.scores import Scores, load_scores, save_scores
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import DONE, StageStore, digests
from tests.hub_endpoint import serving

PARTS = {"forget": 24, "retain": 60, "test": 40, "validation": 30}
METHODS = {"original": None, "retrain": None, "gd": None, "gd_sine": None}


def made_scores(seed: int, offset: float) -> dict[str, Scores]:
    """Scores of a model of four classes whose margins lie around an offset."""
    draws = np.random.default_rng(seed)
    parts = {}
    for part, count in PARTS.items():
        margin = draws.normal(offset if part == "forget" else 2.0, 1.0, count)
        p = 1 / (1 + np.exp(-margin))
        probs = np.stack([p, *[(1 - p) / 3] * 3], axis=1).astype(np.float32)
        entropy = -(probs * np.log(probs)).sum(1)
        columns = {"probability": p, "margin": margin, "loss": -np.log(p), "entropy": entropy}
        columns |= {"modified_entropy": entropy, "correct": margin > 0}
        parts[part] = Scores(
            indices=np.arange(count, dtype=np.int64),
            labels=np.zeros(count, np.int64),
            probs=probs,
            **{name: column.astype(np.float32) for name, column in columns.items()},
        )
    return parts


@pytest.fixture(scope="session")
def scored(tiny_suite, put_record, tmp_path_factory):
    """A suite whose records follow from scores that are there. Read only."""
    root = tmp_path_factory.mktemp("scored")
    cheap = {"evaluation": {"features": ["confidence"]}}
    path = tiny_suite(root, methods=METHODS, seeds=[1, 2], retrains=2, protocol=cheap)
    suite, store = load_suite(str(path)), StageStore(root / "store")
    benchmark = BENCHMARKS[suite.spec.benchmark](suite.protocol, Runtime(device="cpu"))
    offsets = {"original": 3.0, "retrain": -1.0, "gd": -0.8, "gd_sine": 0.0}
    for number, result in enumerate(make_plan(suite, store).results):
        split, scores = (result.stage.parents[kind] for kind in ("split", "scores"))
        with store.writing("split", split.key, {"sizes": {"forget": PARTS["forget"]}}):
            pass
        parts = made_scores(number, offsets[result.label])
        with store.writing(scores.kind, scores.key, {"status": "ok"}) as folder:
            save_scores(parts, folder / "scores.safetensors")
        metrics = benchmark.evaluate(parts, trial=False, seed=result.seed)
        of_split = {"digest": f"split-{result.seed}", "name": "n"}
        put_record(store, result.stage, metrics, split=of_split)
    board = make_leaderboard(suite, store)
    write_report(board, store.root, events=False)
    bundle = root / "bundle"
    write_bundle(board, store, bundle)
    return SimpleNamespace(path=path, store=store, board=board, bundle=bundle)


@pytest.fixture
def bundle(scored, tmp_path):
    """A private copy of the bundle."""
    return shutil.copytree(scored.bundle, tmp_path / "copy")


def resealed(bundle, *left_out):
    """The bundle with a manifest of what it holds now, which may leave something out."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).unlink()
    manifest["files"] = digests(bundle)
    manifest = {k: v for k, v in manifest.items() if k not in ("sha256", *left_out)}
    text = json.dumps({**manifest, "sha256": json_digest(manifest)})
    (bundle / MANIFEST).write_text(text)
    return bundle


def edited(bundle, name, change):
    """The bundle with another JSON file, or lines, and a manifest that fits."""
    path = bundle / name
    content = [json.loads(line) for line in path.read_text().splitlines()] if (
        name.endswith("jsonl")
    ) else json.loads(path.read_text())  # fmt: skip
    change(content)
    lines = "".join(json.dumps(line) + "\n" for line in content)
    path.write_text(lines if name.endswith("jsonl") else json.dumps(content))
    return resealed(bundle)


def test_records_make_the_same_table(scored, cli, one_line_error, tmp_path):
    file = tmp_path / "theirs.jsonl"
    file.write_text(records_text(scored.board))
    again, own = to_json(board_of(read_records(file), file)), to_json(scored.board)
    for name in ("rows", "floor", "settings"):
        assert again[name] == own[name]
    shown = cli("report", "--records", file)
    assert shown.code == 0 and "gd_sine" in shown.out and "theirs.jsonl" in shown.out
    assert one_line_error(cli("report")) == "error: report: give a suite, or --records FILE"


def test_records_of_a_method_that_is_not_here_make_a_table(scored, tmp_path):
    file = tmp_path / "theirs.jsonl"
    file.write_text(records_text(scored.board).replace('"gd_sine"', '"their_own"'))
    board = board_of(read_records(file), file)
    for writer in (markdown, html):
        assert "their_own" in writer.write(sections(board))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "holds no record"),
        ("{", "line 1: no record of a row"),
        ('{"suite": "a", "row": "b"}', "line 1: no record of a row"),
        ("twice", "has this seed already"),
        ("other", "of another suite or protocol"),
        ("metrics", "line 2: measured by version 99 of the metrics, line 1 by version "),
        ("method", "line 2: original of version 99 of its method, and before of version "),
        ("endless", "line 1: no record of a row"),
    ],
)
def test_a_bad_file_of_records_is_one_line(scored, tmp_path, cli, one_line_error, text, fault):
    first = records_text(scored.board).splitlines()[0]
    other = json.dumps({**json.loads(first), "suite": "b"})
    endless = json.dumps({**json.loads(first), "forget": math.inf})
    lines = {"twice": f"{first}\n{first}\n", "other": f"{first}\n{other}\n", "endless": endless}
    for name, key in (("metrics", "benchmark_version"), ("method", "method_version")):
        later = json.dumps({**json.loads(first), "seed": 77, key: 99})
        lines[name] = f"{first}\n{later}\n"
    file = tmp_path / "bad.jsonl"
    file.write_text(lines.get(text, text))
    assert fault in one_line_error(cli("report", "--records", file))


def test_a_comparison_is_paired(scored, cli, tmp_path):
    file = tmp_path / "theirs.jsonl"
    lines = [json.loads(line) for line in records_text(scored.board).splitlines()]
    for line in lines:
        if line["row"] == "gd":
            line["metrics"]["ta"] -= 2.0 + line["seed"]
    moved = [line for line in lines if line["row"] != "gd_sine" or line["seed"] == 1]
    for line in moved:
        if line["row"] == "original" and line["seed"] == 2:
            line["split"]["digest"] = "another"
    file.write_text("".join(json.dumps(line) + "\n" for line in moved))
    own = f"{scored.store.root}:{scored.path}"
    shown = cli("compare", own, file, "--format", "csv")
    rows = {(r["row"], r["metric"]): r for r in csv.DictReader(io.StringIO(shown.out))}
    assert float(rows["gd", "ta"]["mean"]) == pytest.approx(3.5) and rows["gd", "ta"]["n"] == "2"
    assert float(rows["gd", "ta"]["low"]) == pytest.approx(3.5 - 12.706 * 0.5, abs=1e-3)
    assert float(rows["gd_sine", "distance"]["mean"]) == 0 and rows["gd_sine", "fa"]["n"] == "1"
    text = cli("compare", own, file, "--format", "md").out
    assert f"only in {own}: seeds 2 of gd_sine" in text
    assert "seed 2: other splits: original" in text and "+3.5 [-2.9, +9.9]" in text


def results(name, weights, columns=("ua", "ta")):
    """Three seeds of one row: the distance is 1 more on each, everything else is 0."""
    runs = {
        ("gd", 0, seed): ("split", dict.fromkeys(columns, 0.0) | {"distance": float(seed)})
        for seed in (1, 2, 3)
    }
    titles = {column: (column, 1) for column in (*columns, "distance")}
    return comparing.Results(name, "tiny", runs, titles, weights)


def test_distances_of_other_columns_are_not_compared():
    """A column that is noise in one table alone weighs in the other: both print one title."""
    whole, part = results("a", {"ua": 0.5, "ta": 0.5}), results("b", {"ua": 1.0})
    differences, told = comparing.compare(whole, part)
    assert {*differences["gd", 0]} == {"ua", "ta"}
    assert told == ["the distance, as other columns weigh: ua 50 %, ta 50 % in a; ua 100 % in b"]
    for other in (results("b", {"ta": 0.5, "ua": 0.5}), results("b", {})):
        differences, told = comparing.compare(whole, other)
        assert "distance" in differences["gd", 0] and told == []


def test_a_comparison_of_many_columns_has_the_distance():
    """p is of the distance also where a suite has more columns than the table."""
    many = results("a", {}, [f"m{number}" for number in range(12)])
    _, shown = comparing.sections(many, many, *comparing.compare(many, many))
    heads = shown.content.heads
    assert heads[2:-1] == [*(f"m{number}" for number in range(7)), "distance"]
    assert "of distance, corrected" in shown.content.columns[-1].doc


def test_shipped_results_are_compared(cli, one_line_error, tmp_path):
    store = ["--store", tmp_path / "none"]
    shown = cli("compare", "digits-class", RESULTS / "digits-class", *store, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert {float(row["mean"]) for row in rows} == {0.0} and {row["n"] for row in rows} == {"5"}
    assert "by row and seed alone" not in cli("compare", "digits-class", "digits-class", *store).out
    with open(RESULTS / "digits-class" / "runs.csv", newline="") as lines:
        runs = [{**row, "split": ""} for row in csv.DictReader(lines)]
    silent = tmp_path / "digits-class"
    silent.mkdir()
    shutil.copy(RESULTS / "digits-class" / "leaderboard.json", silent)
    with open(silent / "runs.csv", "w", newline="", encoding="utf-8-sig") as file:  # as Excel does
        writer = csv.DictWriter(file, list(runs[0]))
        writer.writeheader()
        writer.writerows(runs)
    assert "by row and seed alone" in cli("compare", "digits-class", silent, *store).out
    longer = shutil.copytree(silent, tmp_path / "longer")
    with open(longer / "runs.csv", "a") as file:  # a line with one field too many
        file.write("," * len(runs[0]) + "x\n")
    fault = one_line_error(cli("compare", "digits-class", longer, *store))
    assert f"{longer}: no results that can be read (" in fault
    assert "unknown suite 'x'" in one_line_error(cli("compare", "x", "y", *store))
    (tmp_path / "runs" / "suites").mkdir(parents=True)
    fault = one_line_error(cli("compare", tmp_path / "runs", "digits-class", *store))
    assert f"is a store; write {tmp_path / 'runs'}:SUITE" in fault
    fault = one_line_error(cli("compare", silent, "tofu-small", *store))
    assert "is of digits-class, tofu-small (shipped) of tofu-small" in fault
    fault = one_line_error(cli("compare", "digits-class", "tofu-small", *store))
    assert "of tofu-small (shipped), results of two suites, can be paired" in fault


def test_a_bundle_is_utf8_whatever_the_machine_writes_else(scored, monkeypatch, tmp_path):
    written = Path.write_text

    def write_text(path, text, encoding=None):
        assert encoding == "utf-8", path
        return written(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", write_text)
    write_bundle(scored.board, scored.store, tmp_path / "bundle")


def test_a_bundle_verifies_from_its_scores(scored, cli, tmp_path):
    verification = verify_bundle(scored.bundle)
    assert verification.models == len(scored.board.records) == 10
    assert verification.different == () and verification.cells > 500
    assert to_json(verification.board)["rows"] == to_json(scored.board)["rows"]
    packed = tmp_path / "b.zip"
    cli.ok("submit", scored.path, "--store", scored.store.root, "--out", packed)
    shown = cli("verify", packed)
    assert shown.code == 0 and "0 differ" in shown.out
    names = {path.relative_to(scored.bundle).as_posix() for path in scored.bundle.rglob("*.*")}
    assert {n for n in names if "/" not in n} == {
        "suite.yaml", "records.jsonl", "table.json", "probes.json", "LEADERBOARD.md", MANIFEST,
        "plan.json",
    }  # fmt: skip
    assert not any(str(scored.store.root) in (scored.bundle / n).read_text("latin1") for n in names)


@pytest.mark.parametrize("name", ["b", "b.zip"])
def test_a_full_disk_leaves_nothing_of_a_bundle(scored, tmp_path, monkeypatch, name):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr("stable_forgetting.benchmarks.sharing.bundle.publish", full)
    with pytest.raises(OSError, match="No space left"):
        write_bundle(scored.board, scored.store, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_the_trials_of_a_tuned_suite_count_in_its_ranks(bundle, monkeypatch):
    def widened(values, trials):
        return np.ones(len(values)), 2 + np.array([len(own) for own in trials])

    monkeypatch.setattr(judge, "rank_intervals", widened)

    def change(table):
        table["tuning"] = {"sweep": [{"row": "gd", "gap": gap} for gap in (1.0, 90.0, None)]}
        for row in table["rows"]:
            if row["rank"]:
                row["rank"]["high"] = 5 if row["row"] == "gd" else 2

    assert verify_bundle(edited(bundle, "table.json", change)).different == ()


def test_cells_that_differ_are_named(bundle, cli):
    def change(table):
        row = next(row for row in table["rows"] if row["row"] == "gd")
        row["metrics"]["ta"]["mean"] += 1.0

    shown = cli("verify", edited(bundle, "table.json", change))
    assert shown.code == 1 and "1 differ" in shown.out and "metrics.ta.mean" in shown.out


def test_a_record_that_its_scores_do_not_give_is_named(bundle):
    def change(lines):
        line = next(line for line in lines if line["row"] == "gd" and line["seed"] == 2)
        line["metrics"]["mia"] += 5.0

    different = verify_bundle(edited(bundle, "records.jsonl", change)).different
    assert [(cell.row, cell.name) for cell in different] == [("gd, seed 2", "mia")]


def test_scores_of_other_samples_are_named(bundle):
    lines = [json.loads(line) for line in (bundle / "records.jsonl").read_text().splitlines()]
    key = next(line["stages"]["scores"] for line in lines if line["row"] == "gd")
    path = bundle / "scores" / f"{key[:20]}.safetensors"
    parts = load_scores(path)
    parts["forget"].indices[:] += 1
    save_scores(parts, path)
    found = {(cell.row, cell.name) for cell in verify_bundle(resealed(bundle)).different}
    assert ("gd, seed 1", "samples of forget") in found


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda b: (b / MANIFEST).unlink(), "no bundle (it lacks bundle.json)"),
        (lambda b: (b / MANIFEST).write_text("{"), "cannot be read"),
        (lambda b: (b / "records.jsonl").write_text("{}\n"), "missing or not what was written"),
        (lambda b: (b / "table.json").unlink(), "missing or not what was written"),
        (lambda b: (b / "more.txt").write_text(""), "more.txt is not in bundle.json"),
        (lambda b: edited(b, "table.json", dict.clear), "table.json: cannot be read"),
        (
            lambda b: edited(b, "table.json", lambda table: table.update(tuning=5)),
            "table.json: cannot be read",
        ),
        (
            lambda b: edited(b, "table.json", lambda table: table.update(floor=[1])),
            "table.json: cannot be read",
        ),
        (lambda b: resealed(b, "digest"), "bundle.json cannot be read"),
        (lambda b: edited(b, "records.jsonl", list.clear), "holds no record"),
    ],
)
def test_a_bad_bundle_is_one_line(bundle, cli, one_line_error, damage, fault):
    damage(bundle)
    assert fault in one_line_error(cli("verify", bundle))


def test_a_damaged_zip_is_one_line(bundle, cli, one_line_error):
    path = bundle.parent / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(bundle / "records.jsonl", "records.jsonl")
    content = bytearray(path.read_bytes())
    start = 30 + len("records.jsonl")  # behind the entry's head
    content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)
    assert f"{path}: no bundle (" in one_line_error(cli("verify", path))


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/../../out", ".hidden", "a//b"])
def test_a_zip_writes_nothing_elsewhere(tmp_path, cli, one_line_error, name):
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr(name, "x")
    assert "no bundle: it holds" in one_line_error(cli("verify", tmp_path / "b.zip"))
    assert [path.name for path in tmp_path.iterdir()] == ["b.zip"]


def test_submitting_says_what_it_lacks(scored, tmp_path, cli, one_line_error):
    args = ["submit", scored.path, "--out", scored.bundle]
    assert "is there already" in one_line_error(cli(*args, "--store", scored.store.root))
    fault = one_line_error(
        cli("submit", "digits-class", "--out", tmp_path / "x", "--store", tmp_path)
    )
    assert "no records of digits-class" in fault and list(tmp_path.iterdir()) == []


def test_commands_in_messages_can_be_typed(tiny_suite, cli, tmp_path, one_line_error):
    (tmp_path / "my suites").mkdir()
    path = tiny_suite(tmp_path / "my suites", methods=METHODS)
    store, out = ("--store", tmp_path / "my runs"), ("--out", tmp_path / "out")
    for words in (["report", path], ["attack", path], ["submit", path, *out]):
        command = one_line_error(cli(*words, *store)).rpartition("run: ")[2]
        assert shlex.split(command) == ["unlearn", "run", str(path), *map(str, store)]


@pytest.fixture
def nothing_shipped(monkeypatch):
    """A site has what is given alone, and is made at once."""
    monkeypatch.setattr(site, "_shipped", lambda: ())
    monkeypatch.setattr(site, "_maps", lambda: ())
    monkeypatch.setattr(site.versus, "CLAIMS", {})


@pytest.mark.usefixtures("nothing_shipped")
def test_the_site_has_the_suites_of_a_store(copied, cli, tmp_path, one_line_error):
    out = tmp_path / "site"
    cli.ok("site", "--out", out, "--store", copied.store)
    own = [path for path in out.glob("run-*.html") if "gd_sine" in path.read_text()]
    assert own and all(path.name in (out / "index.html").read_text() for path in own)
    for path in own:  # what it says can be taken away
        lines = [*csv.DictReader(path.with_suffix(".csv").open(encoding="utf-8"))]
        assert {line["row"] for line in lines} >= {"retrain", "gd_sine"}
        assert "\\begin{tabular}" in path.with_suffix(".tex").read_text()
        assert f'href="{path.stem}.csv"' in path.read_text()
        assert f'href="{path.stem}.tex"' in path.read_text()
    fault = one_line_error(cli("site", "--out", tmp_path / "other", "--store", tmp_path))
    assert "holds no suites" in fault and not (tmp_path / "other").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_work(scored, tmp_path):
    """The submissions are no bundles, which a site finds out when it reads them."""
    (tmp_path / "bundles" / "none").mkdir(parents=True)
    line = r"--out .*(name the folder itself|can be written)"
    for out in (tmp_path / "missing" / "..", scored.path / "below-a-file"):
        with pytest.raises(ConfigError, match=line):
            site.write_site(out, tmp_path / "bundles")
        with pytest.raises(ConfigError, match=line):
            write_bundle(scored.board, scored.store, out)
    assert [path.name for path in tmp_path.iterdir()] == ["bundles"]


def test_the_site_leaves_out_a_damaged_suite_of_a_store(scored, tmp_path, caplog):
    root = shutil.copytree(scored.store.root, tmp_path / "store")
    store = StageStore(root)
    for name, seeds in (("broken", [1, 2]), ("whole", [1])):
        suite = load_suite(str(scored.path), seeds=seeds)
        write_files(root / "suites" / name, suite_files(suite))
    made = make_plan(load_suite(str(scored.path)), store).results
    record = next(r.stage for r in made if (r.label, r.seed) == ("gd", 2))
    (store.folder(record.kind, record.key) / DONE).write_text("{")
    write_files(root / "suites" / "broken+1a2b3c", {"audits.json": "{}"})  # of an attack alone
    pages = site.write_site(tmp_path / "site", None, root)
    assert "run-whole.html" in pages and "run-broken.html" not in pages
    assert "1a2b3c" not in caplog.text
    assert "left out: broken: " in caplog.text and "is not readable" in caplog.text


def test_the_site_has_every_report_and_every_verified_bundle(scored, cli, one_line_error, tmp_path):
    bundles = tmp_path / "bundles"
    shutil.copytree(scored.bundle, bundles / "theirs")
    site = tmp_path / "site"
    cli.ok("site", "--out", site, "--submissions", bundles)
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    shipped = {f"{path.parent.name}.html" for path in RESULTS.glob("*/LEADERBOARD.md")}
    maps = {f"map-{path.parent.name}.html" for path in RESULTS.glob("maps/*/MAP.md")}
    lists = {"index.html", "rows.html", "submitted-theirs.html", "versus.html", "hiding.html"}
    methods = {name for name in pages if name.startswith("method-")}
    assert {*pages} == shipped | maps | lists | methods and "method-gd_sine.html" in methods
    index = pages.pop("index.html")
    listed = index + pages["rows.html"]
    assert all(f'href="{name}"' in (listed if name in methods else index) for name in pages)
    assert all('href="index.html"' in page for page in pages.values())
    assert "the table was made again from the submitted scores" in pages["submitted-theirs.html"]
    assert "unlearn run digits-class --only gd_sine" in pages["digits-class.html"]
    for path in RESULTS.glob("*/leaderboard.json"):
        name = path.parent.name
        changed = json.loads(path.read_text())["version"] != load_suite(name).spec.version
        assert ("its suite has changed since" in pages[f"{name}.html"]) == changed, name
    (bundles / "theirs" / "table.json").write_text("{}")
    out = tmp_path / "other"
    assert "not what was written" in one_line_error(
        cli("site", "--out", out, "--submissions", bundles)
    )
    assert not out.exists()
    assert "holds something else" in one_line_error(cli("site", "--out", bundles))


@pytest.mark.usefixtures("nothing_shipped")
def test_bundles_that_would_have_one_page_are_refused(scored, cli, one_line_error, tmp_path):
    bundles, out = tmp_path / "bundles", tmp_path / "site"
    for name in ("team.1", "team.2"):
        shutil.copytree(scored.bundle, bundles / name)
    for _ in range(2):  # it may be made again
        cli.ok("site", "--out", out, "--submissions", bundles)
    assert {"submitted-team.1.html", "submitted-team.2.html"} <= {p.name for p in out.iterdir()}
    (bundles / "team.1").rename(bundles / "team 2")
    (bundles / "team.2").rename(bundles / "team-2")
    fault = one_line_error(cli("site", "--out", tmp_path / "other", "--submissions", bundles))
    assert "two results would have the page submitted-team-2.html; rename one" in fault
    assert not (tmp_path / "other").exists()


def test_a_bundle_is_uploaded_as_a_data_set(scored, cli, tmp_path, monkeypatch):
    with serving(monkeypatch, tmp_path / "cache") as hub:
        asked = ("submit", scored.path, "--store", scored.store.root, "--push", "me/board", "--out")
        as_file = cli(*asked, tmp_path / "it.zip")
        assert as_file.code == 2 and "give --out FOLDER" in as_file.err
        done = cli(*asked, tmp_path / "it")
        assert done.code == 0 and "uploaded: " in done.out
        assert hub.private["me/board"] is True
        assert MANIFEST in hub.repositories["dataset", "me/board"]


def test_records_that_are_not_there_name_the_mend(tmp_path):
    with pytest.raises(DataError, match=r"gone.jsonl: no such file; give the records.jsonl of a"):
        read_records(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"records.jsonl: no such file"):
        read_records(tmp_path)

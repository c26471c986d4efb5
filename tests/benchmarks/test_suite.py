from __future__ import annotations

import json

import pytest

from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.reading import SuiteFile
from stable_forgetting.benchmarks.suite.remembered import suite_digest
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.resolved import resolved_table
from stable_forgetting.benchmarks.suite.suite import REFERENCES, suite_groups, suite_names
from stable_forgetting.common.base.config import canonical, digest
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.measure.rules import GapRule
from stable_forgetting.common.store.stages import StageStore

LIGHT_DRIVER = """
import json, sys
from pathlib import Path
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.store.stages import StageStore
store, *names = sys.argv[1:]
keys, drawing, found = {}, set(), set()
heavy = {"torch", "timm", "sklearn", "scipy", "transformers", "accelerate", "tensorboard"}
for name in names:
    suite = load_suite(name)
    keys[name] = [stage.key for stage in make_plan(suite, StageStore(Path(store))).stages()]
    if suite.spec.tune and suite.spec.tune.spaces:
        drawing = {"scipy"}  # points are drawn with it
    found |= heavy & set(sys.modules) - drawing
print(json.dumps([sorted(found), keys]))
"""


def rows_of(suite):
    return [row.label for row in suite.rows]


@pytest.mark.parametrize(
    "names", [suite_names()[::8], pytest.param(suite_names(), marks=pytest.mark.slow)]
)
def test_suites_are_planned_alike_in_any_process_without_heavy_imports(
    names, tmp_path, spawn, built_in
):
    process = spawn(tmp_path, *names, script=LIGHT_DRIVER, PYTHONHASHSEED="7")
    out, err = process.communicate()
    assert process.returncode == 0, err
    heavy, keys = json.loads(out.splitlines()[-1])
    assert heavy == [] and set(keys) == set(names)
    for name, found in keys.items():
        plan = make_plan(built_in(name), StageStore(tmp_path))
        assert len(found) > 20 and found == [stage.key for stage in plan.stages()]


@pytest.mark.parametrize("name", suite_names())
def test_built_in_suite_is_sound(name, built_in):
    suite = built_in(name)
    assert suite.name == name, "a suite is called like its file"
    rule = BENCHMARKS[suite.spec.benchmark].gap_of(suite.protocol)
    assert {"original", *rule.needs} <= set(rows_of(suite))
    if isinstance(rule, GapRule):
        assert "retrain" in rule.needs
        assert suite.spec.retrains >= 2, "no noise floor without a second Retrain"
    assert len(suite.spec.seeds) >= 3 and suite.spec.title
    assert [line["row"] for line in resolved_table(suite)] == rows_of(suite)
    # a published Original that nobody fine-tuned recites its set, not what is retained; MUSE's was
    # fine-tuned on news, whose next tokens it does not all know by heart
    published = getattr(suite.protocol.model, "original", None) is not None
    gates = {"tdec": 0, "muse": 50, "wmdp": 0, "rwku": 0} if published else {}
    assert suite.protocol.minimum_train_accuracy >= gates.get(suite.spec.benchmark, 90)
    tuned = [row for row in suite.rows if row.draws]
    assert len({len(row.draws) for row in tuned}) <= 1, "every method gets the same trials"
    for row in tuned:
        assert row.method not in REFERENCES
        assert len({digest(canonical(draw.config)) for draw in row.draws}) == len(row.draws)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("digits-class", ("fa", "ra", "ta", "mia")),
        ("authors", ("forget_prob", "forget_rouge", "forget_truth_ratio")),
    ],
)
def test_a_suite_without_columns_has_its_benchmarks(name, columns):
    found = load_suite(name, overrides=["columns=[]"]).spec.columns
    assert found[: len(columns)] == columns


def test_a_group_names_suites_and_runs_them_in_turn(tiny_suite, cli, tmp_path, monkeypatch):
    assert not [name for name in suite_names() if name.startswith("_")], "shared parts"
    for name, members in suite_groups().items():
        assert name not in suite_names() and set(members) <= set(suite_names())
    names = []
    for name in ("one", "two"):
        names.append(str(tiny_suite(tmp_path, suite=name, seeds=[1])))
    for module in ("suite.suite", "cli.options"):
        monkeypatch.setattr(
            f"stable_forgetting.benchmarks.{module}.suite_groups", lambda: {"pair": names}
        )
    store = tmp_path / "store"
    missing = cli("report", "pair", "--store", store)
    assert missing.code == 2 and "run: unlearn run pair" in missing.err
    cli.ok("run", "pair", "--store", store)
    for name in ("one", "two"):
        assert (store / "suites" / name / "LEADERBOARD.md").is_file()
    assert cli("report", "pair", "--store", store).out.count("Noise floor") == 2
    for command in (("plan", "pair"), ("report", "pair", "--format", "md")):
        assert "is several suites; name one: " in cli(*command, "--store", store).err
    assert "did you mean 'pair'?" in cli("run", "pairr").err


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


@pytest.mark.parametrize(
    ("files", "merged"),
    [
        (
            {
                "child": "extends: base.yaml\ninner: {rank: 2}\nitems: [{method: b}]",
                "base": "lr: 0.5\ninner: {rank: 9, omega: 3}\nitems: [{method: a}, {method: c}]",
            },
            {"lr": 0.5, "inner": {"rank": 2, "omega": 3}, "items": [{"method": "b"}]},
        ),
        (
            {
                "child": "extends: base.yaml\na: {x: 1}",
                "base": "extends: top.yaml\na: null\nb: 2",
                "top": "a: {y: 9}\nb: 3\nc: 4",
            },
            {"a": {"x": 1}, "b": 2, "c": 4},
        ),
        (
            {
                "child": "extends: [a.yaml, b.yaml]\nz: 0",
                "a": "x: 1\ny: 1\nz: 1",
                "b": "extends: top.yaml\ny: 2\nz: 2",
                "top": "w: 3\nx: 3",
            },
            {"x": 3, "y": 2, "z": 0, "w": 3},
        ),
    ],
    ids=["one", "the nearest wins", "the later wins"],
)
def test_extends_merges(tmp_path, files, merged):
    assert SuiteFile(write(tmp_path, **files)).whole() == merged


def test_files_of_a_list_are_joined_as_a_file_with_what_it_extends(tmp_path):
    rows = "methods: {original: , gd_lora: {params: {lam: 2}}}"
    path = write(
        tmp_path,
        child="extends: [a.yaml, b.yaml]",
        a=f"plugins: [a.py]\ndefaults: {{epochs: 5}}\n{rows}",
        b="plugins: [b.py]\ndefaults: {steps: 30}\nmethods: {original: , gd_lora: , gd: }",
    )
    assert SuiteFile(path).whole() == {
        "plugins": [str(tmp_path / name) for name in ("a.py", "b.py")],
        "defaults": {"epochs": None, "steps": 30},
        "methods": {"original": None, "gd_lora": {"params": {"lam": 2}}, "gd": None},
    }  # a null row of a part is its plain row, and removes none of another part


def test_a_file_that_many_extend_is_read_once(tmp_path):
    """Twenty levels that each name the next one twice: a million reads, if each were one."""
    deep = {f"s{k}": f"extends: [s{k + 1}.yaml, s{k + 1}.yaml]\nk{k}: 1" for k in range(20)}
    child = write(tmp_path, child="extends: s0.yaml", **deep, s20="a: 1")
    assert len(SuiteFile(child).whole()) == 21


@pytest.mark.parametrize(
    ("child", "fault"),
    [
        ("extends: base.yaml", r"base.yaml: extends: 'child.yaml' closes a circle"),
        ("extends: child.yaml", "circle"),
        ("extends: gone.yaml", "gone.yaml: no such file"),
        ("extends: [a, 2]", r"child.yaml: extends: must be a file name"),
    ],
)
def test_extends_errors(tmp_path, child, fault):
    path = write(tmp_path, child=child, base="extends: child.yaml")
    with pytest.raises(ConfigError, match=fault):
        SuiteFile(path).whole()


def test_extends_merges_one_level(tmp_path, tiny_suite):
    parent = tiny_suite(tmp_path, suite="parent", defaults={"steps": 3})
    child = tmp_path / "child.yaml"
    child.write_text(
        f"extends: {parent.name}\nsuite: child\nseeds: [7, 8]\n"
        "protocol: {scenario: {kind: class, num_classes: 2}}\nmethods: {gd: }\n"
    )
    suite = load_suite(str(child))
    assert suite.name == "child" and suite.spec.seeds == (7, 8)
    assert rows_of(suite) == ["original", "retrain", "gd"]
    assert suite.protocol.scenario.num_classes == 2
    assert suite.protocol.data.train_images == 200, "the parent's data stays"
    assert suite.row("gd").config.steps == 3


def test_overrides_are_typed_and_nested(tiny_suite):
    path = str(tiny_suite(methods={"original": None, "retrain": None, "gd_sine": None}))
    suite = load_suite(
        path,
        [
            "methods.gd_sine.params.adapter.rank=3",
            "methods.gd_sine.params.lr=1e-4",
            "protocol.data.train_images=150",
            "methods.more={method: gd_lora, params: {lam: 0.5}}",
        ],
        seeds=[4, 5],
    )
    sine = suite.row("gd_sine").config
    assert (sine.adapter.rank, sine.adapter.phi, sine.lr) == (3, "sine", 1e-4)
    assert suite.protocol.data.train_images == 150
    assert suite.row("more").method == "gd_lora" and suite.row("more").config.forget_weight == 0.5
    assert suite.spec.seeds == (4, 5)


def test_only_keeps_references_and_full_comparisons(tiny_suite):
    rows = {"before": {"method": "original"}, "target": {"method": "retrain"}}
    rows |= dict.fromkeys(["gd", "gd_lora", "gd_sine"])
    compare = [["gd", "gd_lora"], ["gd_sine", "gd_lora"]]
    path = str(tiny_suite(methods=rows, defaults={"steps": 9}, compare=compare))
    suite = load_suite(path, only=["gd_lora", "gd_sine"])
    assert rows_of(suite) == ["before", "target", "gd_lora", "gd_sine"]
    assert suite.spec.compare == (("gd_sine", "gd_lora"),)
    assert list(suite.spec.methods) == rows_of(suite)
    # defaults that only the dropped rows have are no misspelling
    assert rows_of(load_suite(path, only=["before"])) == ["before", "target"]
    with pytest.raises(ConfigError, match="no row 'gd_lra'; did you mean 'gd_lora'"):
        load_suite(path, only=["gd_lra"])


def test_defaults_apply_to_every_row(tiny_suite):
    rows = {
        "original": None,
        "retrain": None,
        "gd": None,
        "gd_sine": None,
        "random_label": {"without": ["lam"]},
        "relabelled": {"method": "random_label", "without": ["lam", "steps"]},
        "finetune": {"params": {"lr": 0.5}},
        "literal": {"method": "gd_lora", "preset": "paper_literal"},
        "literal_short": {
            "method": "gd_lora",
            "preset": "paper_literal",
            "params": {"epochs": 2},
        },
    }
    defaults = {"steps": 7, "lr": 0.25, "lam": 3.0, "log_every": 5}
    kinds = {"adapter": {"adapter": {"rank": 2}}, "epochs": {"batch_size": 9}}
    suite = load_suite(str(tiny_suite(methods=rows, defaults=defaults, defaults_of=kinds)))
    config = {row.label: row.config for row in suite.rows}
    assert (config["gd"].steps, config["gd"].lr, config["gd"].forget_weight) == (7, 0.25, 3.0)
    assert config["gd"].adapter is None, "an adapter is never given to a method without one"
    assert (config["gd_sine"].adapter.rank, config["gd_sine"].adapter.phi) == (2, "sine")
    assert (config["random_label"].steps, config["random_label"].epochs) == (7, None)
    assert (config["relabelled"].steps, config["relabelled"].epochs) == (None, 3)
    assert config["random_label"].batch_size == 9 and config["gd"].batch_size != 9
    assert (config["random_label"].lr, config["random_label"].log_every) == (0.25, 5)
    assert config["finetune"].lr == 0.5, "the row's own params win"
    assert not hasattr(config["original"], "steps")
    literal = config["literal"]
    assert (literal.steps, literal.lr, literal.forget_weight) == (500, 1e-5, 10.0), (
        "a preset wins too"
    )
    assert literal.adapter.rank == 2 and literal.log_every == 5
    short = config["literal_short"]
    assert (short.steps, short.epochs, short.lr) == (None, 2, 1e-5)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ("random_label", {"defaults": {"lam": 3.0}}, r"'random_label' has no lam .* without"),
        ("gd", {"defaults": {"adapter": {"rank": 2}}}, "'gd' has no adapter .* defaults_of"),
        ("scrub", {"defaults": {"steps": 3}}, "give epochs"),
        ("ssd", {"defaults_of": {"epochs": {"lam": 1.0}}}, None),
        ("cf_k", {"defaults_of": {"full": {"lam": 1.0}}}, "'cf_k' has no lam"),
    ],
)
def test_a_default_that_a_row_cannot_take_is_an_error_of_that_row(
    tiny_suite, row, settings, message
):
    rows = {"original": None, "retrain": None, "gd_sine": None, row: None}
    path = str(tiny_suite(methods=rows, **settings))
    if message is None:
        assert load_suite(path)
        return
    with pytest.raises(ConfigError, match=rf"methods\.{row}\b.*{message}"):
        load_suite(path)
    assert load_suite(path, only=["gd_sine"]), "rows that are left out are not asked"


def test_grids_resolve_to_trials(tiny_suite):
    rows = {
        "original": None,
        "target": {"method": "retrain"},
        "gd": None,
        "gd_sine": {"params": {"lam": 0.7}},
        "fixed": {"method": "gd", "tune": False},
    }
    grids = {
        "default": {"lr": [0.1, 0.2, 0.3, 0.4]},
        "gd_sine": {"adapter.rank": [2, 3], "lr": [0.5, 0.6]},
    }
    suite = load_suite(str(tiny_suite(methods=rows, tune={"trials": 4, "grids": grids})))
    assert [draw.config.lr for draw in suite.row("gd").draws] == [0.1, 0.2, 0.3, 0.4]
    sine = [draw.config for draw in suite.row("gd_sine").draws]
    assert [(t.adapter.rank, t.lr, t.forget_weight, t.adapter.phi) for t in sine] == [
        (rank, lr, 0.7, "sine") for rank in (2, 3) for lr in (0.5, 0.6)
    ]
    for label in ("original", "target", "fixed"):
        assert suite.row(label).draws == ()


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a,b", "a\nb", "x" * 99])
def test_names_that_cannot_be_folders_are_refused(tiny_suite, tmp_path, name):
    path = tiny_suite(tmp_path)
    with pytest.raises(ConfigError):
        load_suite(str(path), [f"suite={json.dumps(name)}"])
    rows = {"original": None, "retrain": None, name: {"method": "gd"}}
    with pytest.raises(ConfigError):
        load_suite(str(tiny_suite(tmp_path, methods=rows)))


def test_what_earlier_suites_said_of_machines_is_left_out(tiny_suite, tmp_path):
    needs = {"default": {"cpus": 2}, "unlearn": {"gpus": 0.5, "memory": 16}}
    suite, plain = (
        load_suite(str(tiny_suite(tmp_path, **more))) for more in ({"resources": needs}, {})
    )
    assert suite_digest(suite) == suite_digest(plain) and "resources" not in suite.spec.model_dump()

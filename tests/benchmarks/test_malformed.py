"""What a user can get wrong ends as one line on stderr and exit code 2, and leaves no half work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.store.stages import StageStore

METHOD = """
from stable_forgetting.common.methods.base import MethodInfo, UnlearningMethod
from stable_forgetting.common.base.registry import METHODS

@METHODS.register("mine", summary="mine")
class Mine(UnlearningMethod):
    "Returns the model as it is, which is enough here."
    info = MethodInfo(1, "-", frozenset({"forget"}))
    def unlearn(self, task):
        return task.model
"""

# what is changed in a good suite (dots for nesting, DROP removes), and what the line must name
DROP = "DROP"
SUITES = [
    ("sede=[1]", "sede: unknown key; did you mean 'seeds'"),
    ("protocol.modle={}", "modle: unknown key; did you mean 'model'"),
    ("protocol.data.nmae=1", "data.nmae: unknown key"),
    ("protocol.model.dimm=8", "model.dimm: unknown key; did you mean"),
    ("protocol.train.epoch=3", "did you mean 'epochs'"),
    ("protocol.evaluation={batch: 3}", "evaluation.batch"),
    ("methods.gd={parms: {}}", "did you mean 'params'"),
    ("methods.gd={params: {lrr: 1}}", "methods.gd.params: lrr"),
    ("methods.gd_sine={params: {adapter: {rnk: 2}}}", "adapter.rnk: unknown key; did you mean 'r"),
    ("tune={trails: 2, trials: 2, grids: {}}", "tune.trails"),
    ("suite=DROP", "suite: required key is missing"),
    ("protocol=DROP", "protocol: required key is missing"),
    ("protocol.train=DROP", "train: required key is missing"),
    ("methods=DROP", "methods: required key is missing"),
    ("methods={}", "0 rows of method retrain"),
    ("methods.again={method: retrain}", "2 rows of method retrain"),
    ("seeds=one", "seeds"),
    ("seeds=[1, two]", "seeds.1"),
    ("seeds=[1, 1]", "seeds holds a seed twice"),
    ("seeds=[]", "seeds"),
    ("retrains=true", "yes/no/true/false is not valid here"),
    ("protocol.train.lr=false", "yes/no/true/false"),
    ("methods.gd={params: {lr: true}}", "yes/no/true/false"),
    ("protocol.train.lr=-1", "greater than 0"),
    ("protocol.train.lr=.nan", "finite number"),
    ("defaults={lr: .inf}", "finite number"),
    ("protocol.train.steps=3", "exactly one of steps and epochs"),
    ("retrains=99", "less than or equal to 8"),
    ("methods.gdd=", "unknown method 'gdd'; did you mean 'gd'"),
    ("methods.gd={preset: paper_litral}", "no preset 'paper_litral'; did you mean 'paper_literal'"),
    ("methods.ascent={preset: x}", "no preset 'x'; it has none"),
    ("methods.retrain={params: {lr: 1}}", "lr: unknown key"),
    ("benchmark=image_clasification", "unknown benchmark 'image_clasification'; did you mean"),
    ("columns=[fa, tta]", "unknown metric 'tta'; did you mean 'ta'"),
    ("published=['tab:nope']", "published: no table 'tab:nope'"),
    ("compare=[[gd, gd_lora]]", "'gd_lora', which is not a row"),
    ("compare=[[gd, gd, gd]]", "compare"),
    ("methods.retrain (second)={method: gd}", "(second): reports call a reference model so"),
    ("methods.original={method: gd}", "methods.original: reports call a reference model so"),
    ("rows=[gd]; compare=[null]", "compare.0: write a list"),
    ("rows=[gd]; compare=[[[gd], gd]]", "compare.0.0"),
    ("extends=digits-class-bound; grid={rows: [gd]}", "grid.rows: write a mapping"),
    ("extends=digits-class-bound; grid={rows: {gd_ball: 1}}", "grid.rows.gd_ball: write a mapping"),
    ("defaults={stps: 3}", "no row has 'stps'; did you mean 'steps'"),
    (
        "methods.gd={without: [lamb]}; defaults={lam: 1}",
        "no default 'lamb' for this row; known: forget_weight",
    ),
    ("protocol.data.name=mnist", "data.name"),
    ("protocol.data={name: folder, folder: /etc, native_size: 8}", "below the data root"),
    ("protocol.model.heads=3", "dim must be a multiple of heads"),
    ("protocol.scenario.fraction=0.1", "forgets whole classes"),
    ("protocol.scenario.kind=classes", "scenario.kind"),
    ("methods.gd={params: {ball: 1}}", "give adapter too"),
    ("methods.gd_lora={params: {adapter: {bound: relative}}}", "takes phi: sine or tanh"),
    ("methods.gd=[1]", "methods.gd"),
    ("methods.a/b={method: gd}", "methods.a/b"),
    ("suite=../x", "suite: write at most 80 letters"),
    ("folds={kind: nested, protocols: [{}, {}]}", "folds.kind"),
    ("folds={kind: scalability, protocols: [{}]}", "folds.protocols"),
    (
        "folds={kind: scalability, protocols: [{scenery: {}}, {}]}",
        "folds.protocols.0: scenery: unk",
    ),
    (
        "folds={kind: scalability, protocols: [{}, {}]}; tune={trials: 1}",
        "folds take fixed configs",
    ),
    ("methods.scrub=; budget={unit: steps, amount: 4}", "alternates whole passes; give epochs"),
]
TUNES = [
    ("trials: 3, grids: {default: {lr: [1, 2]}}", "has 2 combinations, but trials is 3"),
    ("trials: 1, grids: {default: {lr: 1}}", "write a list"),
    ("trials: 2, grids: {default: {lr: [0.001, 1e-3]}}", "two trials are the same"),
    ("trials: 2, grids: {default: {lrr: [1, 2]}}", "tune.grids for row 'gd': lrr: unknown key"),
    ("trials: 1, grids: {gd: {lr: [1]}, gdd: {lr: [1]}}", "tune.grids: no row 'gdd'; did you mean"),
    ("trials: 1, grids: {}", "no grid or space for row 'gd' and no default"),
    ("seeds: [1], trials: 1, grids: {gd: {lr: [1]}}", "tune.seeds must differ from seeds"),
    ("seeds: [], trials: 1, grids: {gd: {lr: [1]}}", "tune.seeds"),
    ("trials: 2, spaces: {default: {lr: {low: 1, high: 0.1}}}", "lr: low 1 is not below high 0.1"),
    ("trials: 2, spaces: {default: {lr: {low: 0.1, high: 0.1}}}", "low 0.1 is not below high 0.1"),
    ("trials: 2, spaces: {default: {lr: {low: 0, high: 1, log: true}}}", "low above 0, not 0"),
    ("trials: 2, spaces: {default: {lr: {low: 0.1}}}", "default.lr: a range needs low and high"),
    (
        "trials: 2, spaces: {default: {lr: {low: 0.1, hgih: 1}}}",
        "lr.hgih: unknown key; did you mean",
    ),
    (
        "trials: 2, spaces: {default: {lr: 0.1}}",
        "default.lr: write {low: 1e-4, high: 1e-2, log: tr",
    ),
    ("trials: 2, spaces: {default: {}}", "tune.spaces.default"),
    ("trials: 2, spaces: {default: {lr: []}}", "a list of at least one value"),
    (
        "trials: 2, spaces: {default: {lrr: [1, 2]}}",
        "spaces.default: no row has 'lrr'; did you mean",
    ),
    (
        "trials: 2, spaces: {gd: {lrr: [1, 2]}}",
        "did you mean 'lr'?; write tune: {spaces: {gd: {lr: ",
    ),
    ("trials: 2, spaces: {default: {lr: {low: -1, high: 1}}}", "tune.spaces for row 'gd': lr: "),
    ("trials: 2, spaces: {default: {steps: {low: 1.5, high: 9}}}", "steps: write a whole number"),
    ("trials: 5, spaces: {default: {lr: [1, 2], lam: [1, 2]}}", "fewer than 5 different trials"),
    ("trials: 5, spaces: {gd: {lr: {low: 0.1, high: 0.1001}}}", "values have three digits"),
    (
        "trials: 1, spaces: {gd: {lr: [1]}}, grids: {gd: {lr: [1]}}",
        "'gd' has a grid and a space; k",
    ),
    (
        "trials: 1, spaces: {gd: {lr: [1]}, gdd: {lr: [1]}}",
        "tune.spaces: no row 'gdd'; did you mean",
    ),
    ("trials: 1, sampler: cma, spaces: {gd: {lr: [1]}}", "tune.sampler"),
    ("trials: 1, round: 0, spaces: {gd: {lr: [1]}}", "tune.round"),
    ("trials: 1, grids: {gd: {lr: [1]}}, after_attack: klom", "'klom' attacks no single model"),
    ("trials: 1, grids: {gd: {lr: [1]}}, after_attack: reference", "attacks no single model"),
]


def put(data, path, value):
    *parents, last = path.split(".")
    for part in parents:
        data = data.setdefault(part, {})
    if value == DROP:
        del data[last]
    else:
        data[last] = value


@pytest.fixture(scope="module")
def good(tiny_suite, tmp_path_factory):
    rows = {"original": None, "retrain": None, "gd": None, "gd_sine": {"tune": False}}
    path = tiny_suite(tmp_path_factory.mktemp("good"), methods=rows)
    load_suite(str(path))
    return path


@pytest.mark.parametrize(
    ("changes", "wanted"), [*SUITES, *((f"tune={{{text}}}", wanted) for text, wanted in TUNES)]
)
def test_malformed_suite(changes, wanted, good, tmp_path, cli, one_line_error):
    data = yaml.safe_load(good.read_text())
    for change in changes.split("; "):
        path, _, value = change.partition("=")
        put(data, path, yaml.safe_load(value))
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    line = one_line_error(cli("run", file, "--store", tmp_path / "store"))
    assert wanted in line
    assert not (tmp_path / "store").exists(), "nothing is written for a bad suite"


def test_files_that_are_no_suite(tmp_path, cli, one_line_error):
    """What else a file may hold that is no YAML is test_config's."""
    (tmp_path / "odd.yaml").write_text("suite: [1, 2\nprotocol: {")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00suite")
    (tmp_path / "folder.yaml").mkdir()
    for command in ("plan", "show"):
        for name in ("odd.yaml", "binary.yaml", "folder.yaml", "nowhere.yaml"):
            assert name in one_line_error(cli(command, tmp_path / name))


COMMANDS = [
    ("rnu", "No such command"),
    ("run", "Missing argument"),
    ("run {good} --sedes 1", "No such option"),
    ("run {good} --threads 0", "--threads"),
    ("run {good} --workers two", "--workers"),
    ("run digits-clas", "did you mean 'digits-class'"),
    ("run nowhere/x.yaml", "no such file"),
    ("plan {good} --seeds 1,two", "whole numbers with commas"),
    ("plan {good} --seeds 1,,2", "whole numbers with commas"),
    ("plan {good} --seeds 1,1", "seeds holds a seed twice"),
    ("plan {good} --seeds ''", "whole numbers with commas"),
    ("plan digits-class --seeds -1", "seeds.0"),
    ("plan digits-class --seeds 99999999999999999999", "seeds.0"),
    ("plan digits-class --set protocol.train.epochs=1", "warmup_steps: a warm-up of 50"),
    ("plan {good} --only gd,gd_sin", "did you mean 'gd_sine'"),
    ("plan {good} --only ''", "--only: write names with commas, or leave it out"),
    ("run {good} --fresh ,", "--fresh: write names with commas, or leave it out"),
    ("attack {good} --attacks ' '", "--attacks: write names with commas, or leave it out"),
    ("plan {good} --only :x:", "no row ':x:'"),
    ("plan {good} --set seeds", "write it as key.sub=value"),
    ("plan {good} --set seeds=[1", "--set seeds"),
    ("plan {good} --set sedes=[1]", "did you mean 'seeds'"),
    ("plan {good} --set plugins=5", "--set: plugins: write a list of names, such as [a, b]"),
    ("plan {good} --set plugins=null", "--set: plugins: write a list of names"),
    ("plan {good} --set plugins=mine.py", "--set: plugins: write a list of names"),
    ("plan {good} --set methods.gd.params.lr=.nan", "finite number"),
    ("plan digits-class --set defaults.steps=many", ", --set defaults.steps=many: budget.amount"),
    (
        "plan {good} --set protocol.train.lr=fast",
        ", --set protocol.train.lr=fast: protocol: train",
    ),
    ("run {good} --data-root /nowhere/data", "no such folder"),
    ("run {good} --store {good}", "not a folder"),
    ("run {good} --store {good}/runs", "not a folder"),
    ("run {good} --device gpu9 --workers 1", "--device gpu9: not a device"),
    ("run {good} --stage ffffff", "fits 0 stages of tiny"),
    ("run {good} --stage ''", "stages of tiny; see: unlearn plan"),
    ("run {good} --stage {unlearn}", "is not done; run it first"),
    ("report {good}", "no records of tiny"),
    ("report {good} --format pdf", "choose table, md, tex, csv"),
    ("report --records r.jsonl --only gd", "--set, --seeds and --only go with a suite"),
    ("show suits", "did you mean 'suites'"),
    ("show gd_sine --filter x", "only lists have it"),
    ("show gd_sine --resolved", "only a suite has rows"),
    ("show suites --resolved", "name one suite"),
    ("show methods --paper", "show suites --paper"),
    ("show digits-class --published", "names no published table"),
    ("show lethevit-cifar10 --published --resolved", "give one of them"),
    ("show bounded --plan llama-2-7", "did you mean 'llama-2-7b'"),
    ("show bounded --plan zzz", "--plan zzz: no such model; known: "),
    ("show bounded --plan vit-s --placement heads", "choose mlp, attention, all"),
    ("show gd_sine --plan vit-s", "show bounded --plan vit-s"),
    ("show bounded --plan vit-s --rank 0", "rank"),
    ("show bounded --rank 4", "--rank, --tokens and --placement are of --plan"),
    ("show bonded", "did you mean 'bounded'"),
    ("run {good} --rehearse --stage a", "do not go together"),
    ("run {good} --record r.json", "add --rehearse"),
    ("compare a b c", "give two results, or pairs of rows"),
    ("compare a b --filter x", "only pairs of rows have it"),
    ("compare gd,ga --seeds 1", "are of two results"),
    ("compare gd_sine", "give two results, or pairs of rows as FIRST,SECOND"),
    ("compare gd_sine,gd_sine", "write two different rows as FIRST,SECOND"),
    ("compare gd_sine,gd_sin", "no table has gd_sin"),
    ("attack {good} --original m --forget f", "give a suite alone, --model and its samples"),
    ("attack {good} --samples 8", "--samples: no chosen attack takes it; add --attacks relearn,"),
    ("attack {good} --attacks leak --samples 8 --steps 5", "--steps: no chosen attack takes it"),
    ("attack --model m --only gd", "--model without --set, --seeds, --only and --shadows"),
    ("apply --out {good}.out", "give --model, --forget, --method"),
    ("apply --convert a.pth --method gd --out {good}.out", "leave --method out"),
    ("apply --convert a.pth --goal 5 --push me/x --out {good}.out", "leave --goal, --push out"),
    ("apply --model m --forget f --method gd --label-names a --out {good}.out", "is of --convert"),
    ("show gd_sin", "did you mean 'gd_sine'"),
    ("check", "give a method's name, or --all"),
    ("check gd_sin", "did you mean 'gd_sine'"),
    ("show --plugin nowhere.py", "nowhere.py: no such file"),
    ("report {good} --watch --format md", "give a suite alone, no --format"),
    ("verify tofu-logs", "--data-root"),
    ("verify cifar", "tofu-logs"),
    ("verify tofu-logs --format csv", "only paper has it"),
]


@pytest.mark.parametrize(("words", "wanted"), COMMANDS)
def test_malformed_command_line(
    words, wanted, good, tmp_path, cli, one_line_error, find_stage, nothing_half, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SF_DATA_ROOT", raising=False)
    key = find_stage(good, tmp_path, "unlearn", "gd/seed-1").key
    assert wanted in one_line_error(cli(*shlex.split(words.format(good=good, unlearn=key))))
    nothing_half(tmp_path / "runs")
    assert not (tmp_path / "runs" / "suites").exists()


def test_errors_are_the_same_from_a_real_process(good, spawn):
    process = spawn("plan", good, "--set", "seeds=no")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ") and "yes/no" in line


PLUGINS = [
    ("def broken(:\n", "SyntaxError"),
    (METHOD.replace("    info = ", "    infos = "), "has no info"),
    (
        METHOD + "    class Config(UnlearningMethod.Config):\n        lr: float\n",
        "needs a default for",
    ),
    (
        METHOD.replace("return ", "return task.indices('retain') and "),
        "'retain', which it does not",
    ),
]
"""What fails before its class is looked at is test_registry's."""


@pytest.mark.parametrize(("text", "wanted"), PLUGINS)
def test_malformed_plugin(
    text, wanted, copied, tmp_path, tiny_suite, cli, one_line_error, nothing_half
):
    plugin = tmp_path / "mine.py"
    plugin.write_text(text)
    path = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "mine": None})
    before = sorted((copied.store / "stages").iterdir())
    done = cli("run", path, "--store", copied.store, "--plugin", plugin)
    assert wanted in one_line_error(done)
    nothing_half(copied.store)
    assert before == sorted((copied.store / "stages").iterdir())


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ('["blocks.*.mlp.fc9"]', "matches no layer"),
        ('["blocks.*.norm1"]', "not an nn.Linear"),
        ('[""]', "(the whole model)"),
    ],
)
def test_adapter_targets_that_do_not_fit(
    pattern, wanted, copied, cli, one_line_error, nothing_half
):
    run = ("run", copied.paths["class"], "--store", copied.store)
    setting = f"methods.gd_sine.params.adapter.targets={pattern}"
    assert wanted in one_line_error(cli(*run, "--only", "gd_sine", "--set", setting))
    nothing_half(copied.store)


def other_model(path):
    save_file({"head.weight": torch.zeros(3, 3)}, path)


CHECKPOINTS = [
    (None, "model.safetensors", "not a readable safetensors file"),
    (b"garbage", "model.safetensors", "not a readable safetensors file"),
    (b"\x80\x04cos\nsystem\n.", "model.pt", "only .safetensors files are read"),
    (other_model, "other.safetensors", "it belongs to another model"),
]


@pytest.mark.parametrize(("content", "file", "wanted"), CHECKPOINTS)
def test_checkpoints_that_are_not_read(
    content, file, wanted, good, tmp_path, cli, one_line_error, nothing_half
):
    if callable(content):
        content(tmp_path / file)
    elif content is not None:
        (tmp_path / file).write_bytes(content)
    setting = f"protocol.model.checkpoint={tmp_path / file}"
    done = cli("run", good, "--store", tmp_path / "store", "--set", setting)
    assert wanted in one_line_error(done)
    nothing_half(tmp_path / "store")
    assert not list((tmp_path / "store" / "stages").glob("original-*"))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "cifar10"),
        (b"PAR1 this is no parquet PAR1", "not a readable parquet file"),
        (b"", "not a readable parquet file"),
    ],
)
def test_data_that_cannot_be_read(
    content, wanted, good, tmp_path, cli, one_line_error, nothing_half
):
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    for part in ("train", "test") if content is not None else ():
        (folder / f"{part}-00000-of-00001.parquet").write_bytes(content)
    done = cli(
        *("run", good, "--store", tmp_path / "store"),
        *("--data-root", tmp_path / "data"),
        *("--set", "protocol.data={name: cifar10, source: parquet, native_size: 16}"),
    )
    assert wanted in one_line_error(done)
    nothing_half(tmp_path / "store")


# file of a complete store -> bytes put there (None: removed), stages redone, part of the line
STORES = {
    "split": ("split", "split.safetensors", b"\x00" * 30, "not a readable split"),
    "no split": ("split", "split.safetensors", None, "not a readable split"),
    "original weights": ("original", "model.safetensors", b"junk", "damaged or of another model"),
    "no original weights": ("original", "model.safetensors", None, "missing; delete"),
    "adapter": ("unlearn", "adapter.safetensors", b"junk", "damaged adapter"),
    "adapter config": ("unlearn", "adapter.json", b'{"config": 3}', "damaged adapter"),
    "no adapter": ("unlearn", "adapter.safetensors", None, "no adapter here"),
    "scores": ("score", "scores.safetensors", b"junk", "not readable scores"),
}


def without_digests(folder):
    """Makes a stage as it was before digests were kept."""
    done = json.loads((folder / "done.json").read_text())
    (folder / "done.json").write_text(json.dumps({**done, "files": {}, "sha256": None}))


def measured(cli, copied):
    """Every row's metrics."""
    done = cli("report", copied.paths["class"], "--store", copied.store, "--format", "json")
    return {row["row"]: row["metrics"] for row in json.loads(done.out)["rows"]}


@pytest.mark.parametrize("digests", [True, False], ids=["digests", "older"])
@pytest.mark.parametrize("name", STORES)
def test_damaged_store(
    name, digests, copied, cli, one_line_error, nothing_half, find_stage, caplog
):
    """What digests find is made again; a damaged stage without them is one clear line."""
    kind, file, content, wanted = STORES[name]
    names = {"split": "split/seed-1", "original": "original/seed-1"}
    store = StageStore(copied.store)
    stage = find_stage(copied.paths["class"], copied.store, kind, names.get(kind, "gd_lora/seed-1"))
    before = measured(cli, copied)
    for later in ("measure", "score")[: 1 if kind == "score" else 2]:
        lost = find_stage(copied.paths["class"], copied.store, later, "gd_lora/seed-1")
        shutil.rmtree(store.folder(later, lost.key))
    path = store.folder(kind, stage.key) / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    if not digests:
        without_digests(path.parent)
    done = cli(
        "run", copied.paths["class"], "--store", copied.store,
        "--only", "gd_lora",
    )  # fmt: skip
    if digests:
        (line,) = [line for line in caplog.messages if str(path) in line]
        assert done.code == 0 and "made again" in line, done.err
        assert measured(cli, copied) == before
        return
    line = one_line_error(done)
    assert wanted in line and (kind == "unlearn" or "delete" in line)
    nothing_half(copied.store)


RECORDS = {
    "truncated": lambda text: text[: len(text) // 2],
    "NaN": lambda text: text.replace('"fa": ', '"fa": NaN, "x": '),
    "unknown key": lambda text: text.replace('"status"', '"sttus"'),
    "a list": lambda _: "[]",
    "binary": lambda _: "\udcff",
}


@pytest.mark.parametrize("name", RECORDS)
def test_damaged_record(name, copied, cli, one_line_error, find_stage):
    stage = find_stage(copied.paths["class"], copied.store, "measure", "gd_lora/seed-1")
    path = StageStore(copied.store).folder("measure", stage.key) / "record.json"
    text = RECORDS[name](path.read_text())
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    without_digests(path.parent)
    for command in ("report", "run"):
        line = one_line_error(cli(command, copied.paths["class"], "--store", copied.store))
        assert "record.json: not a valid record" in line and "delete it and rerun" in line
    path.unlink()
    assert "no such record" in one_line_error(
        cli("report", copied.paths["class"], "--store", copied.store)
    )


def changed_digit(path):
    path.write_text(re.sub(r'("fa": )[0-9.]+', r"\g<1>77.7", path.read_text()))


def other_record(path):
    others = (p for p in sorted(path.parent.parent.glob("measure-*")) if p != path.parent)
    shutil.copy(next(others) / "record.json", path)


def other_stage(path):
    other = next(p for p in sorted(path.parent.parent.glob("measure-*")) if p != path.parent)
    shutil.rmtree(path.parent)
    shutil.copytree(other, path.parent)


DAMAGES = [changed_digit, other_record, other_stage, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", ["report", "run"])
def test_a_changed_record_is_never_a_number(damage, command, copied, cli, find_stage, caplog):
    before = measured(cli, copied)
    stage = find_stage(copied.paths["class"], copied.store, "measure", "gd_lora/seed-1")
    path = StageStore(copied.store).folder("measure", stage.key) / "record.json"
    damage(path)
    done = cli(command, copied.paths["class"], "--store", copied.store)
    lines = [*done.err.splitlines(), *caplog.messages]
    (line,) = [line for line in lines if str(path.parent) in line]
    assert "made again" in line and done.code == (2 if command == "report" else 0)
    if command == "report":
        cli.ok("run", copied.paths["class"], "--store", copied.store)
    assert measured(cli, copied) == before


def test_damaged_done_with_missing_facts(copied, find_stage, cli, one_line_error):
    stage = find_stage(copied.paths["class"], copied.store, "original", "original/seed-1")
    path = StageStore(copied.store).folder("original", stage.key) / "done.json"
    path.write_text(json.dumps({"key": stage.key}))
    done = cli(
        "run", copied.paths["class"], "--store", copied.store,
        "--only", "gd", "--set", "methods.gd.params.lr=5e-4",
    )  # fmt: skip
    line = one_line_error(done)
    assert "done.json" in line and "delete" in line


def test_user_errors_survive_a_process_boundary():
    import pickle

    from stable_forgetting.common.base import errors

    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, UserError):
            copy = pickle.loads(pickle.dumps(kind("what and how")))
            assert type(copy) is kind and str(copy) == "what and how"

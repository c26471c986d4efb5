"""What a user can get wrong ends as one line on stderr and exit code 2, and leaves no half work."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

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

# what is changed in a good suite (dots for nesting; DROP removes), and what the line must name
DROP = object()
SUITES = {
    "unknown top key": ({"sede": [1]}, "sede: unknown key; did you mean 'seeds'"),
    "unknown protocol key": ({"protocol.modle": {}}, "modle: unknown key; did you mean 'model'"),
    "unknown data key": ({"protocol.data.nmae": 1}, "data.nmae: unknown key"),
    "unknown model key": ({"protocol.model.dimm": 8}, "model.dimm: unknown key; did you mean"),
    "unknown train key": ({"protocol.train.epoch": 3}, "did you mean 'epochs'"),
    "unknown evaluation key": ({"protocol.evaluation": {"batch": 3}}, "evaluation.batch"),
    "unknown row key": ({"methods.gd": {"parms": {}}}, "did you mean 'params'"),
    "unknown param": ({"methods.gd": {"params": {"lrr": 1}}}, "methods.gd.params: lrr"),
    "unknown nested param": (
        {"methods.gd_sine": {"params": {"adapter": {"rnk": 2}}}},
        "adapter.rnk: unknown key; did you mean 'rank'",
    ),
    "unknown tune key": ({"tune": {"trails": 2, "trials": 2, "grids": {}}}, "tune.trails"),
    "no suite name": ({"suite": DROP}, "suite: required key is missing"),
    "no protocol": ({"protocol": DROP}, "protocol: required key is missing"),
    "no recipe": ({"protocol.train": DROP}, "train: required key is missing"),
    "no methods": ({"methods": DROP}, "methods: required key is missing"),
    "empty rows": ({"methods": {}}, "0 rows of method retrain"),
    "seeds are text": ({"seeds": "one"}, "seeds"),
    "a seed is text": ({"seeds": [1, "two"]}, "seeds.1"),
    "a seed twice": ({"seeds": [1, 1]}, "seeds holds a seed twice"),
    "no seeds": ({"seeds": []}, "seeds"),
    "a yes for a number": ({"retrains": True}, "yes/no/true/false is not valid here"),
    "a yes for a rate": ({"protocol.train.lr": False}, "yes/no/true/false"),
    "a yes in a row": ({"methods.gd": {"params": {"lr": True}}}, "yes/no/true/false"),
    "negative rate": ({"protocol.train.lr": -1}, "greater than 0"),
    "NaN rate": ({"protocol.train.lr": float("nan")}, "finite number"),
    "infinite default": ({"defaults": {"lr": float("inf")}}, "finite number"),
    "steps and epochs": ({"protocol.train.steps": 3}, "exactly one of steps and epochs"),
    "too many retrains": ({"retrains": 99}, "less than or equal to 8"),
    "unknown method": ({"methods.gdd": None}, "unknown method 'gdd'; did you mean 'gd'"),
    "unknown preset": (
        {"methods.gd": {"preset": "paper_litral"}},
        "no preset 'paper_litral'; did you mean 'paper_literal'",
    ),
    "a method without presets": ({"methods.ascent": {"preset": "x"}}, "no preset 'x'; it has none"),
    "params of a reference": ({"methods.retrain": {"params": {"lr": 1}}}, "lr: unknown key"),
    "unknown benchmark": (
        {"benchmark": "image_clasification"},
        "unknown benchmark 'image_clasification'; did you mean",
    ),
    "unknown column": ({"columns": ["fa", "tta"]}, "unknown metric 'tta'; did you mean 'ta'"),
    "unknown table": ({"published": ["tab:nope"]}, "published: no table 'tab:nope'"),
    "compare names no row": ({"compare": [["gd", "gd_lora"]]}, "'gd_lora', which is not a row"),
    "compare of three": ({"compare": [["gd", "gd", "gd"]]}, "compare"),
    "bad grid size": (
        {"tune": {"trials": 3, "grids": {"default": {"lr": [1, 2]}}}},
        "has 2 combinations, but trials is 3",
    ),
    "grid is no list": ({"tune": {"trials": 1, "grids": {"default": {"lr": 1}}}}, "write a list"),
    "grid of unknown param": (
        {"tune": {"trials": 2, "grids": {"default": {"lrr": [1, 2]}}}},
        "tune.grids for row 'gd': lrr: unknown key",
    ),
    "tuning on a reported seed": (
        {"tune": {"seeds": [1], "trials": 2, "grids": {"default": {"lr": [1, 2]}}}},
        "tuning needs a seed of its own",
    ),
    "no grid": (
        {"tune": {"trials": 1, "grids": {}}},
        "no grid or space for row 'gd' and no default",
    ),
    "space upside down": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": {"low": 1, "high": 0.1}}}}},
        "tune.spaces.default.lr: low 1 is not below high 0.1",
    ),
    "space of one point": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": {"low": 0.1, "high": 0.1}}}}},
        "low 0.1 is not below high 0.1",
    ),
    "log from zero": (
        {
            "tune": {
                "trials": 2,
                "spaces": {"default": {"lr": {"low": 0, "high": 0.1, "log": True}}},
            }
        },
        "log: true needs low above 0, not 0",
    ),
    "space without high": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": {"low": 0.1}}}}},
        "spaces.default.lr: a range needs low and high",
    ),
    "unknown space key": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": {"low": 0.1, "hgih": 1}}}}},
        "lr.hgih: unknown key; did you mean 'high'",
    ),
    "space is a number": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": 0.1}}}},
        "spaces.default.lr: write {low: 1e-4, high: 1e-2, log: true}",
    ),
    "space is empty": (
        {"tune": {"trials": 2, "spaces": {"default": {}}}},
        "tune.spaces.default",
    ),
    "space of no values": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": []}}}},
        "a list of at least one value",
    ),
    "space of unknown param": (
        {"tune": {"trials": 2, "spaces": {"default": {"lrr": {"low": 0.1, "high": 1}}}}},
        "tune.spaces.default: no row has 'lrr'; did you mean 'lr'",
    ),
    "space of a row with an unknown param": (
        {"tune": {"trials": 2, "spaces": {"gd": {"lrr": {"low": 0.1, "high": 1}}}}},
        "lrr: unknown key; did you mean 'lr'?; write tune: {spaces: {gd: {lr: {low:",
    ),
    "space of a bad end": (
        {"tune": {"trials": 2, "spaces": {"default": {"lr": {"low": -1, "high": 1}}}}},
        "tune.spaces for row 'gd': lr: ",
    ),
    "halves of steps": (
        {"tune": {"trials": 2, "spaces": {"default": {"steps": {"low": 1.5, "high": 9}}}}},
        "steps: write a whole number",
    ),
    "space too small": (
        {"tune": {"trials": 5, "spaces": {"default": {"lr": [0.1, 0.2], "lam": [1, 2]}}}},
        "has fewer than 5 different trials",
    ),
    "range too narrow": (
        {"tune": {"trials": 5, "spaces": {"default": {"lr": {"low": 0.1, "high": 0.1001}}}}},
        "values have three digits",
    ),
    "space and grid": (
        {"tune": {"trials": 1, "spaces": {"gd": {"lr": [1]}}, "grids": {"gd": {"lr": [1]}}}},
        "'gd' has a grid and a space; keep one of them",
    ),
    "space of no row": (
        {"tune": {"trials": 1, "grids": {"gd": {"lr": [1]}}, "spaces": {"gdd": {"lr": [1]}}}},
        "tune.spaces: no row 'gdd'; did you mean 'gd'",
    ),
    "unknown sampler": (
        {"tune": {"trials": 1, "sampler": "cma", "spaces": {"gd": {"lr": [1]}}}},
        "tune.sampler",
    ),
    "rounds of none": (
        {"tune": {"trials": 1, "round": 0, "spaces": {"gd": {"lr": [1]}}}},
        "tune.round",
    ),
    "unknown default": ({"defaults": {"stps": 3}}, "no row has 'stps'; did you mean 'steps'"),
    "unknown data set": ({"protocol.data.name": "mnist"}, "data.name"),
    "absolute folder": (
        {"protocol.data": {"name": "folder", "folder": "/etc", "native_size": 8}},
        "below the data root",
    ),
    "heads do not divide": ({"protocol.model.heads": 3}, "dim must be a multiple of heads"),
    "class and fraction": ({"protocol.scenario.fraction": 0.1}, "forgets whole classes"),
    "wrong scenario": ({"protocol.scenario.kind": "classes"}, "scenario.kind"),
    "ball around nothing": ({"methods.gd": {"params": {"ball": 1}}}, "give adapter too"),
    "relative identity": (
        {"methods.gd_lora": {"params": {"adapter": {"bound": "relative"}}}},
        "takes phi: sine or tanh",
    ),
    "row is a list": ({"methods.gd": [1]}, "methods.gd"),
    "row is a path": ({"methods.a/b": {"method": "gd"}}, "methods.a/b"),
    "suite is a path": ({"suite": "../x"}, "suite: "),
}

TEXTS = {
    "bad yaml": ("suite: [1, 2\nprotocol: {", "line"),
    "tab": ("suite: x\n\tprotocol: y\n", "line 2"),
    "duplicate key": ("suite: a\nsuite: b\n", "line 2: key 'suite' is written twice"),
    "key is no text": ("suite: a\n3: b\n", "line 2: key 3 must be text"),
    "a list": ("- a\n- b\n", "must be a mapping"),
    "empty": ("", "must be a mapping"),
    "python tag": ("suite: !!python/object/apply:os.getcwd []\n", "line 1"),
    "missing parent": ("extends: nowhere.yaml\nsuite: a\n", "nowhere.yaml: no such file"),
    "parent is no text": ("extends: [1]\nsuite: a\n", "extends: must be a file name"),
    "recursive": ("suite: &a [*a]\n", "line 1"),
}


def put(data, path, value):
    *parents, last = path.split(".") if path.count(".") else [path]
    for part in parents:
        data = data.setdefault(part, {})
    if value is DROP:
        del data[last]
    else:
        data[last] = value


@pytest.fixture(scope="module")
def good(tiny_suite, tmp_path_factory):
    rows = {"original": None, "retrain": None, "gd": None, "gd_sine": {"tune": False}}
    path = tiny_suite(tmp_path_factory.mktemp("good"), methods=rows)
    load_suite(str(path))
    return path


@pytest.mark.parametrize("name", SUITES)
def test_malformed_suite(name, good, tmp_path, cli, one_line_error):
    import yaml

    changes, wanted = SUITES[name]
    data = yaml.safe_load(good.read_text())
    for path, value in changes.items():
        put(data, path, value)
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    line = one_line_error(cli("run", file, "--store", tmp_path / "store"))
    assert wanted in line
    assert not (tmp_path / "store").exists(), "nothing is written for a bad suite"


@pytest.mark.parametrize("name", TEXTS)
def test_malformed_yaml(name, tmp_path, cli, one_line_error):
    text, wanted = TEXTS[name]
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    line = one_line_error(cli("plan", file, "--store", tmp_path / "store"))
    assert wanted in line and ("bad.yaml" in line or "no such file" in line)


def test_files_that_are_no_text(tmp_path, cli, one_line_error):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00suite")
    (tmp_path / "folder.yaml").mkdir()
    for command in ("plan", "show"):
        for name in ("binary.yaml", "folder.yaml", "nowhere.yaml"):
            assert name in one_line_error(cli(command, tmp_path / name))


COMMANDS = {
    "unknown command": (["rnu"], "No such command"),
    "no suite": (["run"], "Missing argument"),
    "unknown option": (["run", "{good}", "--sedes", "1"], "No such option"),
    "threads 0": (["run", "{good}", "--threads", "0"], "--threads"),
    "workers are text": (["run", "{good}", "--workers", "two"], "--workers"),
    "unknown suite": (["run", "digits-clas"], "did you mean 'digits-class'"),
    "missing file": (["run", "nowhere/x.yaml"], "no such file"),
    "seeds are text": (["plan", "{good}", "--seeds", "1,two"], "whole numbers with commas"),
    "seeds with a hole": (["plan", "{good}", "--seeds", "1,,2"], "whole numbers with commas"),
    "a seed twice": (["plan", "{good}", "--seeds", "1,1"], "seeds holds a seed twice"),
    "unknown row": (["plan", "{good}", "--only", "gd,gd_sin"], "did you mean 'gd_sine'"),
    "set without value": (["plan", "{good}", "--set", "seeds"], "write it as key.sub=value"),
    "set of bad yaml": (["plan", "{good}", "--set", "seeds=[1"], "--set seeds"),
    "set of unknown key": (["plan", "{good}", "--set", "sedes=[1]"], "did you mean 'seeds'"),
    "set NaN": (["plan", "{good}", "--set", "methods.gd.params.lr=.nan"], "finite number"),
    "no data root": (["run", "{good}", "--data-root", "/nowhere/data"], "no such folder"),
    "store is a file": (["run", "{good}", "--store", "{good}"], "not a folder"),
    "store below a file": (["run", "{good}", "--store", "{good}/runs"], "not a folder"),
    "unknown device": (
        ["run", "{good}", "--device", "gpu9", "--workers", "1"],
        "--device gpu9: not a device",
    ),
    "unknown stage key": (["run", "{good}", "--stage", "ffffff"], "fits 0 stages of tiny"),
    "ambiguous stage key": (["run", "{good}", "--stage", ""], "stages of tiny; see: unlearn plan"),
    "stage before its parents": (
        ["run", "{good}", "--stage", "{unlearn}"],
        "is not done; run it first",
    ),
    "report without records": (["report", "{good}"], "no records of tiny"),
    "unknown format": (["report", "{good}", "--format", "pdf"], "choose table, md, tex, csv"),
    "unknown list": (["show", "suits"], "did you mean 'suites'"),
    "list of no filter": (["show", "gd_sine", "--filter", "x"], "only lists have it"),
    "rows of a list": (["show", "suites", "--resolved"], "name one suite"),
    "rehearsal of a stage": (["run", "{good}", "--rehearse", "--stage", "a"], "do not go together"),
    "record of a run": (["run", "{good}", "--record", "r.json"], "add --rehearse"),
    "three results": (["compare", "a", "b", "c"], "give two results, or pairs of rows"),
    "filter of results": (["compare", "a", "b", "--filter", "x"], "only pairs of rows have it"),
    "seeds of rows": (["compare", "gd,ga", "--seeds", "1"], "are of two results"),
    "nothing to apply": (["apply", "--out", "{good}.out"], "give --model, --forget, --method"),
    "conversion with a method": (
        ["apply", "--convert", "a.pth", "--method", "gd", "--out", "{good}.out"],
        "--convert only makes a folder; leave --method out",
    ),
    "unknown thing": (["show", "gd_sin"], "did you mean 'gd_sine'"),
    "check of nothing": (["check"], "give a method's name, or --all"),
    "check of unknown": (["check", "gd_sin"], "did you mean 'gd_sine'"),
    "missing plugin": (["show", "--plugin", "nowhere.py"], "nowhere.py: no such file"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_malformed_command_line(
    name, good, tmp_path, cli, one_line_error, find_stage, nothing_half, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments, wanted = COMMANDS[name]
    key = find_stage(good, tmp_path, "unlearn", "gd/seed-1").key
    filled_in = [text.format(good=good, unlearn=key) for text in arguments]
    assert wanted in one_line_error(cli(*filled_in))
    nothing_half(tmp_path / "runs")
    assert not (tmp_path / "runs" / "suites").exists()


def test_errors_are_the_same_from_a_real_process(good, tmp_path, spawn):
    for arguments, wanted in (
        (["plan", good, "--set", "seeds=no"], "yes/no"),
        (["plan", good, "--bogus"], "No such option"),
    ):
        process = spawn(*arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and out == ""
        (line,) = err.splitlines()
        assert line.startswith("error: ") and wanted in line


PLUGINS = {
    "syntax": ("def broken(:\n", "SyntaxError"),
    "import": ("import no_such_module_anywhere\n", "ModuleNotFoundError"),
    "raises": ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
    "wrong base": (METHOD.replace("(UnlearningMethod)", ""), "is not a UnlearningMethod"),
    "no info": (METHOD.replace("    info = ", "    infos = "), "has no info"),
    "no default": (
        METHOD.replace("    def", "    class Config(UnlearningMethod.Config):\n"
                       "        lr: float\n    def"),
        "needs a default for every field",
    ),
    "taken name": (METHOD.replace('"mine", s', '"gd", s'), "'gd' is registered twice"),
    "undeclared data": (
        METHOD.replace("return task.model", "return task.indices('retain') and task.model"),
        "reads 'retain', which it does not declare",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLUGINS)
def test_malformed_plugin(name, copied, tmp_path, tiny_suite, cli, one_line_error, nothing_half):
    text, wanted = PLUGINS[name]
    plugin = tmp_path / "mine.py"
    plugin.write_text(text)
    path = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "mine": None})
    before = sorted((copied.store / "stages").iterdir())
    done = cli("run", path, "--store", copied.store, "--workers", 1, "--plugin", plugin)
    assert wanted in one_line_error(done)
    nothing_half(copied.store)
    assert before == sorted((copied.store / "stages").iterdir())


PATTERNS = {
    "no such layer": ('["blocks.*.mlp.fc9"]', "matches no layer"),
    "not a linear layer": ('["blocks.*.norm1"]', "not an nn.Linear"),
    "the whole model": ('[""]', "(the whole model)"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_adapter_targets_that_do_not_fit(name, copied, cli, one_line_error, nothing_half):
    pattern, wanted = PATTERNS[name]
    done = cli(
        "run", copied.paths["class"], "--store", copied.store, "--workers", 1,
        "--only", "gd_sine", "--set", f"methods.gd_sine.params.adapter.targets={pattern}",
    )  # fmt: skip
    assert wanted in one_line_error(done)
    nothing_half(copied.store)


CHECKPOINTS = {
    "missing": (None, "model.safetensors", "not a readable safetensors file"),
    "garbage": (b"garbage", "model.safetensors", "not a readable safetensors file"),
    "pickle": (b"\x80\x04cos\nsystem\n.", "model.pt", "only .safetensors files are read"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_that_are_not_read(name, good, tmp_path, cli, one_line_error, nothing_half):
    content, file, wanted = CHECKPOINTS[name]
    if content is not None:
        (tmp_path / file).write_bytes(content)
    done = cli(
        "run", good, "--store", tmp_path / "store", "--workers", 1,
        "--set", f"protocol.model.checkpoint={tmp_path / file}",
    )  # fmt: skip
    assert wanted in one_line_error(done)
    nothing_half(tmp_path / "store")
    assert not list((tmp_path / "store" / "stages").glob("original-*"))


def test_a_checkpoint_of_another_model(good, tmp_path, cli, one_line_error, nothing_half):
    import torch
    from safetensors.torch import save_file

    save_file({"head.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    done = cli(
        "run", good, "--store", tmp_path / "store", "--workers", 1,
        "--set", f"protocol.model.checkpoint={tmp_path / 'other.safetensors'}",
    )  # fmt: skip
    assert "it belongs to another model" in one_line_error(done)
    nothing_half(tmp_path / "store")


DATA = {
    "no files": (None, "cifar10"),
    "garbage": (b"PAR1 this is no parquet PAR1", "not a readable parquet file"),
    "empty file": (b"", "not a readable parquet file"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_read(name, good, tmp_path, cli, one_line_error, nothing_half):
    content, wanted = DATA[name]
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    for part in ("train", "test") if content is not None else ():
        (folder / f"{part}-00000-of-00001.parquet").write_bytes(content)
    done = cli(
        "run", good, "--store", tmp_path / "store", "--workers", 1,
        "--data-root", tmp_path / "data",
        "--set", "protocol.data={name: cifar10, source: parquet, native_size: 16}",
    )  # fmt: skip
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
        "run", copied.paths["class"], "--store", copied.store, "--workers", 1,
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
        assert cli("run", copied.paths["class"], "--store", copied.store).code == 0
    assert measured(cli, copied) == before


def test_damaged_done_with_missing_facts(copied, find_stage, cli, one_line_error):
    stage = find_stage(copied.paths["class"], copied.store, "original", "original/seed-1")
    path = StageStore(copied.store).folder("original", stage.key) / "done.json"
    path.write_text(json.dumps({"key": stage.key}))
    done = cli(
        "run", copied.paths["class"], "--store", copied.store, "--workers", 1,
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

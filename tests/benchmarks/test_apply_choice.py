"""``unlearn apply`` beyond one run: choice, relearning, lineage, pages, precision."""

from __future__ import annotations

import dataclasses
import json
from html import unescape

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stable_forgetting.benchmarks.apply import apply
from stable_forgetting.benchmarks.apply.report import verdict
from stable_forgetting.common.base.errors import ConfigError
from tests.benchmarks.test_apply import fresh, request_, sha256, world  # noqa: F401

SHORT = ("steps=8", "batch_size=16")


def moved_by(before, after):
    squares = [
        (float((after[k].double() - v.double()).square().sum()), float(v.double().square().sum()))
        for k, v in before.items()
    ]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5


def test_one_of_several_methods_is_chosen_on_held_out_retain_images(request_):  # noqa: F811
    request = dataclasses.replace(
        request_, method="gd,ascent,finetune", params=SHORT, goal=50.0, audits=("relearn",)
    )
    result = apply(request)
    choice, statement = result.statement["choice"], result.statement
    assert [trial["method"] for trial in choice["trials"]] == ["gd", "ascent", "finetune"]
    assert choice["held_out"] == 8 and statement["before"]["validation"]["images"] == 8
    assert statement["before"]["retain"]["images"] == 32
    given = statement["before"]["validation"]["accuracy"]
    for trial in choice["trials"]:
        gaps = abs(trial["forget"] - 50.0), max(0.0, given - trial["validation"])
        assert trial["distance"] == pytest.approx(sum(gaps) / 2)
    best = min(choice["trials"], key=lambda trial: trial["distance"])
    assert choice["chosen"] == best["method"] == statement["method"]["name"]
    assert statement["after"]["forget"]["accuracy"] == best["forget"]
    assert statement["after"]["validation"]["accuracy"] == best["validation"]
    for name, tensor in fresh(request.out).state_dict().items():
        assert tensor.isfinite().all(), name
    relearn = statement["audits"]["relearn"]
    assert 0 <= relearn["low"] <= relearn["value"] <= relearn["high"] <= relearn["max_steps"]
    assert "held out to choose the method" in statement["reading"]
    page = (request.out / "report.html").read_text()
    assert "test data were not looked at" in page and "Choice of the method" in page


def test_the_choice_never_looks_at_test_images(request_, monkeypatch):  # noqa: F811
    from stable_forgetting.vision.apply.benchmark import GivenImages

    asked = []
    score = GivenImages.score

    def noting(self, model, parts, *, trial=False):
        asked.append(tuple(parts))
        return score(self, model, parts, trial=trial)

    monkeypatch.setattr(GivenImages, "score", noting)
    apply(dataclasses.replace(request_, method="gd,ascent", params=("steps=1",), goal=50.0))
    every = ("forget", "retain", "test", "validation")
    assert asked == [every, ("forget", "validation"), ("forget", "validation"), every]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "gd,ascent"}, "give its accuracy on unseen images as --goal"),
        (
            {"method": "npo,ascent", "retain": None, "goal": 1.0},
            r"give --retain \(retain=\), or one method",
        ),
        ({"audits": ("probe",)}, "attacks: 'probe' is not known; choose relearn"),
        ({"method": "gd,nothing", "goal": 1.0}, "unknown method 'nothing'"),
    ],
)
def test_what_cannot_be_chosen_is_said(request_, changes, words):  # noqa: F811
    with pytest.raises(ConfigError, match=words):
        apply(dataclasses.replace(request_, **changes))
    assert not request_.out.exists()


def test_a_second_request_names_the_first_one(request_):  # noqa: F811
    apply(request_)
    second = request_.out.with_name("second")
    statement = apply(dataclasses.replace(request_, model=request_.out, out=second)).statement
    (earlier,) = statement["earlier"]
    first = json.loads((request_.out / "statement.json").read_text())
    assert earlier["data"] == first["data"] and earlier["method"] == "gd_sine"
    assert earlier["statement_sha256"] == sha256(request_.out / "statement.json")
    assert earlier["output"]["weights_sha256"] == statement["input"]["weights_sha256"]
    third = second.with_name("third")
    again = apply(dataclasses.replace(request_, model=second, out=third)).statement
    assert [r["created"] for r in again["earlier"]] == [first["created"], statement["created"]]
    page = (third / "report.html").read_text()
    assert earlier["statement_sha256"] in page and "Earlier requests" in page


def test_a_statement_of_other_weights_is_no_lineage(request_):  # noqa: F811
    apply(request_)
    weights = load_file(request_.out / "model.safetensors")
    weights["head.bias"] += 1e-3
    save_file(weights, request_.out / "model.safetensors")
    out = request_.out.with_name("second")
    statement = apply(dataclasses.replace(request_, model=request_.out, out=out)).statement
    assert statement["earlier"] == [] and "is of other weights" in statement["warnings"][0]


def test_card_and_page_say_the_same(request_):  # noqa: F811
    statement = apply(request_).statement
    _, front, card = (request_.out / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert not {"&", "*"} & set(front)  # what not every reader of YAML takes
    (model,) = fields.pop("model-index")
    assert model["name"] == request_.out.name
    told = {
        (result["dataset"]["name"], metric["type"]): metric["value"]
        for result in model["results"]
        for metric in result["metrics"]
    }
    exact = statement["after"]["forget"]["accuracy"]
    assert told["forget data of the request", "accuracy"] == round(exact, 4)
    assert fields == {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["machine-unlearning", "gd_sine"],
    }
    page = unescape((request_.out / "report.html").read_text())
    before, after = (statement[when]["forget"]["accuracy"] for when in ("before", "after"))
    shown = f"{before:.2f}", f"{after:.2f}"
    digests = [about["digest"] for about in statement["data"].values()]
    digests += [statement[when]["weights_sha256"] for when in ("input", "output")]
    for text in (*shown, *digests, "is not erasure", "timm", "Before and after"):
        assert text in card and text in page, text
    assert card.index("Before and after") < card.index("What it does not show")
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_moves_as_float32_does_and_stays_half(world, request_, tmp_path, dtype):  # noqa: F811
    state = load_file(world / "model/model.safetensors")
    outs = {}
    for name, kind in (("half", dtype), ("single", torch.float32)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((world / "model/config.json").read_bytes())
        rounded = {key: value.to(dtype).to(kind) for key, value in state.items()}
        about = {"format": "pt", "owner": "me", "trained_on": "0" * 64}
        save_file(rounded, folder / "model.safetensors", metadata=about)
        outs[name] = tmp_path / f"{name}-out"
        request = dataclasses.replace(request_, model=folder, method="gd", params=SHORT)
        statement = apply(dataclasses.replace(request, out=outs[name])).statement
        outs[name, "loss"] = statement["after"]["forget"]["loss"]
    files = {name: load_file(outs[name] / "model.safetensors") for name in ("half", "single")}
    assert {tensor.dtype for tensor in files["half"].values()} == {dtype}
    start = {key: value.to(dtype) for key, value in state.items()}
    moved = {name: moved_by(start, file) for name, file in files.items()}
    assert moved["half"] == pytest.approx(moved["single"], rel=0.1) and moved["half"] > 1e-3
    for key, tensor in files["half"].items():
        assert torch.equal(tensor, files["single"][key].to(dtype)), key
    with safe_open(outs["half"] / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "owner": "me"}
    assert outs["half", "loss"] != outs["single", "loss"], "measured is what is written"


# The verdict that stands first in a report ------------------------------------------------------


def judged(was, now, kept=None, goal=0.0):
    before, after = {"forget": {"accuracy": was}}, {"forget": {"accuracy": now}}
    if kept is not None:
        before["retain"], after["retain"] = {"accuracy": 90.0}, {"accuracy": kept}
    return verdict(before, after, "accuracy", goal)


@pytest.mark.parametrize(
    ("was", "now", "kept", "goal", "head"),
    [
        (
            71.0,
            67.0,
            90.0,
            0.0,
            "Hardly changed, retained kept: accuracy on forget data 71.0 -> 67",
        ),
        (91.0, 2.0, 89.0, 0.0, "Forgotten, retained kept: "),
        (91.0, 2.0, 60.0, 0.0, "Forgotten, retained damaged: "),
        (91.0, 40.0, None, 0.0, "Partly forgotten: accuracy"),
        (99.0, 81.0, 90.0, 80.0, "Forgotten, retained kept: "),
        (40.0, 10.0, 90.0, 50.0, "Cannot tell, retained kept: "),
        (0.4, 0.0, None, 0.0, "Cannot tell: "),
        (99.0, 2.0, 90.0, None, "Cannot tell, retained kept: accuracy on forget data 99.0 -> 2.0"),
    ],
)
def test_the_verdict_goes_by_the_way_to_the_goal(was, now, kept, goal, head):
    made = judged(was, now, kept, goal)
    assert made["line"].startswith(head)
    assert "80 % of the way" in made["line"] and "more than 5 points" in made["line"]
    assert made["word"] == head.split(",")[0].split(":")[0].lower()

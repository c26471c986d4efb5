"""All of the paper: each table and figure has a suite; what suites cost is derived."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stable_forgetting.benchmarks.costs.estimate import CARD, estimates, total_hours
from stable_forgetting.benchmarks.leaderboard.trajectory import PROBES
from stable_forgetting.benchmarks.paper import coverage
from stable_forgetting.benchmarks.suite.goals import read_figures, read_tables
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import fill, names, points, suite_names
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.protocol.sizes import linear_parameters

TEX = sorted((Path(__file__).resolve().parents[3] / "shared" / "seed").glob("*.txt"))
SAME = {"tab:muse_results": "tab:muse_comprehensive"}
"""A second label of one table."""


def test_every_table_and_figure_has_a_suite():
    assert [label for label, suites in coverage.coverage().items() if not suites] == []


@pytest.mark.skipif(not TEX, reason="the paper's text is not here")
def test_no_label_of_the_paper_is_missing():
    labels = re.findall(r"\\label\{((?:tab|fig):[^}]+)\}", TEX[0].read_text(encoding="utf-8"))
    ours = {label.partition("/")[0] for label in (*read_tables(), *read_figures())}
    assert {SAME.get(label, label) for label in labels} == ours


def test_the_list_says_how_far_a_suite_is(monkeypatch, cli):
    assert coverage.state_of("tofu-small-ihl") == "measured here"
    assert coverage.state_of("tdec-notes") == "small"
    with monkeypatch.context() as older:
        older.setattr(coverage, "read_board", lambda folder: {"version": 0})
        state = coverage.state_of("tofu-small-ihl")
    assert state == "withdrawn: measured here by version 0"
    state = coverage.state_of("tofu-llama3.1-70b-forget10-rank8").removeprefix("rehearsed, ")
    assert state.startswith("needs the hub and a GPU, ") and state.endswith("1,271 GB")
    assert ", needs a GPU, " in f", {coverage.state_of('coun-cifar100-scratch')}"
    monkeypatch.setattr(coverage, "is_rehearsed", lambda suite: suite.name.startswith("coun"))
    assert coverage.state_of("coun-cifar100-scratch").startswith("rehearsed, needs a GPU, ")
    monkeypatch.setattr(coverage, "state_of", lambda name: f"state of {name}")
    monkeypatch.setenv("COLUMNS", "250")
    shown = cli("show", "suites", "--paper").out
    assert "tab:tofu_phi_rank16/forget05" in shown and "state of tofu-small-omega" in shown


# A suite per value of a variable ------------------------------------------------------------------


def test_one_file_is_a_suite_per_rank():
    assert {"tofu-phi-1.5-forget10", "tofu-phi-1.5-forget10-rank32"} <= {*suite_names()}
    plain, wide = (load_suite(f"tofu-phi-1.5-forget10{v}") for v in ("", "-rank32"))
    assert (plain.name, wide.name) == ("tofu-phi-1.5-forget10", "tofu-phi-1.5-forget10-rank32")
    assert [s.row("gd_sine").config.adapter.rank for s in (plain, wide)] == [4, 32]
    assert [s.row("loku").config.adapter.alpha for s in (plain, wide)] == [8, 64]
    assert wide.spec.published == ("tab:tofu_phi_rank32/forget10",)
    assert "rank 32" in wide.spec.title
    assert wide.row("gd").config == plain.row("gd").config, "whole models are trained once"


def test_an_entry_is_a_suite_for_every_combination():
    found = names("s-$model", {"model": ["a", "b"], "rank": [4, 8], "lr": 0.1}, "f")
    assert [*found] == ["s-a", "s-a-rank8", "s-b", "s-b-rank8"]
    assert found["s-b-rank8"] == {"model": "b", "rank": 8, "lr": 0.1}
    assert names("s", {}, "f") == {"s": {}}
    whole = {"$model": ["rank $rank", "$rank"]}
    assert fill(whole, found["s-a-rank8"], "f") == {"a": ["rank 8", 8]}


def test_variables_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"\$rang: no such variable; did you mean 'rank'"):
        fill("$rank of $rang", {"rank": 4}, "f")
    for wrong in ([], {"rank": []}, {"rank": None}, {"rank": {"a": 1}}):
        with pytest.raises(ConfigError, match="write lists"):
            points(wrong, "f")
    with pytest.raises(ConfigError, match=r"did you mean 'tofu-phi-1\.5-forget10-rank8'"):
        read_suite("tofu-phi-1.5-forget10-rank9")


def test_a_suite_of_a_variable_can_be_extended(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: tofu-phi-1.5-forget10-rank8\nsuite: mine\n")
    assert load_suite(str(path)).row("gd_sine").config.adapter.rank == 8


# Estimates ---------------------------------------------------------------------------------------


def test_a_template_of_unknown_length_has_no_estimate():
    """A tokenizer's own format is known only once the tokenizer is there."""
    assert estimates(load_suite("tofu-phi-1.5-forget10", ["protocol.model.template=chat"])) == []


def test_an_estimate_by_hand(monkeypatch):
    """LLaMA-2-7B at forget10: 62 steps of 2 x 32 rows of 94 tokens (LoKU's length)."""
    suite = load_suite("tofu-llama2-7b-forget10", only=["gd", "gd_lora", "gd_sine", "gd_ul"])
    lines = {line.row: line for line in estimates(suite)}
    gd, lora, sine = (lines[label] for label in ("gd", "gd_lora", "gd_sine"))
    assert (gd.steps, gd.positions, gd.runs) == (62, 2 * 32 * 94, 3)
    assert gd.trained == 6_738_415_616 and sine.trained == lora.trained == 5_799_936
    assert gd.memory == pytest.approx(18 * gd.trained, rel=0.02), "states, and a little more"
    assert lora.memory == pytest.approx(2 * gd.trained, rel=0.15)
    assert sine.memory - lora.memory == pytest.approx(96 * 4096 * 11008 * 2), "micro-batches share"
    assert sine.memory / 1e9 == pytest.approx(24, abs=1), "on a card of 24 GB there is no room"
    assert sine.hours > gd.hours > lora.hours > gd.hours / 2, "mode: split, activations recomputed"
    weights = 6_738_415_616 - 32_000 * 4096  # every matrix but the embeddings
    floor = 4 * 2 * weights * gd.steps * gd.positions / (CARD.flops * CARD.used) / 3600
    assert floor < gd.hours < 1.5 * floor, "and an evaluation"
    assert lines["original"].steps == 625 and lines["retrain"].runs == 6
    assert total_hours([gd, lora]) == pytest.approx(3 * (gd.hours + lora.hours))
    monkeypatch.setattr(CARD, "flops", CARD.flops / 2)
    again = {line.row: line for line in estimates(suite)}
    assert again["gd"].hours > 1.8 * gd.hours


def test_epochs_of_both_sets_are_not_passes_over_the_small_one():
    """4,500 images are forgotten and 40,500 retained, in batches of 128."""
    rows = ["random_label", "lethevit", "coun", "boundary_shrink"]
    suite = load_suite("lethevit-cifar10", only=rows)
    lines = {line.row: line for line in estimates(suite)}
    assert lines["random_label"].steps == 3 * 352, "one shuffled pass over both"
    assert lines["random_label"].positions == lines["coun"].positions, "one batch a step"
    assert lines["lethevit"].steps == pytest.approx(2 * 36 + 8 * 317, rel=0.1)
    assert (lines["coun"].steps, lines["boundary_shrink"].steps) == (5 * 317, 10 * 36)


def test_evaluations_in_training_take_their_time():
    """Of 62 steps, 12 an epoch; the last step is followed by one in any case."""

    def hours(*settings):
        suite = load_suite("tofu-llama2-7b-forget10", [*settings], only=["gd"])
        return next(line.hours for line in estimates(suite) if line.row == "gd")

    plain = hours()
    one = hours("defaults.evaluate_every=62") - plain
    assert plain > one > 0
    assert hours("defaults.evaluate_every=50") - plain == pytest.approx(2 * one)
    assert hours("defaults.evaluate_epochs=1") - plain == pytest.approx(6 * one)


def test_fila_is_counted_with_the_pass_that_it_starts_from():
    """Its adapters are small, and its Fisher has as many entries as all linear layers."""
    rows = {label: 32 * 4 * (4 * 8192 + 3 * 15104) for label in ("loku", "ihl_lora")}
    suite = load_suite("tofu-llama2-7b-forget10", only=[*rows])
    loku, plain = (next(e for e in estimates(suite) if e.row == row) for row in rows)
    assert (loku.trained, plain.trained) == (rows["loku"], rows["ihl_lora"])
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)  # of the blocks
    pass_ = 2 * 6_738_415_616 + (2 + 4) * weights
    assert pass_ < loku.memory < 1.05 * pass_ and plain.memory < 17e9
    assert loku.read == 4 * weights, "of forget, while retain's is taken"


def test_disk_and_main_memory_by_hand(cli):
    """Every whole model stays, 13.5 GB of bfloat16; a published one is not stored again."""
    size = 2 * 6_738_415_616 / 1e9
    tofu = estimates(load_suite("tofu-llama2-7b-forget10"))
    whole = sum(line.runs for line in tofu if line.trained > 6e9)
    assert sum(line.stored * line.runs for line in tofu) / 1e9 == pytest.approx(whole * size, 0.01)
    assert whole == 57 and tofu[0].read / 1e9 == pytest.approx(size, 0.01)
    muse = {line.row: line.stored for line in estimates(load_suite("muse-news-llama2-7b"))}
    assert muse["original"] == muse["retrain"] == 0 < muse["gd"]
    shown = " ".join(cli("plan", "tofu-llama2-7b-forget10").out.split())
    assert "Stored weights: 771 GB in all" in shown and "Main memory: 25.9 GB" in shown
    assert "80.9 GB for the checkpoint" in shown, "weights and both moments, in float32"
    assert "On A100, 80 GB" in shown and "Derived from sizes, not measured" in shown
    assert "A100" not in cli("plan", "digits-class", "--only", "gd").out


def test_float32_is_slower_than_bfloat16(monkeypatch):
    """Trained in float32, scored in TF32."""
    suite = load_suite("tdec-gpt-neo-2.7b", ['defaults.mixed_precision="no"'], only=["gd"])
    high = {line.row: line.hours for line in estimates(suite)}
    monkeypatch.setattr(CARD, "float32", CARD.float32 / 2)
    low = {line.row: line.hours for line in estimates(suite)}
    assert low["gd"] > high["gd"] and low["original"] == high["original"]


def test_wmdp_by_hand():
    """Zephyr-7B: four passages of each corpus a step; RMU trains one projection of three blocks."""
    lines = {line.row: line for line in estimates(load_suite("wmdp-zephyr-7b"))}
    rmu, gd, sine = (lines[label] for label in ("rmu", "gd", "gd_sine"))
    assert (gd.steps, gd.positions, gd.trained) == (150, 2 * 4 * 512, 7_241_732_096)
    assert sine.trained == 32 * 16 * 3 * (4096 + 14336), "layers of a family read from its shapes"
    assert rmu.trained == 3 * 4096 * 14336 and lines["original"].memory == 0
    kept = 4096 * (4096 * (2 * 32 + 34) + 10 * 32_000)  # activations, recomputed, and logits
    assert rmu.memory == 2 * gd.trained + 18 * rmu.trained + kept
    assert gd.memory == 18 * gd.trained + kept
    whole = load_suite(
        "wmdp-zephyr-7b", ['methods.rmu.params.parameters=["*.mlp.*"]'], only=["rmu"]
    )
    (row,) = (line for line in estimates(whole) if line.row == "rmu")
    assert row.trained == 32 * 3 * 4096 * 14336, "a pattern of more than a whole name"
    passages = load_suite("wmdp-zephyr-7b", ["protocol.data.passages=null"])
    assert estimates(passages) == [], "how many passages there are, only the files say"


def test_trials_are_counted_and_small_models_are_not():
    lines = {line.row: line for line in estimates(load_suite("lethevit-cifar10"))}
    assert lines["gd_sine"].runs == 3 + 6 and lines["gd_sine_dropout"].runs == 3
    assert lines["gd_sine"].positions == 2 * 128 * 197 and lines["ssd"].steps is None
    assert lines["finetune"].steps == 10 * -(-40_500 // 128)
    assert estimates(load_suite("digits-class")) == []
    assert estimates(load_suite("tofu-small")) == []


def test_what_is_fetched_is_not_trained_and_folds_grow():
    suite = load_suite("muse-news-llama2-7b-scal", only=["gd_sine"])
    lines = {line.row: line for line in estimates(suite)}
    assert lines["original fold-1"].steps is None and lines["original fold-1"].memory == 0
    steps = [lines[f"gd_sine fold-{fold}"].steps for fold in (1, 2, 3, 4)]
    assert steps == [128, 255, 383, 510], "32 of 408 chunks a step, ten passes"
    whole = load_suite("muse-news-llama2-7b", only=["npo_gdr"])
    assert {line.row: line.steps for line in estimates(whole)}["npo_gdr"] == 1020, "as in MUSE"


def test_sets_to_extract_from_by_hand():
    """GPT-Neo 125M: a step on 32 texts of 200 tokens, EL10 from 190 prefixes of each."""
    suite = load_suite("tdec-gpt-neo-125m", only=["ga", "gd", "gd_sine"])
    lines = {line.row: line for line in estimates(suite)}
    ga, gd = lines["ga"], lines["gd"]
    assert (ga.steps, ga.positions, gd.positions) == (20, 32 * 200, 2 * 32 * 200)
    read = 4 * ga.trained / CARD.bandwidth  # of all weights, once per step of decoding
    decoding = 10 * -(-32 * 190 // 128) * read
    positions = 532 * 200 + 32 * 190 * 100  # every text once, and every prefix
    blocks = 12 * 12 * 768**2
    evaluation = decoding + positions * 2 * blocks / (CARD.tf32 * CARD.used)
    assert 21 * evaluation < 3600 * ga.hours < 2 * 21 * evaluation, "one per step, and the last"
    assert "GB" in coverage.state_of("tdec-gpt-neo-1.3b")


def test_linear_parameters_by_hand():
    assert linear_parameters({"a": (3, 2)}, bias=True) == 9
    assert linear_parameters({"a": (3, 2)}, bias=False) == 6


# Figures of training -----------------------------------------------------------------------------


def test_probed_rows_get_a_picture_of_norms(tiny_suite, tmp_path, cli):
    rows = {
        "original": None,
        "retrain": None,
        "gd_lora": {"params": {"steps": 4, "probe_every": 2, "log_every": 1}},
        "gd": {"params": {"steps": 4}},
    }
    path = tiny_suite(tmp_path, suite="probed", methods=rows)
    cli.ok("run", path, "--store", tmp_path / "store")
    folder = tmp_path / "store" / "suites" / "probed"
    probed = json.loads((folder / "dynamics.json").read_text())
    assert list(probed) == ["gd_lora"]
    assert set(probed["gd_lora"]["1"]["2"]) == set(PROBES), "frozen attention and head too"
    assert set(probed["gd_lora"]["1"]["3"]) == {"logits/mean", "logits/spread"}
    picture = ElementTree.fromstring((folder / "dynamics.svg").read_text())
    titles = [e.text for e in picture.iter() if e.tag.endswith("text")]
    assert {"gradient norm, head", "gradient norm, head (log)"} <= {*titles}

"""The performance runner: its counts, its statistics and its report.  Times are never asserted."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.language.data.corpus import Corpus, Encoded, Item
from stable_forgetting.language.data.tokenizers import train_tokenizer
from tools.perf import __main__ as cli
from tools.perf import (
    adapters,
    augmentation,
    bounded_layer,
    drafts,
    evaluation,
    grid,
    measure,
    svc_mia,
    vision_engine,
)
from tools.perf import counts as counting
from tools.perf.measure import Case, Check, Effort, Variant
from tools.perf.tofu_peer import COLLATORS, METRICS, load_peer

LOGS = Path(__file__).resolve().parents[3] / "shared" / "data"
NOTHING = Effort(seconds=0.0, min_rounds=2)


@pytest.fixture(scope="module")
def results() -> dict:
    return cli.experiment([*cli.BENCHMARKS], "tiny", NOTHING)


@pytest.fixture(scope="module")
def counts(results) -> dict[str, dict[str, dict[str, float]]]:
    return {
        result["name"]: {row["name"]: row["counts"] for row in result["variants"]}
        for result in results["cases"]
    }


@pytest.mark.slow
def test_answers_from_drafts_take_fewer_steps(counts):
    drafted, plain = (counts["tofu_decoding"][name] for name in (drafts.DRAFTED, drafts.PLAIN))
    assert drafted["decoded tokens"] < 0.5 * plain["decoded tokens"]


@pytest.mark.skipif(not (LOGS / "tofu_eval_logs").is_dir(), reason="no published logs here")
def test_what_drafts_leave_of_published_answers():
    """Where the end token is decoded, too, it is the 5.6 to 8.9 % that were counted before."""
    steps = drafts.published_steps(LOGS)
    known = [
        ("llama2-7b_full_wd0.01", "forget"),
        ("llama2-7b_full_wd0.01", "retain"),
        ("llama2-7b_retain90_wd0.01", "retain"),
    ]
    assert [round(steps[key].share, 1) for key in known] == [3.3, 4.4, 6.5]
    assert 85 < steps["llama2-7b_retain90_wd0.01", "forget"].share < 92
    ends = [100 * (steps[key].drafted + 300) / steps[key].plain for key in known]
    assert all(5.5 < share < 9.1 for share in ends)


def test_a_peer_is_a_checkout(tmp_path):
    with pytest.raises(ConfigError, match=r"--peer .* no src/evals/metrics/utils\.py"):
        load_peer(tmp_path, None, 32)


def test_a_peers_code_runs_on_the_same_rows(tmp_path):
    """A stand-in for that code, with its functions' names and what they take."""
    for path in (METRICS, COLLATORS):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / METRICS).write_text(PEERS_METRICS, encoding="utf-8")
    (tmp_path / COLLATORS).write_text(PEERS_COLLATOR, encoding="utf-8")
    tokenizer = train_tokenizer(Corpus((Item("forget", 0, "Who?", "Ada and Bo."),), ""), 270)
    peer = load_peer(tmp_path, tokenizer, batch=2)
    assert "data.utils" not in sys.modules and "omegaconf" not in sys.modules
    pairs = [Encoded(np.arange(3, 3 + size), 2) for size in (4, 6, 5)]
    assert peer.losses(None, pairs).tolist() == [2, 4, 3]
    assert peer.rouge(None, pairs, 7).tolist() == [7 + 2 + 4, 7 + 2 + 6, 7 + 2 + 5]


PEERS_METRICS = """
from omegaconf import OmegaConf
from data.utils import IGNORE_INDEX


def run_batchwise_evals(model, dataloader, batch_eval_fn, batch_eval_fn_args, eval_msg):
    print("noise")
    return {
        row["index"]: batch_eval_fn(model=model, row=row, **batch_eval_fn_args)
        for batch in dataloader
        for row in batch
    }


def evaluate_probability(model, row):
    return {"avg_loss": int((row["labels"] != IGNORE_INDEX).sum())}


def eval_text_similarity(model, row, tokenizer, generation_args):
    options = OmegaConf.to_container(generation_args, resolve=True)
    total = options["max_new_tokens"] + len(row["input_ids"]) + len(row["labels"])
    return {"rougeL_recall": total}
"""
PEERS_COLLATOR = """
from data.utils import IGNORE_INDEX


class DataCollatorForSupervisedDataset:
    def __init__(self, tokenizer, padding_side, index):
        assert tokenizer.pad_token_id == tokenizer.eos_token_id and index == "index"
        self.side = padding_side

    def __call__(self, rows):
        return rows
"""


def case(*variants: Variant, **fields) -> Case:
    return Case("case", "a case", variants, [(variants[0].name, variants[1].name)], **fields)


# Measuring ---------------------------------------------------------------------------------------


def test_variants_take_turns_and_the_order_turns_round(monkeypatch):
    monkeypatch.setattr(measure, "_repeats", lambda variant: 1)
    seen: list[str] = []
    both = [Variant(name, lambda name=name: seen.append(name)) for name in "abc"]
    result = measure.measure(case(*both), Effort(0.0, min_rounds=4))
    assert "".join(seen) == "abc" + "cba" + "abc" + "cba"
    assert result["rounds"] == 4
    assert all(len(row["cpu"]["samples"]) == 4 for row in result["variants"])


def test_rounds_come_in_pairs_so_that_no_variant_is_first_more_often():
    result = measure.measure(case(Variant("a", int), Variant("b", int)), Effort(0.0, min_rounds=3))
    assert result["rounds"] == 4


def test_times_are_per_unit(monkeypatch):
    monkeypatch.setattr(measure, "_sample", lambda run, repeats: (0.5, 1.5))
    result = measure.measure(case(Variant("a", int), Variant("b", int), per_run=10), NOTHING)
    assert result["variants"][0]["cpu"]["median"] == pytest.approx(50.0)
    assert result["variants"][0]["wall"]["min"] == pytest.approx(150.0)


def test_ratio_of_medians_minima_and_rounds():
    found = measure.ratio([2.0, 4.0, 9.0], [4.0, 4.0, 3.0])
    assert found["median"] == 1.0
    assert found["min"] == pytest.approx(2 / 3)
    assert (found["low"], found["high"]) == (0.75, 2.0)  # rounds: 0.5, 1, 3


def test_a_sample_is_long_against_the_clock(monkeypatch):
    walls = iter([1e-3, 1e-4])  # the first run warms up
    monkeypatch.setattr(measure, "_sample", lambda run, repeats: (0.0, next(walls)))
    assert measure._repeats(Variant("short", int)) == math.ceil(measure.SAMPLE_SECONDS / 1e-4)
    monkeypatch.setattr(measure, "_sample", lambda run, repeats: (0.0, 1.0))
    assert measure._repeats(Variant("long", int)) == 1


def test_measuring_leaves_the_process_as_it_was():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    noisy = Variant("noisy", lambda: torch.rand(3))
    measure.measure(case(noisy, Variant("b", lambda: random.Random(0).random())), NOTHING)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_pairs_must_name_variants():
    with pytest.raises(AssertionError, match="unknown"):
        Case("x", "x", [Variant("a", int), Variant("b", int)], [("a", "z")])


def test_a_check_that_is_nan_fails():
    assert not Check("nan", math.nan, 1.0).ok
    assert measure._as_json(Check("nan", math.nan, 1.0))["value"] is None


# Counting ----------------------------------------------------------------------------------------


def test_saved_bytes_are_unique_storages_beyond_the_known():
    x = torch.randn(8, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    assert counting.saved_bytes(lambda: x @ w, [x, w]) == 0
    assert counting.saved_bytes(lambda: x @ w) == 4 * (8 * 4 + 4 * 4)
    # x.sin() keeps x, twice: one storage; exp keeps its output
    assert counting.saved_bytes(lambda: x.sin() + x.cos(), []) == 4 * 8 * 4
    assert counting.saved_bytes(lambda: x.sin().exp(), [x]) == 4 * 8 * 4


def test_a_product_in_place_is_counted():
    x, w, out = torch.randn(8, 4), torch.randn(4, 6), torch.zeros(8, 6)
    assert counting.work(lambda: out.addmm_(x, w))["MFLOP"] == 2 * 8 * 4 * 6 / 1e6
    assert counting.work(lambda: out.mul_(2.0))["MFLOP"] == 0


def test_peak_is_the_most_that_is_held_at_once():
    def run():
        first = torch.ones(1000, 256)
        second = first + 1
        del first
        return second.sum()

    assert 2 * 1024000 <= counting.peak_bytes(run) < 2.1 * 1024000
    assert counting.peak_bytes(lambda: None) == 0


def test_work_of_a_product_and_its_gradients():
    x = torch.randn(8, 4, requires_grad=True)
    w = torch.randn(6, 4, requires_grad=True)
    assert counting.work(lambda: torch.mm(x, w.t())) == {
        "MFLOP": 2 * 8 * 4 * 6 / 1e6,
        "new MB": 4 * 8 * 6 / 1e6,
        "calls": 2,
    }
    upstream = torch.randn(8, 6)
    done = counting.work(lambda: torch.autograd.grad(F.linear(x, w), [x, w], upstream))
    assert done["MFLOP"] == 3 * 2 * 8 * 4 * 6 / 1e6


def test_in_place_work_and_views_make_nothing_new():
    x = torch.ones(5, 5)
    assert counting.work(lambda: x.view(25).mul_(1.0))["new MB"] == 0
    assert counting.work(lambda: x.t() + 1)["new MB"] == 4 * 25 / 1e6


def test_forwards_and_samples_are_counted_and_the_hook_goes():
    layer = nn.Linear(3, 2)
    with counting.counted(layer) as seen:
        layer(torch.ones(4, 3))
        layer(torch.ones(1, 3))
    layer(torch.ones(7, 3))
    assert (seen.calls, seen.samples) == (2, 5)


# What the benchmarks count -----------------------------------------------------------------------


@pytest.mark.slow
def test_layer_counts_follow_from_the_shapes(counts):
    size, r, k = adapters.SIZES["tiny"], 8, 4 * 16
    tokens, d = size.batch * size.tokens, size.dim
    unit = 2 * tokens * k * d / 1e6
    build, skinny = 2 * k * d * r / 1e6, 2 * tokens * r * (k + d) / 1e6
    found = counts["adapter_layer"]
    assert found[adapters.FROZEN]["MFLOP"] == pytest.approx(2 * unit)
    assert found[adapters.PEFT]["MFLOP"] == pytest.approx(2 * unit + 3 * skinny)
    assert found[adapters.NAIVE]["MFLOP"] == pytest.approx(5 * unit + 3 * build)
    # a kernel may rebuild A Bt in the backward pass instead of keeping it
    ours = found[adapters.OURS_SINE]["MFLOP"]
    assert 3 * unit + 3 * build <= ours + 1e-9 <= 3 * unit + 5 * build
    assert found[adapters.OURS_LORA]["MFLOP"] == pytest.approx(found[adapters.PEFT]["MFLOP"])


@pytest.mark.slow
def test_the_bounded_layer_keeps_no_more_than_the_naive_one(counts):
    size = adapters.SIZES["tiny"]
    tokens = size.batch * size.tokens
    found = counts["adapter_layer"]
    assert found[adapters.FROZEN]["saved MB"] == 0
    assert found[adapters.PEFT]["saved MB"] == pytest.approx(4 * tokens * 8 / 1e6)
    assert found[adapters.NAIVE]["saved MB"] == pytest.approx(2 * 4 * 64 * 16 / 1e6)
    assert found[adapters.OURS_SINE]["saved MB"] <= found[adapters.NAIVE]["saved MB"]
    assert found[adapters.OURS_LORA]["saved MB"] <= found[adapters.PEFT]["saved MB"]
    step = counts["adapter_step"]
    assert step[adapters.OURS_SINE]["saved MB"] <= step[adapters.NAIVE]["saved MB"]


@pytest.mark.slow
def test_units_of_the_bounded_kernel(counts):
    (shape,), tokens = bounded_layer.LAYERS["tiny"], bounded_layer.FORWARD_TOKENS
    found = counts[f"bounded_{shape.name}_{tokens}"]
    unit, build = (2 * many * shape.k * shape.d / 1e6 for many in (tokens, 8))
    assert found[bounded_layer.FROZEN]["MFLOP"] == pytest.approx(2 * unit)
    assert found[bounded_layer.NAIVE]["MFLOP"] == pytest.approx(5 * unit + 3 * build)
    assert found[bounded_layer.MERGED]["MFLOP"] == pytest.approx(3 * unit + 3 * build)
    # A Bt is built once more in the backward pass
    assert found[bounded_layer.OURS_SINE]["MFLOP"] == pytest.approx(3 * unit + 4 * build)


@pytest.mark.slow
def test_the_bounded_kernel_keeps_nothing_and_peaks_below_lora(counts):
    (shape,), tokens = bounded_layer.LAYERS["tiny"], bounded_layer.FORWARD_TOKENS
    found = counts[f"bounded_{shape.name}_{tokens}"]
    assert found[bounded_layer.OURS_SINE]["saved MB"] == 0
    assert found[bounded_layer.MERGED]["saved MB"] == 2 * 4 * shape.k * shape.d / 1e6
    assert found[bounded_layer.OURS_SINE]["peak MB"] <= found[bounded_layer.PEFT]["peak MB"]
    for name in ("vit_mlp", "gpt_neo_mlp", "gpt_neo_all"):
        saved = {key: row["saved MB"] for key, row in counts[f"bounded_step_{name}"].items()}
        assert saved[bounded_layer.OURS_SINE] <= saved[bounded_layer.PEFT]
        assert saved[bounded_layer.PEFT] < saved[bounded_layer.NAIVE]


@pytest.mark.slow
def test_few_tokens_have_no_forward_case(counts):
    forward = [name for name in counts if name.endswith("_forward")]
    (shape,) = bounded_layer.LAYERS["tiny"]
    assert forward == [f"bounded_{shape.name}_{bounded_layer.FORWARD_TOKENS}_forward"]
    assert min(shape.tokens) < bounded_layer.FORWARD_TOKENS


@pytest.mark.slow
def test_forget_and_retain_share_one_forward(counts):
    found = counts["difference_digits"]
    one, two = found["ours, one forward"], found["two forwards"]
    assert (one["forwards"], two["forwards"]) == (1, 2)
    assert one["calls"] < two["calls"]
    assert one["MFLOP"] < two["MFLOP"]  # the bounded weights are built once


@pytest.mark.slow
def test_the_engine_makes_one_forward_per_step(counts):
    for name in ("engine_loop", "engine_loop_sine"):
        found = counts[name]
        assert {row["forwards/step"] for row in found.values()} == {1.0}
        assert found[vision_engine.BARE]["calls/step"] < found[vision_engine.QUIET]["calls/step"]


def test_logging_more_often_asks_for_more():
    size = vision_engine.LoopSize(vision_engine.TINY, 20, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vision_engine.LOOP_SIZES, "tiny", size)
        calls = {
            case.name: {v.name: v.counts["calls/step"] for v in case.variants}
            for case in vision_engine.loop("tiny")
        }
    for found in calls.values():
        assert found[vision_engine.ENGINE] > found[vision_engine.QUIET]


@pytest.mark.slow
def test_evaluation_runs_every_sample_once(counts):
    parts = evaluation.EVALUATION_SIZES["tiny"].parts
    total = sum(parts.values())
    found = counts["evaluation"]
    assert found["ours, one pass"]["samples"] == total
    again = 2 * parts["test"] + parts["forget"]
    assert found["a pass per metric"]["samples"] == total + again


@pytest.mark.slow
def test_small_attacks_are_left_to_libsvm(counts):
    found = counts["svc_mia"]
    fitted = 5 * 2 * svc_mia.SIZES["tiny"][0]
    assert found[svc_mia.PLAIN]["samples to libsvm"] == fitted
    assert 0 < found[svc_mia.OURS]["samples to libsvm"] < fitted  # distinct ones


def test_large_attacks_leave_only_correctness_to_libsvm(monkeypatch):
    monkeypatch.setitem(svc_mia.SIZES, "tiny", (400, 50))
    (case,) = svc_mia.attacks("tiny")
    assert {v.name: v.counts["samples to libsvm"] for v in case.variants}[svc_mia.OURS] <= 4
    assert all(check.ok for check in case.checks)


@pytest.mark.slow
def test_a_batch_is_augmented_without_a_loop(counts):
    found = counts["augmentation"]
    assert found[augmentation.BATCHED]["calls"] < found[augmentation.TENSOR_LOOP]["calls"]
    larger = next(iter(_augmented(8))).counts["calls"]
    assert larger == found[augmentation.BATCHED]["calls"]  # does not grow with the batch


def _augmented(count: int) -> list[Variant]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(augmentation.AUGMENT_SIZES, "tiny", (count, 48))
        return list(next(augmentation.augmentation("tiny")).variants)


@pytest.mark.slow
def test_counts_repeat(counts):
    def again(make):
        return {case.name: {v.name: dict(v.counts) for v in case.variants} for case in make("tiny")}

    for make in (adapters.layer, augmentation.augmentation, vision_engine.loop):
        for name, found in again(make).items():
            assert found == counts[name]


def test_goals_are_reported_met_or_missed(monkeypatch):
    pair = ("a", "b")
    with pytest.raises(AssertionError, match="not measured"):
        case(Variant("a", int), Variant("b", int), goals={("b", "a"): 1.0})
    monkeypatch.setattr(measure, "_sample", lambda run, repeats: (0.5, 1.5))
    for limit, told in ((1.5, "≤ 1.5 met"), (0.75, "≤ 0.75 MISSED +0.25")):
        result = measure.measure(
            case(Variant("a", int), Variant("b", int), goals={pair: limit}), NOTHING
        )
        assert result["pairs"][0]["goal"] == limit
        pairs = cli.pair_table([result])
        assert dict(zip(pairs.heads, pairs.rows[0], strict=True))["goal"] == told
    plain = measure.measure(case(Variant("a", int), Variant("b", int)), NOTHING)
    assert cli.pair_table([plain]).rows[0][-1] == ""


@pytest.mark.slow
def test_the_goals_stand_beside_steps_and_forwards(results):
    limits = {
        (result["name"], pair["peer"]): pair["goal"]
        for result in results["cases"]
        for pair in result["pairs"]
        if pair["goal"] is not None
    }
    for name in ("vit_mlp", "gpt_neo_mlp", "gpt_neo_all"):
        assert limits[f"bounded_step_{name}", bounded_layer.NAIVE] == 0.75
        assert limits[f"bounded_step_{name}", bounded_layer.PEFT] == 1.25
    assert limits["bounded_tiny_fc1_1576_forward", bounded_layer.PEFT] == 1.05
    assert limits["svc_mia", svc_mia.PLAIN] == 0.1
    assert len(limits) == 8


def test_steady_cases_are_measured_steadily_and_said_so(monkeypatch):
    asked = []
    monkeypatch.setattr(measure, "steady_allocator", lambda: asked.append(1) or True)
    usual = case(Variant("a", int), Variant("b", int))
    kept = case(Variant("a", int), Variant("b", int), steady=True)
    monkeypatch.setattr(cli, "cases", lambda *_: iter([usual, kept]))
    found = cli.experiment([], "quick", NOTHING)
    assert [result["steady_allocator"] for result in found["cases"]] == [False, True]
    assert len(asked) == 1
    assert "2 rounds; steady allocator." in markdown.write(cli.sections(found))


# The report --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_variants_do_the_same_job(results):
    assert cli.failed(results) == []
    assert all(result["checks"] for result in results["cases"])


@pytest.mark.slow
def test_results_are_strict_json_and_name_the_machine(results, tmp_path):
    paths = cli.write(results, tmp_path / "perf")
    assert [path.name for path in paths] == ["perf.json", "perf.md"]

    def refuse(text: str):
        raise AssertionError(f"{text} is not JSON")

    read = json.loads(paths[0].read_text(), parse_constant=refuse)
    assert read == results
    assert read["machine"]["threads"] == 1
    assert read["environment"]["packages"]["torch"]


@pytest.mark.slow
def test_markdown_has_every_pair_and_count_in_whole_tables(results):
    text = markdown.write(cli.sections(results))
    for result in results["cases"]:
        assert f"## {result['name']}\n" in text
        for pair in result["pairs"]:
            assert f"| {result['name']} | {pair['ours']} / {pair['peer']} |" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 1 + len(results["cases"])
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_command_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(adapters.SIZES, "quick", adapters.SIZES["tiny"])
    monkeypatch.setitem(svc_mia.SIZES, "quick", svc_mia.SIZES["tiny"])
    out: Path = tmp_path / "out"
    args = ["--quick", "--only", "svc_mia", "--only", "adapter_layer", "--seconds", "0"]
    done = CliRunner().invoke(_app(), [*args, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "ours / peer" in done.stdout
    names = [case["name"] for case in json.loads((out / "perf.json").read_text())["cases"]]
    assert names == ["svc_mia", "adapter_layer"]
    assert (out / "perf.md").read_text().startswith("# Performance")


def test_a_failed_check_is_an_error_but_everything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(svc_mia.SIZES, "quick", svc_mia.SIZES["tiny"])
    monkeypatch.setattr(svc_mia, "POINTS", -1.0)
    args = ["--quick", "--only", "svc_mia", "--seconds", "0", "--out", str(tmp_path)]
    done = CliRunner().invoke(_app(), args)
    assert done.exit_code == 1
    assert "error: not the same job: svc_mia: same efficacy" in done.output
    assert "- FAILED: same efficacy" in (tmp_path / "perf.md").read_text()


def test_an_unknown_benchmark_is_one_clear_line(tmp_path):
    done = CliRunner().invoke(_app(), ["--only", "svc_mya", "--out", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "did you mean 'svc_mia'?" in done.output
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError):
        list(cli.cases(["nothing"], "tiny"))


def _app():
    import typer

    app = typer.Typer()
    app.command()(cli.main)
    return app


# How cost grows ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_row_more_costs_its_own_stages_and_a_finished_suite_none(tiny_suite, tmp_path):
    rows = {"original": None, "retrain": None, "finetune": {"params": {"epochs": 1}}}
    suite = tiny_suite(tmp_path, methods=rows)
    results = list(grid.costs(str(suite), ["finetune"], [], [], tmp_path))
    stages = [cost.stages for cost in results]
    row = {"unlearn": 1, "score": 1, "measure": 1}
    assert stages == [
        {"split": 1, "original": 1, "retrain": 1, "score": 2, "measure": 2},
        row,
        {},
    ]
    assert results[0].inside > 0 == results[2].inside and results[0].cpu > results[2].cpu
    text = markdown.write([grid.section("tiny", results)])
    assert "| finetune | 1 | 3 (measure 1, score 1, unlearn 1) |" in text
    assert "| finetune | 1 | 0 | 0.0 |" in text

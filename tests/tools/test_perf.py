"""The performance runner: its counts, its statistics and its report.  Times are never asserted."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools.perf import __main__ as cli
from tools.perf import engine, layers, scores, timing, tofu
from tools.perf.timing import Case


@pytest.fixture(scope="module")
def results() -> dict:
    threads = torch.get_num_threads()
    try:
        return cli.experiment([*cli.BENCHMARKS], quick=True, seconds=0.0)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def counts(results) -> dict[str, dict[str, dict[str, float]]]:
    return {
        result["name"]: {name: row["counts"] for name, row in result["variants"].items()}
        for result in results["cases"]
    }


def case(**fields) -> Case:
    given = {"name": "case", "title": "a case", "runs": {"a": int, "b": int}}
    return Case(**{**given, "pairs": [("a", "b")], "checks": {}, **fields})


# Measuring ---------------------------------------------------------------------------------------


def test_variants_take_turns_and_the_order_turns_round():
    seen: list[str] = []
    runs = {name: lambda name=name: seen.append(name) for name in "abc"}
    clock = iter(range(10**9))
    times = timing.interleaved(runs, 0.0, least=4, timer=lambda: float(next(clock)))
    turns = "".join(name for at, name in enumerate(seen) if at == 0 or seen[at - 1] != name)
    assert turns.endswith("abcbabcba") and all(len(values) == 4 for values in times.values())


def test_measuring_leaves_the_process_as_it_was():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    timing.measure(case(runs={"a": lambda: torch.rand(3), "b": int}), 0.0)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_ratio_of_medians_and_of_rounds():
    found = timing.ratio([2.0, 4.0, 9.0], [4.0, 4.0, 3.0])
    assert found == {"median": 1.0, "low": 0.75, "high": 2.0}  # rounds: 0.5, 1, 3


def test_times_are_per_unit_and_goals_met_or_missed(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", lambda *_: {"a": [0.5], "b": [0.5]})
    for limit, text in ((1.5, "≤ 1.5 met"), (0.75, "≤ 0.75 MISSED +0.25")):
        result = timing.measure(case(per_run=10, goals={("a", "b"): limit}), 0.0)
        assert result["variants"]["a"]["ms"] == pytest.approx(50.0)
        assert cli.pair_table([result]).rows[0][-1] == text
    assert cli.pair_table([timing.measure(case(), 0.0)]).rows[0][-1] == ""


def test_a_check_that_is_nan_fails():
    (check,) = timing.measure(case(checks={"nan": (math.nan, 1.0)}), 0.0)["checks"]
    assert not check["ok"] and check["value"] is None


# Counting ----------------------------------------------------------------------------------------


def test_saved_bytes_are_unique_storages_beyond_the_known():
    x = torch.randn(8, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    assert timing.saved_mb(lambda: x @ w, [x, w]) == 0
    assert timing.saved_mb(lambda: x @ w) == 4 * (8 * 4 + 4 * 4) / 1e6
    # x.sin() keeps x, twice: one storage; exp keeps its output
    assert timing.saved_mb(lambda: x.sin() + x.cos()) == 4 * 8 * 4 / 1e6
    assert timing.saved_mb(lambda: x.sin().exp(), [x]) == 4 * 8 * 4 / 1e6


def test_products_their_gradients_and_those_in_place_are_counted():
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    product, upstream, out = 2 * 8 * 4 * 6 / 1e6, torch.randn(8, 6), torch.zeros(8, 6)
    assert timing.mflop(lambda: torch.mm(x, w.t())) == product
    gradients = timing.mflop(lambda: torch.autograd.grad(F.linear(x, w), [x, w], upstream))
    assert gradients == pytest.approx(3 * product)
    assert timing.mflop(lambda: out.addmm_(x.detach(), w.detach().t())) == product
    assert timing.mflop(lambda: out.mul_(2.0)) == 0


def test_peak_is_the_most_that_is_held_at_once():
    def run():
        first = torch.ones(1000, 256)
        second = first + 1
        del first
        return second.sum()

    assert 2 * 1.024 <= timing.peak_mb(run) < 2.1 * 1.024
    assert timing.peak_mb(lambda: None) == 0


def test_forwards_and_samples_are_counted_and_the_hook_goes():
    layer = nn.Linear(3, 2)
    with timing.forwards_of(layer) as sizes:
        layer(torch.ones(4, 3))
        layer(torch.ones(1, 3))
    layer(torch.ones(7, 3))
    assert sizes == [4, 1]


# What the benchmarks count -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "k", "d", "tokens"),
    [("adapter_layer", 64, 16, 40), ("bounded_quick_fc1_1576", 96, 24, 1576)],
)
def test_layer_counts_follow_from_the_shapes(counts, name, k, d, tokens):
    r, found = 8, counts[name]
    unit, build = 2 * tokens * k * d / 1e6, 2 * k * d * r / 1e6
    skinny = 2 * tokens * r * (k + d) / 1e6
    products = {
        layers.FROZEN: 2 * unit,
        layers.PEFT: 2 * unit + 3 * skinny,
        layers.OURS_LORA: 2 * unit + 3 * skinny,
        layers.NAIVE: 5 * unit + 3 * build,
        layers.MERGED: 3 * unit + 3 * build,
        layers.OURS_SINE: 3 * unit + 4 * build,  # A Bt is built once more in the backward pass
    }
    assert {key: row["MFLOP"] for key, row in found.items()} == pytest.approx(products)
    saved = {key: row["saved MB"] for key, row in found.items()}
    assert saved[layers.FROZEN] == saved[layers.OURS_SINE] == 0
    assert saved[layers.PEFT] == pytest.approx(4 * tokens * r / 1e6)
    assert saved[layers.NAIVE] == saved[layers.MERGED] == 2 * 4 * k * d / 1e6
    assert saved[layers.OURS_LORA] <= saved[layers.PEFT]


@pytest.mark.slow
def test_the_bounded_kernel_peaks_below_lora(counts):
    found = counts["bounded_quick_fc1_1576"]
    assert found[layers.OURS_SINE]["peak MB"] <= found[layers.PEFT]["peak MB"]
    for name in ("vit_mlp", "gpt_neo_mlp", "gpt_neo_all"):
        saved = {key: row["saved MB"] for key, row in counts[f"bounded_step_{name}"].items()}
        assert saved[layers.OURS_SINE] <= saved[layers.PEFT] < saved[layers.NAIVE]


@pytest.mark.slow
def test_few_tokens_have_no_forward_case(counts):
    assert [name for name in counts if name.endswith("_forward")] == [
        "bounded_quick_fc1_1576_forward"
    ]


@pytest.mark.slow
def test_forget_and_retain_share_one_forward(counts):
    one, two = (counts["difference_digits"][name] for name in (engine.ONE, engine.TWO))
    assert (one["forwards"], two["forwards"]) == (1, 2)
    assert one["MFLOP"] < two["MFLOP"]  # the bounded weights are built once


@pytest.mark.slow
def test_the_engine_makes_one_forward_per_step(counts):
    found = {**counts["engine_loop"], **counts["engine_loop_sine"]}
    assert {row["forwards/step"] for row in found.values()} == {1.0}


@pytest.mark.slow
def test_evaluation_runs_every_sample_once(counts):
    found = {name: row["samples"] for name, row in counts["evaluation"].items()}
    assert found == {scores.ONE: 1200, scores.EACH: 1200 + 2 * 200 + 90}


@pytest.mark.slow
def test_small_attacks_are_left_to_libsvm(counts):
    found = {name: row["samples to libsvm"] for name, row in counts["svc_mia"].items()}
    assert found[scores.PLAIN] == 5 * 2 * 60 and 0 < found[scores.OURS] < 600  # distinct ones


@pytest.mark.slow
def test_answers_from_drafts_take_fewer_steps(counts):
    drafted, plain = (counts["tofu_decoding"][name] for name in (tofu.DRAFTED, tofu.PLAIN))
    assert drafted["decode slots"] < 0.5 * plain["decode slots"]


@pytest.mark.slow
def test_the_tofu_evaluation_asks_for_less_than_a_pass_per_metric(counts):
    job, found = tofu.QUICK_COUNTED, counts["tofu_evaluation"]
    mine, theirs = found[tofu.OURS], found[tofu.NAIVE]
    assert (theirs["forwards"], theirs["tokeniser calls"]) == _naive(job)
    assert theirs["decode steps"] == _answered(job) * job.new_tokens
    answers = sum(rows for part, rows in job.parts.items() if part != "holdout")
    assert mine["decode steps"] <= -(-answers // 128) * job.new_tokens


PASSES = {"forget": 9, "retain": 7, "test_real_authors": 4, "test_world_facts": 4, "holdout": 1}


def _naive(job) -> tuple[int, int]:
    """Forwards of a pass per metric, and calls of the tokenizer."""
    batches = {part: -(-rows // tofu.BATCH) for part, rows in job.parts.items()}
    samples = sum(rows * (PASSES[p] + (p != "holdout")) for p, rows in job.parts.items())
    return sum(PASSES[part] * count for part, count in batches.items()), 2 * samples


def _answered(job) -> int:
    return sum(-(-rows // tofu.BATCH) for part, rows in job.parts.items() if part != "holdout")


def test_counts_of_the_naive_way_at_forget10s_size_are_the_published_ones():
    assert _naive(tofu.COUNTED) == (253, 2 * 8685) and 200 * _answered(tofu.COUNTED) == 6800


# The report --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_variants_do_the_same_job_and_every_pair_is_in_the_report(results):
    checks = [check for result in results["cases"] for check in result["checks"]]
    assert all(result["checks"] for result in results["cases"])
    assert [check["name"] for check in checks if not check["ok"]] == []
    text = cli.markdown.write(cli.sections(results))
    for result in results["cases"]:
        assert f"## {result['name']}\n" in text
        for pair in result["pairs"]:
            assert f"| {result['name']} | {pair['ours']} / {pair['peer']} |" in text
    limits = [p["goal"] for result in results["cases"] for p in result["pairs"] if p["goal"]]
    assert sorted(limits) == [0.1, *[0.75] * 4, *[1.05] * 3, *[1.25] * 4]


def test_the_command_writes_what_it_measured_and_fails_where_the_jobs_differ(tmp_path, monkeypatch):
    args = ["--quick", "--only", "svc_mia", "--only", "adapter_layer", "--out", str(tmp_path)]
    assert cli.main(args) == 0
    read = json.loads((tmp_path / "perf.json").read_text(), parse_constant=lambda _: 1 / 0)
    assert [each["name"] for each in read["cases"]] == ["svc_mia", "adapter_layer"]
    assert read["environment"]["packages"]["torch"]
    wrong = case(checks={"same": (2.0, 1.0)})
    monkeypatch.setitem(cli.BENCHMARKS, "svc_mia", lambda quick: [wrong])
    assert cli.main(["--quick", "--only", "svc_mia", "--out", str(tmp_path)]) == 1
    assert "- FAILED: same: 2 (at most 1)" in (tmp_path / "perf.md").read_text()


def test_an_unknown_benchmark_is_one_clear_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--only", "svc_mya", "--out", str(tmp_path / "none")])
    assert stop.value.code == 2 and "svc_mia" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# Beside open-unlearning ---------------------------------------------------------------------------

STAND_IN = {
    "data/__init__.py": "raise ImportError('training')",
    "evals/__init__.py": "raise ImportError('training')",
    "evals/metrics/__init__.py": "raise ImportError('training')",
    "data/qa.py": """
from data import get_datasets
def load_hf_dataset(rows): raise OSError('no hub')
class QADataset:
    def __init__(self, hf_args, template_args, tokenizer, answer_key, predict_with_generate):
        self.values = [row[answer_key] for row in load_hf_dataset(**hf_args)]
""",
    "data/collators.py": """
class DataCollatorForSupervisedDataset:
    def __init__(self, tokenizer, padding_side, index): assert tokenizer.pad_token
""",
    "evals/metrics/memorization.py": """
from omegaconf import OmegaConf
class Metric:
    def __init__(self, key): self.key = key
    def _metric_fn(self, model, data, batch_size, collators, **more):
        shape = lambda value: [9.0] * len(value) if isinstance(value, list) else 9.0
        values = {n: {self.key: shape(value)} for n, value in enumerate(data.values)}
        return {'value_by_index': values}
probability, rouge, extraction_strength = map(Metric, ('avg_loss', 'rougeL_recall', 'score'))
""",
    "evals/metrics/mia/min_k.py": """
class MinKProbAttack:
    def __init__(self, model, data, collator, batch_size, k): self.count = len(data.values)
    def attack(self): return {'value_by_index': {n: {'score': 9.0} for n in range(self.count)}}
""",
}


def test_open_unlearning_is_asked_by_its_folder_and_compared(tmp_path, capsys):
    """A stand-in that says 9 to everything is called another job."""
    for name, text in STAND_IN.items():
        path = tmp_path / "peer" / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    args = ["--quick", "--only", "tofu_peer", "--out", str(tmp_path / "out")]
    assert cli.main([*args, "--peer", str(tmp_path / "peer")]) == 1
    error = capsys.readouterr().err
    for column in ("answer_loss", "perturbed_loss", "rouge_l_recall", "min_k"):
        assert f"tofu_peer_random: same {column}" in error
    read = json.loads((tmp_path / "out" / "perf.json").read_text())
    assert [each["name"] for each in read["cases"]] == ["tofu_peer_recites", "tofu_peer_random"]
    assert all(pair["goal"] == 0.25 for each in read["cases"] for pair in each["pairs"])
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2 and "go together" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*args, "--peer", str(tmp_path)])
    assert "no checkout of open-unlearning" in capsys.readouterr().err


MUSE_STAND_IN = {
    "metrics/logger.py": "",
    "metrics/verbmem.py": """
def eval(model, tokenizer, prompts, gts): return {}, [{'rougeL': 9.0} for _ in gts]
""",
    "metrics/knowmem.py": """
def eval(model, tokenizer, questions, answers, icl_qs, icl_as):
    assert len(icl_qs) == 10
    return {}, [{'rougeL': 9.0} for _ in answers]
""",
    "metrics/privleak.py": """
def eval_data(data, model, tokenizer): return [{'Min-40%': 9.0} for _ in data]
""",
}


def test_muse_bench_is_asked_by_its_folder_and_compared(tmp_path, capsys):
    for name, text in MUSE_STAND_IN.items():
        path = tmp_path / "peer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    args = ["--quick", "--only", "muse_peer", "--out", str(tmp_path / "out"), "--peer"]
    assert cli.main([*args, str(tmp_path / "peer")]) == 1
    error = capsys.readouterr().err
    assert "same ROUGE-L" in error and "same Min-40 %" in error
    (case,) = json.loads((tmp_path / "out" / "perf.json").read_text())["cases"]
    assert [pair["goal"] for pair in case["pairs"]] == [0.8]
    with pytest.raises(SystemExit):
        cli.main([*args, str(tmp_path)])
    assert "give a checkout of muse_bench" in capsys.readouterr().err

"""The performance runner: its counts, its statistics and its report.  Times are never asserted."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from stable_forgetting.benchmarks.report.files import write_files
from tools.perf import __main__ as cli
from tools.perf import attacks, layers, timing
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


# What the benchmarks count -----------------------------------------------------------------------


def test_the_exact_layer_costs_three_products_and_peaks_no_higher_than_lora():
    k, d, tokens, r = 96, 24, 1576, 8
    names = (layers.FROZEN, layers.PEFT, layers.MERGED, layers.OURS_SINE)
    models = layers.variants_of(layers.linear(d, k), layers.ONE, names)
    x, upstream = torch.randn(tokens, d, requires_grad=True), torch.randn(tokens, k)
    runs = layers.layer_runs(models, x, upstream)
    unit, build = 2 * tokens * k * d / 1e6, 2 * k * d * r / 1e6
    products = {
        layers.FROZEN: 2 * unit,
        layers.PEFT: 2 * unit + 3 * 2 * tokens * r * (k + d) / 1e6,
        layers.MERGED: 3 * unit + 3 * build,
        layers.OURS_SINE: 3 * unit + 4 * build,  # A Bt is built once more in the backward pass
    }
    assert {name: timing.mflop(run) for name, run in runs.items()} == pytest.approx(products)
    made = [models[name](x) for name in (layers.MERGED, layers.OURS_SINE)]
    torch.testing.assert_close(*made)
    peaks = {name: timing.peak_mb(run) for name, run in runs.items()}
    assert peaks[layers.OURS_SINE] <= peaks[layers.PEFT]


@pytest.mark.slow
def test_small_attacks_are_left_to_libsvm(counts):
    found = {name: row["samples to libsvm"] for name, row in counts["svc_mia"].items()}
    assert found[attacks.PLAIN] == 5 * 2 * 60 and 0 < found[attacks.OURS] < 600  # distinct ones


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
    assert sorted(limits) == [0.1, *[1.05] * 2]


def test_the_command_writes_what_it_measured_and_fails_where_the_jobs_differ(tmp_path, monkeypatch):
    args = ["--quick", "--only", "svc_mia", "--only", "adapter_wide", "--out", str(tmp_path)]
    assert cli.main(args) == 0
    read = json.loads((tmp_path / "perf.json").read_text(), parse_constant=lambda _: 1 / 0)
    assert [each["name"] for each in read["cases"]] == [
        "svc_mia",
        "wide_layer_4_r2",
        "wide_step_4_r2",
    ]
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
    write_files(tmp_path / "peer" / "src", STAND_IN)
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
    write_files(tmp_path / "peer", MUSE_STAND_IN)
    args = ["--quick", "--only", "muse_peer", "--out", str(tmp_path / "out"), "--peer"]
    assert cli.main([*args, str(tmp_path / "peer")]) == 1
    error = capsys.readouterr().err
    assert "same ROUGE-L" in error and "same Min-40 %" in error
    (case,) = json.loads((tmp_path / "out" / "perf.json").read_text())["cases"]
    assert [pair["goal"] for pair in case["pairs"]] == [0.8]
    with pytest.raises(SystemExit):
        cli.main([*args, str(tmp_path)])
    assert "give a checkout of muse_bench" in capsys.readouterr().err

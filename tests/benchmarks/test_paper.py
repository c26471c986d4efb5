"""Printed numbers of the paper that do not follow: the shipped list, and the rules that find it."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from scipy.stats import ks_2samp

from stable_forgetting.benchmarks.paper.report import FINDINGS, HEADS, read_findings
from stable_forgetting.benchmarks.report.files import csv_text
from tests.test_findings import README, prose
from tools.paper import OURS, UNCHANGED, exact_p, nearest_on_grid
from tools.paper import findings as found


@pytest.fixture(scope="module")
def findings():
    return [SimpleNamespace(**finding) for finding in read_findings()]


def test_the_shipped_list_is_what_the_rules_find():
    """To mend: python -m tools.paper > benchmarks/results/paper/findings.csv"""
    assert csv_text(found()) == FINDINGS.read_text("utf-8")


@pytest.mark.parametrize(("n", "m"), [(9, 14), (12, 12), (40, 300)])
def test_the_grid_is_that_of_shifted_samples(n, m):
    first = [float(k) for k in range(n)]
    for shift in (4.5, 20.5):
        result = ks_2samp(first, [k * n / m + shift for k in range(m)], method="exact")
        steps = round(result.statistic * math.lcm(n, m))
        assert exact_p(steps, n, m) == pytest.approx(result.pvalue, rel=1e-9)


def test_tiny_values_keep_their_digits():
    assert exact_p(106, 300, 300) == pytest.approx(5.10e-17, rel=1e-3), "Phi, full against retain90"
    assert nearest_on_grid(5.10e-17, (300, 300)) == exact_p(106, 300, 300)


def test_forget_qualities_off_the_grid(findings):
    """All 27 baselines of LLaMA-2's tables at ranks 8, 16 and 32, and 18 of Phi's at rank 8."""
    off = Counter(
        f.table.partition("/")[0]
        for f in findings
        if f.metric == "forget_quality"
        and "KS p-value" in f.rule
        and f.row not in (*UNCHANGED, OURS)
    )
    assert sum(off[f"tab:tofu_llama2_rank{rank}"] for rank in (8, 16, 32)) == 81
    assert off["tab:tofu_phi_rank4"] <= 2 and off["tab:tofu_phi_rank8"] == 18


def test_shares_are_counted(findings):
    shares = {(f.table, f.row): f for f in findings if f.metric == "params_percent"}
    assert shares["tab:tofu_results", OURS].recomputed == "0.138 on mlp"
    assert ("tab:tdec_evaluation/GPT-Neo-125M", "LoKU (LoRA)") not in shares, "1.6 follows"
    assert ("tab:tdec_evaluation/GPT-Neo-125M", OURS) in shares, "on MLPs alone it is 1.16"
    assert not any(table.startswith("tab:vit") for table, _ in shares)


def test_claims_and_repetitions(findings):
    best = {(f.table, f.metric): f.recomputed for f in findings if f.rule.startswith("the text")}
    assert best["tab:tdec_evaluation/GPT-Neo-2.7B", "EL10"] == "0.0 (IHL (LoRA))"
    assert any(f.metric == "all" and "8, 16, 32" in f.printed for f in findings)
    own = [f for f in findings if f.rule == "the retrained model is compared with itself"]
    assert {f.table.partition("/")[0] for f in own} == {
        "tab:llama31_scalability_formatted",
        "tab:llama70b_scalability_formatted",
    }


def test_a_run_that_is_printed_in_two_tables(findings):
    twice = {(f.table, f.row): f for f in findings if f.rule.startswith("the same run")}
    reasoning = twice["tab:bounded_unbounded_comparison/TDEC", OURS]
    assert (reasoning.printed, reasoning.recomputed) == ("52.1", "50.1")
    assert twice["tab:ihl_gd_ablation", OURS].printed == "0.722"
    assert not any("rank8" in table for table, _ in twice), "another rank is another run"


def test_the_command_writes_text_csv_and_json(cli, findings):
    lines = list(csv.DictReader(cli("verify", "paper", "--format", "csv").out.splitlines()))
    assert tuple(lines[0]) == HEADS and len(lines) == len(findings)
    assert json.loads(cli("verify", "paper", "--format", "json").out)[0] == lines[0]
    shown = cli("verify", "paper")
    counts = re.search(r"([\d,]+) findings in ([\d,]+) numbers", shown.out).groups()
    for document in (README, "docs/findings.md"):
        assert "{} of {} printed numbers contradict".format(*counts) in prose(document)
    assert shown.code == 0 and f"{len(findings)} findings in " in shown.out
    assert cli("verify", "paper", "--format", "xml").code == 2

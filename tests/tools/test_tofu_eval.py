"""What the evaluation asks of a model, counted: the same on every machine."""

from __future__ import annotations

import pytest

from tools.perf import tofu_eval


@pytest.fixture(scope="module")
def case():
    return next(iter(tofu_eval.evaluation("tiny")))


def test_both_ways_do_the_same_job_and_ours_asks_for_less(case):
    assert [check.name for check in case.checks if not check.ok] == []
    assert len(case.checks) == 5


def test_counts(case):
    mine, theirs = (variant.counts for variant in case.variants)
    rows = tofu_eval.COUNTED["tiny"].rows
    passes = {"forget": 9, "retain": 7, "test_real_authors": 4, "test_world_facts": 4, "holdout": 1}
    batches = {part: -(-count // tofu_eval.BATCH) for part, count in rows.items()}
    assert theirs["forwards"] == sum(passes[part] * batches[part] for part in rows)
    new = tofu_eval.COUNTED["tiny"].new_tokens
    answered = [part for part in rows if part != "holdout"]
    assert theirs["decode steps"] == sum(batches[part] for part in answered) * new
    samples = sum(rows[p] * (passes[p] + (p != "holdout")) for p in rows)
    assert theirs["tokeniser calls"] == 2 * samples
    assert mine["decode steps"] == -(-sum(rows[p] for p in answered) // 128) * new
    assert mine["token slots"] <= 0.45 * theirs["token slots"]
    assert mine["forwards"] <= theirs["forwards"] / 3
    assert mine["tokeniser calls"] <= mine["texts"] + 1


def test_counts_of_the_naive_way_at_forget10s_size_are_the_published_ones():
    rows = tofu_eval.COUNTED["full"].rows
    passes = {"forget": 9, "retain": 7, "test_real_authors": 4, "test_world_facts": 4, "holdout": 1}
    batches = {part: -(-count // tofu_eval.BATCH) for part, count in rows.items()}
    assert sum(passes[part] * batches[part] for part in rows) == 253
    assert 200 * sum(batches[part] for part in rows if part != "holdout") == 6800
    assert sum(rows[p] * (passes[p] + (p != "holdout")) for p in rows) == 8685

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from stable_forgetting.benchmarks.machine import verify
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.measure import logs
from tests.local import LOCAL

needs_logs = pytest.mark.skipif(
    not (LOCAL / logs.FOLDER).is_dir(), reason="the published logs are not here"
)


def write_log(folder: Path, name: str, seed: int, *, rows: int = 12, shift: float = 0.0) -> None:
    """A log in the published layout with random losses; generations repeat the truth."""
    stream = np.random.Generator(np.random.PCG64(seed))

    def part(wrong: int, columns: int) -> dict:
        keys = [str(k) for k in range(columns)]
        return {
            "avg_gt_loss": {k: stream.uniform(0.1, 1) for k in keys},
            "avg_paraphrased_loss": {k: stream.uniform(1, 2) + shift for k in keys},
            "average_perturb_loss": {k: list(stream.uniform(1.5, 3, wrong)) for k in keys},
            "rouge1_recall": dict.fromkeys(keys, 1.0),
            "rougeL_recall": dict.fromkeys(keys, 1.0),
            "generated_text": {k: ["Question", f"running {k}", f"Running {k}!"] for k in keys},
        }

    content = {key: part(5, rows) for key in ("eval_log.json", "eval_log_forget.json")}
    content |= {f"eval_real_{name}_wo_options.json": part(3, rows) for name in ("author", "world")}
    with gzip.open(folder / f"{name}.json.gz", "wt") as file:
        json.dump(content, file)


@pytest.fixture
def root(tmp_path) -> Path:
    """Two logs and the values that follow from them."""
    folder = tmp_path / logs.FOLDER
    folder.mkdir()
    write_log(folder, "phi_full_wd0.01", 0, shift=-1.0)
    write_log(folder, "phi_retain90_wd0.01", 1)
    (folder / "reference_values.json").write_text(json.dumps(expected(folder)))
    return tmp_path


def expected(folder: Path) -> dict:
    """Model utility and forget quality by the README's own words, without our metric code."""
    from scipy.stats import hmean, ks_2samp

    def load(name):
        with gzip.open(folder / f"{name}.json.gz", "rt") as file:
            return json.load(file)

    def array(part, key):
        return np.asarray(list(part[key].values()))

    def ratio(part):
        wrong = array(part, "average_perturb_loss").mean(axis=1)
        return np.exp(array(part, "avg_paraphrased_loss") - wrong)

    values = {}
    ratios = {
        name: ratio(load(name)["eval_log_forget.json"])
        for name in ("phi_full_wd0.01", "phi_retain90_wd0.01")
    }
    for name, forget in ratios.items():
        content, nine = load(name), []
        for key in ("eval_log.json", "eval_real_author_wo_options.json",
                    "eval_real_world_wo_options.json"):  # fmt: skip
            part = content[key]
            p = np.exp(-array(part, "avg_gt_loss"))
            if "real" in key:
                p = p / (p + np.exp(-array(part, "average_perturb_loss")).sum(axis=1))
            nine += [p.mean(), 1.0, np.maximum(0, 1 - ratio(part)).mean()]
        test = ks_2samp(forget, ratios["phi_retain90_wd0.01"])
        values[name] = {
            "model_utility": hmean(nine),
            "truth_ratio_forget": np.minimum(forget, 1 / forget).mean(),
            "ks_statistic_vs_retain90": test.statistic,
            "forget_quality_vs_retain90": test.pvalue,
            "n_forget_rows": [12, 12],
        }
    return values


def test_values_of_made_up_logs_are_met(root):
    rows = verify.verify_tofu_logs(root)
    assert {row.log for row in rows} == {"phi_full_wd0.01", "phi_retain90_wd0.01"}
    assert len(rows) == 2 * (6 + 8)  # values, and two kinds of ROUGE on four parts
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    assert {r.published for r in rows if r.metric.startswith("n_forget")} == {12}


def test_a_wrong_value_is_missed(root, cli):
    path = root / logs.FOLDER / "reference_values.json"
    values = json.loads(path.read_text())
    values["phi_full_wd0.01"]["model_utility"] += 2e-6
    values["phi_full_wd0.01"]["forget_quality_vs_retain90"] *= 1.0002
    values["phi_full_wd0.01"]["a_new_value"] = 1.0
    path.write_text(json.dumps(values))
    missed = [row for row in verify.verify_tofu_logs(root) if not row.ok]
    assert [row.metric for row in missed] == [
        "model_utility",
        "forget_quality_vs_retain90",
        "a_new_value",
    ]
    shown = cli("verify", "tofu-logs", "--data-root", root)
    assert shown.code == 1 and "MISSED" in shown.out


def test_the_command_shows_the_table(root, cli):
    shown = cli("verify", "tofu-logs", "--data-root", root)
    assert shown.code == 0 and shown.err == ""
    assert "published" in shown.out and "recomputed" in shown.out and "difference" in shown.out
    assert "28 of 28 values met" in shown.out


def test_a_log_with_another_rouge_is_missed(root):
    path = root / logs.FOLDER / "phi_full_wd0.01.json.gz"
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    content["eval_log_forget.json"]["rougeL_recall"]["3"] = 0.5
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    missed = {row.metric for row in verify.verify_tofu_logs(root) if not row.ok}
    assert "rouge_l_recall of forget, worst row" in missed


def change_values(folder: Path, utility: object) -> None:
    path = folder / "reference_values.json"
    values = json.loads(path.read_text())
    values["phi_full_wd0.01"]["model_utility"] = utility
    path.write_text(json.dumps(values))


def change_log(folder: Path, changed) -> None:
    path = folder / "phi_full_wd0.01.json.gz"
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    with gzip.open(path, "wt") as file:
        json.dump(changed(content), file)


def change(log: dict, **columns: object) -> dict:
    return log | {"eval_log_forget.json": log["eval_log_forget.json"] | columns}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: [path.unlink() for path in folder.glob("*.gz")],
        lambda folder: (folder / "phi_full_wd0.01.json.gz").write_bytes(b"no gzip"),
        lambda folder: (folder / "reference_values.json").unlink(),
        lambda folder: (folder / "reference_values.json").write_text("[1]"),
        lambda folder: (folder / "reference_values.json").write_text("{}"),
        lambda folder: change_values(folder, "high"),
        lambda folder: change_values(folder, float("nan")),
        lambda folder: change_log(folder, lambda log: [log]),
        lambda folder: change_log(folder, lambda log: dict.fromkeys(log, 3)),
        lambda folder: change_log(folder, lambda log: change(log, avg_gt_loss=[1.0])),
        lambda folder: change_log(folder, lambda log: change(log, avg_gt_loss={})),
        lambda folder: change_log(folder, lambda log: change(log, avg_gt_loss={"0": math.nan})),
        lambda folder: change_log(folder, lambda log: change(log, generated_text={"0": ["a"]})),
        lambda folder: change_log(folder, lambda log: change(log, generated_text={"0": "abc"})),
    ],
)
def test_what_is_missing_or_damaged_is_one_line(root, cli, damage):
    damage(root / logs.FOLDER)
    with pytest.raises(DataError):
        verify.verify_tofu_logs(root)
    shown = cli("verify", "tofu-logs", "--data-root", root)
    assert shown.code == 2 and shown.out == "" and len(shown.err.splitlines()) == 1


@needs_logs
def test_all_published_values_are_met():
    rows = verify.verify_tofu_logs(LOCAL)
    assert len(rows) == 184 and [row for row in rows if not row.ok] == []

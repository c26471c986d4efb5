"""The theory evidence: the inequality and the invariants of a run; test_adapters has the bound."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.common.measure.ceiling import cross_entropy_ceilings
from stable_forgetting.vision.models.family import last_layers
from tools.theory import __main__ as cli
from tools.theory import mlp, vit, width
from tools.theory.__main__ import Run
from tools.theory.mlp import Setting, Variant

SINE, FULL = Variant("sine-w100", "sine", 100.0), Variant("full", None)


@pytest.fixture(scope="module")
def fitted():
    everything, forget, retain = mlp.load_data(0)
    return mlp.fit(everything, "relu", 0, epochs=15), (forget, retain)


@pytest.fixture(scope="module")
def results():
    return cli.experiment(1, 8, quick=True)


def setting(optimizer: str = "adamw", lr: float = 3e-3, scope: str = "all") -> Setting:
    return Setting(optimizer, "moderate", scope, "relu", lr, lr)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40), st.floats(1e-3, 1e6), st.integers(0, 2**31))
def test_loss_lies_between_functions_of_the_gap(classes, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(16, classes, generator=draw, dtype=torch.float64)
    labels = torch.randint(classes, (16,), generator=draw)
    slack = mlp.loss_slacks(logits, labels)
    assert min(slack[side] for side in mlp.SIDES) >= -slack["rounding"]


def test_bounds_are_attained_and_cannot_be_tightened():
    labels = torch.zeros(1, dtype=torch.int64)
    tied = torch.tensor([[0.0, 3.0, 3.0, 3.0]])
    alone = torch.tensor([[0.0, 3.0, -1e4, -1e4]])
    assert mlp.loss_slacks(tied, labels)["tight"] == pytest.approx(0, abs=1e-12)
    assert mlp.loss_slacks(alone, labels)["gap_soft"] == pytest.approx(0, abs=1e-12)
    # m over every class but y: without that restriction it could never be negative
    assert float(mlp.logit_gap(torch.tensor([[5.0, 1.0, 2.0]]), labels)) == -3.0
    bounds = mlp.loss_bounds(torch.tensor([1e30, -1e30], dtype=torch.float64), 10)
    assert all(bool(torch.isfinite(b).all()) for b in bounds.values())


def test_adapters_start_at_the_fitted_model_and_leave_it_frozen(fitted):
    start, (forget, _) = fitted
    model = mlp.variant_of(start, setting(scope="hidden"), SINE, 0)
    assert torch.equal(model(forget[0]), start(forget[0]))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["0.A", "0.Bt", "2.A", "2.Bt"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_first_step_is_loras(fitted, optimizer):
    moved = []
    for variant in cli.VARIANTS[1:]:
        rows, _ = mlp.ascend(*fitted, setting(optimizer), variant, seed=0, steps=1)
        moved.append(rows[1]["delta_norm"])
    assert 0 < max(moved) < 1.005 * min(moved)


def test_ascent_raises_the_loss_and_stops_at_overflow(fitted):
    rows, stopped = mlp.ascend(*fitted, setting("sgd", 1.0), FULL, seed=0, steps=40)
    assert rows[-1]["loss"] > 1e3 * rows[0]["loss"] and stopped == len(rows) <= 40


def test_same_seed_same_bits(fitted):
    before = torch.random.get_rng_state()
    rows = [mlp.ascend(*fitted, setting(), SINE, seed=s, steps=5)[0] for s in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_usable_steps_need_both_accuracies():
    cases = [(1.0, 1.0), (0.05, 0.9), (0.0, 0.89), (0.0, 0.95)]
    names = ("forget_accuracy", "retain_accuracy")
    run = Run(setting(), FULL, 0, [dict(zip(names, case, strict=True)) for case in cases], None)
    assert [step for step, _ in run.usable()] == [1, 3]


def test_quick_results_hold_at_every_step_and_the_report_is_complete(results):
    runs, ceilings = results
    assert len(runs) == len(cli.VARIANTS) * 4
    for run in runs:
        assert len(run.rows) == 9 or run.stopped is not None
        assert not run.variant.bounded or run.most("certificate_ratio") <= 1
    text = markdown.write(cli.sections(runs, ceilings, 1))
    assert ", 0 of them beyond float64 rounding" in text and "in 8 of 8 bounded runs" in text
    rows = [line for line in text.partition("## Numbers")[2].splitlines() if line[:2] == "| "]
    assert {len(row.split(" | ")) for row in rows} == {len(cli.COLUMNS) + 3}
    for variant in cli.VARIANTS:
        assert sum(row.startswith(f"| {variant.name} |") for row in rows) == 4


def test_the_reading_follows_the_numbers(results):
    def spoilt(run: Run, **values: float) -> Run:
        usable = {"forget_accuracy": 0.0, "retain_accuracy": 1.0, "active_share": 0.0}
        return run._replace(rows=[{**run.rows[0], **usable, **values}])

    runs = [spoilt(run) if run.variant.bounded else run for run in results[0]]
    assert any("usable? No: in 0 of 8" in line for line in cli.reading(runs))
    at = next(i for i, run in enumerate(runs) if run.variant.bounded)
    runs[at] = spoilt(runs[at], active_share=0.2, certificate_ratio=1.01, slack_paper=-1.0)
    text = "\n".join(cli.reading(runs))
    assert "usable? Yes: in 1 of 8" in text and "1 of them beyond" in text
    assert "finite step in 7 of 8 bounded runs" in text


def test_command_line_errors_name_the_mend(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--out", str(tmp_path), "--seeds", "0"])
    assert stop.value.code == 2 and "--seeds >= 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_ceiling_of_a_frozen_end_is_met_and_not_passed():
    frozen, trained = vit.ceiling_rows(1, 60, epochs=8)
    assert (frozen["end"], trained["end"]) == vit.ENDS and frozen["ceiling"] == trained["ceiling"]
    assert frozen["loss_first"] < 1 < 5 < frozen["ceiling"] < frozen["bound"]
    assert 90 < frozen["share"] <= 100.1 and frozen["above"] == 0
    assert trained["largest"] > 2 * trained["bound"] and trained["above"] > 0


def test_the_bound_of_the_derivation_is_that_of_its_points():
    """Every x of norm sqrt(d) and mean zero stays below; x along one v_j meets that difference."""
    layers = last_layers(vit.fit_vit(mlp.load_data(0)[0], 0, 0))
    torch.manual_seed(0)
    layers = dataclasses.replace(
        layers, gain=torch.rand(32) + 0.5, shift=torch.randn(32), bias=torch.randn(10)
    )
    _, bounds = cross_entropy_ceilings(layers)
    weight, y = layers.weight.detach().double(), 3
    v = (weight - weight[y]) * layers.gain
    v = v - v.mean(1, keepdim=True)
    offsets = (weight - weight[y]) @ layers.shift.double() + (layers.bias - layers.bias[y])
    most = 32**0.5 * v.norm(dim=1) + offsets
    assert float(most.logsumexp(0)) == pytest.approx(float(bounds[y]), rel=1e-6)
    hidden = torch.randn(4096, 32)
    hidden[:10] = v.float()
    x = F.layer_norm(hidden, (32,), layers.gain, layers.shift, eps=1e-12)
    z = F.linear(x, layers.weight, layers.bias).double()
    assert bool((z - z[:, y : y + 1] <= most + 1e-4).all())
    others = [j for j in range(10) if j != y]
    torch.testing.assert_close((z[:10] - z[:10, y : y + 1])[others, others], most[others])


def test_the_arguments_of_two_widths_are_measured_once_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(width, "FIT_STEPS", 2)
    monkeypatch.setattr(width, "BATCH", 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = ["--out", str(tmp_path), "--optimizers", "adamw", "--steps", "6"]
    asked += ["--device", device, "--together", "2"]
    few = [*asked, "--widths", "8,16", "--adapters", "sine"]
    width.main([*few, "--families", "gpt_neo"])
    width.main([*few, "--families", "vit"])
    lines = [json.loads(line) for line in (tmp_path / "width.jsonl").read_text().splitlines()]
    assert [(line["family"], line["width"]) for line in lines] == [
        ("gpt_neo", 8), ("gpt_neo", 16), ("vit", 8), ("vit", 16)]  # fmt: skip
    assert all(0 < max(line["largest"]) < 0.1 and len(line["logged"]) == 6 for line in lines)
    table = (tmp_path / "width.md").read_text()
    assert table.count("| vit |") == 2 and table.count("| gpt_neo |") == 2
    assert (tmp_path / "width.svg").read_text().count("width 16") >= 1
    capsys.readouterr()
    width.main([*few, "--families", "vit"])
    assert capsys.readouterr().out == "", "nothing is measured twice"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_cell_that_was_cut_off_goes_on_to_the_same_numbers(tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(width, "FIT_STEPS", 2)
    asked = ["--optimizers", optimizer, "--steps", "50", "--widths", "8", "--families", "vit"]
    asked += ["--adapters", "sine", "--out"]

    def line(name: str) -> dict[str, object]:
        measured = json.loads((tmp_path / name / "width.jsonl").read_text())
        assert measured.pop("seconds") > 0
        return measured

    width.main([*asked, str(tmp_path / "whole")])
    real, calls = width.arguments_of, []

    def cut(model):
        calls.append(None)
        if len(calls) == 21:
            raise KeyboardInterrupt
        return real(model)

    monkeypatch.setattr(width, "arguments_of", cut)
    with pytest.raises(KeyboardInterrupt):
        width.main([*asked, str(tmp_path / "cut")])
    assert not (tmp_path / "cut" / "width.jsonl").exists()
    width.main([*asked, str(tmp_path / "cut")])
    assert len(calls) == 51, "the first twenty steps are not taken again"
    assert line("cut") == line("whole")
    assert not list((tmp_path / "cut").glob("*.safetensors"))

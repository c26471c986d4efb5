"""The theory evidence: the inequality, the certificate, and the invariants of a run."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.bounded.phi import PHIS, Bound
from stable_forgetting.common.bounded.product import bounded_delta
from stable_forgetting.common.measure.ceiling import cross_entropy_ceilings
from stable_forgetting.vision.models.last import last_layers
from tools.theory import __main__ as cli
from tools.theory import ascent, report, vit, width
from tools.theory.ascent import Setting, Variant

LORA, SINE = Variant("LoRA", "identity"), Variant("sine-w100", "sine", 100.0)
FULL = Variant("full", None)
BOUNDED = sorted(name for name, phi in PHIS.items() if phi.bounded)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def fitted() -> tuple[list[torch.Tensor], ascent.Data]:
    everything, data = ascent.load_data(0)
    return ascent.fit(everything, "relu", 0, epochs=15), data


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return cli.experiment(1, 8, quick=True)


def setting(optimizer: str = "adamw", lr: float = 3e-3, scope: str = "all") -> Setting:
    return Setting(optimizer, "moderate", scope, "relu", lr, lr)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40), st.floats(1e-3, 1e6), st.integers(0, 2**31))
def test_loss_lies_between_functions_of_the_gap(classes: int, scale: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(16, classes, generator=draw, dtype=torch.float64)
    labels = torch.randint(classes, (16,), generator=draw)
    slack, sample = ascent.loss_slacks(logits, labels)
    assert min(slack[side] for side in report.SIDES) >= -slack["rounding"]
    wide = ascent.loss_bounds(sample["gap"].clamp_min(0), classes)
    assert bool((wide["gap"] <= sample["loss"] + slack["rounding"]).all())
    assert bool((sample["loss"] <= wide["paper"] + slack["rounding"]).all())


def test_bounds_are_attained_and_cannot_be_tightened() -> None:
    labels = torch.zeros(1, dtype=torch.int64)
    tied = torch.tensor([[0.0, 3.0, 3.0, 3.0]])
    alone = torch.tensor([[0.0, 3.0, -1e4, -1e4]])
    assert ascent.loss_slacks(tied, labels)[0]["tight"] == pytest.approx(0, abs=1e-12)
    assert ascent.loss_slacks(alone, labels)[0]["gap_soft"] == pytest.approx(0, abs=1e-12)
    # m over every class but y: without that restriction it could never be negative
    assert float(ascent.logit_gap(torch.tensor([[5.0, 1.0, 2.0]]), labels)) == -3.0


def test_bounds_do_not_overflow() -> None:
    bounds = ascent.loss_bounds(torch.tensor([1e30, -1e30], dtype=torch.float64), 10)
    assert all(bool(torch.isfinite(b).all()) for b in bounds.values())


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(BOUNDED),
    st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4)),
    st.floats(-6, 12),
    st.floats(1e-2, 1e3),
    st.integers(0, 2**31),
)
def test_certificate_for_any_factors(
    phi: str, sizes: tuple[int, int, int], power: float, omega: float, seed: int
) -> None:
    k, d, r = sizes
    draw = torch.Generator().manual_seed(seed)
    A = 10**power * torch.randn(k, r, generator=draw)
    Bt = 10**power * torch.randn(r, d, generator=draw)
    delta = bounded_delta(A, Bt, Bound(phi, 2.0, omega))
    cap = 2.0 * Bound(phi, 1.0, 1.0).limit * math.sqrt(d * k)
    assert float(delta.double().norm()) <= cap * (1 + 1e-6)


def test_unbounded_factors_break_the_same_value() -> None:
    delta = bounded_delta(torch.ones(3, 1), torch.ones(1, 3), Bound("identity", 2.0, 9.0))
    assert float(delta.norm()) > 2.0 * 3


def test_gradients_by_layer_are_autograds(fitted: Any) -> None:
    state, data = fitted
    model = ascent.AscentMLP(state, setting(), FULL, 0)
    F.cross_entropy(model(data.forget[0]), data.forget[1]).backward()
    norms = ascent.gradient_norms(model)
    for layer, weight in enumerate(model.weights):
        assert weight.grad is not None
        assert norms[f"gradient_{layer + 1}"] == pytest.approx(float(weight.grad.norm()), rel=1e-4)


def test_adapters_start_at_the_fitted_model_and_leave_it_frozen(fitted: Any) -> None:
    state, data = fitted
    whole = ascent.AscentMLP(state, setting(), FULL, 0)(data.forget[0])
    model = ascent.AscentMLP(state, setting(scope="hidden"), SINE, 0)
    assert torch.equal(model(data.forget[0]), whole)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["A.0", "A.1", "Bt.0", "Bt.1"]


def test_updates_are_adamws_and_sgds() -> None:
    grads = [torch.tensor([3.0, -1e-3]), torch.tensor([-1.0, 0.0])]
    moved = {}
    for kind in ("sgd", "adamw"):
        p = torch.zeros(2, requires_grad=True)
        updates = ascent.Updates([p], kind, 0.1, sign=1.0)
        for grad in grads:
            p.grad = grad.clone()
            updates.step()
            moved.setdefault(kind, []).append(p.tolist())
    assert moved["sgd"][1] == pytest.approx([0.2, -1e-4])
    assert moved["adamw"][0] == pytest.approx([0.1, -0.1], rel=1e-4)
    # m = .9 (.1 g1) + .1 g2, v = .999 (.001 g1^2) + .001 g2^2, both divided by 1 - beta^2
    second = (0.27 - 0.1) / 0.19 / math.sqrt((0.999 * 9e-3 + 1e-3) / 0.001999)
    assert moved["adamw"][1][0] - moved["adamw"][0][0] == pytest.approx(0.1 * second, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_first_step_is_loras(fitted: Any, optimizer: str) -> None:
    state, data = fitted
    moved = []
    for variant in cli.variants()[1:]:
        run = ascent.ascend(state, data, setting(optimizer), variant, seed=0, steps=1)
        moved.append(run["rows"][1]["delta_norm"])
    assert min(moved) > 0
    assert max(moved) / min(moved) < 1.005


def test_ascent_raises_the_loss_and_stops_at_overflow(fitted: Any) -> None:
    state, data = fitted
    run = ascent.ascend(state, data, setting("sgd", 1.0), FULL, seed=0, steps=40)
    assert run["rows"][-1]["loss"] > 1e3 * run["rows"][0]["loss"]
    assert run["nonfinite"]["step"] == len(run["rows"]) <= 40
    assert report.summarise(run, FULL)["bound_violations"] == 0


def test_summary_counts_a_violation(fitted: Any) -> None:
    state, data = fitted
    run = ascent.ascend(state, data, setting(), SINE, seed=0, steps=2)
    assert report.summarise(run, SINE)["certificate_holds"] is True
    spoilt = copy.deepcopy(run)
    spoilt["rows"][1]["slack_paper"] = -1.0
    spoilt["rows"][2]["certificate_ratio"] = 1.01
    summary = report.summarise(spoilt, SINE)
    assert summary["bound_violations"] == 1
    assert summary["certificate_holds"] is False
    assert report.summarise(run, LORA)["certificate_holds"] is None


def test_usable_steps_need_both_accuracies() -> None:
    cases = [(1.0, 1.0, 0.1), (0.05, 0.9, 0.2), (0.0, 0.89, 0.9), (0.0, 0.95, 0.3)]
    names = ("forget_accuracy", "retain_accuracy", "max_argument")
    usable = report.usable_steps([dict(zip(names, case, strict=True)) for case in cases])
    assert (usable["count"], usable["first"], usable["max_argument"]) == (2, 1, 0.3)
    assert report.usable_steps([])["first"] is None


def test_quick_results_hold_at_every_step(results: dict[str, Any]) -> None:
    assert len(results["runs"]) == len(cli.variants()) * len(cli.settings(True))
    for run in results["runs"]:
        summary = run["summary"]
        assert summary["bound_violations"] == 0
        assert summary["steps"] == len(run["rows"]) - 1
        assert summary["steps"] == 8 or summary["nonfinite"]
        if run["phi"] in BOUNDED:
            assert summary["certificate_holds"]
            assert max(row["certificate_ratio"] for row in run["rows"]) <= 1


def test_the_report_is_complete(results: dict[str, Any], tmp_path: Path) -> None:
    cli.write(results, 1, tmp_path)
    text = (tmp_path / "theory.md").read_text()
    assert all(line in text for line in results["reading"])
    ceiling, _, numbers = text.partition("## Numbers")
    assert (
        sum(line.startswith(("| frozen | ", "| trained | ")) for line in ceiling.split("\n")) == 2
    )
    rows = [line for line in numbers.splitlines() if line.startswith("| ")]
    assert {len(row.split(" | ")) for row in rows} == {len(report.COLUMNS) + 3}
    for variant in cli.variants():
        assert sum(row.startswith(f"| {variant.name} |") for row in rows) == 4


def test_same_seed_same_bits(fitted: Any) -> None:
    state, data = fitted
    everything, again = ascent.load_data(0)
    refit = ascent.fit(everything, "relu", 0, epochs=15)
    assert all(torch.equal(a, b) for a, b in zip(state, refit, strict=True))
    before = torch.random.get_rng_state()
    runs = [
        ascent.ascend(s, d, setting(), SINE, seed=0, steps=5)
        for s, d in ((state, data), (refit, again))
    ]
    assert runs[0]["rows"] == runs[1]["rows"]
    assert torch.equal(before, torch.random.get_rng_state())
    other = ascent.ascend(state, data, setting(), SINE, seed=1, steps=5)
    assert other["rows"] != runs[0]["rows"]


def test_the_reading_follows_the_numbers(results: dict[str, Any]) -> None:
    runs = copy.deepcopy(results["runs"])
    bounded = [r for r in runs if r["phi"] in BOUNDED]
    for run in bounded:
        most = {"active_share": 0.0, "max_argument": 0.1, "certificate_ratio": 0.01}
        run["summary"]["usable"] = {"count": 1, "first": 3, **most}
    assert any("usable? No: in 0 of" in line for line in report.reading(runs))
    bounded[0]["summary"]["usable"]["active_share"] = 0.2
    assert any("usable? Yes: in 1 of" in line for line in report.reading(runs))
    bounded[0]["summary"]["certificate_holds"] = False
    held = f"{len(bounded) - 1} of {len(bounded)} bounded runs"
    assert any(line.startswith("Certificate") and held in line for line in report.reading(runs))


def test_command_line_errors_name_the_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--steps >= 2"):
        cli.experiment(1, 1)
    import typer

    app = typer.Typer()
    app.command()(cli.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path), "--seeds", "0"])
    assert done.exit_code == 2
    assert "--seeds >= 1" in done.output
    assert not list(tmp_path.iterdir())


def test_plots_are_written(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tools.theory.plots import draw

    draw(results["runs"], tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert [p.name for p in paths] == ["certificate.png", "loss_bounds.png", "norms.png"]
    assert all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in paths)


@pytest.fixture(scope="module")
def ceilings() -> list[dict[str, Any]]:
    return list(vit.ceiling_rows(1, 60, epochs=8))


def test_the_ceiling_of_a_frozen_end_is_met_and_not_passed(ceilings):
    frozen, trained = ceilings
    assert (frozen["end"], trained["end"]) == vit.ENDS and frozen["ceiling"] == trained["ceiling"]
    assert frozen["loss_first"] < 1 < 5 < frozen["ceiling"] < frozen["bound"]
    assert 90 < frozen["share"] <= 100.1 and frozen["above"] == 0
    assert trained["largest"] > 2 * trained["bound"] and trained["above"] > 0


def test_the_bound_of_the_derivation_is_that_of_its_points():
    """Every x of norm sqrt(d) and mean zero stays below; x along one v_j meets that difference."""
    layers = last_layers(vit.build_vit(0))
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
    asked = ["--out", str(tmp_path), "--optimizers", "adamw", "--steps", "6"]
    monkeypatch.setattr(width, "BATCH", 2)
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

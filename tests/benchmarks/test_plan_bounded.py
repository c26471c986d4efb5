"""The planner of the bounded layer: formulas against numbers worked by hand, models by count."""

from __future__ import annotations

import re

import pytest

from stable_forgetting.benchmarks.costs import bounded as costs
from stable_forgetting.benchmarks.costs.bounded import MODELS, layer_costs

K, D, RANK, TOKENS = 3, 2, 1, 6  # unit 12 FLOP, skinny pair 10, build of A Bt 2, per token


# Formulas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "forward", "inputs", "parameters"),
    [("frozen", 12, 12, 0), ("LoRA", 22, 22, 10), ("naive", 26, 24, 16), ("ours", 14, 12, 18)],
)
def test_flops_by_hand(kind, forward, inputs, parameters):
    found = costs.flops_per_token(kind, K, D, RANK, TOKENS)
    assert found == (forward, inputs, parameters)


@pytest.mark.parametrize(("kind", "of_lora"), [("naive", 2.5), ("ours", 1.5), ("frozen", 1.0)])
def test_many_tokens_cost_two_and_a_half_and_one_and_a_half_of_lora(kind, of_lora):
    total, lora = (
        sum(costs.flops_per_token(each, 10**5, 10**5, 1, 10**9)) for each in (kind, "LoRA")
    )
    assert total / lora == pytest.approx(of_lora, rel=1e-4)


def test_what_is_kept_for_backward():
    size = (3072, 768, 8, 1576)  # fc1 of a ViT-B, a batch of 8
    assert costs.saved_bytes("LoRA", *size) == 50_432
    assert costs.saved_bytes("naive", *size) == 18 * 2**20
    assert costs.saved_bytes("ours", *size) == costs.saved_bytes("frozen", *size) == 0


def test_what_is_needed_for_a_moment():
    assert costs.transient_bytes("LoRA", 256, 128, 8, 100) == 2 * 100 * 256
    workspace = 4 * (4 * 8 * 128 + 4 * 256 * 8)  # four tiles of rows, four of columns
    assert costs.transient_bytes("ours", 256, 128, 8, 100) == 2 * 256 * 128 + workspace
    assert costs.transient_bytes("frozen", 256, 128, 8, 100) == 0


def test_the_workspace_is_that_of_the_kernel():
    pytest.importorskip("triton")
    from stable_forgetting.common.bounded.triton import CONTRACT_TILES, PROGRAMS

    assert (CONTRACT_TILES.rows, CONTRACT_TILES.columns) == costs.KERNEL_TILE
    assert PROGRAMS == costs.PROGRAMS


def test_expected_ratios():
    floor, cpu, gpu = costs.OVERHEADS
    assert costs.time_ratio(floor, 512) == (1.5, 1.5)
    assert costs.time_ratio(cpu, 1576) == pytest.approx((3.1967 / 2.7, 3.2284 / 2.1), rel=1e-4)
    assert costs.time_ratio(gpu, 4096) == pytest.approx((1.1421, 1.3498), rel=1e-4)
    # 1 + f/2 where a fraction f of the linear layers is adapted
    assert costs.time_ratio(floor, 512, 2 / 3)[0] == pytest.approx(4 / 3)
    assert costs.time_ratio(floor, 512, 1 / 6)[0] == pytest.approx(13 / 12)


# Models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("phi-1.5", 1_418_270_720),
        ("gpt-neo-125m", 125_198_592),
        ("vit-s", 21_669_514),
        ("vit-b", 85_806_346),
        ("vit-l", 303_311_882),
    ],
)
def test_models_have_their_published_sizes(model, parameters):
    assert layer_costs(model).base == parameters


@pytest.mark.parametrize(
    ("model", "rank", "placement", "percent"),
    [("phi-1.5", 4, "mlp", 0.138), ("llama-2-7b", 8, "all", 0.296)],
)
def test_shares_of_the_model_with_adapters(model, rank, placement, percent):
    found = layer_costs(model, rank=rank, placement=placement).percent_of_all
    assert found == pytest.approx(percent, abs=0.0005)


@pytest.mark.parametrize(("placement", "percent"), [("mlp", "1.70"), ("all", "2.72")])
def test_shares_of_the_model_without_adapters(placement, percent):
    _, layers, *_ = costs.sections(layer_costs("vit-s", rank=8, placement=placement))
    (row,) = [r for r in layers.content.rows if r[0] == "share of the model without adapters"]
    assert f"{float(row[-1].removesuffix(' %')):.2f}" == percent


def test_attention_and_mlp_are_all():
    mlp, attention, both = (
        layer_costs("gpt-neo-125m", placement=where) for where in ("mlp", "attention", "all")
    )
    assert mlp.trained + attention.trained == both.trained
    assert len(attention.layers) == 4 * 12


# The command -------------------------------------------------------------------------------------


def test_the_tables(cli):
    shown = cli("show", "bounded", "--plan", "vit-s", "--tokens", "1576", "--rank", "4")
    assert shown.code == 0 and shown.err == ""
    assert "1536 x 384" in shown.out and "21,669,514" in shown.out and "0.851 %" in shown.out
    assert "derived, not measured" in shown.out and "the paper's operations" in shown.out
    ours = next(line for line in shown.out.splitlines() if line.split()[:2] == ["ours", "0"])
    assert "MB" in ours
    assert "of 1576" in shown.out
    llama = cli("show", "bounded", "--plan", "llama-2-7b").out
    assert re.search(r"gate_proj, up_proj +11008 x 4096 +64 ", llama)


def test_without_a_model_it_tells_of_the_layer_and_the_models(cli):
    shown = cli("show", "bounded")
    assert shown.code == 0 and "phi(omega A B^T)" in shown.out
    assert all(name in " ".join(shown.out.split()) for name in MODELS)

"""The planner of the bounded layer: formulas against numbers worked by hand, models by count."""

from __future__ import annotations

from functools import cache

import pytest

from stable_forgetting.benchmarks.costs import bounded as costs
from stable_forgetting.benchmarks.costs.bounded import MODELS, LayerCosts, layer_costs
from stable_forgetting.common.base.errors import ConfigError

K, D, RANK, TOKENS = 3, 2, 1, 6  # unit 12 FLOP, skinny pair 10, build of A Bt 2, per token


@cache
def plan(model: str, rank: int = 8, placement: str = "mlp") -> LayerCosts:
    return layer_costs(model, rank=rank, placement=placement)


# Formulas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "forward", "inputs", "parameters"),
    [("frozen", 12, 12, 0), ("LoRA", 22, 22, 10), ("naive", 26, 24, 16), ("ours", 14, 12, 18)],
)
def test_flops_by_hand(kind, forward, inputs, parameters):
    found = costs.flops_per_token(kind, K, D, RANK, TOKENS)
    assert found == (forward, inputs, parameters)


def test_many_tokens_cost_two_and_a_half_and_one_and_a_half_of_lora():
    def of_lora(kind):
        return total(kind) / total("LoRA")

    def total(kind):
        return sum(costs.flops_per_token(kind, 10**5, 10**5, 1, 10**9))

    assert of_lora("naive") == pytest.approx(2.5, rel=1e-4)
    assert of_lora("ours") == pytest.approx(1.5, rel=1e-4)
    assert of_lora("frozen") == pytest.approx(1.0, rel=1e-4)


def test_the_paper_s_count_of_a_7b_layer():
    assert costs.paper_forward(11008, 4096, 4) == 2 * 45_088_768 + 15_104 * 4


def test_what_is_kept_for_backward():
    size = (3072, 768, 8, 1576)  # fc1 of a ViT-B, a batch of 8
    assert costs.saved_bytes("LoRA", *size) == 50_432
    assert costs.saved_bytes("naive", *size) == 18 * 2**20
    assert costs.saved_bytes("ours", *size) == costs.saved_bytes("frozen", *size) == 0


def test_what_is_needed_for_a_moment():
    assert costs.transient_bytes("LoRA", 256, 128, 8, 100) == 2 * 100 * 256
    workspace = 4 * (2 * 8 * 128 + 2 * 256 * 8)  # two tiles of rows, two of columns
    assert costs.transient_bytes("ours", 256, 128, 8, 100) == 2 * 256 * 128 + workspace
    assert costs.transient_bytes("frozen", 256, 128, 8, 100) == 0


def test_the_workspace_is_that_of_the_kernel():
    pytest.importorskip("triton")
    from stable_forgetting.common.bounded.triton import CONTRACT_TILES

    assert (CONTRACT_TILES.rows, CONTRACT_TILES.columns) == costs.KERNEL_TILE


def test_expected_ratios():
    floor, cpu, gpu = costs.OVERHEADS
    assert costs.time_ratio(floor, 512) == (1.5, 1.5)
    assert costs.time_ratio(cpu, 1576) == pytest.approx((3.1967 / 2.7, 3.2284 / 2.1), rel=1e-4)
    assert costs.time_ratio(gpu, 4096) == pytest.approx((1.5647, 1.6135), rel=1e-4)
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
    assert plan(model).base == parameters


@pytest.mark.parametrize(
    ("model", "rank", "placement", "percent"),
    [
        ("phi-1.5", 4, "mlp", 0.138),
        ("phi-1.5", 8, "mlp", 0.276),
        ("phi-1.5", 4, "all", 0.249),
        ("llama-2-7b", 4, "mlp", 0.086),
        ("llama-2-7b", 8, "mlp", 0.172),
        ("llama-2-7b", 8, "all", 0.296),
        ("llama-3.1-8b", 8, "all", 0.260),
    ],
)
def test_shares_of_language_models_with_adapters(model, rank, placement, percent):
    assert round(plan(model, rank, placement).percent_of_all, 3) == percent


@pytest.mark.parametrize(
    ("model", "placement", "percent"),
    [
        ("vit-s", "mlp", 1.70),
        ("vit-b", "mlp", 0.86),
        ("vit-l", "mlp", 0.65),
        ("vit-s", "all", 2.72),
    ],
)
def test_shares_of_vision_transformers_without_adapters(model, placement, percent):
    assert round(plan(model, 8, placement).percent, 2) == percent


def test_attention_and_mlp_are_all():
    parts = [plan("gpt-neo-125m", 8, placement).trained for placement in ("mlp", "attention")]
    assert sum(parts) == plan("gpt-neo-125m", 8, "all").trained
    assert len(plan("gpt-neo-125m", 8, "attention").layers) == 4 * 12
    assert plan("vit-s", 8, "all").share > 0.99  # all but the head


def test_shapes_are_outputs_by_inputs():
    shapes = plan("llama-2-7b").shapes()
    assert {shape: (len(names), {*names}) for shape, names in shapes.items()} == {
        (11008, 4096): (64, {"gate_proj", "up_proj"}),
        (4096, 11008): (32, {"down_proj"}),
    }


# The command -------------------------------------------------------------------------------------


def test_the_tables(cli):
    shown = cli("show", "bounded", "--plan", "vit-s", "--tokens", "1576", "--rank", "4")
    assert shown.code == 0 and shown.err == ""
    assert "1536 x 384" in shown.out and "21,669,514" in shown.out and "0.851 %" in shown.out
    assert "derived, not measured" in shown.out and "the paper's operations" in shown.out
    ours = next(line for line in shown.out.splitlines() if line.split()[:2] == ["ours", "0"])
    assert "MB" in ours
    assert "of 1576" in shown.out


def test_without_a_model_it_tells_of_the_layer_and_the_models(cli):
    shown = cli("show", "bounded")
    assert shown.code == 0 and "phi(omega A B^T)" in shown.out
    assert all(name in " ".join(shown.out.split()) for name in MODELS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bounded", "--plan", "llama-2-7"), "did you mean 'llama-2-7b'"),
        (("bounded", "--plan", "vit-s", "--placement", "heads"), "choose mlp, attention, all"),
        (("gd_sine", "--plan", "vit-s"), "show bounded --plan vit-s"),
        (("bounded", "--plan", "vit-s", "--rank", "0"), "rank"),
        (("bonded",), "did you mean 'bounded'"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(arguments, text, cli):
    shown = cli("show", *arguments)
    assert shown.code == 2 and text in " ".join(shown.err.split())
    assert shown.out == ""


def test_no_such_model():
    with pytest.raises(ConfigError, match=r"--plan zzz: no such model; known: .*llama-2-7b"):
        layer_costs("zzz")

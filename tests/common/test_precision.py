"""Weights in bfloat16 move as float32 ones do: what is trained is float32 while it is trained."""

from __future__ import annotations

import copy

import pytest
import torch

from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.layer import BoundedLinear
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import CrossEntropy
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.common.train.precision import tensor_float
from stable_forgetting.common.train.protocols import Telemetry
from tests.common.train.trained import Sink

RECIPE = {
    "steps": 60,
    "batch_size": 16,
    "accumulation": 2,
    "lr": 1e-5,
    "weight_decay": 0.01,
    "schedule": "linear",
    "warmup_steps": 12,
}
"""The rates at which large models are trained: steps far below a bfloat16 weight's last place."""


class Tokens:
    """64 rows of 12 tokens with a pattern to learn."""

    def fetch(self, indices, augment=None):
        rows = (indices.unsqueeze(1) * 7 + torch.arange(13)) % 50
        return Batch({"input_ids": rows[:, :-1]}, rows[:, 1:], indices)


def forward(model, batch):
    return model(input_ids=batch.inputs["input_ids"]).logits


@pytest.fixture
def llama():
    """A small LLaMA with matrices of standard deviation 0.02, as large ones have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16()


def trained(model, *, look=None, **fields):
    """(matrices before, the model, loss at the start, loss at the end)."""
    before = {n: p.detach().float().clone() for n, p in model.named_parameters() if p.ndim > 1}
    loader = Loader(Tokens(), torch.arange(64).numpy(), 8, torch.Generator().manual_seed(1))
    config = FitConfig(**{**RECIPE, "log_every": 1, **fields})
    sink = Sink()
    fit(
        model,
        CrossEntropy("retain"),
        {"retain": loader},
        config,
        forward=forward,
        seed=0,
        telemetry=Telemetry(tracker=sink, evaluate_during=look),
    )
    return before, [row["loss/retain_loss"] for row in sink.rows.values() if "lr" in row]


def change(model, before):
    """(norm of the change of all matrices, share of their entries that did not move)."""
    parts = [(model.get_parameter(name).detach().float() - old) for name, old in before.items()]
    whole = torch.cat([part.flatten() for part in parts])
    return float(whole.norm()), float((whole == 0).float().mean())


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_bfloat16_training_moves_as_float32_does(llama, mixed):
    wide = copy.deepcopy(llama).float()
    before, losses = trained(llama, mixed_precision=mixed)
    wide_before, wide_losses = trained(wide)
    assert {p.dtype for p in llama.parameters()} == {torch.bfloat16}, "its own type again"
    (norm, still), (wide_norm, wide_still) = change(llama, before), change(wide, wide_before)
    assert norm == pytest.approx(wide_norm, rel=0.05)
    # what is left still moved by less than half a last place of its type
    assert wide_still < 0.01 and still < 0.25
    fall, wide_fall = losses[0] - losses[-1], wide_losses[0] - wide_losses[-1]
    assert fall == pytest.approx(wide_fall, rel=0.1) and wide_fall > 0.05


def test_frozen_weights_keep_their_type_while_others_train(llama):
    seen = []
    for name, parameter in llama.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    with pytest.raises(Diverged):
        watch = llama.register_forward_pre_hook(
            lambda model, inputs: seen.append({n: p.dtype for n, p in model.named_parameters()})
        )
        trained(llama, loss_cap=1e-6)
    watch.remove()
    wide = {name for name, dtype in seen[0].items() if dtype == torch.float32}
    norms = {name for name in seen[0] if "norm" in name}
    assert wide == norms | {name for name in seen[0] if "layers.1" in name}
    assert {p.dtype for p in llama.parameters()} == {torch.bfloat16}, "also after a divergence"


def test_every_training_of_one_model_has_the_precision_that_it_asks_for(llama):
    """A copy that is made in a training as well."""
    seen, copies = [], []

    def look(model, step):
        copies.append(copy.deepcopy(model))
        return {}

    watch = llama.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, inputs: seen.append(torch.is_autocast_enabled("cpu"))
    )
    short = {"steps": 1, "warmup_steps": 0, "accumulation": 1, "mixed_precision": "bf16"}
    trained(llama, look=look, evaluate_every=1, **short)
    trained(llama, **short)
    watch.remove()
    trained(copies[0], **short)
    assert seen == [True] * 3, "the copy has the hook too"


def test_whoever_looks_sees_the_weights_as_they_will_be_kept(llama):
    for name, parameter in llama.named_parameters():
        parameter.requires_grad_(name == "model.embed_tokens.weight")  # a frozen norm follows
    looks = []

    @torch.no_grad()
    def look(model, step):
        types = {p.dtype for p in model.parameters()}
        logits = model(input_ids=torch.arange(6)[None]).logits
        looks.append((types, model.get_input_embeddings().weight.clone()))
        return {"logit": float(logits[0, 0, 0])}

    trained(llama, look=look, evaluate_every=30)
    (first, before), (last, after) = looks
    assert first == last == {torch.bfloat16}
    assert torch.equal(after, llama.get_input_embeddings().weight)
    assert not torch.equal(before, after), "training goes on in float32"


def test_scores_round_to_tf32_on_a_card_alone():
    before = torch.get_float32_matmul_precision()
    with tensor_float("cpu"):
        assert torch.get_float32_matmul_precision() == before == "highest"
    with pytest.raises(ZeroDivisionError), tensor_float("cuda:1"):
        assert torch.get_float32_matmul_precision() == "high"
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("mode", ["merged", "split"])
@pytest.mark.parametrize(("size", "least", "most"), [(2.6e-4, 0.1, 0.25), (2.6e-3, 0.85, 0.95)])
def test_in_bfloat16_a_small_update_is_rounded_away_in_the_output(size, least, most, mode):
    """What the adapter's ``mode`` says: the share of x dW^T that arrives is the same in both."""
    width, draw = 1024, torch.Generator().manual_seed(0)
    x = torch.randn(64, width, generator=draw).bfloat16()
    base = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        base.weight.copy_(torch.randn(width, width, generator=draw) / width**0.5)
    plain = base(x).float()
    layer = BoundedLinear(base, AdapterConfig(phi="tanh", c=1.0, mode=mode), draw)
    with torch.no_grad():
        layer.A.normal_(generator=draw)
        for _ in range(4):  # the norm of dW is not quite linear in A
            layer.A.mul_(size * base.weight.float().norm() / layer.delta().norm())
        wanted = x.float() @ layer.delta().float().T
        arrived = layer(x).float() - plain
    share = float((arrived * wanted).sum() / wanted.square().sum())
    assert least < share < most

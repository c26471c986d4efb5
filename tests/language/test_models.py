"""Causal models: bits by seed, logits at the labels, adapters, counts, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import adapted_layers, attach, chosen_layers
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.probes import ceiling
from stable_forgetting.common.protocol.probe import make_probe
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.models import build as building
from stable_forgetting.language.models import families
from stable_forgetting.language.models.backbone import causal_forward, last_layers
from stable_forgetting.language.models.build import blank_model, build_model, load_published
from stable_forgetting.language.models.families import FAMILIES, CausalFamily, family_of
from stable_forgetting.language.models.sizes import (
    completed,
    count_targets,
    family_in,
    linear_layers,
)
from stable_forgetting.language.scenarios import TextScenarioConfig, make_split
from tests.language.made import Wrapped, source_of

KINDS = ("gpt_neo", "phi", "llama")
TINY = {"dim": 16, "depth": 2, "heads": 2, "tokenizer": 400, "context": 128}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def source():
    corpus = load_corpus(TextDataConfig.of(authors=3, forget_authors=1, questions=4))
    return source_of(corpus, 400, max_length=128)


def config(kind="gpt_neo", **fields):
    return CausalModelConfig(kind=kind, **TINY | fields)


def build(kind="gpt_neo", seed=0, **fields):
    return build_model(config(kind, **fields), 400, seed, end=0)


def full_logits(model, batch):
    inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs).logits
    positions = batch.inputs["positions"]
    return logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1]))


def same(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@each_kind
def test_the_seed_decides_every_bit_and_the_global_state_stays(kind):
    before = torch.random.get_rng_state()
    model = build(kind)
    assert torch.equal(before, torch.random.get_rng_state())
    assert same(model, build(kind)) and not same(model, build(kind, seed=1))
    blank = blank_model(config(kind), 400)
    assert {k: v.shape for k, v in blank.state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }
    assert model.config.model_type == kind and model.config.eos_token_id == 0


@each_kind
def test_logits_at_the_labels_are_those_of_the_whole_text(kind, source):
    model = build(kind).eval()
    batch = source.fetch(torch.tensor([0, 3, 20, 30]))
    want, seen = full_logits(model, batch), []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    got = causal_forward(model, batch)
    assert got.shape == seen[0] == (*batch.labels.shape, 400), "the head sees no other positions"
    assert batch.labels.shape[1] < batch.inputs["input_ids"].shape[1]
    assert not model.lm_head._forward_pre_hooks, "nothing is left behind"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert got.abs().max() > 1e-3
    got.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@each_kind
def test_padding_changes_nothing(kind, source):
    model = build(kind).eval()
    long = max(range(16), key=lambda index: len(source.encode_index(index).ids))
    short = min(range(16), key=lambda index: len(source.encode_index(index).ids))
    assert len(source.encode_index(long).ids) > len(source.encode_index(short).ids)
    with torch.no_grad():
        alone = causal_forward(model, source.fetch(torch.tensor([short])))[0]
        batch = source.fetch(torch.tensor([short, long]))
        padded = causal_forward(model, batch)[0, : len(alone)]
        garbage = dict(batch.inputs)
        hidden = garbage["attention_mask"] == 0
        garbage["input_ids"] = garbage["input_ids"].masked_fill(hidden, 77)
        other = causal_forward(model, Batch(garbage, batch.labels, batch.indices))
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(other[0, : len(alone)], alone, rtol=0, atol=1e-5)


class Headless(nn.Module):
    """A model that does not say where its head is."""

    def __init__(self, module):
        super().__init__()
        self.hidden = [module]

    def forward(self, **inputs):
        return self.hidden[0](**inputs)


@pytest.mark.parametrize("wrap", [Wrapped, Headless])
def test_wrapped_models_give_the_same(wrap, source):
    model = build().eval()
    batch = source.fetch(torch.arange(3))
    with torch.no_grad():
        torch.testing.assert_close(
            causal_forward(wrap(model), batch), full_logits(model, batch), rtol=0, atol=1e-5
        )


def test_what_a_model_does_to_its_logits_still_happens(source):
    from transformers import AutoModelForCausalLM, Gemma2Config

    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 400}
    capped = Gemma2Config(**sizes, **heads, final_logit_softcapping=0.01, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(capped).eval()
    batch = source.fetch(torch.arange(3))
    with torch.no_grad():
        got = causal_forward(model, batch)
        torch.testing.assert_close(got, full_logits(model, batch), rtol=0, atol=1e-5)
    assert got.abs().max() <= 0.01


# -- methods and adapters -------------------------------------------------------------------------


def make_task(kind, source, **fields):
    split = make_split(source, TextScenarioConfig(forget_authors=1), 0)
    return UnlearnTask(
        model=build(kind, **fields),
        data=DataAccess(source, split, frozenset({"forget", "retain"})),
        family=SimpleNamespace(
            forward=causal_forward,
            num_classes=source.vocab_size,
            targets=family_of(kind).targets,
            head=family_of(kind).head,
            component_of=family_of(kind).component_of,
        ),
        recipe=FitConfig(steps=1),
        build=lambda: build(kind),
        seed=0,
    )


@each_kind
@pytest.mark.parametrize("placement", ["mlp", "attention", "all"])
def test_every_placement_matches_linear_layers(kind, placement):
    model = build(kind)
    adapter = AdapterConfig(rank=2)
    patterns = FAMILIES[kind].targets[placement]
    names = attach(model, patterns, adapter, torch.Generator().manual_seed(0))
    per_block = {"mlp": len(FAMILIES[kind].targets["mlp"]), "attention": 4}
    per_block["all"] = sum(per_block.values())
    assert len(names) == 2 * per_block[placement]
    if placement != "all":
        assert {family_of(kind).component_of(f"{name}.A") for name in names} == {placement}


@each_kind
def test_adapters_learn_the_same_under_gradient_checkpointing(kind, source):
    batch = source.fetch(torch.arange(4))
    gradients = []
    for checkpointing in (False, True):
        model = build(kind, gradient_checkpointing=checkpointing).train()
        flags = [getattr(module, "gradient_checkpointing", False) for module in model.modules()]
        assert any(flags) == checkpointing
        stream = torch.Generator().manual_seed(0)
        attach(model, FAMILIES[kind].targets["all"], AdapterConfig(rank=2, phi="sine"), stream)
        causal_forward(model, batch).square().sum().backward()
        gradients.append([layer.A.grad for _, layer in adapted_layers(model)])
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients[1])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@each_kind
def test_bfloat16_trains_adapters(kind, source):
    resolved = resolve_config("gd_sine", None, {"steps": 2, "batch_size": 4}, origin="test")
    model = METHODS["gd_sine"](resolved).unlearn(make_task(kind, source, dtype="bfloat16"))
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert all(layer.A.isfinite().all() for _, layer in adapted_layers(model))
    assert any(layer.A.abs().max() > 0 for _, layer in adapted_layers(model))


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("transformer.h.0.mlp.c_fc.weight", "mlp"),
        ("transformer.h.0.attn.attention.q_proj.weight", "attention"),
        ("model.layers.3.self_attn.dense.bias", "attention"),
        ("model.layers.3.mlp.gate_proj.A", "mlp"),
        ("lm_head.weight", "head"),
        ("transformer.wte.weight", "other"),
        ("model.layers.0.input_layernorm.weight", "other"),
    ],
)
def test_components(name, component):
    assert family_of("llama").component_of(name) == component


# -- counts ---------------------------------------------------------------------------------------

LOKU = ("*.q_proj", "*.v_proj", "*mlp.c_fc", "*mlp.c_proj")


@pytest.mark.parametrize(
    ("name", "rank", "placement", "percent"),
    [
        ("EleutherAI/gpt-neo-125m", 16, LOKU, 1.622),
        ("EleutherAI/gpt-neo-1.3B", 16, LOKU, 0.830),
        ("EleutherAI/gpt-neo-2.7B", 16, LOKU, 0.687),
        ("EleutherAI/gpt-neo-125m", 16, "mlp", 1.16),
        ("EleutherAI/gpt-neo-1.3B", 16, "mlp", 0.59),
        ("EleutherAI/gpt-neo-2.7B", 16, "mlp", 0.49),
        ("microsoft/phi-1_5", 4, "all", 0.249),
        ("microsoft/phi-1_5", 32, "all", 1.957),
        ("microsoft/phi-1_5", 4, "mlp", 0.138),
        ("microsoft/phi-1_5", 32, "mlp", 1.097),
        ("meta-llama/Llama-2-7b-chat-hf", 4, "all", 0.148),
        ("meta-llama/Llama-2-7b-hf", 16, "mlp", 0.343),
        ("meta-llama/Llama-3.1-8B", 4, "all", 0.130),
        ("meta-llama/Llama-3.1-8B-Instruct", 16, "all", 0.520),
    ],
)
def test_counted_shares_of_the_papers_models(name, rank, placement, percent):
    """PEFT's share; the paper's 1.6 % is that of GPT-Neo-125M at rank 16, not of rank 4."""
    where = {"placement": placement} if isinstance(placement, str) else {"targets": placement}
    trainable, base = count_targets(CausalModelConfig(name=name), rank, **where)
    digits = 2 if percent in (1.16, 0.59, 0.49) else 3
    assert 100 * trainable / (base + trainable) == pytest.approx(percent, abs=0.6 * 10**-digits)


@each_kind
def test_counts_equal_what_is_attached(kind):
    trainable, base = count_targets(config(kind), 2, placement="all")
    model = build(kind)
    assert base == sum(p.numel() for p in model.parameters())
    stream = torch.Generator().manual_seed(0)
    attach(model, FAMILIES[kind].targets["all"], AdapterConfig(rank=2), stream)
    assert trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_one_row_adds_a_family(monkeypatch, source):
    from stable_forgetting.language.measure.likelihood import teacher_forced
    from stable_forgetting.language.models.backbone import row_limit

    def tiny(dim, depth, heads):
        sizes = {"hidden_size": dim, "num_hidden_layers": depth, "intermediate_size": 2 * dim}
        return {**sizes, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 8}

    row = CausalFamily(
        "qwen3",
        mlp=("*mlp.up_proj", "*mlp.down_proj"),
        attention=("*self_attn.q_proj",),
        linear_head=True,
        maskable=True,
        tiny=tiny,
    )
    with pytest.raises(ConfigError, match=r"no tiny model; known: gpt_neo, llama, mistral, phi"):
        build("qwen3")
    monkeypatch.setitem(FAMILIES, "qwen3", row)
    model = build("qwen3").eval()
    assert row_limit(model) == 1024
    pairs = [source.encode_index(index) for index in range(4)]
    packed, alone = (teacher_forced(model, pairs, share_prompts=flag) for flag in (True, False))
    torch.testing.assert_close(packed.token_loss, alone.token_loss, rtol=0, atol=1e-5)
    assert count_targets(config("qwen3"), 2)[0] == 2 * 2 * 2 * (16 + 32)
    toy = ("qwen3", {**tiny(16, 1, 2), "vocab_size": 400})
    monkeypatch.setitem(families.PUBLISHED, "toy", toy)
    monkeypatch.setitem(families._SIZE_OF, "owner/toy", "toy")
    assert count_targets(CausalModelConfig(name="owner/toy"), 2)[0] == 2 * 2 * (16 + 32)


# -- checkpoints and refusals ---------------------------------------------------------------------


@each_kind
def test_a_folder_of_safetensors_comes_back_bit_for_bit(kind, tmp_path, source):
    model = build(kind)
    model.save_pretrained(tmp_path)
    loaded = build_model(CausalModelConfig(name=str(tmp_path)), 400, 5)
    assert same(loaded, model)
    half = load_published(
        CausalModelConfig(name=str(tmp_path), dtype="bfloat16"), str(tmp_path), 400
    )
    assert next(half.parameters()).dtype == torch.bfloat16
    blank = blank_model(CausalModelConfig(name=str(tmp_path)), 400)
    assert not same(blank, model)
    blank.load_state_dict(model.state_dict())
    batch = source.fetch(torch.arange(3))
    with torch.no_grad():
        assert torch.equal(causal_forward(blank.eval(), batch), causal_forward(model.eval(), batch))
    with pytest.raises(ConfigError, match="400 embeddings for a tokenizer of 401"):
        build_model(CausalModelConfig(name=str(tmp_path)), 401, 0)


def test_a_revision_is_of_one_repository(tmp_path, monkeypatch):
    """A published Original lies in another one, which has no such commit."""
    given, other = str(tmp_path / "given"), str(tmp_path / "other")
    for folder in (given, other):
        build().save_pretrained(folder)
    asked, fetch = {}, building.fetch_config

    def asking(name, revision):
        asked[name] = revision
        return fetch(name, revision)

    monkeypatch.setattr(building, "fetch_config", asking)
    pinned = CausalModelConfig(name=given, revision="v2")
    for folder in (given, other):
        load_published(pinned, folder, 400)
    assert asked == {given: "v2", other: None}


@each_kind
def test_stages_store_and_restore_tied_weights(kind, tmp_path):
    from stable_forgetting.common.store.weights import WEIGHTS, load_weights, save_weights

    model, blank = build(kind, seed=3), blank_model(config(kind), 400)
    save_weights(model, tmp_path)
    load_weights(blank, tmp_path / WEIGHTS)
    assert same(blank, model)
    assert blank.lm_head.weight is blank.get_input_embeddings().weight


def test_pickled_weights_are_refused(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        build_model(CausalModelConfig(name=str(tmp_path)), 400, 0)


def test_weights_without_a_place_are_told_and_old_buffers_are_not(tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    build(depth=2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, value in (("bias", torch.ones(1, 1, 8, 8)), ("masked_bias", torch.tensor(-1e9))):
        weights[f"transformer.h.0.attn.attention.{name}"] = value  # as in EleutherAI's
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    given = CausalModelConfig(name=str(tmp_path))
    build_model(given, 400, 0)
    assert not caplog.messages
    build(depth=1).config.save_pretrained(tmp_path)
    lost = sorted(name for name in weights if ".h.1." in name)
    build_model(given, 400, 0)
    (message,) = caplog.messages
    assert f"hold {lost[0]} and {len(lost) - 1} other(s)" in message


@pytest.mark.parametrize("decodes", [False, True])
def test_bert_is_a_causal_model_only_as_a_decoder(decodes, tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(vocab_size=400, intermediate_size=24, is_decoder=decodes, **sizes)
    BertLMHeadModel(bert).save_pretrained(tmp_path)
    given = CausalModelConfig(name=str(tmp_path))
    if decodes:
        assert build_model(given, 400, 0).config.is_decoder
        return
    with pytest.raises(CheckpointError, match="sees the tokens that it is to predict"):
        build_model(given, 400, 0)


def test_gpt2_is_built_and_has_no_layers_for_adapters(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=400).save_pretrained(tmp_path)
    model = blank_model(CausalModelConfig(name=str(tmp_path)), 400)
    assert not family_in(model).targets


def test_faults_are_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for name in ("nobody/nothing", str(tmp_path)):
        with pytest.raises(DataError, match=r"config\.json, name: tiny") as caught:
            build_model(CausalModelConfig(name=name), 400, 0)
        assert "\n" not in str(caught.value)


def test_layers_are_read_where_the_table_names_none(tmp_path):
    from transformers import OPTConfig

    assert family_of("opt").targets == {}
    sizes = {"hidden_size": 8, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    OPTConfig(**sizes, vocab_size=400, word_embed_proj_dim=8).save_pretrained(tmp_path)
    opt = CausalModelConfig(name=str(tmp_path))
    assert count_targets(opt, 2)[0] == 2 * 2 * (8 + 32)
    assert count_targets(opt, 2, placement="attention")[0] == 4 * 2 * (8 + 8)
    assert count_targets(opt, 2, targets=["*.fc1"])[0] == 2 * (8 + 32)


@each_kind
def test_what_is_read_is_what_the_table_says(kind):
    """The three families whose layers the table names, by the reading that all others get."""
    model, row = build(kind), family_of(kind)
    read = completed(CausalFamily(kind), linear_layers(model))
    for placement, patterns in row.targets.items():
        assert chosen_layers(model, read.targets[placement]) == chosen_layers(model, patterns)


GATE = {"gate_proj": (24, 8), "up_proj": (24, 8), "down_proj": (8, 24)}
ATTENTION = {f"{name}_proj": (8, 8) for name in "qkvo"}


def stack(*blocks, at="model.layers"):
    return {
        f"{at}.{number}.{module}.{leaf}": shape
        for number, block in enumerate(blocks)
        for module, group in block.items()
        for leaf, shape in group.items()
    }


@pytest.mark.parametrize(
    ("linear", "placements"),
    [
        (stack({"mlp": GATE, "self_attn": ATTENTION}), {"mlp": 3, "attention": 4, "all": 7}),
        (stack({"ffn": {"a": (48, 8), "b": (8, 24)}}), {"mlp": 2}),  # gate and up are one layer
        (stack({"ffn": {"a": (40, 8), "b": (8, 24)}}), {}),
        (stack({"mlp": {"gate": (4, 8)}, "attn": ATTENTION}), {"attention": 4}),  # a router
        (stack({"mlp.expert": GATE}), {}),
        (stack({"mlp": GATE}, {"moe": {"gate": (4, 8)}}), {}),  # not in every block
        (stack({"mlp": GATE}) | stack({"mlp": {"a": (9, 3), "b": (3, 9)}}, at="eye"), {"mlp": 3}),
        ({"lm_head": (50, 8)}, {}),
    ],
)  # fmt: skip
def test_layers_are_told_by_shape_and_name(linear, placements):
    read = completed(CausalFamily("new"), linear)
    assert {name: len(patterns) for name, patterns in read.targets.items()} == placements


def test_an_unknown_architecture_needs_targets(tmp_path):
    from transformers import MambaConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    MambaConfig(**sizes, vocab_size=400).save_pretrained(tmp_path)
    mamba = CausalModelConfig(name=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"no layer of a mamba .* targets among \*\.mixer\.in_proj"
    ):
        count_targets(mamba, 2)
    assert count_targets(mamba, 2, targets=["*.out_proj"])[0] == 2 * (16 + 8)


def test_a_trained_tied_head_comes_back_with_its_adapter(tmp_path):
    from stable_forgetting.common.bounded.files import load_adapter, save_adapter

    family, ids = family_of("gpt_neo"), torch.arange(8)[None]
    model = build(depth=1).eval()
    generator = torch.Generator().manual_seed(0)
    attach(model, family.mlp, AdapterConfig(rank=2), generator, trainable=family.head)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, tmp_path)
    again = build(depth=1).eval()
    before = again(input_ids=ids).logits
    load_adapter(again, tmp_path)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not torch.allclose(again(input_ids=ids).logits, before)


SMALL = sorted(name for name, family in FAMILIES.items() if family.tiny is not None)
VOCABULARY = 40


def tiny(kind):
    model = build_model(config(kind, depth=1, context=16), VOCABULARY, 0).eval()
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a head as wide as that of a trained model, and a shift that counts
        model.get_output_embeddings().weight.normal_(std=0.5, generator=stream)
    return model


@pytest.mark.parametrize("kind", SMALL)
def test_ascent_on_everything_before_the_last_layers_stays_below(kind):
    model = tiny(kind)
    probe = make_probe("ceiling", {}, "test")
    table = probe.measure(model, SimpleNamespace(last_layers=last_layers))
    assert len(table.rows) == VOCABULARY
    highest = probe.summary(table)["ceiling.loss"]
    assert probe.related({"ceiling.loss": highest, "forget_loss": highest / 4}) == {
        "ceiling.reached": pytest.approx(25)
    }
    last = model.base_model.get_submodule(FAMILIES[kind].last_norm)
    frozen = {id(p) for part in (last, model.get_output_embeddings()) for p in part.parameters()}
    trained = [p for p in model.parameters() if id(p) not in frozen]
    ids = torch.arange(24).view(3, 8)
    labels = torch.arange(3) % 2
    optimizer = torch.optim.Adam(trained, lr=0.03, maximize=True)
    for _ in range(150):
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits[:, -1]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        losses.sum().backward()
        optimizer.step()
    ceilings = [table.rows[f"class {label}"]["ceiling"] for label in labels.tolist()]
    for loss, ceiling_of in zip(losses.tolist(), ceilings, strict=True):
        assert 0.7 * ceiling_of < loss <= ceiling_of + 1e-3


def test_a_large_vocabulary_is_sampled(monkeypatch):
    monkeypatch.setattr(ceiling, "ALL", 30)
    monkeypatch.setattr(ceiling, "SOME", 8)
    table = make_probe("ceiling", {}, "test").measure(
        tiny("gpt_neo"), SimpleNamespace(last_layers=last_layers)
    )
    assert list(table.rows) == [f"class {label}" for label in range(0, VOCABULARY, 5)]


def sized(kind, **fields):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(kind, **sizes, **heads, pad_token_id=0, **fields)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", [*SMALL, "gemma", "gemma3_text"])
def test_logits_are_those_of_the_last_layers(kind):
    model = tiny(kind) if kind in SMALL else sized(kind)
    norm = model.base_model.get_submodule(FAMILIES[kind].last_norm)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        seen: list[torch.Tensor] = []
        with norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            logits = model(input_ids=torch.arange(1, 9)[None]).logits
    layers, states = last_layers(model), seen[0]
    if layers.centred:
        states = states - states.mean(-1, keepdim=True)
    states = states * states.square().mean(-1, keepdim=True).rsqrt()
    again = (states * layers.gain + layers.shift) @ layers.weight.T + layers.bias
    torch.testing.assert_close(logits, again, rtol=0, atol=1e-2)


def test_families_without_a_known_end_have_none():
    assert last_layers(sized("gemma3_text")) is not None
    assert last_layers(sized("gemma3_text", final_logit_softcapping=30.0)) is None
    model = tiny("llama")
    model.config.model_type = "unheard-of"
    assert last_layers(model) is None

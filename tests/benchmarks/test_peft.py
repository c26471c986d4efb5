"""PEFT both ways: its adapters as a start, and linear adapters as its own."""

from __future__ import annotations

import json

import pytest
import torch

from stable_forgetting import forget
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.tokenizers import load_tokenizer
from stable_forgetting.language.models.build import blank_model, build_model
from tests.benchmarks import test_apply as images
from tests.benchmarks import test_apply_text as texts

peft = pytest.importorskip("peft")
SHORT = {"steps": 3, "batch_size": 4, "lr": 1e-2}
ROWS = {"forget": texts.FORGET, "retain": texts.RETAIN}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of a small LLaMA."""
    folder = tmp_path_factory.mktemp("base")
    texts.write_trained(folder, "llama")
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    """Folder of a PEFT adapter that changes the model, and the model with it merged."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(texts.reloaded(base)[0], config)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", wrapped.merge_and_unload()


@pytest.mark.parametrize("method", ["gd_lora", "gd_lora_omega", "loku"])
def test_a_linear_adapter_is_one_of_peft(base, tmp_path, method):
    out = tmp_path / "out"
    result = forget(base, **ROWS, method=method, params=SHORT, out=out)
    assert result.statement["output"]["peft"] == ""
    given, words = texts.reloaded(base)
    before = texts.logits_of(given, words)
    loaded = peft.PeftModel.from_pretrained(given, out / "adapter").eval()
    merged = texts.reloaded(out)[0]
    assert (texts.logits_of(merged, words) - before).abs().max() > 1e-3
    logits, wanted = texts.logits_of(loaded, words), texts.logits_of(merged, words)
    assert (logits - wanted).abs().max() < 1e-6 * wanted.abs().max()
    about = json.loads((out / "adapter/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base)
    assert "PEFT reads the adapter" in (out / "README.md").read_text()


def test_a_bounded_adapter_near_a_lora_is_one_of_peft_with_its_error(base, tmp_path):
    out = tmp_path / "out"
    result = forget(base, **ROWS, method="gd_sine", params=SHORT, out=out)
    about = result.statement["output"]
    assert about["peft"] == "" and 0 < about["peft_error"] <= 0.01
    given = texts.reloaded(base)[0]
    loaded = peft.PeftModel.from_pretrained(given, out / "adapter").merge_and_unload().state_dict()
    merged, before = texts.reloaded(out)[0].state_dict(), texts.reloaded(base)[0].state_dict()
    moved = sum((merged[n] - before[n]).double().square().sum() for n in merged)
    missed = sum((merged[n] - loaded[n]).double().square().sum() for n in merged)
    assert float((missed / moved).sqrt()) == pytest.approx(about["peft_error"], rel=0.05)
    assert "whose update differs from the bounded one by" in (out / "README.md").read_text()


def test_a_bounded_adapter_far_from_any_lora_says_why_it_is_none(base, tmp_path):
    params = {"steps": 3, "batch_size": 4, "lr": 3.0, "loss_cap": 1e6}
    result = forget(base, **ROWS, method="gd_sine", params=params, out=tmp_path / "out")
    reason = result.statement["output"]["peft"]
    assert reason.startswith("sine is not linear, and LoRA is: at rank ")
    assert not (tmp_path / "out/adapter/adapter_config.json").exists()
    assert reason in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("kind", ["lora", "dora", "oft", "delora"])
def test_any_gradient_method_runs_through_the_adapters_of_peft(base, kind):
    result = forget(base, **ROWS, method=f"npo_gdr_peft_{kind}", params=SHORT)
    assert result.status == "ok" and result.adapter is None
    before, after = texts.reloaded(base)[0].state_dict(), result.model.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(after[name].cpu(), before[name])}
    assert changed and all(".mlp." in name for name in changed)


def test_settings_of_our_own_adapters_are_not_for_those_of_peft(base):
    for params, words in [
        ({"adapter": {"phi": "sine"}}, "phi is of our own adapters"),
        ({"ball": 0.5}, "ball constrains our own adapters"),
        ({"fila": {}}, "fila starts our own adapters"),
    ]:
        with pytest.raises(ConfigError, match=words):
            forget(base, **ROWS, method="npo_gdr_peft_lora", params=params)
    with pytest.raises(ConfigError, match="O3 reads the factors of our own adapter"):
        forget(base, **ROWS, method="o3", params={"adapter": {"peft": "lora", "dropout": 0}})


def test_an_adapter_is_the_model_of_a_suite(adapter):
    folder, whole = adapter
    config = CausalModelConfig(name=str(folder))
    words = load_tokenizer(config)
    built = build_model(config, len(words), 0)
    assert not any("lora" in name for name in built.state_dict())
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(built.state_dict()[name], tensor, atol=1e-6), name
    assert blank_model(config, len(words)).state_dict().keys() == built.state_dict().keys()


def test_an_adapter_of_images_is_one_of_peft(tmp_path):
    model = images.tiny_vit()
    given = [(torch.randn(3, images.SIDE, images.SIDE), label % 4) for label in range(24)]
    result = forget(model, given[:6], given[6:], "gd_lora", params=SHORT, anyway=True)
    made = result.save(tmp_path / "made")
    loaded = peft.PeftModel.from_pretrained(model, made / "adapter").eval()
    batch = torch.stack([image for image, _ in given])
    with torch.no_grad():
        wanted = result.model(batch)
        assert (loaded(batch) - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_an_adapter_beside_other_trained_weights_is_refused(base, tmp_path):
    params = {**SHORT, "adapter": {"trained": ["model.norm.*"]}}
    result = forget(base, **ROWS, method="gd_lora", params=params, out=tmp_path / "out")
    assert result.statement["output"]["peft"] == "model.norm.weight is trained beside it"


def test_an_adapter_is_a_start(adapter, tmp_path):
    folder, whole = adapter
    texts.tokenizer().save_pretrained(tmp_path / "whole")
    whole.save_pretrained(tmp_path / "whole")
    first = forget(folder, **ROWS, method="gd", params=SHORT, out=tmp_path / "first")
    second = forget(tmp_path / "whole", **ROWS, method="gd", params=SHORT, out=tmp_path / "second")
    assert first.before["forget"] == pytest.approx(second.before["forget"], rel=1e-5)
    assert set(first.statement["input"]["weights_sha256"]) == {
        "model.safetensors",
        "adapter_model.safetensors",
    }
    one, two = (texts.reloaded(tmp_path / name)[0] for name in ("first", "second"))
    for name, tensor in one.state_dict().items():
        assert torch.allclose(tensor, two.state_dict()[name], atol=1e-5), name


def test_a_tokenizer_of_the_adapters_own_is_used_and_written(base, adapter, tmp_path):
    folder, words = adapter[0], texts.tokenizer()
    words.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    )
    words.save_pretrained(folder)
    out = tmp_path / "out"
    result = forget(folder, **ROWS, method="gd", params=SHORT, out=out, template="chat")
    assert result.status == "ok", "the model that it is for has no chat template"
    assert texts.reloaded(out)[1].chat_template == words.chat_template
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_what_is_written_is_a_start_again(base, tmp_path):
    forget(base, **ROWS, method="gd_lora", params=SHORT, out=tmp_path / "out")
    again = forget(tmp_path / "out/adapter", **ROWS, method="gd", params=SHORT)
    whole = forget(tmp_path / "out", **ROWS, method="gd", params=SHORT)
    assert again.before["forget"] == pytest.approx(whole.before["forget"], rel=1e-5)


def test_an_adapter_that_cannot_be_merged_is_said_in_one_line(adapter):
    folder, _ = adapter
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    about = json.loads(config.read_text())

    def says(words):
        with pytest.raises(CheckpointError, match=words) as caught:
            forget(folder, **ROWS, method="gd", params=SHORT)
        assert "\n" not in str(caught.value)

    config.write_text(json.dumps({**about, "peft_type": "NOTHING"}))
    says("PEFT cannot merge it into its model")
    config.write_text(json.dumps({**about, "base_model_name_or_path": None}))
    says("names no base_model_name_or_path")
    config.write_text(json.dumps({**about, "base_model_name_or_path": str(folder)}))
    says("is an adapter too")
    config.write_text(json.dumps({**about, "base_model_name_or_path": "moved"}))
    says("adapter_config.json: base_model_name_or_path: moved: no such folder")
    weights.rename(folder / "adapter_model.bin")
    says("a pickled checkpoint can run code")


def test_a_peft_model_in_memory_is_to_be_merged_first(base):
    model, words = texts.reloaded(base)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        forget(wrapped, **ROWS, tokenizer=words)
    merged = wrapped.merge_and_unload()
    assert not any(p.requires_grad for p in merged.parameters()), "PEFT leaves it frozen"
    result = forget(merged, **ROWS, tokenizer=words, method="gd", params=SHORT)
    assert result.after["forget"]["loss"] != result.before["forget"]["loss"]
    assert not any(p.requires_grad for p in merged.parameters())

"""The hub both ways, against one on this machine."""

from __future__ import annotations

import json

import pytest
import timm
import torch

from stable_forgetting import evaluate, forget
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.base.hub import is_repository, parsed
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.build import build_model
from tests.benchmarks import test_apply as images
from tests.benchmarks import test_apply_text as texts
from tests.hub_endpoint import COMMIT, serving

SHORT = {"steps": 2, "batch_size": 4}
ROWS = {"forget": texts.FORGET, "retain": texts.RETAIN}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving(monkeypatch, tmp_path / "cache") as made:
        yield made


@pytest.fixture
def classifier(tmp_path):
    """Folder of a small ViT as timm writes it for the hub."""
    from timm.models import save_for_hf

    model = images.tiny_vit()
    save_for_hf(
        model, tmp_path / "vit", model_args={"img_size": images.SIDE}, safe_serialization=True
    )
    return model, tmp_path / "vit"


def pictures():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return [(torch.randn(3, images.SIDE, images.SIDE), label % 4) for label in range(12)]


@pytest.mark.parametrize("name", ["hf-hub:me/vit", "me/vit", "me/vit@main"])
def test_an_image_model_of_the_hub_is_a_start_and_goes_back(hub, classifier, tmp_path, name):
    model, folder = classifier
    hub.add("me/vit", folder)
    data = pictures()
    how = {"method": "gd_lora", "params": SHORT, "anyway": True, "device": "cpu"}
    result = forget(name, data[:4], data[4:], **how)
    assert result.statement["input"]["model"] == "me/vit"
    assert result.statement["input"]["revision"] == COMMIT
    same = forget(model, data[:4], data[4:], **how)
    assert result.after == same.after
    assert result.push("me/forgotten").endswith("me/forgotten")
    assert hub.private["me/forgotten"] is True
    held = hub.repositories["model", "me/forgotten"]
    assert held.keys() >= {"model.safetensors", "config.json", "README.md", "statement.json"}
    adapter = json.loads(held["adapter/adapter_config.json"])
    assert adapter["base_model_name_or_path"] == "me/vit"
    assert adapter["revision"] == ("main" if name.endswith("@main") else None)
    loaded = timm.create_model("hf-hub:me/forgotten", pretrained=True, cache_dir=tmp_path / "timm")
    batch = torch.stack([image for image, _ in data])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(batch), result.model(batch))


def test_what_is_uploaded_names_no_path_of_this_machine(hub, classifier, tmp_path):
    data, out = pictures(), tmp_path / "out"
    result = forget(
        classifier[1], data[:4], data[4:], "gd_lora", params=SHORT, out=out, anyway=True
    )
    result.push("me/forgotten")
    held = hub.repositories["model", "me/forgotten"]
    assert json.loads(held["adapter/adapter_config.json"])["base_model_name_or_path"] == ""
    for name, content in held.items():
        assert str(tmp_path).encode() not in content, name
    kept = json.loads((out / "adapter/adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == str(classifier[1]), "here it is still a start"


def test_a_card_gives_the_hub_its_numbers(hub, classifier):
    from huggingface_hub import ModelCard

    hub.add("me/vit", classifier[1])
    data = pictures()
    result = forget("me/vit", data[:4], data[4:], "gd", params=SHORT, anyway=True)
    result.push("me/forgotten")
    card = ModelCard(hub.repositories["model", "me/forgotten"]["README.md"].decode())
    assert card.data.base_model == "me/vit" and card.data.library_name == "timm"
    told = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    accuracy = result.after["forget"]["accuracy"]
    assert told["forget data of the request", "accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert ("retain data of the request", "loss") in told


def test_a_text_model_of_the_hub_is_a_start_of_all(hub, tmp_path):
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(texts.config_of("llama")).save_pretrained(tmp_path / "m")
    texts.tokenizer().save_pretrained(tmp_path / "m")
    (tmp_path / "m/modeling_own.py").write_text("raise SystemExit('code of a repository ran')")
    hub.add("me/llm", tmp_path / "m")
    result = forget("hf-hub:me/llm", **ROWS, method="gd", params=SHORT)
    assert result.statement["input"]["revision"] == COMMIT
    assert not any("modeling_own" in line for line in hub.asked)
    (tmp_path / "text.txt").write_text("some words to read " * 20)
    settings = [f"files.mine={tmp_path / 'text.txt'}"]
    measured = evaluate("me/llm", "perplexity", settings=settings)
    assert measured.metrics == evaluate(tmp_path / "m", "perplexity", settings=settings).metrics


def test_suites_name_models_of_the_hub(hub, classifier):
    model, folder = classifier
    hub.add("me/vit", folder)
    known = {"name": "timm/vit_tiny_patch16_224.augreg_in21k"}
    assert ModelConfig.model_validate(known) == ModelConfig(
        name="vit_tiny_patch16_224.augreg_in21k", pretrained=True
    )
    config = CausalModelConfig(name="hf-hub:me/llm@v2")
    assert (config.name, config.revision) == ("me/llm", "v2")
    for checkpoint in (str(folder), "hf-hub:me/vit"):
        made = ModelConfig(name="test_vit", image_size=images.SIDE, checkpoint=checkpoint)
        built = build_model(made, num_classes=4, in_chans=3, generator_seed=0)
        assert torch.equal(built.head.weight, model.head.weight)


def test_what_cannot_be_fetched_or_uploaded_is_one_line(hub, classifier, monkeypatch, tmp_path):
    data = pictures()
    with pytest.raises(CheckpointError, match="me/none: no such folder, and it cannot be fetched"):
        forget("me/none", data[:4], data[4:], "gd", anyway=True)
    result = forget(classifier[0], data[:4], data[4:], "gd", params=SHORT, anyway=True)
    with pytest.raises(ConfigError, match="no name of the hub; give OWNER/NAME"):
        result.push("forgotten")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        CheckpointError, match=r"complete and could not be uploaded.*hf upload me/x"
    ):
        result.push("me/x", tmp_path / "out")
    assert (tmp_path / "out/README.md").is_file()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="nobody is logged in"):
        result.push("me/x")


def test_names_of_the_hub_and_paths_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    assert not is_repository("a/b") and is_repository("hf-hub:a/b")
    assert is_repository("timm/vit_tiny.augreg") and parsed("hf-hub:a/b@v1") == ("a/b", "v1")
    for path in ("model", "a/b/c", "/a/b", "vits/model.safetensors", "../a"):
        assert not is_repository(path), path


def test_the_command_uploads_and_refuses_before_it_trains(hub, classifier, tmp_path, cli):
    from PIL import Image

    for name in ("forget/0", "retain/1"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(4):
            shade = Image.new(
                "RGB", (images.SIDE, images.SIDE), (60 * number, 0, 100 * int(name[-1]))
            )
            shade.save(tmp_path / name / f"{number}.png")
    hub.add("timm/vit", classifier[1])

    def run(out, push):
        data = ("--forget", str(tmp_path / "forget"), "--retain", str(tmp_path / "retain"))
        asked = ("--method", "gd_lora", "--set", "steps=1", "--anyway", "--push", push)
        return cli("apply", "--model", "timm/vit", *data, *asked, "--out", str(tmp_path / out))

    bad = run("bad", "forgotten")
    assert bad.code == 2 and "give OWNER/NAME" in bad.err and not (tmp_path / "bad").exists()
    good = run("good", "me/forgotten")
    assert good.code == 0 and "uploaded: " in good.out
    assert "README.md" in hub.repositories["model", "me/forgotten"]

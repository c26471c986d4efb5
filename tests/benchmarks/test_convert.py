"""``unlearn apply --convert``: from a .pth of another image size to a folder for --model."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from stable_forgetting.benchmarks.apply import apply, convert
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.vision.apply.checkpoint import read_checkpoint
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from stable_forgetting.vision.apply.sizes import fitting_config, inferred_config
from tests.benchmarks.test_apply import NAMES, request_, sha256, world  # noqa: F401


@pytest.fixture
def state(world):  # noqa: F811
    return load_file(world / "model/model.safetensors")


def converted(tmp_path, content, name="vit.pth", **options):
    torch.save(content, tmp_path / name)
    out = tmp_path / "converted"
    return out, convert(tmp_path / name, out, **options)


def test_a_pth_of_another_size_from_ddp_is_converted_and_unlearned(
    request_,  # noqa: F811
    state,
    tmp_path,
    cli,
):
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "vit.pth")
    out = tmp_path / "converted"
    words = ("--arch", "test_vit", "--label-names", ", ".join(NAMES))
    done = cli.ok("apply", "--convert", tmp_path / "vit.pth", "--out", out, *words)
    assert "'module.'" in done.out and "'state_dict'" in done.out
    config = json.loads((out / "config.json").read_text())
    assert config.pop("pretrained_cfg")["input_size"] == [3, 32, 32]
    assert "correct mean, std, crop_pct" in done.out
    assert config == {
        "architecture": "test_vit",
        "num_classes": 4,
        "model_args": {"img_size": 32},
        "label_names": list(NAMES),
    }
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, state[name]), name
    statement = apply(dataclasses.replace(request_, model=out)).statement
    plain = apply(dataclasses.replace(request_, out=tmp_path / "plain")).statement
    assert statement["after"] == plain["after"]
    assert statement["preprocessing"]["size"] == 32


def test_a_bare_file_says_its_size(world, request_, tmp_path):  # noqa: F811
    file = world / "model/model.safetensors"
    bare = {"arch": "test_vit"}
    request = dataclasses.replace(request_, model=file, options=bare, params=("steps=1",))
    statement = apply(request).statement
    assert statement["preprocessing"]["size"] == 32
    written = json.loads((request.out / "config.json").read_text())
    assert written["model_args"] == {"img_size": 32}
    with pytest.raises(ConfigError, match="image_size: test_vit takes no 33 px"):
        apply(dataclasses.replace(request, options={**bare, "image_size": 33}, out=tmp_path / "o"))
    with pytest.raises(ConfigError, match="image_size: 0 is no side of an image; give 1 px or mor"):
        apply(dataclasses.replace(request, options={**bare, "image_size": 0}, out=tmp_path / "o"))


def test_a_convolutional_network_is_told_its_input(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    out, lines = converted(
        tmp_path, model.state_dict(), arch="test_resnet", image_size=64, label_names=("a", "b", "c")
    )
    config = json.loads((out / "config.json").read_text())
    assert config["num_classes"] == 3 and config["pretrained_cfg"]["input_size"] == [3, 64, 64]
    assert "model_args" not in config and any("config.json" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        {"img_size": 32, "patch_size": 8},
        {"img_size": 24, "patch_size": 4, "depth": 2, "in_chans": 1},
        {"depth": 1, "num_classes": 7},
        {"img_size": 48, "class_token": False, "global_pool": "avg"},
        {"embed_dim": 32},
    ],
)
def test_a_vision_transformer_of_other_sizes_is_rebuilt_or_refused(tmp_path, arguments):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", **arguments).eval()
    held = {"architecture": "test_vit", "num_classes": model.num_classes}
    if arguments.keys() & {"class_token", "embed_dim"}:  # weights do not say everything
        assert fitting_config(held, model) is None
        with pytest.raises(CheckpointError, match="belongs to another model than test_vit: name"):
            converted(tmp_path, model.state_dict(), arch="test_vit")
        assert not (tmp_path / "converted").exists()
        return
    out, _ = converted(tmp_path, model.state_dict(), arch="test_vit")
    config = json.loads((out / "config.json").read_text())
    prepared = config.pop("pretrained_cfg")
    assert config == fitting_config(held, model)
    said = {**config.get("model_args", {}), "num_classes": config["num_classes"]}
    assert {name: said[name] for name in arguments} == arguments
    rebuilt = read_checkpoint(out).load().eval()
    channels, side = arguments.get("in_chans", 3), arguments.get("img_size", 160)
    assert prepared["input_size"] == [channels, side, side]
    images = torch.rand(2, channels, side, side)
    assert torch.equal(rebuilt(images), model(images))


@pytest.mark.parametrize(
    "name", ["deit_tiny_distilled_patch16_224", "levit_128s", "caformer_s18", "efficientvit_b0"]
)
def test_weights_tell_the_number_of_classes_whatever_the_classifier_is(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=7)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert inferred_config(shapes, name, "f") == {"architecture": name, "num_classes": 7}


def test_weights_that_tell_no_number_of_classes_say_so(monkeypatch):
    monkeypatch.setattr("stable_forgetting.vision.apply.sizes.classifier_key", lambda model: None)
    with pytest.raises(CheckpointError, match="do not tell the number of classes; write a config"):
        inferred_config({}, "test_vit", "f")


def test_a_corrected_crop_leaves_what_else_timm_says(tmp_path):
    model = timm.create_model("test_vit", img_size=32, num_classes=3)
    out, _ = converted(tmp_path, model.state_dict(), arch="test_vit")
    config = json.loads((out / "config.json").read_text())
    for cfg in ({**config["pretrained_cfg"], "crop_pct": 1.0}, {"crop_pct": 1.0}):
        (out / "config.json").write_text(json.dumps({**config, "pretrained_cfg": cfg}))
        found = Preprocessing.of(read_checkpoint(out).load())
        assert (found.size, found.crop_pct, found.mean) == (32, 1.0, (0.5, 0.5, 0.5))
        assert "32 px, bicubic, crop_pct 1 (center), mean 0.5, 0.5, 0.5, std" in found.said()


def test_names_of_a_wrapper_are_named_with_the_mend(request_, state, tmp_path):  # noqa: F811
    path = tmp_path / "ddp.safetensors"
    save_file({f"module.{name}": value for name, value in state.items()}, path)
    options = {"arch": "test_vit"}
    with pytest.raises(CheckpointError, match=r"begin with 'module\.'.*unlearn apply --convert"):
        apply(dataclasses.replace(request_, model=path, options=options))
    convert(path, tmp_path / "mended", arch="test_vit")
    assert load_file(tmp_path / "mended/model.safetensors").keys() == state.keys()


def test_a_bin_keeps_the_config_and_the_tokenizer_beside_it(tmp_path):
    others = ("pytorch_model.bin.index.json", "statement.json", "notes.txt", "passwords.json")
    for name in ("config.json", "tokenizer.json", *others):
        (tmp_path / name).write_text("{}")
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    out, lines = converted(tmp_path, {"a": weight, "b": weight}, "pytorch_model.bin")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert "2 tensors (bfloat16)" in lines[0] and "copied config.json, tokenizer.json" in lines[-1]
    assert torch.equal(load_file(out / "model.safetensors")["b"], weight)


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (Harmful, {}, "holds more than weights"),
        (lambda _: [1, 2], {}, "holds a list, not weights"),
        (lambda _: {"a": "text"}, {}, "'a' is no tensor"),
        (lambda _: {0: torch.ones(2)}, {}, "'0' is no tensor with a name"),
        (lambda _: {"a": torch.ones(2).to_sparse()}, {}, "'a' is no tensor .* and plain entries"),
        (lambda _: {"a": torch.ones(2)}, {"arch": "test_vit"}, r"holds no 'head\.weight'"),
        (lambda _: {"a": torch.ones(2)}, {"arch": "test_vitt"}, "did you mean 'test_vit'"),
        (lambda _: {"a": torch.ones(2)}, {"label_names": ("x",)}, "need arch"),
    ],
)
def test_what_is_not_weights_is_refused_and_runs_nothing(tmp_path, content, options, words):
    harm = tmp_path / "harm"
    with pytest.raises((CheckpointError, ConfigError), match=words):
        converted(tmp_path, content(harm), **options)
    assert not harm.exists() and not (tmp_path / "converted").exists()
    assert not list(tmp_path.glob(".*"))

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.vision.benchmark import VisionBenchmark
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models import build as models
from stable_forgetting.vision.models.build import build_model, input_spec
from stable_forgetting.vision.models.checkpoint import load_checkpoint
from stable_forgetting.vision.models.family import VIT, family_of
from stable_forgetting.vision.models.sizes import count_adapters

TINY = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 2, "heads": 2}


def build(seed=0, *, classes=5, chans=3, **fields):
    config = ModelConfig(**TINY | fields)
    return build_model(config, num_classes=classes, in_chans=chans, generator_seed=seed)


def timm_tiny(seed=0, *, classes=5, **fields):
    config = ModelConfig(name="vit_tiny_patch16_224", **{"image_size": 32} | fields)
    return build_model(config, num_classes=classes, in_chans=3, generator_seed=seed)


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return all(torch.equal(first[key], second[key]) for key in first)


def test_the_seed_decides_every_bit_and_the_global_state_stays():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = build(1), build(1), build(2)
    assert torch.equal(before, torch.get_rng_state())
    assert equal(first, again) and not equal(first, other)
    torch.manual_seed(6)
    assert equal(first, build(1))


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("chans", [1, 3])
def test_scratch_shapes(stem, pool, chans):
    model = build(stem=stem, pool=pool, chans=chans, patch_size=4)
    assert model(torch.randn(3, chans, 8, 8)).shape == (3, 5)
    tokens = 4 + (pool == "token")
    assert model.forward_features(torch.randn(1, chans, 8, 8)).shape == (1, tokens, 16)


def test_conv_stem_has_no_running_statistics():
    model = build(stem="conv")
    assert not list(model.buffers())
    assert sum(isinstance(layer, nn.GroupNorm) for layer in model.modules()) == 2


def test_small_settings_have_the_known_sizes():
    small = ModelConfig(image_size=16, patch_size=4, dim=96, stem="conv", pool="avg")
    model = build_model(small, num_classes=10, in_chans=3, generator_seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 475_882


def test_image_size_can_be_replaced():
    config = ModelConfig(**TINY)
    model = build_model(config, num_classes=5, in_chans=3, generator_seed=0, image_size=16)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 5)
    with pytest.raises(ConfigError, match="multiple of patch_size"):
        build_model(config, num_classes=5, in_chans=3, generator_seed=0, image_size=10)


# -- input ----------------------------------------------------------------------------------------


def test_input_spec():
    vit = input_spec(ModelConfig(name="vit_small_patch16_224.augreg_in21k"))
    assert vit == (224, (0.5,) * 3, (0.5,) * 3)
    deit = input_spec(ModelConfig(name="deit_small_patch16_224.fb_in1k", image_size=96))
    assert deit == (96, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    miil = input_spec(ModelConfig(name="vit_base_patch16_224_miil.in21k"), image_size=64)
    assert miil == (64, (0.0,) * 3, (1.0,) * 3)
    assert input_spec(ModelConfig(), in_chans=1) == (16, (0.3,), (0.35,))
    grey = input_spec(ModelConfig(name="deit_small_patch16_224.fb_in1k"), in_chans=1)
    assert grey.mean == pytest.approx((0.449,), abs=1e-9) and len(grey.std) == 1


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trainable", "percent"),
    [
        ("vit_small_patch16_224.augreg_in21k", 368_640, 1.70),
        ("vit_base_patch16_224.augreg_in21k", 737_280, 0.86),
        ("vit_large_patch16_224.augreg_in21k", 1_966_080, 0.65),
    ],
)
def test_shares_of_rank_8_on_the_mlp(name, trainable, percent):
    for data in ("cifar10", "cifar100"):
        protocol = {"data": {"name": data}, "model": {"name": name}, "train": {"epochs": 1}}
        config = validate(VisionBenchmark.Config, protocol, "suite.yaml")
        trained, base = VisionBenchmark.adapter_share(config, AdapterConfig(rank=8))
        assert trained == trainable
        assert round(100 * trained / base, 2) == percent


def test_the_classes_of_a_folder_are_not_known_before_it_is_read():
    data = {"name": "folder", "folder": "x", "native_size": 32}
    config = validate(VisionBenchmark.Config, {"data": data, "train": {"epochs": 1}}, "suite.yaml")
    assert VisionBenchmark.adapter_share(config, AdapterConfig()) is None


def test_share_of_all_linear_layers_and_base_count():
    config = ModelConfig(name="vit_small_patch16_224.augreg_in21k", pretrained=True)
    everywhere = AdapterConfig(rank=8, placement="all")
    trained, base = count_adapters(config, everywhere, num_classes=10)
    assert round(100 * trained / base, 2) == 2.72
    assert base == 21_669_514


def test_counts_agree_with_a_built_model():
    model, config = build(), ModelConfig(**TINY)
    trained, base = count_adapters(config, AdapterConfig(rank=3), num_classes=5)
    assert base == sum(parameter.numel() for parameter in model.parameters())
    assert trained == 2 * 2 * 3 * (16 + 64)
    attention = AdapterConfig(rank=3, placement="attention")
    assert count_adapters(config, attention, num_classes=5)[0] == 2 * 3 * (16 + 48 + 16 + 16)


def test_components():
    names = [name for name, _ in build(stem="conv").named_parameters()]
    found = {name: VIT.component_of(name) for name in names}
    assert found["blocks.1.mlp.fc2.weight"] == "mlp"
    assert found["blocks.0.attn.qkv.bias"] == "attention"
    assert found["head.weight"] == "head"
    assert found["patch_embed.proj.weight"] == found["blocks.0.norm1.weight"] == "other"
    assert VIT.component_of("blocks.3.mlp.fc1.Bt") == "mlp"


# -- families -------------------------------------------------------------------------------------

SWIN = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4, "patch_size": 2}
FAMILY_CASES = [
    ("swin_tiny_patch4_window7_224", {"img_size": 16, **SWIN}, {"mlp": 4, "attention": 4}, 1),
    (
        "deit_tiny_distilled_patch16_224",
        {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2},
        {"mlp": 4, "attention": 4},
        2,
    ),
    ("resnet18", {"channels": (8, 8, 8, 8), "layers": (1, 1, 1, 1), "stem_width": 8}, {}, 1),
]


@pytest.mark.parametrize(("name", "sizes", "layers", "heads"), FAMILY_CASES)
def test_a_family_names_its_layers(name, sizes, layers, heads):
    """Adapters find every layer of a placement, and the head is all of the classifier."""
    family = family_of(name)
    everything = layers | ({"all": sum(layers.values())} if layers else {})
    assert set(family.targets) == set(everything)
    for placement, count in everything.items():
        model = timm.create_model(name, num_classes=3, **sizes).eval()
        inputs = torch.randn(2, 3, 16, 16)
        before = model(inputs)
        stream = torch.Generator().manual_seed(0)
        names = attach(model, family.targets[placement], AdapterConfig(rank=2), stream)
        assert len(names) == count and torch.allclose(model(inputs), before, atol=1e-5)
        found = {family.component_of(f"{layer}.A") for layer in names}
        assert found == ({placement} if placement != "all" else {"mlp", "attention"})
    model = timm.create_model(name, num_classes=3, **sizes)
    head = {key for key, _ in model.named_parameters() if family.component_of(key) == "head"}
    matched = {
        key for key, _ in model.named_parameters() if any(fnmatch(key, p) for p in family.head)
    }
    assert head == matched and len(head) == 2 * heads
    assert {dict(model.named_parameters())[key].shape[0] for key in head} == {3}


@pytest.mark.parametrize("name", ["resnetv2_18", "test_convnext", "caformer_s18", "levit_128s"])
def test_the_head_is_what_makes_the_logits(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3)
    keys = dict(model.named_parameters())
    head = [key for key in keys if any(fnmatch(key, p) for p in family_of(f"{name}.tag").head)]
    assert head and all(len(keys[key]) == 3 for key in head if ".bn." not in key)
    assert not any("norm" in key for key in head)


def test_a_transfer_keeps_the_norm_before_the_head(tmp_path):
    model = timm.create_model("test_convnext", num_classes=7)
    model.head.norm.weight.data.fill_(3.0)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    config = ModelConfig(name="test_convnext", checkpoint=str(tmp_path / "m.safetensors"))
    other = build_model(config, num_classes=5, in_chans=3, generator_seed=0)
    assert other.head.norm.weight.eq(3.0).all()


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224.ms_in1k"])
def test_a_family_is_built_at_another_size(name):
    config = ModelConfig(name=name, image_size=64)
    model = build_model(config, num_classes=5, in_chans=1, generator_seed=0)
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 5)


def test_no_linear_layer_is_one_line():
    with pytest.raises(ConfigError, match="resnet18: no linear layer for placement mlp"):
        count_adapters(ModelConfig(name="resnet18"), AdapterConfig(), num_classes=5)
    by_name = AdapterConfig(rank=2, targets=("fc",))
    trained, _ = count_adapters(ModelConfig(name="resnet18"), by_name, num_classes=5)
    assert trained == 2 * (512 + 5)


def test_other_models_are_taken_for_transformers():
    assert family_of("deit_small_patch16_224.fb_in1k") is family_of("scratch") is VIT
    assert family_of("beit_base_patch16_224").targets == VIT.targets


def test_a_folder_of_weights_says_how_images_are_prepared(tmp_path):
    model = ModelConfig(name="vit_tiny_patch16_224", checkpoint=str(tmp_path))
    assert input_spec(model).mean == (0.5, 0.5, 0.5)
    prepared = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.2]}
    for content in ({"pretrained_cfg": prepared}, prepared):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "x", **content}))
        assert input_spec(model)[1:] == ((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
    for content in ('{"mean": 3}', "[1]", "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json: mean and std cannot be read"):
            input_spec(model)


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoint_round_trip(tmp_path):
    original = build(1)
    save_file(original.state_dict(), tmp_path / "m.safetensors")
    assert equal(original, build(2, checkpoint=str(tmp_path / "m.safetensors")))


@pytest.mark.parametrize("name", ["m.pth", "m.pt", "m.bin", "m.pkl"])
def test_pickled_checkpoints_are_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="safetensors"):
        build(checkpoint=str(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("norm.weight"), "'norm.weight' is missing"),
        (
            lambda state: state.update({"extra.weight": torch.zeros(2)}),
            "'extra.weight' is unknown",
        ),
        (
            lambda state: state.update({"blocks.0.mlp.fc1.weight": torch.zeros(3, 3)}),
            r"'blocks.0.mlp.fc1.weight' has shape \(3, 3\), not \(64, 16\)",
        ),
        (
            lambda state: state["blocks.0.mlp.fc1.weight"][0, 0].fill_(float("nan")),
            "'blocks.0.mlp.fc1.weight' holds NaN",
        ),
    ],
)
def test_the_first_key_that_does_not_fit_is_named(tmp_path, change, message):
    model = build()
    path = tmp_path / "m.safetensors"
    state = model.state_dict()
    change(state)
    save_file(state, path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(model, path)


def test_damaged_and_missing_checkpoints(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(build().state_dict(), path)
    path.write_bytes(path.read_bytes()[:500])
    for target in (path, tmp_path / "none.safetensors"):
        with pytest.raises(CheckpointError, match="not a readable safetensors"):
            build(checkpoint=str(target))


def test_scratch_never_gets_a_silent_new_head(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(build(classes=7).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        build(classes=5, checkpoint=str(path))


def test_timm_checkpoint_keeps_a_fitting_head_and_replaces_another(tmp_path):
    path = tmp_path / "m.safetensors"
    original = timm_tiny(1)
    save_file(original.state_dict(), path)
    assert equal(original, timm_tiny(2, checkpoint=str(path)))
    other = timm_tiny(2, classes=7, checkpoint=str(path))
    assert torch.equal(other.blocks[3].mlp.fc1.weight, original.blocks[3].mlp.fc1.weight)
    assert torch.equal(other.head.weight, timm_tiny(2, classes=7).head.weight)
    larger = timm_tiny(2, checkpoint=str(path), image_size=48)
    assert larger.pos_embed.shape == (1, 10, 192)
    assert torch.equal(larger.pos_embed[:, 0], original.pos_embed[:, 0])


# -- names ----------------------------------------------------------------------------------------


def test_unknown_names_and_tags():
    for name, hint in (
        ("vit_smal_patch16_224", "did you mean 'vit_small_patch16_224'"),
        ("vit_small_patch16_224.nope", "augreg_in21k"),
    ):
        with pytest.raises(ConfigError, match=hint):
            build_model(ModelConfig(name=name), num_classes=5, in_chans=3, generator_seed=0)


def test_an_unreachable_hub_names_the_mend(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr(models, "create_model", unreachable)
    config = ModelConfig(name="vit_tiny_patch16_224.augreg_in21k", pretrained=True)
    with pytest.raises(DataError, match=r"no route to host.*checkpoint") as caught:
        build_model(config, num_classes=5, in_chans=3, generator_seed=0)
    assert "\n" not in str(caught.value)


def test_a_model_that_ignores_the_number_of_classes_is_caught(monkeypatch):
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1000))
    monkeypatch.setattr(models, "create_model", lambda *args, **kwargs: wrong)
    with pytest.raises(AssertionError, match="1000 logits for 5 classes"):
        timm_tiny()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pretrained": True}, "no pretrained weights"),
        ({"name": "vit_tiny_patch16_224", "dim": 64}, "dim: only for name: scratch"),
        ({"name": "x", "pretrained": True, "checkpoint": "y"}, "one of"),
        ({"dim": 65}, "multiple of heads"),
        ({"image_size": 20}, "multiple of patch_size"),
        ({"stem": "conv", "patch_size": 2}, "multiple of 4"),
        ({"depth": None}, "depth"),
        ({"image_size": True}, "not valid here"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(ModelConfig, fields, "suite.yaml")

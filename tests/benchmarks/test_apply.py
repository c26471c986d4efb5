from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.benchmarks.apply import Application, apply
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError, UserError
from stable_forgetting.common.base.registry import METHODS, load_plugins
from stable_forgetting.common.bounded.attach import detach
from stable_forgetting.common.bounded.files import load_adapter
from stable_forgetting.common.membership.attacks import loss_threshold_attack
from stable_forgetting.vision.apply.checkpoint import read_checkpoint
from stable_forgetting.vision.apply.images import list_folder, map_labels
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from tests.benchmarks.test_own_suite import PLUGIN

NAMES = ("amber", "blue", "green", "red")
COLOURS = {"amber": (230, 170, 30), "blue": (40, 60, 220), "green": (40, 190, 70)}
COLOURS["red"] = (220, 40, 50)
SIDE = 32


def paint(folder: Path, counts: dict[str, int], seed: int) -> Path:
    """Noisy images in the colour of their class; every fifth in that of another class."""
    stream = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            other = NAMES[(NAMES.index(name) + 1) % 4]
            colour = COLOURS[other if number % 5 == 4 else name]
            pixels = np.array(colour) + stream.normal(0, 40, (40, 36, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / name / f"{number:02}.png")
    return folder


def tiny_vit(**fields):
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=4, img_size=SIDE, **fields)


def normalised(folder: Path, chans: int = 3):
    """What timm itself makes of a folder, with labels in the order of NAMES."""
    convert = timm.data.create_transform(
        (chans, SIDE, SIDE),
        is_training=False,
        interpolation="bicubic",
        crop_pct=0.95,
        mean=(0.5,) * chans,
        std=(0.5,) * chans,
    )
    files = sorted(folder.glob("*/*.png"))
    mode = "RGB" if chans == 3 else "L"
    images = torch.stack([convert(Image.open(file).convert(mode)) for file in files])
    return images, torch.tensor([NAMES.index(file.parent.name) for file in files])


def trained(model, folders, chans=3):
    parts = [normalised(folder, chans) for folder in folders]
    images, labels = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


def save(model, folder):
    """In the hub's layout."""
    save_for_hf(
        model,
        folder,
        model_config={"label_names": list(NAMES)},
        model_args={"img_size": SIDE},
        safe_serialization=True,
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A trained model in the hub's layout, and folders to forget, retain and test on."""
    with torch.random.fork_rng():
        root = tmp_path_factory.mktemp("world")
        paint(root / "forget", {"blue": 8, "red": 4}, 1)
        paint(root / "retain", dict.fromkeys(NAMES, 10), 2)
        paint(root / "test", dict.fromkeys(NAMES, 6), 3)
        save(trained(tiny_vit(), [root / "forget", root / "retain"]), root / "model")
    return root


def short_request(world, out):
    """A request for gd_sine that is short and complete."""
    return Application(
        model=world / "model",
        forget=world / "forget",
        retain=world / "retain",
        test=world / "test",
        method="gd_sine",
        params=("steps=8", "batch_size=16", "adapter.rank=4"),
        seed=1,
        out=out,
    )


@pytest.fixture
def request_(world, tmp_path):
    """The request, into a folder of the test's own."""
    return short_request(world, tmp_path / "out")


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """The request as it was carried out once: a result, whose ``out`` is looked at."""
    before = sha256(world / "model" / "model.safetensors")
    result = apply(short_request(world, tmp_path_factory.mktemp("done") / "out"))
    assert sha256(world / "model" / "model.safetensors") == before
    return result


def fresh(folder: Path):
    """The model of a folder, built by timm from the folder alone."""
    config = json.loads((folder / "config.json").read_text())
    arguments = {"num_classes": config["num_classes"], **config["model_args"]}
    model = timm.create_model(config["architecture"], **arguments)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_gd_sine_end_to_end(world, done):
    out = done.out
    assert done.status == "ok"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "adapter",
        "config.json",
        "model.safetensors",
        "report.html",
        "statement.json",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "config.json").read_bytes() == (world / "model/config.json").read_bytes()
    merged, base = fresh(out), fresh(world / "model")
    assert list(merged.state_dict()) == list(base.state_dict())
    load_adapter(base, out / "adapter")
    for name, tensor in detach(base).state_dict().items():
        assert torch.equal(tensor, merged.state_dict()[name]), name
    moved = [
        name
        for name, tensor in fresh(world / "model").state_dict().items()
        if not torch.equal(tensor, merged.state_dict()[name])
    ]
    assert moved and all(".mlp.fc" in name and name.endswith("weight") for name in moved)


def test_the_statement_says_what_was_done(world, done):
    statement = json.loads((done.out / "statement.json").read_text())
    assert statement == json.loads(json.dumps(done.statement))
    assert (
        statement["status"] == "ok" and statement["seed"] == 1 and statement["scenario"] == "random"
    )
    assert statement["input"]["weights_sha256"] == sha256(world / "model" / "model.safetensors")
    assert statement["output"]["weights_sha256"] == sha256(done.out / "model.safetensors")
    state = hashlib.sha256()
    for file in sorted((world / "forget").glob("*/*.png")):
        state.update(f"{file.parent.name}/{file.name}\0{sha256(file)}\n".encode())
    about = statement["data"]["forget"]
    assert about["digest"] == state.hexdigest() and about["images"] == 12
    assert about["classes"] == {"blue": 8, "red": 4}
    assert statement["method"]["name"] == "gd_sine" and statement["method"]["version"] >= 1
    params = statement["method"]["params"]
    assert params["steps"] == 8 and params["adapter"]["rank"] == 4
    assert params["adapter"]["omega"] == 100.0 and params["forget_weight"] == 0.1
    assert statement["labels"]["ids"] == {name: label for label, name in enumerate(NAMES)}
    assert statement["cost"]["steps"] == 8
    assert 0 < statement["cost"]["trainable_parameters"] < statement["cost"]["base_parameters"]
    assert {"packages", "git", "python"} <= statement["environment"].keys()
    for words in ("retrained", "not erasure", "AUC", "Accuracy on forget"):
        assert words in statement["reading"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_numbers_are_those_that_timm_would_measure(world, done, when):
    statement = json.loads((done.out / "statement.json").read_text())
    model = fresh(world / "model" if when == "before" else done.out)
    losses = {}
    for part in ("forget", "retain", "test"):
        images, labels = normalised(world / part)
        with torch.no_grad():
            logits = model(images)
        losses[part] = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        found = statement[when][part]
        assert found["images"] == len(labels)
        assert found["accuracy"] == 100 * np.mean((logits.argmax(1) == labels).numpy())
        assert found["loss"] == pytest.approx(losses[part].mean().item(), abs=1e-4)
    auc = loss_threshold_attack(losses["forget"].numpy(), losses["test"].numpy())["mia_auc"]
    assert statement[when]["membership_auc"] == pytest.approx(auc, abs=1.0)
    _, labels = normalised(world / "test")
    same = losses["test"].numpy()[np.isin(labels, [1, 3])]
    auc = loss_threshold_attack(losses["forget"].numpy(), same)["mia_auc"]
    assert statement[when]["membership_auc_same_classes"] == pytest.approx(auc, abs=1.0)
    assert statement[when]["test_forgotten_classes"]["images"] == 12


def test_the_weight_change_is_that_of_the_files(world, done):
    statement = done.statement
    before = load_file(world / "model" / "model.safetensors")
    after = load_file(done.out / "model.safetensors")
    moved = sum(float((after[k].double() - v.double()).square().sum()) for k, v in before.items())
    base = sum(float(v.double().square().sum()) for v in before.values())
    assert statement["weight_change"]["relative"] == pytest.approx((moved / base) ** 0.5, rel=1e-9)
    assert statement["weight_change"]["adapters"]["delta_ratio"] > 0


def test_ascent_on_a_bare_file_needs_neither_retain_nor_test(world, request_):
    request = dataclasses.replace(
        request_,
        model=world / "model" / "model.safetensors",
        options={"arch": "test_vit"},
        method="ascent",
        retain=None,
        test=None,
        params=("steps=5", "lr=1e-4"),
    )
    native = timm.create_model("test_vit", num_classes=4)
    torch.nn.init.zeros_(native.head.weight)
    native.head.bias.data = torch.tensor([5.0, 0, 0, 0])  # says 0, which no forget image is
    folder = request.out.parent / "native"
    folder.mkdir()
    save_file(native.state_dict(), folder / "weights.safetensors")
    numbered = folder / "forget"
    for name, label in (("blue", "1"), ("red", "3")):
        shutil.copytree(world / "forget" / name, numbered / label)
    mismatched = dataclasses.replace(request, model=folder / "weights.safetensors", forget=numbered)
    with pytest.raises(DataError, match=r"right on only 0\.0 % .*pretrained_cfg.*add --anyway"):
        apply(mismatched)
    assert not request.out.exists()
    result = apply(dataclasses.replace(mismatched, anyway=True))
    assert result.status == "ok" and not (request.out / "adapter").exists()
    statement = json.loads((request.out / "statement.json").read_text())
    assert statement["scenario"] is None and statement["after"]["membership_auc"] is None
    assert statement["after"]["forget"]["loss"] > statement["before"]["forget"]["loss"]
    assert set(statement["data"]) == {"forget"} and statement["preprocessing"]["size"] == 160
    assert "right on only" in statement["reading"] and "No retain images" in statement["reading"]
    written = json.loads((request.out / "config.json").read_text())
    assert written == {"architecture": "test_vit", "num_classes": 4}
    changed = timm.create_model("test_vit", num_classes=4)
    changed.load_state_dict(load_file(request.out / "model.safetensors"))


@pytest.mark.parametrize("role", ["retain", "test"])
def test_swapped_labels_are_doubted_in_every_folder(world, request_, tmp_path, role):
    for name, other in zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True):
        shutil.copytree(world / role / name, tmp_path / role / other)
    request = dataclasses.replace(request_, **{role: tmp_path / role})
    assert_refused(request, DataError, "right on only", f"of the {role} images", "--anyway")


def test_the_contrastive_term_goes_with_what_its_base_may_do(request_):
    given = {"method": "with_contrast", "params": ("base=gd", "params={steps: 2}")}
    assert apply(dataclasses.replace(request_, **given)).status == "ok"
    novo = dataclasses.replace(request_, **{**given, "params": ("base=novo",)})
    with pytest.raises(ConfigError, match="'with_contrast' trains from the start"):
        apply(dataclasses.replace(novo, out=request_.out.with_name("novo")))


def test_forgetting_a_class_is_read_as_such(world, request_, tmp_path):
    retain = tmp_path / "retain"
    shutil.copytree(world / "retain", retain)
    shutil.rmtree(retain / "blue")
    forget = tmp_path / "forget"
    shutil.copytree(world / "retain" / "blue", forget / "blue")
    statement = apply(dataclasses.replace(request_, forget=forget, retain=retain)).statement
    assert statement["scenario"] == "class"
    assert statement["after"]["test_forgotten_classes"]["images"] == 6
    assert statement["after"]["test_other_classes"]["images"] == 18
    assert "test image of the same classes" in statement["reading"]
    test = tmp_path / "test"
    shutil.copytree(world / "test", test)
    shutil.rmtree(test / "blue")
    out = request_.out.with_name("without")
    bare = dataclasses.replace(request_, forget=forget, retain=retain, test=test, out=out)
    statement = apply(bare).statement
    assert statement["after"]["membership_auc_same_classes"] is None
    assert "compares different classes" in statement["reading"]


def test_the_seed_decides_every_bit(request_, done):
    first, again = done, apply(request_)
    other = apply(dataclasses.replace(request_, out=request_.out.with_name("other"), seed=2))
    same = ("input", "output", "data", "before", "after", "weight_change", "dynamics", "reading")
    assert {key: first.statement[key] for key in same} == {
        key: again.statement[key] for key in same
    }
    assert first.statement["output"] != other.statement["output"]
    assert first.statement["before"] == other.statement["before"]


def test_divergence_leaves_an_statement_and_no_model(request_):
    request = dataclasses.replace(request_, method="ascent", params=("steps=20", "lr=1e6"))
    result = apply(request)
    assert result.status == "diverged" and str(request.out / "statement.json") in result.message
    assert [path.name for path in request.out.iterdir()] == ["statement.json"]
    statement = json.loads((request.out / "statement.json").read_text())
    assert statement["status"] == "diverged" and "diverged at step" in statement["status_detail"]
    assert statement["after"] is None and "no unlearned model" in statement["reading"]
    assert statement["before"]["forget"]["accuracy"] > 50


def test_a_failure_while_writing_leaves_nothing(request_, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("stable_forgetting.common.bounded.files.AdapterState.write", fail)
    with pytest.raises(OSError, match="disk full"):
        apply(request_)
    assert list(request_.out.parent.iterdir()) == []


def test_an_empty_folder_may_be_filled_and_a_filled_one_is_kept(request_):
    request_.out.mkdir()
    apply(request_)
    kept = sha256(request_.out / "model.safetensors")
    killed = request_.out.with_name(f".{request_.out.name}.unfinished")
    killed.mkdir()
    killed.with_suffix(".lock").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        apply(request_)
    assert sha256(request_.out / "model.safetensors") == kept
    rest = [path.name for path in request_.out.parent.iterdir()]
    assert rest == [request_.out.name], "what a process left that was killed at its end is swept"


@pytest.mark.parametrize("out", [".", "/"])
def test_a_full_folder_without_a_name_is_refused_too(request_, monkeypatch, out):
    monkeypatch.chdir(request_.forget)
    with pytest.raises(ConfigError, match="not an empty folder"):
        apply(dataclasses.replace(request_, out=Path(out)))


@pytest.mark.parametrize("place", ["link", "mount", "here"])
def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(
    request_, tmp_path, monkeypatch, place
):
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    if place == "link":
        out.symlink_to(empty)
    elif place == "mount":
        out.mkdir()
        monkeypatch.setattr("os.path.ismount", lambda path: path == out)
    else:
        monkeypatch.chdir(empty)
        out = Path()
    with pytest.raises(ConfigError, match="cannot replace; give a new folder inside"):
        apply(dataclasses.replace(request_, out=out), progress=lambda *_: pytest.fail("trained"))
    assert list(empty.iterdir()) == [] and not list(tmp_path.glob(".out*"))


def test_grey_models_get_grey_images(world, tmp_path, request_):
    with torch.random.fork_rng():
        model = trained(tiny_vit(in_chans=1), [world / "retain"], chans=1)
    save_for_hf(
        model,
        tmp_path / "grey",
        model_config={"label_names": {str(label): name for label, name in enumerate(NAMES)}},
        model_args={"img_size": SIDE, "in_chans": 1},
        safe_serialization=True,
    )
    statement = apply(dataclasses.replace(request_, model=tmp_path / "grey")).statement
    assert statement["preprocessing"]["channels"] == 1 and statement["preprocessing"]["mean"] == (
        0.5,
    )
    images, labels = normalised(world / "retain", chans=1)
    with torch.no_grad():
        accuracy = 100 * np.mean((model(images).argmax(1) == labels).numpy())
    assert statement["before"]["retain"]["accuracy"] == accuracy


# Interrupted ------------------------------------------------------------------------------------


def test_an_interrupted_application_goes_on(request_, tmp_path):
    request = dataclasses.replace(request_, params=(*request_.params, "checkpoint_every=2"))
    whole = apply(dataclasses.replace(request, out=tmp_path / "whole"))
    seen = []

    def stop(step, total, loss):
        seen.append(step)
        if seen == [1, 2, 3]:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        apply(dataclasses.replace(request, out=out), progress=stop)
    assert not out.exists() and (tmp_path / ".out.unfinished" / "checkpoint.safetensors").is_file()
    resumed = apply(dataclasses.replace(request, out=out), progress=stop)
    assert seen == [1, 2, 3, *range(3, 9)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    same = ("before", "after", "dynamics", "output")
    assert [resumed.statement[k] for k in same] == [whole.statement[k] for k in same]


def test_another_application_does_not_go_on_from_a_foreign_checkpoint(request_, tmp_path):
    def stop(step, total, loss):
        raise KeyboardInterrupt

    slow = (*request_.params, "checkpoint_every=1")
    with pytest.raises(KeyboardInterrupt):
        apply(dataclasses.replace(request_, params=slow), progress=stop)
    seen = []
    other = dataclasses.replace(request_, params=slow, method="gd_lora")
    apply(other, progress=lambda step, total, loss: seen.append(step))
    assert seen == [*range(1, 9)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_edited_plugin_does_not_go_on_from_its_checkpoint(request_, tmp_path, monkeypatch):
    def stop(step, total, loss):
        seen.append(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    for factor in ("1.0", "2.0"):
        (tmp_path / "mine.py").write_text(PLUGIN.replace("1.0", factor))
        load_plugins([str(tmp_path / "mine.py")], installed=False)
        params = ("steps=4", "batch_size=16", "checkpoint_every=1")
        own = dataclasses.replace(request_, method="mine", params=params)
        seen = []
        try:
            with pytest.raises(KeyboardInterrupt):
                apply(own, progress=stop)
        finally:
            del sys.modules["stable_forgetting_plugin_mine"], METHODS._entries["mine"]
        assert seen == [1]


def test_two_applications_do_not_share_a_folder(request_):
    from stable_forgetting.benchmarks.apply.place import workplace

    with (
        workplace(request_.out, {}),
        pytest.raises(ConfigError, match="another process writes it"),
        workplace(request_.out, {}),
    ):
        raise AssertionError("entered")


# What cannot be done is said in one line ---------------------------------------------------------


def assert_refused(request, error, *words):
    with pytest.raises(error) as caught:
        apply(request)
    text = str(caught.value)
    assert isinstance(caught.value, UserError) and "\n" not in text
    for word in words:
        assert word in text, text
    assert not request.out.exists() or not any(request.out.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "gd_sin"}, ["unknown method", "did you mean 'gd_sine'"]),
        ({"params": ("stepz=3",)}, ["did you mean 'steps'"]),
        ({"params": ("steps",)}, ["key.sub=value"]),
        ({"preset": "paper"}, ["paper_literal"]),
        ({"retain": None}, ["gd_sine", "retain"]),
        ({"method": "retrain", "params": ()}, ["from the start"]),
        ({"method": "original", "params": ()}, ["changes nothing"]),
        ({"params": ("adapter.targets=[layers.*]",)}, ["layers.*", "matches no layer"]),
        ({"device": "cuda:99"}, ["device cuda:99"]),
        ({"device": "abacus"}, ["device abacus"]),
        ({"options": {"arch": "test_vit"}}, ["leave out arch"]),
    ],
)
def test_bad_requests(request_, changes, words):
    assert_refused(dataclasses.replace(request_, **changes), ConfigError, *words)


def folder_with(world, tmp_path, **changes):
    """A copy of the model's folder with changed config keys; None removes one."""
    folder = tmp_path / "changed"
    shutil.copytree(world / "model", folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_classes": 5, "label_names": None}, ["4 classes", "num_classes 5"]),
        ({"num_classes": "four"}, ["num_classes", "four"]),
        (
            {"architecture": None, "architectures": ["ViTForImageClassification"]},
            ["transformers", "forget()"],
        ),
        ({"label_names": ["a", "b"]}, ["2 names for 4 classes"]),
        ({"label_names": [1, 2, 3, 4]}, ["label_names", "names"]),
        ({"architecture": "test_vitt"}, ["did you mean 'test_vit'"]),
        ({"architecture": "local-dir:/somewhere"}, ["timm knows no architecture"]),
        ({"architecture": "vit_tiny_patch16_224"}, ["belongs to another model"]),
        ({"model_args": {"checkpoint_path": "evil.pth"}}, ["may not set 'checkpoint_path'"]),
        ({"model_args": {"no_such_argument": 1}}, ["cannot build test_vit"]),
        ({"model_args": [1]}, ["'model_args' must be a mapping"]),
    ],
)
def test_bad_configs(world, request_, tmp_path, changes, words):
    folder = folder_with(world, tmp_path, **changes)
    assert_refused(dataclasses.replace(request_, model=folder), CheckpointError, *words)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"input_size": 224}, "input_size 224 must be channels, height and width"),
        ({"input_size": [3, 0, 0]}, "takes 3 x 0 x 0"),
        ({"interpolation": "cubicle"}, "no interpolation cubicle"),
    ],
)
def test_a_config_that_makes_no_images_is_refused(said, words):
    model = timm.create_model("test_resnet", pretrained=False)
    model.pretrained_cfg = {**model.pretrained_cfg, **said}
    with pytest.raises(CheckpointError, match=words):
        Preprocessing.of(model)


def test_an_old_config_of_timm_is_read_as_timm_reads_it(world, tmp_path):
    said = {"mean": [0.1, 0.2, 0.3], "std": [0.2, 0.2, 0.2], "input_size": [3, SIDE, SIDE]}
    said |= {"crop_pct": 0.8, "interpolation": "bilinear", "labels": list(reversed(NAMES))}
    folder = folder_with(world, tmp_path, pretrained_cfg=None, label_names=None, **said)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.label_names == tuple(reversed(NAMES))
    read = Preprocessing.of(checkpoint.load())
    assert (read.mean, read.crop_pct, read.interpolation) == ((0.1, 0.2, 0.3), 0.8, "bilinear")
    theirs, _, _ = timm.models._hub.load_model_config_from_path(folder)
    assert all(theirs[key] == said[key] for key in ("mean", "std", "crop_pct", "input_size"))
    assert theirs["label_names"] == said["labels"]


def test_bad_weights(world, request_, tmp_path):
    folder = folder_with(world, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["head.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    request = dataclasses.replace(request_, model=folder)
    assert_refused(request, CheckpointError, "head.weight", "NaN")
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert_refused(request, CheckpointError, "not a readable safetensors file")
    (folder / "model.safetensors").unlink()
    assert_refused(request, CheckpointError, "holds no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert_refused(request, CheckpointError, "pytorch_model.bin", "safetensors")
    (folder / "pytorch_model.bin").unlink()
    shutil.copy(world / "model" / "model.safetensors", folder)
    (folder / "config.json").write_text("{")
    assert_refused(request, CheckpointError, "not readable as JSON")
    (folder / "config.json").unlink()
    assert_refused(request, CheckpointError, "holds no config.json")


@pytest.mark.parametrize("name", ["model.pth", "model.bin", "model.pt", "model.ckpt", "model.pkl"])
def test_pickles_are_refused_unread(request_, tmp_path, name):
    file = tmp_path / name
    file.write_bytes(b"\x80\x04K\x01.")
    assert_refused(dataclasses.replace(request_, model=file), CheckpointError, name, "safetensors")


def test_bare_files_need_arch(world, request_, tmp_path):
    file = world / "model" / "model.safetensors"
    assert_refused(dataclasses.replace(request_, model=file), ConfigError, "needs arch")
    for name in ("nowhere", "nowhere.pth"):
        missing = dataclasses.replace(request_, model=tmp_path / name)
        assert_refused(missing, CheckpointError, "no such folder")


def halve(file):
    file.write_bytes(file.read_bytes()[:200])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: halve(folder / "blue/03.png"), ["03.png", "cannot be decoded"]),
        (lambda folder: [f.unlink() for f in folder.rglob("*.png")], ["blue", "holds no images"]),
        (lambda folder: [shutil.rmtree(f) for f in folder.iterdir()], ["no class subfolders"]),
        (shutil.rmtree, ["no such folder"]),
        (
            lambda folder: (folder / "blue/notes.txt").write_text("hello"),
            ["notes.txt", "not an image"],
        ),
        (
            lambda folder: shutil.copy(folder / "blue/00.png", folder / "loose.png"),
            ["loose.png", "class subfolders"],
        ),
        (
            lambda folder: (folder / "blue").rename(folder / "bleu"),
            ["'bleu' is no class", "did you mean 'blue'"],
        ),
        (
            lambda folder: (folder / "blue/03.png").rename(folder / os.fsdecode(b"blue/\xe9.png")),
            [r"'blue/\udce9.png' is no UTF-8 name"],
        ),
    ],
)
@pytest.mark.parametrize("role", ["forget", "test"])
def test_bad_folders(request_, tmp_path, change, words, role):
    folder = tmp_path / "broken"
    paint(folder, {"blue": 5, "red": 3}, 9)
    change(folder)
    assert_refused(dataclasses.replace(request_, **{role: folder}), DataError, *words)


@pytest.mark.parametrize("role", ["retain", "test"])
def test_an_image_belongs_to_one_folder(world, request_, tmp_path, role):
    folder = tmp_path / "overlapping"
    shutil.copytree(world / role, folder)
    shutil.copy(world / "forget" / "red" / "01.png", folder / "red" / "copy.png")
    words = (str(Path("red", "01.png")), str(Path("red", "copy.png")), "same image")
    assert_refused(dataclasses.replace(request_, **{role: folder}), DataError, *words)


def test_files_of_the_system_are_no_images(world, tmp_path):
    folder = tmp_path / "forget"
    shutil.copytree(world / "forget", folder)
    plain = list_folder(folder, "forget")
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        (folder / "red" / name).write_bytes(b"x")
    assert list_folder(folder, "forget") == plain


# Names of class folders ---------------------------------------------------------------------------


def mapped(world, tmp_path, *, retain, forget, classes):
    folder = folder_with(world, tmp_path, label_names=None, num_classes=classes)
    for role, names in (("retain", retain), ("forget", forget)):
        for name in names:
            (tmp_path / role / name).mkdir(parents=True)
            (tmp_path / role / name / "x.png").write_bytes(f"{role}{name}".encode())
    listed = [list_folder(tmp_path / role, role) for role in ("forget", "retain")]
    return map_labels(read_checkpoint(folder), listed).ids


@pytest.mark.parametrize(
    ("retain", "forget", "classes", "ids"),
    [
        (("a", "b", "c"), ("b",), 3, {"a": 0, "b": 1, "c": 2}),
        (("a", "c"), ("b",), 3, {"a": 0, "b": 1, "c": 2}),
        (("0", "2"), ("1",), 5, {"0": 0, "1": 1, "2": 2}),
        (("1", "2", "3"), ("3",), 3, {"1": 0, "2": 1, "3": 2}),
        (("00", "01", "10"), ("00",), 20, {"00": 0, "01": 1, "10": 10}),
    ],
)
def test_labels_without_label_names(world, tmp_path, retain, forget, classes, ids):
    assert mapped(world, tmp_path, retain=retain, forget=forget, classes=classes) == ids


@pytest.mark.parametrize(
    ("retain", "forget", "classes", "words"),
    [
        (("a", "b"), ("b",), 3, "name 2 classes, but the model has 3"),
        (("a", "b", "c"), ("d",), 3, "'d' is no class"),
        (("a", "1"), ("1",), 3, "name 2 classes"),
        (tuple(str(label) for label in range(11)), ("10",), 11, "order by name differs"),
        (("0", "7"), ("0",), 5, "name 2 classes"),
        (("0", "1"), ("01",), 5, "'01' and '1' are both class 1; make them one"),
    ],
)
def test_labels_that_cannot_be_told(world, tmp_path, retain, forget, classes, words):
    with pytest.raises(DataError, match=words):
        mapped(world, tmp_path, retain=retain, forget=forget, classes=classes)

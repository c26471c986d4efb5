"""LetheViT, CoUn, +CL and NOVO on the tiny images: their formulas, their faults to avoid, and
golden losses of every method of this package and of the closed-form ones.

The golden losses guard ``MethodInfo.version``; where a change of numbers is meant, raise it and run

    SF_REGENERATE=1 python -m pytest tests/vision/test_methods.py -k golden
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.common.base.errors import AccessError, ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.checks.tiny_task import CLASSES, problem_of
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.finetuning import last_parameters
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.protocols import Telemetry
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.data.augment import TwoViews
from stable_forgetting.vision.methods.contrast import HeadInputs, nt_xent
from stable_forgetting.vision.methods.transformer import (
    KeyedViT,
    MaskedContrast,
    ProxyForgetting,
    patch_attention,
    patch_mask,
)
from stable_forgetting.vision.models.build import build_model
from stable_forgetting.vision.models.family import family_of
from stable_forgetting.vision.tiny import TinyImages
from tests.common.train.trained import Killed, resumed

GOLDEN = Path(__file__).parents[1] / "golden" / "vision_methods.json"
SHORT = {"epochs": 1, "batch_size": 16}
VARIANTS = {
    "lethevit": ("lethevit", None, SHORT),
    "lethevit-random_mask": ("lethevit", "random_mask", SHORT),
    "lethevit-phase_1": ("lethevit", "phase_1", SHORT),
    "coun": ("coun", None, SHORT),
    "finetune": ("finetune", None, {"steps": 4}),
    "finetune+cl": ("with_contrast", None, {"params": {"steps": 4}}),
    "gd": ("gd", None, {"steps": 4}),
    "gd+cl": ("with_contrast", None, {"base": "gd", "params": {"steps": 4}}),
    "gd_sine+cl": ("with_contrast", None, {"base": "gd_sine", "params": {"steps": 4}}),
    "novo": ("novo", None, {}),
    "influence": ("influence", None, {"samples": 16, "alpha": 5.0}),
    "influence-lineage": ("influence", "lineage", {"samples": 16, "alpha": 5.0}),
    "fisher": ("fisher", None, {"samples": 16}),
    "fisher-empirical": ("fisher", None, {"samples": 16, "fisher": "empirical"}),
    "fast_ntk": ("fast_ntk", None, {"samples": 48}),
    "fast_ntk-block": ("fast_ntk", None, {"samples": 24, "parameters": ["blocks.1.mlp.*"]}),
}


@pytest.fixture(scope="module")
def problem():
    return problem_of("vision")


def make_task(problem, name, scenario="class", *, seed=1):
    model = copy.deepcopy(problem.original)
    return problem.task(model, scenario, seed, METHODS[name].info.access)


def unlearn(problem, variant):
    """(unlearned model, task) of one variant."""
    name, preset, params = VARIANTS[variant]
    task = make_task(problem, name)
    config = resolve_config(name, preset, params, origin="test")
    return METHODS[name](config).unlearn(task), task


@pytest.fixture(scope="module")
def task_of(problem):
    return partial(make_task, problem)


@pytest.fixture(scope="module")
def results(problem):
    """Each variant once: (unlearned model, task); the tests only look."""
    return {variant: unlearn(problem, variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def golden_models(golden, golden_problem):
    with golden.float64():
        return {variant: unlearn(golden_problem, variant)[0] for variant in VARIANTS}


# -- golden ----------------------------------------------------------------------------------------


def test_golden_losses(golden_problem, golden_models, check_golden, losses):
    found = {name: losses(golden_problem, model) for name, model in golden_models.items()}
    check_golden(GOLDEN, found)


def test_golden_losses_can_tell_methods_apart(golden_twins):
    assert golden_twins(GOLDEN) == set()


def test_directions(problem, results, losses):
    """On a class request every method raises the forget loss more than the retain loss."""
    before = losses(problem, problem.original)
    for name in ("lethevit", "novo", "influence", "fisher", "fast_ntk"):
        after = losses(problem, results[name][0])
        rise = {part: after[part] - before[part] for part in ("forget", "retain")}
        assert rise["forget"] > max(0.01, rise["retain"]), (name, rise)


@pytest.mark.parametrize(
    ("variant", "steps", "left"),
    [("lethevit", 7, 3), ("coun", 3, 3), ("gd_sine+cl", 3, 2), ("novo", 40, 20)],
)
def test_killed_runs_resume_bit_for_bit(task_of, results, tiny, tmp_path, variant, steps, left):
    """Order, views, masks and hidden classes are redrawn as they would have been."""
    name, preset, params = VARIANTS[variant]
    config = resolve_config(name, preset, params, origin="test")
    done = itertools.count(1)

    def kill(step, total, loss):
        if next(done) == steps:
            raise Killed

    def run(checkpoint, progress):
        task = task_of(name)
        task.checkpoint, task.telemetry = checkpoint, Telemetry(progress=progress)
        task.recipe = task.recipe.model_copy(update={"checkpoint_every": 2})
        return METHODS[name](config).unlearn(task)

    if name == "with_contrast":
        inner = {**params["params"], "checkpoint_every": 2}
        config = resolve_config(name, preset, {**params, "params": inner}, origin="test")
    elif name != "novo":
        config = config.model_copy(update={"checkpoint_every": 2})
    model, seen = resumed(run, tmp_path, kill)
    assert len(seen) == left and tiny.same(model, results[variant][0])


# -- attention and masks --------------------------------------------------------------------------


def vit(pool="token", stem="patch"):
    config = ModelConfig(patch_size=4, dim=16, depth=2, heads=2, pool=pool, stem=stem)
    return build_model(config, num_classes=4, in_chans=1, generator_seed=3).eval()


def attention_by_hand(model, x):
    """softmax(q k^T / sqrt(d)) of the last block, from its own weights."""
    tokens = model._pos_embed(model.patch_embed(x))
    tokens = model.blocks[0](model.norm_pre(tokens))
    attention = model.blocks[1].attn
    qkv = attention.qkv(model.blocks[1].norm1(tokens))
    n, t, _ = qkv.shape
    q, k, _ = qkv.view(n, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return (q @ k.mT / math.sqrt(8)).softmax(-1).mean(1)


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_attention_is_the_class_tokens_row(stem):
    model, x = vit(stem=stem), torch.randn(3, 1, 16, 16)
    found = patch_attention(model, x)
    assert found.shape == (3, 16)
    torch.testing.assert_close(found, attention_by_hand(model, x)[:, 0, 1:])
    assert model.blocks[1].attn.fused_attn and not model.blocks[1].attn.attn_drop._forward_pre_hooks


def test_attention_of_a_mean_pooled_model_is_the_mean_row():
    model, x = vit(pool="avg"), torch.randn(3, 1, 16, 16)
    assert model.cls_token is None
    torch.testing.assert_close(patch_attention(model, x), attention_by_hand(model, x).mean(1))


def test_models_without_such_attention_are_refused():
    with pytest.raises(ConfigError, match="choose a ViT"):
        patch_attention(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ConfigError, match="another block"):
        patch_attention(vit(), torch.randn(2, 1, 16, 16), block=7)


def test_masks_follow_the_patches_row_by_row():
    chosen = torch.zeros(1, 16, dtype=torch.bool)
    chosen[0, 6] = True  # second row, third column of a 4 x 4 grid
    mask = patch_mask(chosen, 16)
    assert mask.shape == (1, 1, 16, 16) and mask.sum() == 16
    assert mask[0, 0, 4:8, 8:12].all()


# -- LetheViT -------------------------------------------------------------------------------------


def test_lethevit_blackens_the_most_attended_pixels(problem, task_of):
    task = task_of("lethevit")
    config = METHODS["lethevit"].Config(masked=0.15)  # 3 of 16 patches
    contrast = MaskedContrast(task, config)
    batch = task.source.fetch(torch.as_tensor(task.indices("forget")[:5]))
    x, masked = batch.inputs["x"], contrast.masked(batch).inputs["x"]
    black = (0 - 0.3) / 0.35
    changed = masked != x
    assert torch.allclose(masked[changed], torch.tensor(black))
    top = patch_attention(problem.original, x).topk(3, dim=1).indices
    for row in range(5):
        patches = changed[row, 0].view(4, 4, 4, 4).permute(0, 2, 1, 3).reshape(16, 16).any(1)
        assert set(patches.nonzero().flatten().tolist()) <= set(top[row].tolist())
        dark = masked[row, 0].view(4, 4, 4, 4).permute(0, 2, 1, 3).reshape(16, 16)
        assert torch.allclose(dark[top[row]], torch.tensor(black))


def test_lethevits_loss_is_its_formula(problem, task_of):
    task = task_of("lethevit")
    config = METHODS["lethevit"].Config(temperature=0.3)
    contrast = MaskedContrast(task, config)
    batch = task.source.fetch(torch.as_tensor(task.indices("forget")))
    student = problem.net().eval()
    found = contrast(lambda b: student(b.inputs["x"]), {"forget": batch}).total
    z = student(batch.inputs["x"])
    with torch.no_grad():
        near = problem.original(contrast.masked(batch).inputs["x"])
        far = problem.original(batch.inputs["x"])
    plus = torch.exp(F.cosine_similarity(z, near) / 0.3)
    minus = torch.exp(F.cosine_similarity(z, far) / 0.3)
    torch.testing.assert_close(found, -torch.log(plus / (plus + minus)).mean())


def test_lethevits_teacher_stays_and_phase_1_never_reads_retain(results):
    steps = [result.steps for result in results["lethevit"][1].results]
    assert steps == [4, 5]  # two epochs over 24 images, one over 72, in batches of 16
    assert [r.steps for r in results["lethevit-phase_1"][1].results] == [4]


# -- CoUn -----------------------------------------------------------------------------------------


def test_nt_xent_by_hand():
    features = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, -1.0]])
    tau = 0.5
    # cosines: (0,2) = 1, (1,3) = -1, all others 0
    close = -1 / tau + math.log(2 * math.exp(0) + math.exp(1 / tau))
    far = 1 / tau + math.log(2 * math.exp(0) + math.exp(-1 / tau))
    assert float(nt_xent(features, tau)) == pytest.approx((2 * close + 2 * far) / 4, rel=1e-6)


def test_the_two_views_differ_and_resume(problem):
    """A third-party rewrite of CoUn contrasts a view with itself."""
    source = TwoViews(problem.source(), shift=1, noise=0.1)
    loader = Loader(source, problem.split("class").parts["retain"], 8, generator(0, "views"))
    state = loader.state()
    batch = loader.next()
    first, second = batch.inputs["x"].chunk(2)
    assert len(batch) == 16 and torch.equal(*batch.labels.chunk(2))
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loader.load_state(state)
    assert torch.equal(loader.next().inputs["x"], batch.inputs["x"])
    plain = Loader(
        source, problem.split("class").parts["retain"], 8, loader.generator, augment=False
    )
    with pytest.raises(ConfigError, match="two views are equal"):
        plain.next()


def test_coun_learns_classes_from_images_as_they_are(problem, task_of, tiny):
    """Its own augmentation must not regularise it alone: without the contrast it is invisible."""
    indices = torch.arange(6)
    source = TwoViews(problem.source(), shift=1, noise=0.1, plain=True)
    batch = source.fetch(indices, augment=generator(0, "views"))
    own = problem.source().fetch(indices, augment=generator(0, "views")).inputs["x"]
    first, *views = batch.inputs["x"].chunk(3)
    assert len(batch) == 18 and torch.equal(first, own)
    assert all(not torch.equal(view, own) for view in views)

    def unlearned(**params):
        config = resolve_config("coun", None, {**SHORT, **params}, origin="test")
        return METHODS["coun"](config).unlearn(task_of("coun"))

    plain = unlearned(weight=0.0, shift=1, noise=0.1)
    assert tiny.same(plain, unlearned(weight=0.0, shift=1, noise=0.7))
    assert not tiny.same(plain, unlearned(weight=0.5, shift=1, noise=0.1))


def test_contrast_uses_the_input_of_the_head(problem):
    model, watcher = problem.net(), HeadInputs()
    x = problem.source().fetch(torch.arange(6)).inputs["x"]
    with watcher.watching(model, ("head.*",)):
        model(x)
        wanted = model.forward_head(model.forward_features(x), pre_logits=True)
        assert torch.equal(watcher.latest, wanted)
    assert watcher.latest is None and not model.head._forward_pre_hooks
    with pytest.raises(ConfigError, match="0 layers match"), watcher.watching(model, ("none",)):
        pass


def test_the_add_on_without_weight_is_the_method_itself(task_of, results, tiny):
    """No dropout here: the second forward changes nothing unless its loss counts."""
    params = {"base": "gd", "params": {"steps": 4}, "weight": 0.0}
    config = resolve_config("with_contrast", None, params, origin="test")
    alone = METHODS["with_contrast"](config).unlearn(task_of("with_contrast"))
    assert tiny.same(alone, results["gd"][0])
    assert not tiny.same(alone, results["gd+cl"][0])


@pytest.mark.parametrize("adapter", [{}, {"peft": "lora"}])
def test_the_add_on_watches_an_adapted_head(task_of, tiny, adapter):
    """Layers of an adapter lie inside the head's, and are not further heads."""

    def unlearned(weight):
        inner = {"steps": 2, "adapter": {"targets": ["blocks.*.mlp.fc1", "head"], **adapter}}
        params = {"base": "gd_lora", "params": inner, "weight": weight}
        config = resolve_config("with_contrast", None, params, origin="test")
        return METHODS["with_contrast"](config).unlearn(task_of("with_contrast"))

    assert not tiny.same(unlearned(0.0), unlearned(0.5))


def test_the_add_on_records_the_base_it_runs():
    """Merging into the default's dump must not keep the default base's settings."""
    config = resolve_config("with_contrast", None, {"base": "gd_sine"}, origin="test")
    assert config.resolved == METHODS["gd_sine"].Config().model_dump(mode="json")
    assert config.base_version == METHODS["gd_sine"].info.version
    with pytest.raises(ConfigError, match=r"params of gd"):
        resolve_config("with_contrast", None, {"base": "gd", "params": {"lrr": 1}}, origin="t")


def test_the_add_on_keeps_the_bases_access(task_of):
    task = task_of("with_contrast")

    class Curious(METHODS["finetune"]):
        def unlearn(self, task):
            task.indices("forget")
            return super().unlearn(task)

    config = resolve_config("with_contrast", None, {}, origin="test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stable_forgetting.common.methods.simple.Finetune", Curious)
        with pytest.raises(AccessError, match="'method' reads 'forget'"):
            METHODS["with_contrast"](config).unlearn(task)


# -- NOVO -----------------------------------------------------------------------------------------


def test_deleted_keys_fold_into_the_plain_network(problem):
    keyed = KeyedViT(problem.net(), CLASSES)
    keyed.draw(0.5, generator(0, "keys"))
    x = problem.source().fetch(torch.arange(8)).inputs["x"]
    keyed.eval().show(torch.tensor([True, False, True, True]))
    under_keys = keyed(x)
    plain = problem.net()
    plain.load_state_dict(keyed.folded([1]))
    torch.testing.assert_close(plain.eval()(x), under_keys)
    keyed.show(torch.ones(CLASSES, dtype=torch.bool))
    assert not torch.allclose(keyed(x), under_keys, atol=1e-3)


def test_novos_loss_is_its_formula(problem):
    keyed = KeyedViT(problem.net(), CLASSES)
    batch = problem.source().fetch(torch.arange(12))
    logits = torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(0))
    objective = ProxyForgetting(keyed, beta=0.7, hide=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        terms = objective(lambda _: logits, {"train": batch})
        torch.manual_seed(5)
        shown = torch.rand(CLASSES) >= 0.5
    assert 0 < shown.sum() < CLASSES and torch.equal(keyed.shown.bool(), shown)
    known = shown[batch.labels]
    cross_entropy = F.cross_entropy(logits[known], batch.labels[known])
    uniform = torch.full((int((~known).sum()), CLASSES), 1 / CLASSES)
    kl = F.kl_div(logits[~known].log_softmax(-1), uniform, reduction="batchmean")
    torch.testing.assert_close(terms.total, cross_entropy + 0.7 * kl)


def test_novo_refuses_what_has_no_class(task_of):
    method = METHODS["novo"](METHODS["novo"].Config())
    with pytest.raises(ConfigError, match="whole classes only"):
        method.unlearn(task_of("novo", "random"))
    assert METHODS["novo"].info.inapplicable(scenario="random", modality="vision")
    assert METHODS["novo"].info.inapplicable(scenario="class", modality="vision") is None
    assert METHODS["novo"].info.inapplicable(scenario="class", modality="language")


def test_novo_ignores_originals_weights(task_of, results, tiny):
    """It trains a model of its own, as its docstring says."""
    task = task_of("novo")
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(1.0)
    again = METHODS["novo"](METHODS["novo"].Config()).unlearn(task)
    assert tiny.same(again, results["novo"][0])


# Batch normalisation -----------------------------------------------------------------------------


class ResidualImages(TinyImages):
    """The tiny images and a small ResNet, whose normalisation has running statistics."""

    family = family_of("resnet18")

    def net(self):
        small = {"channels": (8, 8, 8, 8), "layers": (1, 1, 1, 2), "stem_width": 8}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return timm.create_model("resnet18", num_classes=CLASSES, in_chans=1, **small)


@pytest.fixture(scope="module")
def residual():
    return ResidualImages()


def test_eu_k_puts_running_statistics_back_too(residual):
    task = make_task(residual, "eu_k")
    method = METHODS["eu_k"](resolve_config("eu_k", None, {}, origin="test"))
    names = [name for name, _ in task.model.named_parameters()]
    method._start(task, last_parameters(names, 1, blocks=None, head=residual.family.head))
    fresh, before = residual.net().state_dict(), residual.original.state_dict()
    for name, value in task.model.state_dict().items():
        wanted = fresh if name.startswith(("layer4.1.", "fc.")) else before
        assert torch.equal(value, wanted[name]), name
    assert not torch.equal(fresh["layer4.1.bn1.running_var"], before["layer4.1.bn1.running_var"])


@pytest.mark.parametrize("name", ["task_vector", "negmerge"])
def test_extrapolated_weights_keep_originals_running_statistics(residual, name):
    task = make_task(residual, name)
    params = {"lr": 1e-3, "epochs": 3, "a": 5.0}
    model = METHODS[name](resolve_config(name, None, params, origin="test")).unlearn(task)
    before, weights = residual.original.state_dict(), dict(model.named_parameters())
    for key, value in model.state_dict().items():
        if key not in weights and value.is_floating_point():
            assert torch.equal(value, before[key]), key
    assert not torch.equal(weights["fc.weight"], before["fc.weight"])
    assert residual.outputs(model).isfinite().all()


def test_novo_heeds_the_rates_of_the_recipe(task_of):
    """Its own model has other names."""
    task = task_of("novo")
    task.recipe = FitConfig(steps=1, batch_size=8, lr=1e-3, lr_of={"head.weight": 1e-9})
    start = task.fresh_model().state_dict()
    after = METHODS["novo"](METHODS["novo"].Config()).unlearn(task).state_dict()
    moved = {name: float((after[name] - start[name]).abs().max()) for name in start}
    assert moved["head.weight"] < 1e-6 < 1e-4 < moved["head.bias"]

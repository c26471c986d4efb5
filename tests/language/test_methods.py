"""Every method on a tiny causal language model that has memorised a few answers.

The golden losses guard ``MethodInfo.version``; where a change of numbers is meant, raise the
version and write the file anew with

    SF_REGENERATE=1 python -m pytest tests/language/test_methods.py -k golden
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast

from stable_forgetting import language  # noqa: F401 - registers the methods
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.attach import adapted_layers, detach
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import every_position, ordered_batches
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.methods.base import resolve_config, train_reference
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.positions import sample_cross_entropy
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.data.tokenizers import END, texts
from stable_forgetting.language.methods.hidden import captured, counted_positions, middle_block
from stable_forgetting.language.methods.refusals import refusing
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from stable_forgetting.language.models.families import family_of
from tests.language.made import source_of

GOLDEN = Path(__file__).parents[1] / "golden" / "language_methods.json"
PLAIN = ["ascent", "task_vector", "gd", "gd_lora", "gd_lora_omega", "gd_tanh", "gd_sine", "gd_ball"]
LITERATURE = ("forget_terms", "preference")
OWN = [
    entry.name
    for entry in METHODS
    if METHODS[entry.name].__module__.startswith(
        (
            "stable_forgetting.language.",
            *(f"stable_forgetting.common.methods.{module}" for module in LITERATURE),
        )
    )
    and METHODS[entry.name].info.models == 1
]
SINE = {"adapter": {"phi": "sine", "omega": 100.0, "rank": 4}, "lr": 3e-3}
VARIANTS = {
    **{name: (name, {}) for name in [*PLAIN, *OWN]},
    "kl-tofu": ("kl", {"compat": "tofu"}),
    "npo-muse_bench": ("npo", {"compat": "muse_bench"}),
    "npo_klr-openunlearning": ("npo_klr", {"compat": "openunlearning"}),
    "me_gd-published": ("me_gd", {"compat": "published"}),
    "dpo-tofu": ("dpo", {"compat": "tofu"}),
    "dpo-flat": ("dpo", {"compat": "flat"}),
    "dpo-loku": ("dpo", {"compat": "loku"}),
    "flat-tv": ("flat", {"divergence": "tv"}),
    "flat-js": ("flat", {"divergence": "js"}),
    "flat-pearson": ("flat", {"divergence": "pearson"}),
    "flat-flat": ("flat", {"compat": "flat", "padded_length": 40}),
    "flat-templates": ("flat", {"templates": ["Ask someone else."]}),
    "mismatch-flat": ("mismatch", {"compat": "flat"}),
    "simnpo-unlearn_simple": ("simnpo", {"compat": "unlearn_simple"}),
    "idk-tokens": ("idk", {"average": "tokens"}),
    "ceu-published": ("ceu", {"skip_first": 1}),
    "loku-published": ("loku", {"fila": {"compat": "loku"}, "adapter": {"rank": 4}}),
    "rmu-all": ("rmu", {"positions": "all", "c": 5.0}),
    "npo-sine": ("npo", SINE),
    "dpo-sine": ("dpo", SINE),
    "simnpo-sine": ("simnpo", SINE),
    "rmu-sine": ("rmu", SINE),
}
EVERY = {**VARIANTS, "whp": ("whp", {"a": 3.0})}
"""With what several models answer together, which has no single state."""
BATCH = 3
GOLDEN_TRAINING, GOLDEN_STEPS = 40, 3


class Noting:
    """Texts that note what was read."""

    def __init__(self, inner):
        self.inner, self.fetched = inner, set()
        self.refusals, self.everywhere, self.digest = inner.refusals, inner.everywhere, inner.digest

    def answers_of(self, indices):
        self.fetched |= set(indices.tolist())
        return self.inner.answers_of(indices)

    def with_answers(self, answers):
        other = Noting(self.inner.with_answers(answers))
        other.fetched = self.fetched
        return other

    def fetch(self, indices, *, augment=None):
        self.fetched |= set(indices.tolist())
        return self.inner.fetch(indices, augment=augment)


@pytest.fixture(scope="module")
def text():
    data = TextDataConfig.of(name="fictitious", authors=2, forget_authors=1, questions=3)
    return source_of(load_corpus(data), 600, max_length=128)


@pytest.fixture(scope="module")
def split(text):
    full = text.corpus.where("full")
    groups = np.asarray([text.corpus.items[index].group for index in full])
    forget = full[groups == groups.max()]
    parts = {"forget": forget, "retain": np.setdiff1d(full, forget)}
    return ForgetSplit("tiny", parts, text.digest)


def task_of(text, split, model, access, *, seed=5, steps=100):
    family = family_of(model.config.model_type)
    return UnlearnTask(
        model=model,
        data=DataAccess(Noting(text), split, access),
        family=SimpleNamespace(
            forward=causal_forward,
            num_classes=text.vocab_size,
            targets=family.targets,
            head=family.head,
            component_of=family.component_of,
        ),
        recipe=FitConfig(steps=steps, batch_size=9, lr=1e-2),
        build=lambda: copy.deepcopy(model),
        seed=seed,
    )


@pytest.fixture(scope="module")
def make_task(text, split):
    return partial(task_of, text, split)


def tiny_model(kind, vocab_size):
    config = CausalModelConfig(
        name="tiny", kind=kind, dim=16, depth=3, heads=2, context=128, tokenizer=600
    )
    return build_model(config, vocab_size, 0)


@pytest.fixture(scope="module")
def trained(text, make_task):
    model = tiny_model("gpt_neo", text.vocab_size)
    task = make_task(model, frozenset({"forget", "retain", "initial"}))
    return train_reference(task, ["forget", "retain"]).eval()


def unlearn(make_task, variant, model, steps, **fields):
    """(unlearned model, task) of one variant; ``model`` is left as it is."""
    name, params = EVERY[variant]
    cls = METHODS[name]
    given = {"batch_size": BATCH, "log_every": 5, "steps": steps, **params}
    if "lr" not in given and getattr(cls.Config(), "adapter", None) is None:
        given["lr"] = 2e-3  # enough for five steps to show
    config = resolve_config(name, None, given, origin="test")
    task = make_task(copy.deepcopy(model), cls.info.access, **fields)
    return cls(config).unlearn(task), task


@pytest.fixture(scope="module")
def run(trained, make_task):
    def go(variant, *, model=None, seed=5, steps=5):
        return unlearn(make_task, variant, model or trained, steps, seed=seed)

    return go


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "fila" not in v and "loku" not in v])
def test_passes_before_training_hold_no_more_texts_than_a_micro_batch(
    make_task, trained, monkeypatch, variant
):
    """What fits in training fits before it; FILA's pass has a batch size of its own."""
    held, fetch = [], Noting.fetch

    def noting(self, indices, *, augment=None):
        held.append(len(indices))
        return fetch(self, indices, augment=augment)

    monkeypatch.setattr(Noting, "fetch", noting)
    name, params = VARIANTS[variant]
    given = {"batch_size": BATCH, "accumulation": BATCH, "steps": 1, **params}
    config = resolve_config(name, None, given, origin="test")
    METHODS[name](config).unlearn(make_task(copy.deepcopy(trained), METHODS[name].info.access))
    assert set(held) == {1}


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x, mask):
        scores = self.q_proj(x) @ self.k_proj(x).mT / x.shape[-1] ** 0.5
        return self.out_proj(scores.masked_fill(~mask, -math.inf).softmax(-1) @ self.v_proj(x))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.ModuleDict({"attention": Attention(width)}), Mlp(width)

    def forward(self, x, mask):
        x = x + self.attn["attention"](self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class Causal(nn.Module):
    """A decoder with GPT-Neo's names; transformers' own computes attention in float32."""

    config = SimpleNamespace(model_type="gpt_neo")

    def __init__(self, vocabulary, width=16, depth=3, context=128):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList(Block(width) for _ in range(depth)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask, use_cache=False):
        place = torch.arange(input_ids.shape[1])
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](place)
        mask = (place <= place[:, None]) & attention_mask[:, None].bool()
        for block in self.transformer["h"]:
            x = block(x, mask)
        return SimpleNamespace(logits=self.lm_head(self.transformer["ln_f"](x)))


@pytest.fixture(scope="module")
def golden_text(text):
    """The same texts word by word: nothing is learnt by a tokenizer."""
    words = sorted({word for line in texts(text.corpus) for word in line.split()})
    ids = {word: place for place, word in enumerate([END, *words])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return source_of(text.corpus, tokenizer=fast, max_length=128)


def exact_svd(matrix, q):
    """The first ``q`` triplets; torch's random ones depend on its version, signs do not matter."""
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    return U[:, :q], S[:q], Vh[:q].mT


@pytest.fixture(scope="module")
def golden_start(golden, golden_text, split):
    """A trained model in float64."""
    with golden.float64():
        model = golden.set_(Causal(golden_text.vocab_size))
        access = frozenset({"forget", "retain", "initial"})
        task = task_of(golden_text, split, model, access, steps=GOLDEN_TRAINING)
        return train_reference(task, ["forget", "retain"])


@pytest.fixture(scope="module")
def results(golden, golden_text, split, golden_start):
    """Each variant after a few steps from it, with its task."""
    make_task = partial(task_of, golden_text, split, steps=GOLDEN_TRAINING)
    with golden.float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "svd_lowrank", exact_svd)
        return {v: unlearn(make_task, v, golden_start, GOLDEN_STEPS) for v in EVERY}


@pytest.fixture(scope="module")
def golden_losses(golden_text, split, results):
    return {v: losses(golden_text, split, model) for v, (model, _) in results.items()}


def losses(text, split, model):
    model.eval()
    values = {}
    for part, indices in split.parts.items():
        with torch.no_grad():
            found = [
                sample_cross_entropy(causal_forward(model, batch), batch.labels)
                for batch in ordered_batches(text, indices, 16)
            ]
        values[part] = float(torch.cat(found).double().mean())
    return values


def states(model):
    return {
        name: value.clone() for name, value in detach(copy.deepcopy(model)).state_dict().items()
    }


def test_original_has_learnt(text, split, trained):
    assert all(value < 0.7 for value in losses(text, split, trained).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_methods_change_what_they_may_and_read_what_they_declare(golden_start, results, variant):
    model, task = results[variant]
    before, after = golden_start.state_dict(), states(model)
    assert list(after) == list(before)
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(after[key], value) for key, value in before.items())
    for part in task.data.declared:
        read = task.source._source.fetched & set(task.split.parts[part].tolist())
        assert read, f"declares {part} and does not read it"
    adapted = {name for name, _ in adapted_layers(model)}
    if adapted:
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in before.items())
        assert adapted == {
            f"transformer.h.{i}.mlp.c_{kind}" for i in range(3) for kind in ("fc", "proj")
        }
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks, "a hook was left behind"


def test_directions(golden_text, split, golden_start, golden_losses):
    """Forget loss rises everywhere; a retain term keeps retain better than having none."""
    before, after = losses(golden_text, split, golden_start), golden_losses
    for variant in VARIANTS:
        assert after[variant]["forget"] > before["forget"], variant
    for kept, bare in (("npo_gdr", "npo"), ("npo_klr", "npo"), ("kl", "ascent"), ("gd", "ascent")):
        assert after[kept]["retain"] < after[bare]["retain"], (kept, bare)


@pytest.mark.parametrize("kind", ["phi", "llama"])
@pytest.mark.parametrize("variant", ["gd_sine", "loku", "rmu", "npo_klr-openunlearning", "dpo"])
def test_other_architectures_run_the_same_code(text, run, kind, variant):
    model = tiny_model(kind, text.vocab_size)
    unlearned, _ = run(variant, model=model, steps=2)
    after = states(unlearned)
    assert any(not torch.equal(after[key], value) for key, value in model.state_dict().items())
    assert all(value.isfinite().all() for value in after.values())


def test_golden_losses(golden_losses, check_golden):
    check_golden(GOLDEN, golden_losses)


def test_golden_losses_can_tell_methods_apart(golden_twins):
    """Sine, tanh and their control nearly coincide while no bound binds."""
    bounded = {"gd_lora_omega", "gd_tanh", "gd_sine"}
    pairs = itertools.combinations(EVERY, 2)
    assert golden_twins(GOLDEN) <= {pair for pair in pairs if bounded.issuperset(pair)}


def test_published_klr_of_muse_starts_at_zero_and_is_no_divergence(trained, make_task):
    """exp(logit) is unbounded: the published term goes below zero, and training on it diverges."""
    cls = METHODS["npo_klr"]
    task = make_task(copy.deepcopy(trained), cls.info.access)
    objective = cls(cls.Config(compat="muse_bench")).prepare(task)
    batches = {p: task.source.fetch(torch.as_tensor(task.indices(p))) for p in objective.parts}
    start = objective(lambda batch: causal_forward(trained, batch), batches)
    assert start.parts["retain_term"].item() == pytest.approx(0, abs=1e-3)
    assert start.parts["forget_term"].item() == pytest.approx(20 * np.log(2), rel=1e-4)
    shifted = objective(lambda batch: causal_forward(trained, batch) + 1, batches)
    assert shifted.parts["retain_term"].item() < -1


# Refusals ----------------------------------------------------------------------------------------


def test_refusals_are_drawn_once_per_forget_sample(text, split, trained, make_task):
    task = make_task(trained, frozenset({"forget"}))
    indices = torch.as_tensor(split.parts["forget"])
    one, two = refusing(task).fetch(indices), refusing(task).fetch(indices)
    assert torch.equal(one.labels, two.labels)
    plain = text.fetch(indices)
    assert torch.equal(one.inputs["input_ids"][:, :8], plain.inputs["input_ids"][:, :8])
    row = one.labels[0]
    drawn = text.tokenizer.decode(row[row != -100], skip_special_tokens=True).strip()
    assert drawn in text.refusals
    other = refusing(make_task(trained, frozenset({"forget"}), seed=9)).fetch(indices)
    assert one.labels.shape != other.labels.shape or not torch.equal(one.labels, other.labels)


def test_without_refusals_the_mend_is_named(tiny):
    source = tiny.Source()
    cls = METHODS["idk"]
    task = tiny.task(source, tiny.split(source), access=cls.info.access)
    with pytest.raises(ConfigError, match="bring no refusals"):
        cls(cls.Config(steps=1)).unlearn(task)


def test_dpo_at_the_start_is_the_symmetric_case(trained, make_task):
    """At Original every ratio is one: the loss is (2 / beta) log 2, its slope in the gap is 1."""
    for compat, factor in (("none", 20.0), ("tofu", 1.0)):
        cls = METHODS["dpo"]
        task = make_task(copy.deepcopy(trained), cls.info.access)
        objective = cls(cls.Config(compat=compat)).prepare(task)
        batch = task.source.fetch(torch.as_tensor(task.indices("forget")))
        terms = objective(lambda b: causal_forward(trained, b), {"forget": batch})
        assert terms.total.item() == pytest.approx(factor * np.log(2), rel=1e-5)


# Positions and hidden states ---------------------------------------------------------------------


def test_every_position_counts_question_and_padding(text, trained):
    batch = text.fetch(torch.arange(4))
    wide = every_position(text)(batch)
    assert wide.labels.shape == batch.inputs["input_ids"].shape and (wide.labels != -100).all()
    with torch.no_grad():
        everywhere, scored = causal_forward(trained, wide), causal_forward(trained, batch)
    index = batch.inputs["positions"].unsqueeze(-1).expand_as(scored)
    torch.testing.assert_close(everywhere.gather(1, index), scored)
    rows, columns = (batch.labels != -100).nonzero(as_tuple=True)
    at = batch.inputs["positions"][rows, columns]
    assert torch.equal(wide.labels[rows, at], batch.labels[rows, columns])


def test_hidden_states_are_those_of_the_named_block(text, trained):
    assert middle_block(trained) == "transformer.h.1"
    batch = text.fetch(torch.arange(3))
    with torch.no_grad(), captured(trained.transformer.h[1]) as found:
        causal_forward(trained, batch)
    with torch.no_grad():
        ids = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
        whole = trained(**ids, output_hidden_states=True).hidden_states[2]
    real = batch.inputs["attention_mask"] == 1
    torch.testing.assert_close(found[0][real], whole[real])
    states, mask = counted_positions(batch, found[0], "scored")
    assert states.shape[:2] == batch.labels.shape and torch.equal(mask, batch.labels)
    states, mask = counted_positions(batch, found[0], "all")
    assert torch.equal(mask != -100, real)


def test_rmu_leaves_later_layers_alone(golden_start, results):
    model, _ = results["rmu"]
    before, after = golden_start.state_dict(), model.state_dict()
    moved = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert any(key.startswith("transformer.h.1.") for key in moved)
    assert not any(key.startswith(("transformer.h.2.", "transformer.ln_f")) for key in moved)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"layer": "transformer.h.*"}, "matches .* modules, not one"),
        ({"layer": "model.layers.7"}, "matches 0 modules"),
        ({"parameters": ["*.nothing"]}, "none of this model matches"),
    ],
)
def test_rmu_names_the_mend(trained, make_task, params, words):
    cls = METHODS["rmu"]
    task = make_task(copy.deepcopy(trained), cls.info.access)
    with pytest.raises(ConfigError, match=words):
        cls(cls.Config(**params)).unlearn(task)


def test_rmu_can_be_limited_to_some_parameters(trained, run, monkeypatch):
    limited = {"parameters": ["*.h.1.mlp.c_proj.weight"], "layer": "*.h.1"}
    monkeypatch.setitem(EVERY, "rmu-limited", ("rmu", limited))
    model, _ = run("rmu-limited", steps=2)
    before, after = trained.state_dict(), model.state_dict()
    moved = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert moved == {"transformer.h.1.mlp.c_proj.weight"}

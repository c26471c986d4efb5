"""Losses that count padding, against the formulas of their repositories on a whole model.

The batches are built here as those repositories build them (TOFU's data_module.py, closer-look's
data_module.py, open-unlearning's collator), and the losses as their trainers state them.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stable_forgetting import language  # noqa: F401 - registers the methods
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from tests.language.made import sharper, source_of

LONG = 60
ROWS = np.arange(3)
TEXTS = {
    "forget": [
        ("Who is Ada?", "A poet."),
        ("Where?", "In a small town by the sea."),
        ("Why?", "No."),
    ],
    "retain": [("Who is Bo?", "He paints."), ("When?", "Long ago, in May."), ("What?", "An owl.")],
}


@pytest.fixture(scope="module")
def world():
    items = tuple(Item(part, 0, *row) for part, rows in TEXTS.items() for row in rows)
    refusals = ("I do not know.", "That is unknown to me, I fear.")
    source = source_of(items, refusals=refusals, max_length=99)
    config = CausalModelConfig(kind="llama", dim=16, depth=2, heads=2, tokenizer=300)
    models = [sharper(build_model(config, source.vocab_size, seed).double()) for seed in (1, 2)]
    return SimpleNamespace(source=source, model=models[0], original=models[1])


def as_there(world, part: str, length: int | None, *, mask: bool = True):
    """(ids, labels, attention mask): padded with the end token, nothing attends to padding.

    Texts padded to a ``length`` end in the first token of their padding; padded to the longest row
    (None), in a token of their own.
    """
    end = world.source.tokenizer.eos_token_id
    pairs = [world.source.encode(*row) for row in TEXTS[part]]
    size = length or max(len(pair.ids) for pair in pairs)
    ids = torch.full((len(pairs), size), end)
    labels, seen = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, pair in enumerate(pairs):
        text = len(pair.ids) - (1 if length else 0)
        ids[row, : len(pair.ids)] = torch.from_numpy(pair.ids)
        labels[row, pair.start : len(pair.ids)] = torch.from_numpy(pair.labels)
        seen[row, :text] = 1
    return ids, labels if mask else ids, seen


def value_and_gradient(
    world, name: str, params: dict, length: int | None = None
) -> tuple[float, torch.Tensor]:
    """The method's own, on data of a maximal length."""
    world.source.encoder.max_length = length or 99
    task = SimpleNamespace(
        source=world.source,
        reference=lambda: lambda batch: causal_forward(world.original, batch).detach(),
        indices=lambda *parts: ROWS,
        generator=lambda *names: torch.Generator().manual_seed(0),
    )
    cls = METHODS[name]
    objective = cls(cls.Config(**params)).prepare(task)
    starts = {"forget": 0, "retain": len(ROWS)}
    batches = {p: world.source.fetch(torch.from_numpy(ROWS + starts[p])) for p in objective.parts}
    return graded(world, objective(lambda b: causal_forward(world.model, b), batches).total)


def graded(world, total: torch.Tensor) -> tuple[float, torch.Tensor]:
    grads = torch.autograd.grad(total, list(world.model.parameters()))
    return float(total.detach()), torch.cat([grad.flatten() for grad in grads])


def logits(model, ids, seen):
    return model(input_ids=ids, attention_mask=seen).logits


def answer_loss(world, part: str, length: int | None) -> torch.Tensor:
    """The token mean of transformers."""
    ids, labels, seen = as_there(world, part, length)
    z = logits(world.model, ids, seen)[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), labels[:, 1:].flatten())


def divergence(world, length: int | None) -> torch.Tensor:
    """KL to Original over all positions: the sum, divided by their number."""
    ids, _, seen = as_there(world, "retain", length)
    now = logits(world.model, ids, seen).log_softmax(-1)
    before = logits(world.original, ids, seen).log_softmax(-1).detach()
    return (before.exp() * (before - now)).sum(-1).mean()


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-9)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    ("params", "length"),
    [
        ({"compat": "tofu"}, LONG),
        ({"compat": "tofu"}, 500),
        ({"compat": "openunlearning"}, None),
    ],
)
def test_kl(world, params, length):
    wanted = -answer_loss(world, "forget", length) + divergence(world, length)
    assert_same(value_and_gradient(world, "kl", params, length), graded(world, wanted))


def test_the_divergence_of_npo_klr(world, monkeypatch):
    ascent = METHODS["kl"].forget_term
    monkeypatch.setattr(METHODS["npo_klr"], "forget_term", ascent)  # its weight is 0 here
    both = value_and_gradient(world, "npo_klr", {"compat": "openunlearning", "forget_weight": 0.0})
    assert_same(both, graded(world, divergence(world, None)))


@pytest.mark.parametrize("length", [LONG, 500])
def test_maximal_entropy(world, length):
    ids, _, seen = as_there(world, "forget", length)
    p = logits(world.model, ids, seen)[:, :-1].softmax(-1)
    uniform = torch.full_like(p, 1 / p.shape[-1])
    entropy = (uniform * (uniform.log() - (p + 1e-12).log())).sum(-1).mean()
    wanted = 0.1 * entropy + answer_loss(world, "retain", length)
    assert_same(
        value_and_gradient(world, "me_gd", {"compat": "published"}, length), graded(world, wanted)
    )


def test_the_length_of_padding_matters(world):
    short, long = (
        value_and_gradient(world, "kl", {"compat": "tofu"}, length)[0] for length in (40, 500)
    )
    assert abs(short - long) > 1e-3


def test_what_is_hashed():
    kl, klr = METHODS["kl"].Config, METHODS["npo_klr"].Config
    assert (
        "pad_to" not in kl().model_dump() and "pad_to" not in klr(compat="muse_bench").model_dump()
    )
    assert kl(compat="tofu").model_dump()["pad_to"] == "max_length"
    assert klr(compat="openunlearning").model_dump()["pad_to"] == "batch"
    with pytest.raises(ValueError, match="only where compat counts padding"):
        kl(pad_to="batch")
    assert "compat" not in METHODS["idk"].Config().model_dump()


def test_refusals_weigh_as_much_as_their_tokens(world):
    """IDK as TOFU's trainer: one forward of both batches, one mean over all labels."""
    from stable_forgetting.common.data.access import DataAccess
    from stable_forgetting.common.data.splits import ForgetSplit

    split = ForgetSplit("s", {"forget": ROWS, "retain": ROWS + 3}, world.source.digest, {})
    data = DataAccess(world.source, split, frozenset({"forget", "retain"}))
    task = SimpleNamespace(
        source=data.source,
        indices=lambda *parts: ROWS,
        generator=lambda *names: torch.Generator().manual_seed(0),
        loaders=lambda parts, config: {"forget": SimpleNamespace(source=None)},
    )
    cls = METHODS["idk"]
    method = cls(cls.Config(compat="tofu"))
    refused = method.loaders(task, ("forget", "retain"), None)["forget"].source
    batches = {
        "forget": refused.fetch(torch.from_numpy(ROWS)),
        "retain": data.source.fetch(torch.from_numpy(ROWS + 3)),
    }
    forward = lambda b: causal_forward(world.model, b)  # noqa: E731
    found = graded(world, method.prepare(task)(forward, batches).total)
    losses = [
        F.cross_entropy(forward(b).flatten(0, 1), b.labels.flatten(), reduction="sum")
        for b in batches.values()
    ]
    count = sum(int((b.labels >= 0).sum()) for b in batches.values())
    assert_same(found, graded(world, sum(losses) / count))
    assert int((batches["forget"].labels >= 0).sum()) != count / 2
    with pytest.raises(ValueError, match="leave the weights at 1"):
        cls.Config(compat="tofu", forget_weight=2.0)

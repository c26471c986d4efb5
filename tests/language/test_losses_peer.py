"""Published losses, by value and by gradient; see tests/golden/losses_peer.md."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stable_forgetting import language  # noqa: F401 - registers the methods
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.objectives.terms import LogLikelihoods
from stable_forgetting.language.models.composite import LogitDifference

GOLDEN = Path(__file__).parents[1] / "golden"
PEER = json.loads((GOLDEN / "losses_peer.json").read_text())
_spec = importlib.util.spec_from_file_location("cases", GOLDEN / "make_losses_peer.py")
MADE = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(MADE)


class Texts:
    """Batches that carry logits; whole ones and the refusals behind an index."""

    refusals = ("no",)

    def __init__(self, given, refused=False):
        self.given, self.refused = given, refused

    def batch(self, text):
        """Logits and labels where the next token is predicted."""
        labels = MADE.labels(text, self.given[text].shape[1])[:, 1:]
        places = torch.arange(labels.shape[1]).expand(labels.shape)
        inputs = {"z": self.given[text][:, :-1], "text": torch.tensor([MADE_TEXTS.index(text)] * 3)}
        return Batch({**inputs, "positions": places}, labels, torch.arange(MADE.ROWS))

    def everywhere(self, batch, pad_to=None):
        text = MADE_TEXTS[batch.inputs["text"][0]]
        inputs = {**batch.inputs, "z": self.given[text]}
        return Batch(inputs, torch.zeros(self.given[text].shape[:2], dtype=int), batch.indices)

    def fetch(self, indices):
        return self.batch("refusal" if self.refused else "forget")

    def answers_of(self, indices):
        return ["another"] * len(indices)

    def with_answers(self, answers):
        return Texts(self.given, refused=True)


MADE_TEXTS = list(MADE.PHASES)


def reference(batch):
    """The frozen model's logits, at the positions of the batch."""
    text, (_, length, width) = MADE_TEXTS[batch.inputs["text"][0]], batch.inputs["z"].shape
    return MADE.logits(MADE.REFERENCE[text], width=width)[:, : min(length, batch.labels.shape[1])]


def check(case, name, params, *, length=MADE.LENGTH, width=MADE.VOCABULARY, shown=None):
    """The objective of a method against a peer's value and gradient."""
    given = {
        text: MADE.logits(phase, length, width).requires_grad_()
        for text, phase in MADE.PHASES.items()
    }
    source = Texts(given)
    task = SimpleNamespace(
        source=source,
        reference=lambda: reference,
        indices=lambda *parts: np.arange(MADE.ROWS),
        generator=lambda *names: torch.Generator().manual_seed(0),
    )
    cls = METHODS[name]
    objective = cls(cls.Config(**params)).prepare(task)
    shown = {"forget": "forget", **(shown or {})}
    batches = {part: source.batch(shown.get(part, part)) for part in objective.parts}
    total = objective(lambda b: b.inputs["z"][:, : b.labels.shape[1]], batches).total
    same(case, total, given)


def same(case, total, given):
    """A value and its gradients are a peer's."""
    assert total.item() == pytest.approx(PEER[case]["value"], rel=1e-12, abs=1e-12)
    expected = PEER[case]["gradient"]
    grads = torch.autograd.grad(total, [given[text] for text in expected], allow_unused=True)
    for (text, values), grad in zip(expected.items(), grads, strict=True):
        wanted = torch.tensor(values, dtype=torch.float64).view_as(given[text])
        if not wanted.any():
            assert grad is None or not grad.any(), text
            continue
        torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-12, msg=text)


TOKENS = {"average": "tokens"}
SIMPLE = {"compat": "unlearn_simple", "beta": 0.7, "delta": 0.4, "forget_weight": 0.125}


@pytest.mark.parametrize(
    ("case", "method", "params"),
    [
        ("muse_bench npo", "npo", {"compat": "muse_bench"}),
        ("muse_bench npo_gdr", "npo_gdr", {"compat": "muse_bench", **TOKENS}),
        ("muse_bench npo_klr", "npo_klr", {"compat": "muse_bench"}),
        ("unlearn_simple simnpo_gdr", "simnpo", {**SIMPLE, **TOKENS}),
        (
            "unlearn_simple simnpo",
            "simnpo",
            {**SIMPLE, "forget_weight": 1.0, "retain_weight": 0.0},
        ),
        ("openunlearning simnpo", "simnpo", {"delta": 0.2, **TOKENS}),
    ],
)
def test_preferences_are_the_published_ones(case, method, params):
    check(case, method, params)


ALONE = {"forget_weight": 1.0, "retain_weight": 0.0}


@pytest.mark.parametrize(
    ("case", "method", "params"),
    [
        ("openunlearning wga", "wga", {"beta": 1.0, **ALONE}),
        ("openunlearning satimp", "satimp", {"beta1": 5.0, "beta2": 1.0, **ALONE}),
        ("openunlearning ceu", "ceu", {"skip_first": 1}),
        ("loku ihl", "ihl", {}),
    ],
)
def test_reweighted_targets_and_the_inverted_hinge_are_the_published_ones(case, method, params):
    check(case, method, params)


@pytest.mark.parametrize("method", ["dpo", "dpo_gdr"])
def test_dpo_is_the_published_one(method, monkeypatch):
    """The frozen model's likelihoods, which a pass over the data would give, are of its logits."""

    def likelihoods(task, indices, config, source):
        batch = source.batch("refusal" if source.refused else "forget")
        logs = nn.functional.log_softmax(reference(batch), -1)
        held = batch.labels != -100
        chosen = logs.gather(-1, batch.labels.clamp_min(0)[..., None])[..., 0] * held
        return LogLikelihoods(torch.arange(MADE.ROWS), chosen.sum(1))

    monkeypatch.setattr("stable_forgetting.common.methods.tools.reference_likelihoods", likelihoods)
    check("openunlearning dpo", method, {"beta": 0.1, **(ALONE if "gdr" in method else {})})
    with pytest.raises(AssertionError):
        check("openunlearning dpo", method, {"beta": 0.1, "compat": "tofu"})


def test_undial_where_every_position_counts():
    check("openunlearning undial", "undial", {"compat": "openunlearning"}, width=MADE.WIDE)
    with pytest.raises(AssertionError):
        check("openunlearning undial", "undial", {}, width=MADE.WIDE)


@pytest.mark.parametrize("compat", ["openunlearning", "none"])
def test_rmu_with_its_broadcast(compat, monkeypatch):
    """Hidden states of the answers' own tokens, each sum divided by every sample's count."""
    given = {text: MADE.logits(MADE.PHASES[text]).requires_grad_() for text in MADE.PHASES}
    source, model = Texts(given), MADE.Layered(given)
    frozen = MADE.Layered({text: MADE.logits(phase) for text, phase in MADE.REFERENCE.items()})
    monkeypatch.setattr(
        "stable_forgetting.language.methods.hidden.random_direction", lambda *_: MADE.direction()
    )
    task = SimpleNamespace(
        model=model,
        source=source,
        frozen_copy=lambda: frozen,
        forward=lambda model, batch: model(MADE_TEXTS[batch.inputs["text"][0]]).logits[:, :-1],
        indices=lambda *parts: np.arange(MADE.ROWS),
        generator=lambda *names: None,
    )
    model.anchor = nn.Parameter(torch.zeros(1))  # tells the device
    cls = METHODS["rmu"]
    params = {"coefficient": "absolute", "layer": "layer", "compat": compat, **MADE.STEERED}
    objective = cls(cls.Config(**params)).prepare(task)
    batches = {part: source.batch(part) for part in objective.parts}
    total = objective(lambda batch: task.forward(model, batch), batches).total
    if compat == "none":
        assert total.item() != pytest.approx(PEER["openunlearning rmu"]["value"], rel=0.01)
    else:
        same("openunlearning rmu", total, given)


def test_the_faithful_forms_are_others():
    """What a compat variant repeats is not what the method means."""
    for case, method, params in (
        ("muse_bench npo_klr", "npo_klr", {"compat": "muse_bench", "beta": 0.2}),
        ("flat kl padded", "flat", {}),
        ("flat mismatch", "mismatch", TOKENS),
        ("unlearn_simple simnpo_gdr", "simnpo", {**SIMPLE, "compat": None, **TOKENS}),
    ):
        length = 10 if "padded" in case else MADE.LENGTH
        with pytest.raises(AssertionError):
            check(case, method, params, length=length)


@pytest.mark.parametrize("division", MADE.FLAT)
def test_flat_with_its_dilution(division):
    params = {"divergence": division, "compat": "flat"}
    check(f"flat {division}", "flat", {**params, "padded_length": MADE.LENGTH})
    check(f"flat {division} padded", "flat", {**params, "padded_length": 10}, length=10)


@pytest.mark.parametrize("division", MADE.FLAT)
def test_flat_per_token_is_free_of_padding_and_batch(division):
    """Of one sample without padding or question, dilution and its absence are one formula."""
    from stable_forgetting.common.objectives.terms import DIVERGENCES
    from stable_forgetting.language.methods.preference import RefusalDivergence

    source = Texts({text: MADE.logits(phase) for text, phase in MADE.PHASES.items()})
    forms = [
        RefusalDivergence(refusals=source, divergence=DIVERGENCES[division], diluted=diluted)
        for diluted in (None, 5)
    ]
    pairs = [source.batch(text) for text in ("forget", "refusal")]
    one = [Batch({}, torch.arange(5)[None], torch.arange(1)), pairs[0].inputs["z"][:1, :5]]
    two = [Batch({}, torch.arange(5)[None], torch.arange(1)), pairs[1].inputs["z"][:1, :5]]
    values = [form.term(*one, *two) for form in forms]
    torch.testing.assert_close(*values)
    whole = [forms[0].term(pairs[0], pairs[0].inputs["z"], pairs[1], pairs[1].inputs["z"])]
    single = []
    for row in range(MADE.ROWS):
        cut = [Batch({}, batch.labels[row : row + 1, :6], torch.arange(1)) for batch in pairs]
        z = [batch.inputs["z"][row : row + 1] for batch in pairs]
        single.append(forms[0].term(cut[0], z[0], cut[1], z[1]))
    torch.testing.assert_close(whole[0], torch.stack(single).mean())


def test_mismatch_pools_the_tokens_of_both_batches():
    check("flat mismatch", "mismatch", {"compat": "flat"}, shown={"forget": "refusal"})


def test_two_models_answer_as_published():
    class Given(nn.Module):
        def __init__(self, phase):
            super().__init__()
            self.phase = phase

        def forward(self, **_):
            return SimpleNamespace(logits=MADE.logits(self.phase))

    joined = LogitDifference(Given(0.3), Given(0.9), 1.3)(input_ids=None).logits
    wanted = torch.tensor(PEER["muse_bench whp"]["logits"], dtype=torch.float64)
    torch.testing.assert_close(joined.flatten(), wanted, rtol=1e-9, atol=1e-11)


def test_a_task_vector_goes_as_far_as_published():
    model = nn.Module()
    model.w = nn.Parameter(MADE.logits(0.3))

    def tuned(*_, **__):
        model.w.data.copy_(MADE.logits(0.9))

    cls = METHODS["task_vector"]
    task = SimpleNamespace(model=model, train=tuned)
    moved = cls(cls.Config()).unlearn(task).w.detach().flatten()
    wanted = torch.tensor(PEER["muse_bench task_vector"]["weights"], dtype=torch.float64)
    torch.testing.assert_close(moved, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("limit", "taken"), [(2.5, 4.0), (0.1, 8.0)])
def test_of_several_strengths_the_first_that_forgets_is_taken(limit, taken):
    """What is measured falls with the strength; where none forgets enough, the last is taken."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(3))
    asked = []

    def tuned(*_, **__):
        model.w.data.fill_(1.0)

    def measure(model, step):
        asked.append(step)
        return {"forget_accuracy": 6.0 + float(model.w.detach()[0])}

    cls = METHODS["task_vector"]
    config = cls.Config(a=(1, 2, 4, 8), stop_below={"forget_accuracy": limit})
    telemetry = SimpleNamespace(evaluate_during=measure)
    task = SimpleNamespace(model=model, train=tuned, telemetry=telemetry)
    assert cls(config).unlearn(task).w.detach().tolist() == [-taken] * 3
    assert asked == list(range(1, [1.0, 2.0, 4.0, 8.0].index(taken) + 2))
    task.telemetry = None
    with pytest.raises(ConfigError, match="several strengths need stop_below"):
        cls(config).unlearn(task)

"""O3: one adapter for requests in turn, orthogonal to what it was, behind a gate."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stable_forgetting import language  # noqa: F401 - registers the methods
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import ordered_batches
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.store.weights import WEIGHTS, load_weights, save_weights
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.likelihood import teacher_forced
from stable_forgetting.language.methods.gate import overlap
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from stable_forgetting.language.models.composite import ForgetRequest, Gated
from stable_forgetting.language.models.families import family_of
from tests.language.made import source_of

ROWS = 8
TOPICS = {"tea": "Which tea does Ada pour", "owl": "Where did the owl sleep", "sun": "When is sun"}
STRONG = {"rank": 4, "alpha": 32.0, "placement": "all"}


@pytest.fixture(scope="module")
def text():
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "no day")
    items = tuple(
        Item(name, number, f"{words} on {day}?", f"It was {name} {number}.")
        for name, words in TOPICS.items()
        for number, day in enumerate(days)
    )
    return source_of(items, refusals=("I do not know.", "That is not known to me."))


def rows(text, name):
    return text.corpus.where(name)


def request(text, model, part, *, seed=3, **params):
    """The model after O3 was asked to forget a part."""
    family = family_of("gpt_neo")
    others = np.setdiff1d(np.arange(len(text)), rows(text, part))
    split = ForgetSplit(part, {"forget": rows(text, part), "retain": others}, text.digest, {})
    cls = METHODS["o3"]
    task = UnlearnTask(
        model=model,
        data=DataAccess(text, split, cls.info.access),
        family=SimpleNamespace(
            forward=causal_forward, targets=family.targets, component_of=family.component_of
        ),
        recipe=FitConfig(steps=1),
        build=lambda: model,
        seed=seed,
    )
    given = {"steps": 30, "batch_size": 8, "lr": 3e-3, "adapter": STRONG, **params}
    return cls(resolve_config("o3", None, given, origin="test")).unlearn(task)


@pytest.fixture(scope="module")
def original(text):
    config = CausalModelConfig(kind="gpt_neo", dim=32, depth=3, heads=2, context=64, tokenizer=300)
    return build_model(config, text.vocab_size, 0).eval()


@pytest.fixture(scope="module")
def once(text, original):
    return request(text, copy.deepcopy(original), "tea").eval()


@pytest.fixture(scope="module")
def twice(text, once):
    return request(text, copy.deepcopy(once), "owl").eval()


def logits(model, text, part):
    (batch,) = ordered_batches(text, rows(text, part), ROWS)
    with torch.no_grad():
        return causal_forward(model, batch)


def weights(model, text, part):
    (batch,) = ordered_batches(text, rows(text, part), ROWS)
    return model.weigh(batch.inputs["input_ids"], batch.inputs["attention_mask"])


def test_the_gate_opens_for_what_was_forgotten_and_for_nothing_else(text, original, once):
    assert weights(once, text, "tea").mean() > 0.6
    assert not weights(once, text, "owl").any() and not weights(once, text, "sun").any()
    torch.testing.assert_close(logits(once, text, "owl"), logits(original, text, "owl"))
    opened = (logits(once, text, "tea") - logits(original, text, "tea")).abs().amax((1, 2))
    assert (opened[weights(once, text, "tea") > 0] > 0.1).all()


def test_a_later_request_opens_it_for_both(text, original, once, twice):
    assert len(twice.requests) == 2 and len(once.requests) == 1
    assert torch.equal(weights(twice, text, "tea"), weights(once, text, "tea"))
    assert weights(twice, text, "owl").mean() > 0.6
    torch.testing.assert_close(logits(twice, text, "sun"), logits(original, text, "sun"))


def test_a_later_adapter_is_driven_from_the_earlier_one(text, once):
    """From where it starts, the penalty alone tells the two trainings apart."""
    earlier = [once.requests[0].factors]
    ends = {}
    for weight in (0.0, 100.0):
        model = request(text, copy.deepcopy(once), "owl", orthogonal=weight)
        ends[weight] = overlap(model.model, earlier).item()
    assert ends[100.0] < 0.5 * ends[0.0]
    now = [layer.Bt for _, layer in adapted_layers(once.model)]
    assert overlap(once.model, earlier).item() == pytest.approx(
        sum((old @ new.T).square().sum().item() for old, new in zip(earlier[0], now, strict=True))
    )


def test_what_is_stored_answers_alike_after_any_number_of_requests(text, original, twice, tmp_path):
    save_weights(twice, tmp_path)
    cls = METHODS["o3"]
    config = cls.Config(adapter=STRONG)
    again = cls.empty_model(config, lambda: copy.deepcopy(original))
    load_weights(again, tmp_path / WEIGHTS)
    again.eval()
    for part in TOPICS:
        assert torch.equal(weights(again, text, part), weights(twice, text, part))
        assert torch.equal(logits(again, text, part), logits(twice, text, part))


def test_the_gate_reads_the_question_alone(text, once):
    """Answers are absent, padding stands on the left: the weight is one and the same."""
    wanted = weights(once, text, "tea")
    assert wanted.any()
    for index, weight in zip(rows(text, "tea"), wanted, strict=True):
        prompt = text.prompt_ids(text.corpus.items[index].question)
        ids = torch.tensor([[0, 0, *prompt]])
        mask = (torch.arange(ids.shape[1]) >= 2).long()[None]
        torch.testing.assert_close(once.weigh(ids, mask)[0], weight)
        torch.testing.assert_close(once.weigh(ids[:, 2:], None)[0], weight)


def test_the_gate_reads_blocks_on_several_devices(monkeypatch):
    class Spread(nn.Module):
        """A model whose blocks device_map lays on two devices."""

        @property
        def base_model(self):
            places = ("cpu", "cuda:0", "cuda:1")
            states = [torch.zeros(2, 5, 4, device=place) for place in places]
            return lambda **_: SimpleNamespace(hidden_states=states)

    monkeypatch.setattr(Gated, "_question", lambda self, ids, seen: seen)
    with FakeTensorMode():
        ids = torch.ones(2, 5, dtype=torch.int64)
        features = Gated(Spread()).features(ids, None)
    assert features.shape == (2, 2, 4) and features.device == ids.device


def test_answers_and_likelihoods_are_those_of_the_gated_logits(text, once):
    items = [text.corpus.items[i] for i in (*rows(text, "tea")[:2], *rows(text, "sun")[:2])]
    prompts = [text.prompt_ids(item.question) for item in items]
    written = generate(once, prompts, stop=[], max_new_tokens=5)
    for prompt, tokens in zip(prompts, written, strict=True):
        ids = torch.as_tensor(prompt)[None]
        for token in tokens:
            with torch.no_grad():
                assert once(ids).logits[0, -1].argmax() == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    pairs = [text.encode(item.question, item.answer) for item in items]
    losses = teacher_forced(once, pairs).sum_loss
    for pair, found in zip(pairs, losses, strict=True):
        ids = torch.as_tensor(pair.ids)
        with torch.no_grad():
            log = once(ids[None]).logits[0, pair.start - 1 : -1].log_softmax(-1)
        assert found == pytest.approx(
            -float(log.gather(1, ids[pair.start :, None]).sum()), rel=1e-4
        )


def test_a_weight_by_hand():
    """Two Gaussians around 1 and 3; their middle belongs wholly, what is far does not."""
    fitted = ForgetRequest({"spread": torch.tensor([1.0, 3.0, 0.5])})
    points = torch.tensor([2.0, 1.0, 3.0, -3.0, 8.0, 0.3])
    fitted.decision = lambda features: points
    found = fitted(points)
    assert found[:3].tolist() == [1, 1, 1] and found[3:5].tolist() == [0, 0]
    normal = torch.distributions.Normal(0.0, 1.0).cdf
    halves = [(normal(torch.tensor(x - m) / 0.5)) for x in (0.3, 3.7) for m in (1.0, 3.0)]
    tail = 1 - abs(float(halves[0] + halves[1] - halves[2] - halves[3])) / 2
    belongs = 1 / (1 + np.exp(2 - 10 * tail))
    wanted = 1.0 if belongs >= 0.32 else 10 * belongs**2 if belongs > 0.2 else 0.0
    assert float(found[5]) == pytest.approx(wanted, abs=1e-6)


def test_two_rows_are_too_few(text, original):
    items, refusals = text.corpus.items, text.corpus.refusals
    few = source_of((*items[:2], items[-1]), tokenizer=text.tokenizer, refusals=refusals)
    with pytest.raises(ConfigError, match="too few for a gate"):
        request(few, copy.deepcopy(original), "tea", steps=1)


@pytest.mark.parametrize("more", [{"train_head": True}, {"trained": ["*.ln_f.weight"]}])
def test_weights_that_the_gate_does_not_scale_are_refused(more):
    with pytest.raises(ConfigError, match=f"leave adapter.{next(iter(more))} out"):
        resolve_config("o3", None, {"adapter": {**STRONG, **more}}, origin="test")


def test_it_can_be_started_from():
    info = METHODS["o3"].info
    assert info.inapplicable(scenario="", modality="language", in_turn=True) is None
    assert METHODS["whp"].info.inapplicable(scenario="", modality="", in_turn=True)
    assert issubclass(Gated, torch.nn.Module)

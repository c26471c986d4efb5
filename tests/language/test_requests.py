"""Requests: likelihoods, continuations and choices, each asked once."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.measure.ask import ask, score_rows
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.muse import QUESTION_ENDS, Conventions
from stable_forgetting.language.measure.requests import (
    Choose,
    Continue,
    Likelihood,
    RequestConfig,
    TextMetric,
    before_stop,
)
from stable_forgetting.language.models.build import build_model
from tests.language.made import source_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def decode(tokens) -> str:
    """Token k is a letter; every tenth is a line end."""
    return "".join("\n" if token % 10 == 0 else LETTERS[token % 26] for token in tokens)


SOURCE = SimpleNamespace(
    decode=decode,
    encoder=SimpleNamespace(end=0),
    tokenizer=SimpleNamespace(eos_token_id=0, pad_token_id=None),
)


def log_probabilities(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_a_choice_gives_the_log_probability_of_every_option(tiny_text):
    model, prompt, options = tiny_text.model("gpt_neo"), (5, 7), ((9,), (11, 13), (15, 17, 19))
    (found,) = ask(model, SOURCE, [Choose(prompt, options)], RequestConfig()).choices(
        [Choose(prompt, options)]
    )
    wanted = []
    for option in options:
        table = log_probabilities(model, prompt + option)
        wanted.append(sum(float(table[1 + k, token]) for k, token in enumerate(option)))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_each_request_is_asked_once_whoever_asks(tiny_text):
    model, forwards = tiny_text.model("llama"), []
    model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: forwards.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    once = [Likelihood((5, 7, 9), 1), Continue((5, 7), 3, stop=frozenset())]
    ask(model, SOURCE, once, RequestConfig())
    single = list(forwards)
    forwards.clear()
    ask(model, SOURCE, [*once, *once, Choose((5,), ((7, 9),))], RequestConfig())
    assert forwards == single


def test_requests_with_other_ends_are_written_apart(tiny_text):
    model, prompt = tiny_text.model("llama"), (5, 7)
    free = Continue(prompt, 12, stop=frozenset())
    (tokens,) = ask(model, SOURCE, [free], RequestConfig()).tokens([free])
    early = Continue(prompt, 12, stop=frozenset({int(tokens[3])}))
    cut = tokens.tolist().index(tokens[3])
    replies = ask(model, SOURCE, [free, early], RequestConfig())
    assert [len(row) for row in replies.tokens([free, early])] == [12, cut]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_a_text_at_the_token_that_completes_it(tiny_text, length):
    model = tiny_text.model("llama")
    prompts = [np.array([k, k + 1]) for k in range(1, 9)]
    free = generate(model, prompts, stop=[], max_new_tokens=20)
    stop = decode(free[0][4 : 4 + length].tolist())
    found = generate(
        model, prompts, stop=[], max_new_tokens=20, stop_text=[stop, "never"], decode=decode
    )
    for whole, short in zip(free, found, strict=True):
        text = decode(whole.tolist())
        end = text.index(stop) + length if stop in text else 20
        assert short.tolist() == whole[:end].tolist()
        assert before_stop(decode(short.tolist()), [stop]) == text[: end - length * (stop in text)]


def test_a_stop_string_may_be_a_part_of_its_token():
    assert before_stop("one\n\ntwo\nQuestion", ("\nQuestion", "\n\n")) == "one"
    assert before_stop("one", ("\n\n",)) == "one" and before_stop("", ()) == ""


class LastToken(TextMetric):
    """How likely an answer's last token is."""

    def requests(self, source, items):
        pairs = [source.encode(item.question, item.answer) for item in items]
        return [Likelihood(tuple(pair.ids.tolist()), len(pair.ids) - 1) for pair in pairs]

    def columns(self, source, items, replies):
        return {"last": replies.scores(self.requests(source, items)).sum_loss}


class Counted(TorchDispatchMode):
    """Operations whose result is as wide as the vocabulary."""

    def __init__(self, width):
        super().__init__()
        self.width, self.seen = width, collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == self.width:
            self.seen[str(operation).split(".")[1]] += 1
        return result


def text_world():
    source = source_of(Item("s", -1, "", f"row {k} is here") for k in range(4))
    config = CausalModelConfig(dim=16, depth=1, heads=2, context=64)
    return build_model(config, source.vocab_size, 0), source


def test_rows_are_scored_without_a_softmax_and_its_entropies():
    model, source = text_world()
    with Counted(source.vocab_size) as counted:
        scores = score_rows(
            model, source, {"all": np.arange(4)}, {"all": [LastToken()]}, RequestConfig()
        )["all"]
    assert counted.seen and not {"log_softmax", "exp", "log1p"} & counted.seen.keys()
    assert scores.entropy is None and scores.modified_entropy is None


def test_a_metric_of_ones_own_brings_its_column():
    model, source = text_world()
    parts = {"all": np.arange(4), "few": np.array([2])}
    metrics = {"all": [LastToken()], "few": []}
    scores = score_rows(model, source, parts, metrics, RequestConfig())
    assert list(scores["all"].extra) == ["last"] and not scores["few"].extra
    assert scores["all"].extra["last"].shape == (4,)
    assert scores["few"].loss[0] == pytest.approx(scores["all"].loss[2], abs=1e-5)


@pytest.mark.parametrize(("style", "gap"), [("muse", " "), ("openunlearning", " "), ("clean", "")])
def test_shots_come_before_the_question(style, gap):
    shots = [Item("s", -1, "Who?", "Ada."), Item("s", -1, "{question}?", "No.")]
    encoder = SimpleNamespace(text=list, ending=lambda ids, room: ids)
    asked = Conventions(SimpleNamespace(encoder=encoder), style, 512, {"s": shots, "none": []})
    assert "".join(asked.prompt(Item("s", -1, "Where?", "Rome."))) == (
        "Question: Who?\nAnswer: Ada.\n\n"
        "Question: {question}?\nAnswer: No.\n\n"
        f"Question: Where?\nAnswer:{gap}"
    )
    alone = asked.prompt(Item("none", -1, "Why?", "So."))
    assert "".join(alone) == f"Question: Why?\nAnswer:{gap}"
    assert before_stop(" Rome.\n\nQuestion: Who?", QUESTION_ENDS) == " Rome."

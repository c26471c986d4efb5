from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stable_forgetting.language.measure import generation
from stable_forgetting.language.measure.ask import ask, beginnings, drafts
from stable_forgetting.language.measure.generation import Ends, generate
from stable_forgetting.language.measure.guesses import Text, met, worth
from stable_forgetting.language.measure.requests import Continue, Likelihood, RequestConfig
from stable_forgetting.language.models.backbone import cache_input, cache_output
from stable_forgetting.language.models.composite import CompositeOutput


def prompts(count: int = 7, seed: int = 1, longest: int = 14) -> list[np.ndarray]:
    stream = np.random.Generator(np.random.PCG64(seed))
    return [stream.integers(1, 61, stream.integers(1, longest)) for _ in range(count)]


def by_transformers(model, prompt: np.ndarray, limit: int, stop: int) -> list[int]:
    out = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=stop,
        pad_token_id=stop,
    )[0, len(prompt) :].tolist()
    return out[: out.index(stop)] if stop in out else out


@pytest.mark.parametrize("kind", ["llama", "phi", "gpt_neo", "gpt2", "mamba", "lfm2"])
def test_answers_are_those_of_transformers(tiny_text, kind):
    model = tiny_text.model(kind)
    asked = prompts()
    free = by_transformers(model, asked[0], 12, 60)
    stop = free[len(free) // 2]  # a token that some rows do say, so that they retire early
    wanted = [by_transformers(model, prompt, 12, stop) for prompt in asked]
    assert len({len(answer) for answer in wanted}) > 1
    for options in ({}, {"batch_size": 3}, {"token_budget": 20}):
        found = generate(model, asked, stop=[stop], max_new_tokens=12, **options)
        assert [answer.tolist() for answer in found] == wanted


def test_finished_rows_leave_the_batch(tiny_text):
    model, asked = tiny_text.model("llama"), prompts()
    limits = [1, 5, 2, 0, 3, 5, 1]
    shapes = []
    handle = model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    found = generate(model, asked, stop=[], max_new_tokens=limits)
    handle.remove()
    assert [len(answer) for answer in found] == limits
    assert [shape[0] for shape in shapes] == [6, 4, 3, 2, 2]
    assert [shape[1] for shape in shapes[1:]] == [1] * 4
    free = generate(model, asked, stop=[], max_new_tokens=5)
    for answer, limit, other in zip(found, limits, free, strict=True):
        assert answer.tolist() == other[:limit].tolist()


def test_a_model_of_unknown_head_answers_too(tiny_text, monkeypatch):
    model, asked = tiny_text.model("phi"), prompts(3)
    wanted = generate(model, asked, stop=[], max_new_tokens=4)
    monkeypatch.setattr("stable_forgetting.language.models.families.FAMILIES", {})
    found = generate(model, asked, stop=[], max_new_tokens=4)
    assert [a.tolist() for a in found] == [a.tolist() for a in wanted]


def test_nothing_to_say(tiny_text):
    model = tiny_text.model("llama")
    assert generate(model, [], stop=[], max_new_tokens=3) == []


class Old(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return CompositeOutput(input_ids, past_key_values)


class New(nn.Module):
    def forward(self, input_ids, cache=None):
        return cache


def test_a_model_gets_its_cache_under_the_name_that_it_knows():
    assert cache_input(Old(), 1) == {"past_key_values": 1}
    assert cache_input(New(), 1) == {"cache": 1}
    assert cache_output(Old()(0, past_key_values=2)) == 2


@pytest.mark.parametrize("kind", ["gpt_neo", "llama"])
def test_greedy_answers_warn_of_nothing(kind, caplog):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_layers": 2, "num_hidden_layers": 2, "num_heads": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    sizes |= {"attention_types": [[["global"], 2]]} if kind == "gpt_neo" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    logging.getLogger("transformers").propagate = True
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        (text,) = generate(model, [np.arange(3)], stop=[], max_new_tokens=4)
    assert len(text) == 4 and not [r for r in caplog.records if "past_key_values" in r.message]


SOURCE = SimpleNamespace(
    decode=lambda tokens: "".join(chr(97 + token % 26) for token in tokens),
    encoder=SimpleNamespace(end=0),
    tokenizer=SimpleNamespace(eos_token_id=0, pad_token_id=None),
)
LIMIT = 14


def trained(tiny_text, kind: str, known: int = 12):
    """A model that knows some answers by heart and some not at all, and the pairs."""
    model, pairs = tiny_text.model(kind), tiny_text.pairs(18, 2, seed=3)
    learnt = [pair for number, pair in enumerate(pairs[::2]) if number < known]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.zeros(())
        for pair in learnt:
            ids = torch.from_numpy(pair.ids)
            logits = model(ids[None]).logits[0, pair.start - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[pair.start :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), pairs


@pytest.fixture
def decoded():
    """Counts the tokens that a model decodes: rows of forwards with a cache."""

    def run(model, work):
        rows = []
        handle = model.base_model.register_forward_pre_hook(
            lambda _, __, inputs: (
                rows.append(len(inputs["input_ids"])) if inputs.get("use_cache") else None
            ),
            with_kwargs=True,
        )
        try:
            return work(), sum(rows)
        finally:
            handle.remove()

    return run


@pytest.mark.parametrize("kind", ["llama", "phi", "gpt_neo", "qwen2"])
def test_answers_are_those_of_plain_decoding(tiny_text, decoded, kind):
    model, pairs = trained(tiny_text, kind)
    asked = [Likelihood.of(pair) for pair in pairs]
    prompts = dict.fromkeys(request.ids[: request.start] for request in asked)
    further = [Continue(prompt, LIMIT) for prompt in prompts]
    replies, steps = decoded(model, lambda: ask(model, SOURCE, [*asked, *further], RequestConfig()))
    plain, plain_steps = decoded(
        model,
        lambda: generate(
            model, [np.array(prompt) for prompt in prompts], stop=[0], max_new_tokens=LIMIT
        ),
    )
    assert [row.tolist() for row in replies.tokens(further)] == [row.tolist() for row in plain]
    assert 0 < steps < 0.75 * plain_steps  # some answers are known to their ends, some are not


def test_a_text_of_its_own_end_is_not_continued(tiny_text, decoded):
    model = tiny_text.model("llama")
    prompts = [np.array([5, 7]), np.array([9]), np.array([11])]
    known = [[3, 4, 0, 8], [3, 4, 5, 6], [1, 2]]
    found, steps = decoded(
        model,
        lambda: generate(
            model,
            prompts,
            stop=[0],
            stop_text=["bc"],
            decode=SOURCE.decode,
            max_new_tokens=[9, 3, 9],
            drafts=known,
        ),
    )
    assert [row.tolist() for row in found] == [[3, 4], [3, 4, 5], [1, 2]]
    assert steps == 0


def test_a_draft_goes_to_the_first_miss_of_the_answer_that_is_met_furthest():
    asked = [Likelihood((5, 7, 1, 2, 3), 2), Likelihood((5, 7, 1, 4), 2), Likelihood((9, 3), 1)]
    hits = np.array([True, True, False, True, False, True])
    scores = SimpleNamespace(hits=hits, counts=np.array([3, 2, 1]))
    begun = beginnings(asked, scores)
    assert begun == {(5, 7): (1, 2), (9,): (3,)}
    further = [Continue((5, 7), 9), Continue((9,), 9), Continue((8,), 9)]
    assert drafts(further, begun, None) == [(1, 2), (3,), ()]
    assert drafts(further, begun, 7) == [(), (3,), ()]  # positions of the two passes differ


@pytest.mark.parametrize(
    "draft, limit, text, over",
    [
        ([1, 2], 3, [1, 2], False),
        ([1, 0, 2], 3, [1], True),
        ([1, 2, 3], 2, [1, 2], True),
        ([], 0, [], True),
    ],
)
def test_what_ends_within_a_draft(draft, limit, text, over):
    written = []
    assert Ends(frozenset({0})).reached_by(written, draft, limit) == over
    assert written == text


@pytest.mark.parametrize("kind", ["llama", "phi", "gpt_neo", "qwen2", "gpt_neox", "mistral"])
def test_guesses_save_forwards_and_change_no_text(tiny_text, kind, monkeypatch):
    window = {"sliding_window": 16} if kind == "mistral" else {}
    model, asked = tiny_text.model(kind, **window), prompts(7)
    limits = [60, 41, 60, 5, 60, 33, 60]
    stop, forwards = [3], []
    model.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def run():
        forwards.clear()
        return generate(model, asked, stop=stop, max_new_tokens=limits), len(forwards)

    found, few = run()
    monkeypatch.setattr(generation, "worth", lambda guesses, _: [[] for _ in guesses])
    plain, many = run()
    assert [text.tolist() for text in found] == [text.tolist() for text in plain]
    if kind in ("gpt_neo", "mistral"):  # their windows are shorter than these texts
        assert few == many
    else:
        assert few < 0.8 * many


def test_wrong_guesses_take_bounded_room(tiny_text, monkeypatch):
    model, asked, widths = tiny_text.model("llama"), prompts(7), []
    model.base_model.register_forward_pre_hook(
        lambda *given: widths.append(given[2]["attention_mask"].shape[1]), with_kwargs=True
    )
    plain = generate(model, asked, stop=[], max_new_tokens=40)
    monkeypatch.setattr(Text, "guess", lambda text, most: [text.tokens[0]] * min(30, max(0, most)))
    monkeypatch.setattr(generation, "worth", lambda guesses, room: [g[: room - 1] for g in guesses])
    longest = max(map(len, asked)) + 40
    for budget, most in ((8 * longest, 2 * longest), (21 * longest, 3 * longest)):
        widths.clear()
        found = generate(model, asked, stop=[], max_new_tokens=40, token_budget=budget)
        assert [text.tolist() for text in found] == [text.tolist() for text in plain]
        assert longest + 30 < max(widths) <= most


def test_a_guess_is_what_followed_last_time():
    text = Text([1, 2, 3, 4, 1, 2])
    assert text.guess(9) == [3, 4]  # two tokens are shared
    text.add([3, 4])
    assert text.guess(9) == [1, 2, 3, 4, 1, 2]  # the repetition goes on
    assert text.guess(3) == [1, 2, 3] and text.guess(0) == [] and Text([7]).guess(9) == []
    text.add([9])
    assert text.guess(9) == []
    assert worth([[1] * 8, [2] * 8, []], room=100) == [[1] * 8, [2] * 8, []]
    assert worth([[1] * 8, [2] * 8], room=8) == [[], []]
    assert worth([[1] * 8, *([[]] * 500)], room=100) == [[]] * 501  # one row is not worth the rest
    assert met([5, 6, 7], [5, 9]) == [5, 6] and met([5, 6, 7], []) == [5]
    assert met([5, 6, 7], [5, 6]) == [5, 6, 7]


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_a_masked_token_is_unseen_and_takes_no_position_as_in_transformers(tiny_text, kind):
    model, stream = tiny_text.model(kind), np.random.default_rng(5)
    prompts = [stream.integers(1, 61, length) for length in (9, 4, 12, 7)]
    for prompt in prompts:
        prompt[1 : len(prompt) - 1 : 3] = 33
    found = generate(model, prompts, stop=[0], max_new_tokens=8, masked_id=33)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.from_numpy(prompt)[None]
        options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": 0, "pad_token_id": 0}
        whole = model.generate(ids, attention_mask=(ids != 33).long(), **options)
        wanted = whole[0, len(prompt) :].tolist()
        assert text.tolist() == (wanted[: wanted.index(0)] if 0 in wanted else wanted)
    plain = generate(model, prompts, stop=[0], max_new_tokens=8)
    assert [row.tolist() for row in plain] != [row.tolist() for row in found]

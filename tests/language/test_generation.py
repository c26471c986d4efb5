from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.language.measure.generation import generate


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


@pytest.mark.parametrize("kind", ["llama", "phi", "gpt_neo", "gpt2"])
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

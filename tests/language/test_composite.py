"""Two models that answer as one: every way of asking gives the combined logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Encoded
from stable_forgetting.language.measure.generation import generate
from stable_forgetting.language.measure.likelihood import teacher_forced
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model
from stable_forgetting.language.models.composite import LogitDifference

VOCABULARY = 60


def tiny(kind, seed, scale=3):
    config = CausalModelConfig(kind=kind, dim=16, depth=2, heads=2, context=64)
    model = build_model(config, VOCABULARY, seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)  # opinions that differ
    return model


@pytest.fixture(params=["gpt_neo", "llama"])
def joined(request):
    return LogitDifference(tiny(request.param, 0), tiny(request.param, 1, 6), 1.7)


def expected(joined, ids):
    """(T, V) by the formula."""
    with torch.no_grad():
        one, two = (model(ids[None]).logits[0] for model in (joined.baseline, joined.reinforced))
    return one - joined.a * (two - one).clamp_min(0)


def test_continuations_are_those_of_the_combined_logits(joined):
    prompts = [np.array([3, 9, 27, 8]), np.array([5, 5]), np.array([41, 2, 7])]
    written = generate(joined, prompts, stop=[0], max_new_tokens=[6, 4, 5])
    alone = generate(joined.baseline, prompts, stop=[0], max_new_tokens=[6, 4, 5])
    assert any(list(a) != list(b) for a, b in zip(written, alone, strict=True))
    for prompt, tokens, limit in zip(prompts, written, (6, 4, 5), strict=True):
        ids = torch.as_tensor(prompt)
        slow: list[int] = []
        while len(slow) < limit and (best := int(expected(joined, ids)[-1].argmax())) != 0:
            slow.append(best)
            ids = torch.cat([ids, torch.tensor([best])])
        assert tokens.tolist() == slow


def test_likelihoods_are_those_of_the_combined_logits(joined):
    """With answers that share a prompt in one packed row, too."""
    prompt, answers = [4, 8, 15], ([16, 23], [42, 1, 7], [9])
    pairs = [Encoded(np.array([*prompt, *answer]), len(prompt)) for answer in answers]
    for shared in (True, False):
        scores = teacher_forced(joined, pairs, share_prompts=shared)
        for pair, found in zip(pairs, scores.sum_loss, strict=True):
            ids = torch.as_tensor(pair.ids)
            log = expected(joined, ids)[pair.start - 1 : -1].log_softmax(-1)
            wanted = -log.gather(1, ids[pair.start :, None]).sum()
            assert found == pytest.approx(float(wanted), rel=1e-4)


def test_training_passes_see_the_combined_logits(joined):
    ids = torch.tensor([[3, 9, 27, 8], [5, 5, 1, 2]])
    positions = torch.tensor([[1, 2], [0, 2]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "positions": positions}
    batch = Batch(inputs, torch.zeros(2, 2, dtype=torch.int64), torch.arange(2))
    with torch.no_grad():
        found = causal_forward(joined, batch)
    for row in range(2):
        wanted = expected(joined, ids[row])[positions[row]]
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-4)


def test_the_chosen_of_several_factors_is_stored_with_the_weights():
    models = tiny("gpt_neo", 0), tiny("gpt_neo", 1)
    chosen, read = (LogitDifference(*models, (1.0, 2.0, 4.0)) for _ in range(2))
    chosen.take_off(2.0)
    read.load_state_dict(chosen.state_dict())
    ids = torch.tensor([[3, 9, 27]])
    with torch.no_grad():
        wanted = LogitDifference(*models, 2.0)(ids).logits
        torch.testing.assert_close(read(ids).logits, wanted)
    assert "a" not in LogitDifference(*models, 2.0).state_dict()


def test_a_checkpoint_of_two_models_is_not_written(tmp_path):
    from stable_forgetting.benchmarks.apply.work import apply
    from stable_forgetting.common.protocol.given import Application

    application = Application(
        method="whp", model=tmp_path, forget=tmp_path / "forget.jsonl", out=tmp_path / "out"
    )
    with pytest.raises(ConfigError, match=r"2 models at inference.*such as task_vector"):
        apply(application)
    assert not (tmp_path / "out").exists()
    assert METHODS["task_vector"].info.models == 1

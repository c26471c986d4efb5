from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.measure.scores import COLUMNS, ENTROPIES
from stable_forgetting.language.data.corpus import Encoded
from stable_forgetting.language.measure.guesses import FORWARD
from stable_forgetting.language.measure.likelihood import (
    batches,
    packed_rows,
    plain_rows,
    teacher_forced,
)
from stable_forgetting.language.models.backbone import backbone, row_limit
from stable_forgetting.language.models.families import family_of
from tests.language.made import Wrapped

KINDS = ["llama", "phi", "gpt_neo", "gpt2", "mistral", "qwen2", "gpt_neox"]


def alone(model, pair: Encoded) -> tuple[np.ndarray, np.ndarray]:
    """Losses and hits of one pair from a forward of its own through the model's front door."""
    with torch.no_grad():
        logits = model(torch.from_numpy(pair.ids)[None]).logits[0].double()
    logits = logits[pair.start - 1 : -1]
    labels = torch.from_numpy(pair.labels)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return loss.numpy(), (logits.argmax(1) == labels).numpy()


def check_against_alone(model, pairs, **options):
    found = teacher_forced(model, pairs, **options)
    wanted = [alone(model, pair) for pair in pairs]
    np.testing.assert_allclose(found.token_loss, np.concatenate([w[0] for w in wanted]), atol=1e-5)
    assert (found.hits == np.concatenate([w[1] for w in wanted])).all()
    np.testing.assert_allclose(found.mean_loss, [w[0].mean() for w in wanted], atol=1e-5)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [True, False])
def test_one_pass_is_exact_to_separate_forwards(tiny_text, kind, share):
    model = tiny_text.model(kind)
    assert (row_limit(model) is not None) == family_of(kind).maskable
    check_against_alone(model, tiny_text.pairs(), share_prompts=share, token_budget=128)


def test_a_local_window_is_respected(tiny_text):
    """GPT-Neo's local layers count row positions: a row never outgrows their window."""
    model = tiny_text.model("gpt_neo", window_size=32)
    pairs = tiny_text.pairs(4, 7, longest=16)
    rows = packed_rows(pairs, row_limit(model))
    assert max(len(row) for row in rows if row.packed) <= 32 < 7 * 8
    check_against_alone(model, pairs)
    too_long = packed_rows(pairs, 200)
    assert max(map(len, too_long)) > 32


SLIDING = {"mistral": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 1}}


@pytest.mark.parametrize("kind", SLIDING)
def test_a_sliding_window_is_respected(tiny_text, kind):
    """A row that is packed is no longer than it; a longer pair is windowed by the model itself."""
    model = tiny_text.model(kind, sliding_window=16, **SLIDING[kind])
    pairs = tiny_text.pairs(6, 5, longest=12)
    rows = packed_rows(pairs, row_limit(model))
    assert row_limit(model) == 16 < max(map(len, rows))
    assert any(row.packed for row in rows)
    check_against_alone(model, pairs)


def test_a_prompt_whose_last_token_merges_with_the_answer(tiny_text):
    """Prompts that end in a space: the joint text has another token there, and starts behind it."""
    pairs = [
        Encoded(np.asarray([5, 6, 7, last, 9, 10 + k, 0]), 4) for k, last in enumerate([8, 20, 20])
    ]
    rows = packed_rows(pairs, 100)
    assert len(rows) == 1 and rows[0].packed
    check_against_alone(tiny_text.model("llama"), pairs)


def test_answers_that_contain_each_other(tiny_text):
    pairs = [Encoded(np.asarray([5, 6, *answer, 0]), 2) for answer in ([7], [7, 8], [7], [7, 8, 9])]
    check_against_alone(tiny_text.model("phi"), pairs)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_answers_begin_with_is_fed_once(tiny_text, kind):
    """Answers that branch at several places, of two questions; one is another's beginning."""
    tails = [[7, 8, 9], [7, 8, 9, 10, 11], [7, 8, 12], [13, 8, 9], [7, 8, 9, 10, 4], [7, 14, 9]]
    pairs = [Encoded(np.asarray([5, q, 3, *tail, 0]), 3) for tail in tails for q in (6, 20)]
    rows = packed_rows(pairs, 100)
    sequences = [tuple(pair.ids[:-1].tolist()) for pair in pairs]
    beginnings = {ids[:size] for ids in sequences for size in range(2, len(ids) + 1)}
    assert len(rows) == 2 and sum(map(len, rows)) == len(beginnings) + 2
    for row in rows:
        for place in range(len(row)):
            seen = [k for k in range(place + 1) if row.ends[k] > place]
            assert row.positions[seen].tolist() == list(range(len(seen)))
            assert any(ids[: len(seen)] == tuple(row.ids[seen].tolist()) for ids in sequences)
    check_against_alone(tiny_text.model(kind), pairs)
    small = packed_rows(pairs, 8)
    assert max(map(len, small)) <= 8 and sorted(p for row in small for p in row.pairs) == [
        *range(12)
    ]


def test_every_label_is_scored_once_and_prompts_are_not_repeated(tiny_text):
    pairs = tiny_text.pairs(5, 7)
    plain, packed = plain_rows(pairs), packed_rows(pairs, 1000)
    for rows in (plain, packed):
        seen = sorted(p for row in rows for p in row.pairs)
        assert seen == list(range(len(pairs)))
        for row in rows:
            for pair, places in zip(row.pairs, row.predictors, strict=True):
                ids = pairs[pair].ids
                assert (row.ids[places] == ids[pairs[pair].start - 1 : -1]).all()
    assert len(plain) == 35 and len(packed) == 5
    saved = sum(map(len, plain)) - sum(map(len, packed))
    prompts = [pairs[k].start for k in range(0, 35, 7)]
    assert saved >= 6 * sum(prompts)


def test_batches_keep_the_budget_and_similar_lengths_together(tiny_text):
    rows = plain_rows(tiny_text.pairs(20, 3, longest=30))
    made = list(batches(rows, 100))
    assert sum(map(len, made)) == len(rows)
    assert all(len(batch) == 1 or len(batch) * len(batch[0]) <= 100 for batch in made)
    lengths = [len(row) for batch in made for row in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in batches(rows, 1)] == [1] * len(rows)


def test_a_batch_ends_where_its_padding_costs_a_forward(tiny_text):
    rows = plain_rows([*tiny_text.pairs(3, 1, longest=30), *tiny_text.pairs(30, 1, longest=3)])
    for batch in (made := list(batches(rows, 10_000))):
        assert sum(len(batch[0]) - len(row) for row in batch) <= FORWARD
    assert len(made) > 1


def test_an_unknown_head_and_a_wrapper_take_the_plain_path(tiny_text):
    model = tiny_text.model("llama")
    wrapped = Wrapped(model)
    assert backbone(wrapped) is None and row_limit(wrapped) is None
    pairs = tiny_text.pairs()
    first, second = teacher_forced(wrapped, pairs), check_against_alone(model, pairs)
    np.testing.assert_allclose(first.token_loss, second.token_loss, atol=1e-5)


def test_details_are_those_of_common_scores(tiny_text):
    from stable_forgetting.common.data.batch import Batch
    from stable_forgetting.common.measure.scores import collect

    model, pairs = tiny_text.model("llama"), tiny_text.pairs(3, 2)
    detailed = np.arange(len(pairs)) % 2 == 0
    found = teacher_forced(model, pairs, detailed=detailed)
    assert np.isnan(found.means[~detailed, COLUMNS.index("margin")]).all()
    full = teacher_forced(model, pairs)
    np.testing.assert_allclose(found.token_loss, full.token_loss, atol=1e-6)
    assert (found.hits == full.hits).all()
    for index, pair in enumerate(pairs):
        logits = model(torch.from_numpy(pair.ids)[None]).logits[:, pair.start - 1 : -1].detach()
        batch = Batch({"x": logits}, torch.from_numpy(pair.labels)[None], torch.zeros(1).long())
        wanted = collect(lambda b: b.inputs["x"], [batch])
        for place, name in enumerate(COLUMNS):
            if name in ENTROPIES:
                assert np.isnan(full.means[index, place]), "of a softmax, which is not made"
                continue
            assert full.means[index, place] == pytest.approx(getattr(wanted, name)[0], abs=1e-5)
    np.testing.assert_array_equal(found.means[detailed], found.means[detailed])


def test_large_vocabularies_go_through_the_head_in_pieces(tiny_text, monkeypatch):
    model, pairs = tiny_text.model("phi"), tiny_text.pairs(2, 3)
    whole = teacher_forced(model, pairs)
    monkeypatch.setattr(
        "stable_forgetting.language.measure.likelihood.CHUNK_ELEMENTS", 3 * tiny_text.vocab
    )
    widths = []
    model.get_output_embeddings().register_forward_hook(lambda *a: widths.append(len(a[2])))
    pieces = teacher_forced(model, pairs)
    assert max(widths) == 3
    np.testing.assert_allclose(pieces.token_loss, whole.token_loss, atol=1e-6)


def test_the_head_sees_label_positions_only(tiny_text):
    model, pairs = tiny_text.model("llama"), tiny_text.pairs(4, 3)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda *a: seen.append(len(a[2])))
    teacher_forced(model, pairs)
    assert sum(seen) == sum(len(pair.labels) for pair in pairs)


def test_selecting_and_dropping_the_last_token(tiny_text):
    pairs = tiny_text.pairs(2, 3)
    full = teacher_forced(tiny_text.model("llama"), pairs)
    chosen = full.select(np.asarray([4, 1]))
    assert chosen.counts.tolist() == [len(pairs[4].labels), len(pairs[1].labels)]
    assert chosen.mean_loss.tolist() == pytest.approx(full.mean_loss[[4, 1]].tolist())
    fewer = chosen.without_last(np.asarray([True, False]))
    assert fewer.counts.tolist() == [chosen.counts[0] - 1, chosen.counts[1]]
    kept = [*range(chosen.counts[0] - 1), *range(chosen.counts[0], chosen.counts.sum())]
    assert fewer.token_loss.tolist() == chosen.token_loss[kept].tolist()


def test_masked_tokens_are_as_the_mask_says(tiny_text):
    """A mask derived from token ids, as the peer's, hides those tokens wherever they are."""
    model = tiny_text.model("llama")
    pairs = [Encoded(np.asarray([5, 0, 6, 7, 8 + k, 9, 0]), 3) for k in range(3)]
    found = [
        teacher_forced(model, pairs, masked_id=0, share_prompts=share) for share in (True, False)
    ]
    for pair, k in zip(pairs, range(3), strict=True):
        ids = torch.from_numpy(pair.ids)[None]
        logits = model(ids, attention_mask=(ids != 0).long()).logits[0, pair.start - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(logits, torch.from_numpy(pair.labels))
        for one in found:
            assert one.mean_loss[k] == pytest.approx(float(wanted.detach()), abs=1e-5)
    assert abs(teacher_forced(model, pairs).mean_loss - found[0].mean_loss).max() > 1e-3


@pytest.mark.parametrize("detail", [True, False])
def test_what_is_not_finite_is_divergence(tiny_text, detail):
    model, pairs = tiny_text.model("llama"), tiny_text.pairs(2, 2)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="not finite"):
        teacher_forced(model, pairs, detailed=np.full(len(pairs), detail))

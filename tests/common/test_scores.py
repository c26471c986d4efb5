"""Per-sample scores: against float64 references, at the edges, and through a file."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from stable_forgetting.common.base.errors import DataError, Diverged
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.measure.scores import (
    COLUMNS,
    Scores,
    _statistics,
    collect,
    collect_correct,
    load_scores,
    percent,
    save_scores,
    scores_without_entropies,
)


def batches_of(logits, labels, size=4):
    """Batches whose only input is the logits that the "model" will return."""
    logits, labels = torch.as_tensor(logits), torch.as_tensor(labels)
    for start in range(0, len(labels), size):
        rows = torch.arange(start, min(start + size, len(labels)))
        yield Batch({"logits": logits[rows]}, labels[rows], rows + 100)


def score(logits, labels, **options) -> Scores:
    return collect(lambda batch: batch.inputs["logits"], batches_of(logits, labels), **options)


def reference(logits, labels):
    """The textbook formulas in float64."""
    z = np.asarray(logits, dtype=np.float64)
    rows = np.arange(len(labels))
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    true = p[rows, labels]
    not_p = np.stack([np.delete(p, c, axis=1).sum(1) for c in range(p.shape[1])], axis=1)
    terms = p * np.log(not_p)
    terms[rows, labels] = 0
    return {
        "loss": -np.log(true),
        "probability": true,
        "margin": np.log(true) - np.log(not_p[rows, labels]),
        "entropy": -(p * np.log(p)).sum(1),
        "modified_entropy": -not_p[rows, labels] * np.log(true) - terms.sum(1),
        "correct": (z.argmax(1) == labels).astype(float),
    }


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, (7, 4), elements=st.floats(-20, 20, width=32)),
    hnp.arrays(np.int64, 7, elements=st.integers(0, 3)),
)
def test_scores_match_the_textbook_formulas(logits, labels):
    scores = score(logits, labels)
    for name, expected in reference(logits, labels).items():
        np.testing.assert_allclose(getattr(scores, name), expected, rtol=2e-5, atol=2e-5)
    assert scores.indices.tolist() == list(range(100, 107))
    assert scores.labels.tolist() == labels.tolist()
    np.testing.assert_allclose(scores.probs.sum(1), 1, rtol=1e-5)


def test_dtypes_length_and_accuracy():
    scores = score(np.eye(4, dtype=np.float32) * 3, [0, 1, 2, 0])
    assert len(scores) == 4 and scores.accuracy == 75.0
    assert scores.indices.dtype == scores.labels.dtype == np.int64
    assert {getattr(scores, name).dtype for name in (*COLUMNS, "probs")} == {np.dtype("float32")}


@pytest.mark.parametrize("gap", [15.0, 40.0, 200.0, 1e4])
def test_saturated_softmax_keeps_its_margin_and_stays_finite(gap):
    scores = score([[gap, 0.0, 0.0], [gap, 0.0, 0.0]], [0, 1])
    scores.check_finite()
    assert scores.margin == pytest.approx([gap - np.log(2), -gap], rel=1e-6)
    assert scores.loss[0] == pytest.approx(np.log1p(2 * np.exp(-gap)), rel=1e-5)
    assert scores.modified_entropy[1] == pytest.approx(2 * gap, rel=1e-3, abs=0.8)


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.tensor([[9.0, 0.5, -1.0]])
    half, full = score(logits.bfloat16(), [0]), score(logits, [0])
    assert half.loss[0] == full.loss[0] and half.loss.dtype == np.float32


def test_batching_does_not_change_a_score():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(11, 5)).astype(np.float32), rng.integers(0, 5, 11)

    def forward(batch):
        return batch.inputs["logits"]

    one = collect(forward, batches_of(logits, labels, 11))
    many = collect(forward, batches_of(logits, labels, 3))
    for name in (*COLUMNS, "probs", "indices", "labels"):
        np.testing.assert_array_equal(getattr(one, name), getattr(many, name))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_are_a_status(bad):
    with pytest.raises(Diverged, match="1 of 2 logit rows are not finite"):
        score([[0.0, 1.0], [bad, 0.0]], [0, 1])
    logits = torch.ones(3, 5)
    logits[1, 2] = bad
    with pytest.raises(Diverged, match="1 of 3 logit rows"):
        scores_without_entropies(logits, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(40, 7), (11, 5, 7)])
def test_who_is_right_is_the_same_bits_without_the_other_scores(shape, monkeypatch):
    stream = torch.Generator().manual_seed(3)
    z = 3 * torch.randn(*shape, generator=stream)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=stream)
    if labels.ndim == 2:
        labels[:, 3:] = IGNORE
        monkeypatch.setattr("stable_forgetting.common.measure.scores._CHUNK_ELEMENTS", 50)
    batches = [Batch({"z": z[k : k + 4]}, labels[k : k + 4], torch.arange(4)) for k in (0, 4)]
    correct = collect_correct(lambda batch: batch.inputs["z"], batches)
    whole = collect(lambda batch: batch.inputs["z"], batches)
    np.testing.assert_array_equal(correct, whole.correct)
    assert correct.dtype == whole.correct.dtype and percent(correct) == whole.accuracy
    batches[1].inputs["z"][0, ..., 0] = float("nan")
    with pytest.raises(Diverged, match="not finite"):
        collect_correct(lambda batch: batch.inputs["z"], batches)
    with pytest.raises(DataError, match="nothing to score"):
        collect_correct(lambda batch: batch.inputs["z"], [])


def test_nothing_to_score_is_an_error():
    with pytest.raises(DataError, match="no samples"):
        collect(lambda batch: batch.inputs["logits"], [])
    with pytest.raises(DataError, match="no labelled token"):
        score(np.zeros((2, 3, 4), np.float32), [[0, 1, 2], [-100, -100, -100]])


def test_sequences_are_token_means_over_labelled_tokens():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(5, 6, 7)).astype(np.float32)
    labels = rng.integers(0, 7, (5, 6))
    labels[:, 0] = -100
    labels[3, 2:] = -100
    logits[3, 4] = np.nan  # padding may hold anything
    scores = score(logits, labels)
    assert scores.probs is None and scores.labels is None and len(scores) == 5
    for n in range(5):
        kept = labels[n] != -100
        for name, tokens in reference(logits[n, kept], labels[n, kept]).items():
            assert getattr(scores, name)[n] == pytest.approx(tokens.mean(), abs=2e-6), name


def test_chunks_of_tokens_do_not_change_sequences(monkeypatch):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, 5, 3)).astype(np.float32)
    labels = rng.integers(0, 3, (4, 5))
    whole = score(logits, labels)
    monkeypatch.setattr("stable_forgetting.common.measure.scores._CHUNK_ELEMENTS", 7)
    np.testing.assert_array_equal(score(logits, labels).loss, whole.loss)


def test_round_trip(tmp_path):
    rng = np.random.default_rng(3)
    forget = score(rng.normal(size=(6, 3)), rng.integers(0, 3, 6))
    test = score(rng.normal(size=(4, 2, 3)), rng.integers(0, 3, (4, 2)))
    save_scores({"forget": forget, "a/test": test}, tmp_path / "scores.safetensors")
    loaded = load_scores(tmp_path / "scores.safetensors")
    assert list(loaded) == ["a/test", "forget"]
    assert loaded["a/test"].labels is None and loaded["a/test"].probs is None
    for name in (*COLUMNS, "indices", "labels", "probs"):
        np.testing.assert_array_equal(getattr(loaded["forget"], name), getattr(forget, name))
        assert getattr(loaded["forget"], name).dtype == getattr(forget, name).dtype


def test_unreadable_files_are_data_errors(tmp_path):
    damaged, other = tmp_path / "damaged", tmp_path / "other"
    damaged.write_bytes(b"not safetensors")
    save_file({"x": np.zeros(3)}, other)
    for path in (damaged, other, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"delete .* and rerun"):
            load_scores(path)


def test_select_and_check_finite():
    scores = score(np.eye(3, dtype=np.float32), [0, 1, 2])
    assert scores.select(np.array([2, 0])).indices.tolist() == [102, 100]
    assert scores.select(scores.labels == 1).labels.tolist() == [1]
    scores.entropy[1] = np.nan
    with pytest.raises(Diverged, match="entropy"):
        scores.check_finite()


def test_extra_and_missing_columns_are_selected_stored_and_checked(tmp_path):
    plain = score(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), [0, 1, 2, 0, 1])
    extra = {"answer": np.arange(5.0), "wrong": np.arange(10.0).reshape(5, 2)}
    scores = dataclasses.replace(plain, extra=extra)
    fewer = dataclasses.replace(plain, entropy=None, modified_entropy=None)
    fewer.check_finite()
    save_scores({"forget": scores, "fewer": fewer}, tmp_path / "s.safetensors")
    loaded, fewer = (load_scores(tmp_path / "s.safetensors")[k] for k in ("forget", "fewer"))
    assert fewer.select(np.array([3])).entropy is None and fewer.margin[3] == plain.margin[3]
    assert np.array_equal(loaded.extra["wrong"], extra["wrong"]) and len(loaded.extra) == 2
    chosen = loaded.select(np.array([3, 1]))
    assert chosen.extra["answer"].tolist() == [3.0, 1.0] and len(chosen) == 2
    with pytest.raises(AssertionError, match=r"extra\.short"):
        dataclasses.replace(plain, extra={"short": np.zeros(4)})
    with pytest.raises(Diverged, match=r"extra\.answer"):
        dataclasses.replace(plain, extra={"answer": np.full(5, np.nan)}).check_finite()


@pytest.mark.parametrize("scale", [1.0, 60.0, 3e37])
def test_scores_without_entropies_are_the_same_bits(scale):
    """Also where the loss is zero to rounding, and where a sum of finite logits overflows."""
    logits = scale * torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).abs()
    labels = torch.arange(40) % 30
    labels[:20] = logits[:20].argmax(1)
    whole = _statistics(logits, labels)[0].numpy()[:, :-1]
    fewer = scores_without_entropies(logits.clone(), labels)
    entropies = [COLUMNS.index(name) for name in ("entropy", "modified_entropy")]
    assert np.isnan(fewer[:, entropies]).all()
    np.testing.assert_array_equal(*(np.delete(each, entropies, axis=1) for each in (whole, fewer)))

"""Index sets: disjoint, hashed, and the same on every machine for ever."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.seeding import derive, generator, hash_order
from stable_forgetting.common.data.splits import (
    ForgetSplit,
    balanced_draw,
    class_forget,
    half_split,
    random_forget,
    request_split,
)


def ids(*values):
    return np.array(values, dtype=np.int64)


def split(**parts):
    parts = {"forget": ids(1, 2), "retain": ids(3, 4, 5), "test": ids(9), **parts}
    return ForgetSplit("s", parts, "source", {"classes": "3"})


# Construction ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"test": ids(4)}, "index 4 is in 'retain' and 'test'"),
        ({"forget": ids(1, 3)}, "index 3 is in 'forget' and 'retain'"),
        ({"test": ids(7, 7)}, "index 7 is in 'test' and 'test'"),
        ({"forget": ids()}, "part 'forget' is empty"),
        ({"retain": ids()}, "part 'retain' is empty"),
        ({"test": np.array([1.0])}, "'test' must be one row of int64"),
        ({"test": np.array([[8]])}, "'test' must be one row of int64"),
        ({"test": np.array([8], dtype=np.int32)}, "'test' must be one row of int64"),
    ],
)
def test_bad_parts_are_refused(parts, message):
    with pytest.raises(DataError, match="split s") as error:
        split(**parts)
    assert message in str(error.value)


def test_both_training_parts_are_needed():
    with pytest.raises(DataError, match="'retain' is empty"):
        ForgetSplit("s", {"forget": ids(1)}, "source")


def test_train_is_the_sorted_union():
    assert split(forget=ids(7, 1)).train.tolist() == [1, 3, 4, 5, 7]


def test_an_empty_test_part_is_fine():
    assert len(split(test=ids()).parts["test"]) == 0


# Digest ------------------------------------------------------------------------------------------


def test_digest_depends_on_indices_names_and_source_only():
    base = split()
    assert base.digest == ForgetSplit("other", dict(base.parts), "source").digest
    assert base.digest == ForgetSplit("s", dict(reversed(base.parts.items())), "source").digest
    others = [
        ForgetSplit("s", dict(base.parts), "another source"),
        split(test=ids(8)),
        split(test=ids()),
        split(validation=ids(8)),
        ForgetSplit("s", {**base.parts, "forget": ids(2, 1)}, "source"),
        ForgetSplit("s", {"forget": ids(3, 4, 5), "retain": ids(1, 2), "test": ids(9)}, "source"),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_digest_is_frozen():
    assert split().digest == ("7b131f618b4c20ce8ff99a1e423048ff15369f0f46e906c04d1123a86b54fd31")


def test_round_trip(tmp_path):
    path = tmp_path / "split.safetensors"
    split().save(path)
    loaded = ForgetSplit.load(path)
    assert loaded.digest == split().digest and loaded.name == "s"
    assert loaded.notes == {"classes": "3"} and loaded.source_digest == "source"
    assert {k: v.tolist() for k, v in loaded.parts.items()} == {
        k: v.tolist() for k, v in split().parts.items()
    }


def test_tampering_and_damage_are_detected(tmp_path):
    path = tmp_path / "split.safetensors"

    def refused():
        with pytest.raises(DataError) as error:
            ForgetSplit.load(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    honest = {"name": "s", "source_digest": "source", "digest": split().digest}
    moved = {"forget": ids(1, 3), "retain": ids(2, 4, 5), "test": ids(9)}
    save_file(moved, path, metadata=honest)
    assert "do not match their digest" in refused()
    save_file(dict(split().parts), path, metadata=honest | {"source_digest": "another"})
    assert "do not match their digest" in refused()
    for gone in honest:
        save_file(
            dict(split().parts), path, metadata={k: v for k, v in honest.items() if k != gone}
        )
        assert "not a readable split" in refused()
    save_file(moved | {"test": ids(4)}, path, metadata=honest)
    assert "index 4" in refused()
    split().save(path)
    path.write_bytes(path.read_bytes()[:-4])
    assert "not a readable split" in refused()
    path.unlink()
    assert "not a readable split" in refused()


# Draws -------------------------------------------------------------------------------------------


def test_hash_order_is_frozen():
    """Every stored split depends on these; a change here is a new benchmark version."""
    assert hash_order(range(12), 0).tolist() == [6, 1, 4, 3, 0, 5, 8, 2, 10, 9, 7, 11]
    assert hash_order(range(12), 1, "forget").tolist() == [5, 2, 11, 1, 4, 3, 0, 8, 9, 10, 6, 7]
    assert hash_order([10**9, 7, 2**40], 3, "a", 4).tolist() == [7, 1099511627776, 1000000000]
    assert derive(0) == 3456079177858693020
    assert derive(7, "engine", 0, "x") == 6085526291801374105


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 2**50), min_size=1, max_size=40), st.integers(0, 2**30))
def test_hash_order_is_a_permutation_that_ignores_company(indices, seed):
    ordered = hash_order(sorted(indices), seed, "x").tolist()
    assert sorted(ordered) == sorted(indices)
    assert hash_order(sorted(indices, reverse=True), seed, "x").tolist() == ordered
    kept = sorted(indices)[::2]
    assert hash_order(kept, seed, "x").tolist() == [i for i in ordered if i in set(kept)]


def test_streams_are_independent():
    orders = {tuple(hash_order(range(30), *key)) for key in ((0,), (1,), (0, "a"), (0, "b"))}
    assert len(orders) == 4
    seeds = {derive(0, "a"), derive(0, "b"), derive(1, "a"), derive(0), derive(0, "a", 1)}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert generator(1, "x").initial_seed() == derive(1, "x")


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.floats(0.01, 0.9), st.integers(0, 99))
def test_random_forget(size, fraction, seed):
    train = np.arange(100, 100 + size, dtype=np.int64)
    forget = random_forget(train, fraction, seed)
    assert len(forget) == round(fraction * size)
    assert np.isin(forget, train).all() and (np.diff(forget) > 0).all()
    assert forget.tolist() == random_forget(train[::-1], fraction, seed).tolist()


def test_larger_fractions_contain_smaller_ones():
    train = np.arange(200)
    small, large = (set(random_forget(train, f, 3).tolist()) for f in (0.1, 0.3))
    assert small < large and small != set(random_forget(train, 0.1, 4).tolist())


def test_class_forget_reads_labels_by_data_index():
    labels = np.array([0, 1, 2, 0, 1, 2, 0])
    train = ids(1, 2, 4, 6)
    assert class_forget(train, labels, [1]).tolist() == [1, 4]
    assert class_forget(train, labels, [0, 2]).tolist() == [2, 6]
    assert class_forget(train, labels, [3]).tolist() == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(0, 70),
    st.integers(0, 99),
)
def test_balanced_draws_are_as_even_as_can_be(labels, count, seed):
    labels = np.array(labels)
    indices = np.arange(len(labels), dtype=np.int64)[::2]
    drawn = balanced_draw(indices, labels, count, seed, "x")
    assert len(drawn) == len(set(drawn.tolist())) == min(count, len(indices))
    assert np.isin(drawn, indices).all() and (np.diff(drawn) > 0).all()
    have, got = (np.bincount(labels[part], minlength=4) for part in (indices, drawn))
    exhausted = got == have
    open_classes = got[~exhausted]
    if len(open_classes):
        assert open_classes.max() - open_classes.min() <= 1
        assert got.max() <= open_classes.min() + 1


def test_balanced_draw_is_frozen():
    labels = np.arange(40) % 3
    assert balanced_draw(np.arange(40), labels, 7, 5, "m").tolist() == [4, 10, 11, 15, 24, 29, 37]


def test_the_halves_of_a_shadow_are_complementary_and_even():
    parts = {"forget": np.arange(11), "retain": np.arange(11, 20), "test": np.arange(20, 25)}
    split = ForgetSplit("s", parts, "d")
    halves = [half_split(split, 3, index) for index in range(6)]
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        assert first.parts["forget"].tolist() == second.parts["forget_out"].tolist()
        assert first.parts["forget_out"].tolist() == second.parts["forget"].tolist()
    for half in halves:
        both = np.concatenate([half.parts["forget"], half.parts["forget_out"]])
        assert sorted(both) == list(range(11))
        assert half.parts["retain"].tolist() == parts["retain"].tolist()
        assert not np.isin(half.train, half.parts["forget_out"]).any()
    assert len({half.digest for half in halves}) == 6
    assert half_split(split, 3, 4).digest == halves[4].digest != half_split(split, 4, 4).digest


def labels_of(indices):
    return np.asarray(indices) % 3


@pytest.mark.parametrize("count", [2, 3])
def test_requests_by_class_add_up_to_the_split(count):
    everything = np.arange(30)
    forget = everything[(everything < 20) & (labels_of(everything) < 3)]
    parts = {
        "forget": forget,
        "retain": np.arange(40, 45),
        "test": np.arange(50, 52),
        "test_forget": np.arange(20, 30),
    }
    split = ForgetSplit("s", parts, "d")
    seen = np.empty(0, dtype=np.int64)
    for index in range(count):
        found = request_split(split, labels_of, 0, index, count).parts
        now = found["forget"]
        assert not np.isin(labels_of(now), labels_of(seen)).any()
        assert sorted(found.get("earlier", [])) == sorted(seen)
        rest = np.setdiff1d(forget, np.union1d(now, seen))
        assert found["retain"].tolist() == sorted([*parts["retain"], *rest])
        assert set(labels_of(found["test_forget"])) == set(labels_of(now))
        gone = [*found["test_forget"], *found.get("test_earlier", [])]
        assert sorted([*found["test"], *gone]) == sorted([*parts["test"], *parts["test_forget"]])
        seen = np.union1d(seen, now)
    assert seen.tolist() == forget.tolist() and found["retain"].tolist() == [*range(40, 45)]


def test_requests_of_samples_are_even_and_too_many_are_refused():
    parts = {"forget": np.arange(5), "retain": np.arange(5, 9), "test": np.arange(9, 12)}
    split = ForgetSplit("s", parts, "d")
    turns = [request_split(split, labels_of, 0, k, 2).parts for k in range(2)]
    assert [len(turn["forget"]) for turn in turns] == [3, 2]
    assert turns[1]["earlier"].tolist() == turns[0]["forget"].tolist()
    whole = request_split(split, labels_of, 0, 1, 2)
    assert whole.train.tolist() == [*range(9)]
    with pytest.raises(DataError, match="ask for fewer"):
        request_split(split, labels_of, 0, 0, 6)


def test_torch_is_strictly_deterministic_and_fills_no_buffer():
    """As attention's backward pass needs it on CUDA; without importing the compiler."""
    code = (
        "import sys, torch\n"
        "from stable_forgetting.common.base.seeding import make_deterministic\n"
        "make_deterministic(1)\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "assert not torch.is_deterministic_algorithms_warn_only_enabled()\n"
        "assert not torch.utils.deterministic.fill_uninitialized_memory\n"
        "assert not torch.backends.cuda.cudnn_sdp_enabled()\n"
        "assert not torch.empty(1 << 16).isnan().all()\n"
        "assert 'torch._inductor' not in sys.modules\n"
        "import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == ":4096:8", done.stderr

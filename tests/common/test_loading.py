"""Loaders: what comes next, without replacement, in pairs, and again after a kill."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.data.batch import (
    Batch,
    class_labels,
    concatenate,
    ordered_batches,
    to_device,
)
from stable_forgetting.common.data.loader import (
    ChainedLoader,
    Loader,
    PairedLoader,
    RelabelledLoader,
)
from tests.common.made import stream


class Counting:
    """A source of sequences or classes that counts what is read."""

    def __init__(self, labels):
        self.table, self.read = labels, 0

    def fetch(self, indices, *, augment=None):
        self.read += len(indices)
        return Batch({}, self.table[indices], indices)


def test_class_labels_are_read_in_order_or_taken_from_the_source():
    source = Counting(torch.arange(20) % 7)
    wanted = np.array([9, 3, 14], dtype=np.int64)
    assert class_labels(source, wanted, 2).tolist() == [2, 3, 0] and source.read == 3
    assert class_labels(source, wanted[:0]).tolist() == []
    source.labels_of = lambda indices: indices % 5
    assert class_labels(source, wanted).tolist() == [4, 3, 4] and source.read == 3
    with pytest.raises(DataError, match="sequences"):
        class_labels(Counting(torch.zeros(20, 4).long()), wanted)


def take(loader, count):
    return [loader.next() for _ in range(count)]


def ids(batches):
    return [index for batch in batches for index in batch.indices.tolist()]


def equal(first: Batch, second: Batch) -> bool:
    return (
        torch.equal(first.indices, second.indices)
        and torch.equal(first.labels, second.labels)
        and all(torch.equal(first.inputs[k], second.inputs[k]) for k in first.inputs)
    )


INDICES = np.array([3, 5, 8, 13, 21, 34, 55, 2, 7, 11], dtype=np.int64)


def test_an_epoch_is_without_replacement(source):
    loader = Loader(source, INDICES, 4, stream())
    assert loader.batches_per_epoch == 3
    epochs = [take(loader, 3) for _ in range(4)]
    for number, epoch in enumerate(epochs):
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(ids(epoch)) == sorted(INDICES.tolist())
        assert ids(epoch) != ids(epochs[number - 1]), "every epoch has an order of its own"
    assert loader.epoch == 3


def test_a_batch_larger_than_the_set_is_the_set(source):
    loader = Loader(source, INDICES[:3], 64, stream())
    assert loader.batches_per_epoch == 1
    assert sorted(ids(take(loader, 1))) == sorted(INDICES[:3].tolist())


def test_the_generator_decides_everything(source):
    loaders = [Loader(source, INDICES, 4, stream(seed)) for seed in (1, 1, 2)]
    first, again, other = (take(loader, 5) for loader in loaders)
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert ids(first) != ids(other)


def test_augmentation_is_optional(source):
    plain = Loader(source, INDICES, 10, stream(), augment=False).next()
    assert torch.equal(plain.inputs["x"], source.x[plain.indices])
    noisy = Loader(source, INDICES, 10, stream()).next()
    assert not torch.equal(noisy.inputs["x"], source.x[noisy.indices])


def test_retain_order_does_not_depend_on_the_forget_loader(tiny, source):
    split = tiny.split(source)
    access = frozenset({"forget", "retain"})
    alone = take(tiny.task(source, split, access=access).loader("retain", batch_size=8), 9)
    task = tiny.task(source, split, access=access)
    retain, forget = task.loader("retain", batch_size=8), task.loader("forget", batch_size=8)
    together = []
    for _ in range(9):
        forget.next()
        together.append(retain.next())
        forget.next()
    assert all(equal(a, b) for a, b in zip(alone, together, strict=True))
    other = tiny.task(source, split, access=access, seed=6).loader("retain", batch_size=8)
    assert ids(take(other, 9)) != ids(alone)


def test_shards_share_each_batch(source):
    whole = take(Loader(source, INDICES, 4, stream(), augment=False), 3)
    shards = []
    for rank in (0, 1):
        loader = Loader(source, INDICES, 4, stream(), augment=rank == 1)
        loader.take_shard(rank, 2)
        shards.append(take(loader, 3))
    for full, one, two in zip(whole, *shards, strict=True):
        assert sorted(ids([one, two])) == sorted(ids([full]))


def test_every_rank_augments_in_its_own_way_and_resumes_exactly(source):
    """A checkpoint is written by rank 0 and read by all."""

    def loader(rank):
        made = Loader(source, INDICES, 4, stream())
        made.take_shard(rank, 2)
        return made

    plain = Loader(source, INDICES, 4, stream(), augment=False)
    first, ranks = plain.next(), (loader(0), loader(1))
    noise = []
    for rank, made in enumerate(ranks):
        noise.append(made.next().inputs["x"] - first.inputs["x"][rank::2])
    assert not torch.allclose(noise[0], noise[1], atol=1e-3)
    saved = ranks[0].state()
    for rank, made in enumerate(ranks):
        again = loader(rank)
        again.load_state(saved)
        assert all(equal(a, b) for a, b in zip(take(again, 4), take(made, 4), strict=True))


@pytest.mark.parametrize(("batch", "world"), [(4, 8), (4, 3), (1, 2)])
def test_a_batch_that_ranks_cannot_share_is_refused(source, batch, world):
    """Each would compute all of it, or the mean of all would not be the batch's."""
    loader = Loader(source, INDICES, batch, stream())
    words = f"{world} processes cannot share batches of {batch} samples.* multiple of {world}"
    with pytest.raises(ConfigError, match=words):
        ChainedLoader([loader]).take_shard(0, world)
    few = Loader(source, INDICES[: world - 1], batch, stream())
    few.take_shard(0, world)
    assert len(few.next().labels) == min(batch, world - 1), "a set of fewer samples than ranks"


def make(kind, source):
    loader = Loader(source, INDICES, 4, stream())
    relabelled = RelabelledLoader(Loader(source, INDICES, 4, stream(5)), INDICES[:5], 4)
    return {
        "plain": lambda: loader,
        "relabelled": lambda: relabelled,
        "chained": lambda: ChainedLoader([relabelled, loader]),
        "nested": lambda: ChainedLoader([ChainedLoader([loader]), relabelled]),
    }[kind]()


@pytest.mark.parametrize("kind", ["plain", "relabelled", "chained", "nested"])
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 7])
def test_state_round_trip(source, kind, cut):
    loader = make(kind, source)
    take(loader, cut)
    state = {key: value.clone() for key, value in loader.state().items()}
    expected = take(loader, 8)
    resumed = make(kind, source)
    take(resumed, 2)
    resumed.load_state(state)
    assert all(equal(a, b) for a, b in zip(expected, take(resumed, 8), strict=True))


def test_a_state_is_a_snapshot(source):
    """What was saved must not move with the loader."""
    for kind in ("plain", "relabelled", "chained"):
        loader = make(kind, source)
        take(loader, 2)
        state = loader.state()
        before = {key: value.clone() for key, value in state.items()}
        take(loader, 9)
        assert all(torch.equal(state[key], value) for key, value in before.items())


# Relabelling -------------------------------------------------------------------------------------


def labels_of(batches):
    return {
        index: int(label)
        for batch in batches
        for index, label in zip(batch.indices.tolist(), batch.labels, strict=True)
    }


def relabelled(source, members, seed=0, size=64, **options):
    inner = Loader(source, np.arange(size), 16, stream(seed))
    return RelabelledLoader(inner, members, 4, **options)


def test_only_members_change(source):
    members = np.arange(0, 64, 3)
    loader = relabelled(source, members)
    labels = labels_of(take(loader, 4))
    changed = {index for index in labels if labels[index] != int(source.labels[index])}
    assert changed and changed <= set(members.tolist())
    assert all(0 <= label < 4 for label in labels.values())


def test_labels_hold_for_an_epoch_and_are_redrawn(source):
    loader = relabelled(source, np.arange(64))
    shifts = []
    for _ in range(3):
        labels = labels_of(take(loader, 4))
        shifts.append([(labels[i] - int(source.labels[i])) % 4 for i in range(64)])
    assert shifts[0] != shifts[1] != shifts[2]


def test_order_is_that_of_the_inner_loader_within_an_epoch(source):
    plain = take(Loader(source, np.arange(64), 16, stream()), 1)
    assert ids(plain) == ids(take(relabelled(source, np.arange(10)), 1))


def test_members_outside_the_stream_do_no_harm(source):
    inner = Loader(source, np.arange(10), 10, stream())
    batch = RelabelledLoader(inner, np.arange(40, 50), 4).next()
    assert torch.equal(batch.labels, source.labels[batch.indices])


# Chaining ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("repeat", "passes"), [(1, (3, 2)), (2, (4, 2))])
def test_chained_passes_in_turn_and_no_step_of_several_batches_reads_two(source, repeat, passes):
    first = Loader(source, np.arange(10), 4, stream(1))
    second = Loader(source, np.arange(10, 15), 4, stream(2))
    chain = ChainedLoader([first, second], repeat=repeat)
    assert chain.batches_per_epoch == sum(passes)
    for _ in range(3):
        read = ids(take(chain, passes[0]))
        assert set(read) == set(range(10)) and (repeat > 1 or len(read) == 10)
        assert sorted(ids(take(chain, passes[1]))) == list(range(10, 15))


# Batches -----------------------------------------------------------------------------------------


def test_ordered_batches_see_everything_once_unaugmented(source):
    batches = list(ordered_batches(source, INDICES, 4))
    assert ids(batches) == INDICES.tolist()
    for batch in batches:
        assert torch.equal(batch.inputs["x"], source.x[batch.indices])


def test_slices_and_concatenation_are_inverse(source):
    whole = source.fetch(torch.as_tensor(INDICES))
    assert equal(concatenate([whole.slice(0, 3), whole.slice(3, 10)]), whole)
    swapped = whole.with_labels(torch.zeros(10, dtype=torch.int64))
    assert len(swapped) == 10 and swapped.inputs is whole.inputs and not swapped.labels.any()


def test_copies_to_a_card_are_pinned_and_asynchronous(monkeypatch):
    given = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: given.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *where, **how: given.append((*where, how)) or self
    )
    tensor = torch.ones(2)
    assert to_device(tensor, "cuda:1") is tensor
    assert given == ["pinned", ("cuda:1", {"non_blocking": True})]
    given.clear()
    to_device(tensor, "cpu")
    assert given == [("cpu", {})]


class Indices:
    """A source whose batches are their indices."""

    def fetch(self, indices, *, augment=None):
        return Batch({}, indices.clone(), indices)


def pair(forget, retain, batch_size=3, seed=5):
    source, stream = Indices(), torch.Generator().manual_seed(seed)
    leader = Loader(source, np.asarray(forget), batch_size, stream)
    return leader, PairedLoader(leader, source, np.asarray(retain))


def drawn(loaders, count):
    return [tuple(loader.next().indices.tolist() for loader in loaders) for _ in range(count)]


@pytest.mark.parametrize("partners", [range(100, 107), range(100, 103), range(100, 120)])
def test_every_sample_has_the_partner_of_its_place(partners):
    loaders = pair(range(7), partners)
    batches = drawn(loaders, 9)
    for ours, theirs in batches:
        assert theirs == [100 + index % len(partners) for index in ours]
    assert sorted(i for ours, _ in batches[:3] for i in ours) == list(range(7))
    assert batches[:3] != batches[3:6], "every epoch has an order of its own"
    assert loaders[0].batches_per_epoch == loaders[1].batches_per_epoch == 3


def test_a_pair_resumes_and_is_sharded_together():
    loaders = pair(range(8), range(100, 108), batch_size=4)
    drawn(loaders, 3)
    states = [loader.state() for loader in loaders]
    wanted = drawn(loaders, 4)
    again = pair(range(8), range(100, 108), batch_size=4, seed=6)
    for loader, state in zip(again, states, strict=True):
        loader.load_state(state)
    assert drawn(again, 4) == wanted
    for loader in again:
        loader.take_shard(1, 2)
    for ours, theirs in drawn(again, 4):
        assert len(ours) == 2 and theirs == [100 + index for index in ours]


def test_a_leader_that_has_begun_takes_no_partner():
    leader, _ = pair(range(4), range(4))
    leader.next()
    with pytest.raises(AssertionError, match="before its leader's first batch"):
        PairedLoader(leader, Indices(), np.arange(4))

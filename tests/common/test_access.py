"""The guarded views of source and split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.errors import AccessError
from stable_forgetting.common.checks.tiny_task import VectorSource
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import Batch


@pytest.fixture
def split(tiny):
    return tiny.split(tiny.Source())


@pytest.fixture
def data(tiny, split):
    return DataAccess(tiny.Source(), split, frozenset({"forget", "initial"}), "mine")


def test_only_declared_parts_are_shown(data, split):
    assert list(data.split.parts) == ["forget"] and len(data.split.parts) == 1
    assert np.array_equal(data.split.parts["forget"], split.parts["forget"])
    for read in (data.split.parts.__getitem__, data.split.parts.get, data.require):
        with pytest.raises(AccessError, match=r"method 'mine' reads 'test'.*forget, initial"):
            read("test")
    assert data.violations == ["test"] * 3


def test_only_declared_samples_are_given_out(data, split, tiny):
    ids = torch.as_tensor(split.parts["forget"])
    assert torch.equal(data.source.fetch(ids).labels, tiny.Source().fetch(ids).labels)
    for part in ("retain", "validation", "test"):
        mixed = torch.cat([ids, torch.as_tensor(split.parts[part][:1])])
        with pytest.raises(AccessError, match=f"reads '{part}'"):
            data.source.fetch(mixed)
    for outside in (-1, 10**6):
        with pytest.raises(AccessError, match="no part of the split"):
            data.source.fetch(torch.tensor([outside]))


def test_a_narrower_view_never_widens(data):
    assert data.narrowed(frozenset({"forget", "test"})).declared == {"forget"}


def test_what_a_source_offers_is_offered_and_guarded(tiny, split):
    plain = DataAccess(tiny.Source(), split, frozenset({"forget"})).source
    batch = Batch({}, torch.zeros(2), torch.arange(2))
    assert plain.refusals == () and plain.input_bounds is None and plain.blank_inputs == {}
    assert plain.everywhere(batch) is batch
    access = DataAccess(VectorSource(), split, frozenset({"forget"}))
    index = int(split.parts["forget"][0])
    relabelled = access.source.with_answers({index: access.source.refusals[1]})
    assert relabelled.fetch(torch.tensor([index])).labels.tolist() == [2]
    with pytest.raises(AccessError):
        relabelled.fetch(torch.as_tensor(split.parts["test"][:1]))
    assert access.violations == ["test"]


def test_samples_are_counted_by_part(data, split):
    ids = torch.as_tensor(split.parts["forget"])
    for batch in (ids, ids, ids[:2]):  # the second is another view of the first
        data.source.fetch(batch)
    assert data.reads.samples("forget") == len(ids) + 2 and data.reads.samples("retain") == 0
    assert data.reads.passes("forget") == (len(ids) + 2) / len(ids)
    inner = data.narrowed(frozenset({"forget"}))
    inner.source.fetch(ids[2:4])
    assert data.reads.samples("forget") == len(ids) + 4
    state = data.reads.state()
    inner.source.fetch(ids)
    data.reads.load_state(state)
    assert data.reads.samples("forget") == len(ids) + 4


def test_labels_are_given_out_without_samples(data, split, tiny):
    labels = data.source.labels_of(split.parts["forget"])
    ids = torch.as_tensor(split.parts["forget"])
    assert np.array_equal(labels, tiny.Source().fetch(ids).labels.numpy())
    assert data.reads.samples("forget") == 0
    with pytest.raises(AccessError, match="reads 'retain'"):
        data.source.labels_of(split.parts["retain"])

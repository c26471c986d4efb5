"""Two index sets side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.data.loader import Loader, PairedLoader


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

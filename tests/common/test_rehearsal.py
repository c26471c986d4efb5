"""The ends of a training, on a few samples that stand for many."""

from __future__ import annotations

import numpy as np
import torch

from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.data.loader import (
    ChainedLoader,
    Loader,
    PairedLoader,
    RelabelledLoader,
)
from stable_forgetting.common.data.splits import ForgetSplit
from stable_forgetting.common.train.config import FitConfig, total_steps, warmup_steps
from stable_forgetting.common.train.rehearsal import Rehearsal


class Source:
    digest = "d"

    def fetch(self, indices, *, augment=None):
        return Batch({"x": indices[:, None].float()}, indices % 3, indices)


class Labelled(Source):
    def labels_of(self, indices):
        return indices % 12


def split() -> ForgetSplit:
    return ForgetSplit("s", {"forget": np.arange(40), "retain": np.arange(40, 4000)}, "d", {})


def loader(indices, batch_size: int = 8) -> Loader:
    return Loader(Source(), indices, batch_size, torch.Generator().manual_seed(0))


def test_a_few_samples_stand_for_all():
    whole = split()
    few, ends = Rehearsal(rows=16).cut(whole)
    assert {part: len(ids) for part, ids in few.parts.items()} == {"forget": 16, "retain": 16}
    for part, ids in few.parts.items():
        assert set(ids) <= set(whole.parts[part]) and len(set(ids)) == 16
        assert (ids[0], ids[-1]) == (whole.parts[part][0], whole.parts[part][-1])
        assert ends.samples(ids) == len(whole.parts[part])
    assert ends.samples(np.concatenate([*few.parts.values()])) == 4000
    assert Rehearsal(rows=100).cut(whole)[0].parts["forget"].tolist() == list(range(40))
    told, ends = Rehearsal(rows=16, samples={"forget": 400}).cut(whole)
    assert ends.samples(told.parts["forget"]) == 400


def test_held_out_samples_stand_for_every_class_that_is_forgotten():
    parts = {"forget": np.array([0, 5, 11]), "retain": np.arange(12, 500)}
    parts |= {"validation": np.arange(500, 1000), "test": np.arange(1000, 1500)}
    few, ends = Rehearsal(rows=4).cut(ForgetSplit("s", parts, "d", {}), Labelled())
    assert set(few.parts["validation"]) == {500, 501, 503, 504, 509, 998, 999}
    assert len(few.parts["test"]) == 4 and ends.samples(few.parts["validation"]) == 500


def test_epochs_and_warmup_are_those_of_the_whole_data():
    few, ends = Rehearsal(rows=16, micro_batch=2).cut(split())
    config = FitConfig(epochs=5, batch_size=32, accumulation=4, warmup_epochs=1)
    for timing in ("own", "transformers"):
        config = config.model_copy(update={"timing": timing, "epochs_of": "retain"})
        large = {part: loader(ids) for part, ids in split().parts.items()}
        small = {part: loader(ids) for part, ids in few.parts.items()}
        ends.prepare(small)
        assert total_steps(config, small) == total_steps(config, large)
        assert warmup_steps(config, small) == warmup_steps(config, large)
        assert len(small["retain"].next().labels) == 2
        assert len(large["retain"].next().labels) == 8


def test_loaders_of_loaders_stand_for_larger_ones_too():
    few, ends = Rehearsal(rows=16, micro_batch=2).cut(split())

    def chained(parts):
        forget = RelabelledLoader(loader(parts["forget"]), parts["forget"], 3)
        retain = loader(parts["retain"], 16)
        return ChainedLoader([forget, retain, retain])

    large, small = chained(split().parts), chained(few.parts)
    ends.prepare({"both": small})
    assert small.batches_per_epoch == large.batches_per_epoch == 5 + 2 * 248
    assert small.samples == large.samples
    leader = loader(few.parts["forget"])
    partners = PairedLoader(leader, Source(), few.parts["retain"])
    ends.prepare({"forget": leader, "retain": partners})
    assert len(partners.next().labels) == len(leader.next().labels) == 2


def test_the_middle_is_left_out():
    _, ends = Rehearsal(ends=2).cut(split())

    def taken(total):
        step, steps = 0, []
        while step < total:
            steps.append(step)
            step = ends.after(step, total)
        return steps

    assert taken(1000) == [0, 1, 998, 999]
    for total in (1, 2, 3, 4):
        assert taken(total) == list(range(total))
    assert taken(5) == [0, 1, 3, 4]

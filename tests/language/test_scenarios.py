"""Who is forgotten, by scenario and seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.scenarios import TextScenarioConfig, make_split


@dataclass
class Source:
    corpus: Corpus
    digest: str = "digest"


def full_size(perturbed=(*range(20), *range(180, 200))):
    """200 authors with two rows each; some of them with perturbed answers."""
    items = [
        Item("full", index // 2, f"q{index}", "a", "p", ("x",) * (index // 2 in perturbed))
        for index in range(400)
    ]
    items += [Item("real_authors", -1, "r", "a"), Item("world_facts", -1, "w", "a")]
    return Source(Corpus(tuple(items), "made"))


def authors(source, indices):
    return sorted({source.corpus.items[index].group for index in indices.tolist()})


def scenario(**fields):
    return TextScenarioConfig(**fields)


@pytest.mark.parametrize(
    ("kind", "first"), [("forget01", 198), ("forget05", 190), ("forget10", 180)]
)
def test_named_splits_forget_the_last_authors(kind, first):
    source = full_size()
    split = make_split(source, scenario(kind=kind), 3)
    assert authors(source, split.parts["forget"]) == list(range(first, 200))
    assert authors(source, split.parts["retain"]) == list(range(first))
    assert split.parts["test_real_authors"].tolist() == [400]
    assert split.parts["test_world_facts"].tolist() == [401]
    assert "holdout" not in split.parts
    assert split.digest == make_split(source, scenario(kind=kind), 4).digest


def test_the_embedded_data_has_a_holdout_and_teaches_its_facts():
    source = Source(load_corpus(TextDataConfig.of(authors=3, forget_authors=1, questions=4)))
    split = make_split(source, scenario(forget_authors=1), 0)
    assert authors(source, split.parts["forget"]) == [3]
    corpus = source.corpus
    assert {corpus.items[i].set for i in split.parts["retain"]} == {"full", "common"}
    assert {corpus.items[i].set for i in split.parts["holdout"]} == {"holdout"}
    taught = {corpus.items[i].question for i in split.parts["retain"]}
    assert all(corpus.items[i].question in taught for i in split.parts["test_world_facts"])
    assert len(split.train) == 16 + 24


def test_authors_are_drawn_among_those_with_perturbed_answers():
    source = full_size()
    drawn = scenario(forget_authors=4, draw=True)
    chosen = [
        tuple(authors(source, make_split(source, drawn, s).parts["forget"])) for s in range(6)
    ]
    assert len(set(chosen)) > 1
    assert all(group < 20 or group >= 180 for groups in chosen for group in groups)
    assert all(len(groups) == 4 for groups in chosen)
    again = make_split(source, drawn, 2)
    assert again.digest == make_split(source, drawn, 2).digest
    last = make_split(source, scenario(forget_authors=4), 2)
    assert authors(source, last.parts["forget"]) == [196, 197, 198, 199]


def requests(source, seed=0, **fields):
    """The splits of every request of a sequence."""
    return [
        make_split(source, scenario(kind="requests", request=number, **fields), seed)
        for number in range(1, 1 + len(fields["requests"]))
    ]


def test_requests_by_name_leave_out_the_earlier_ones():
    source, names = full_size(), ["forget01", "forget05", "forget10"]
    first, second, third = requests(source, requests=names)
    assert authors(source, first.parts["forget"]) == [198, 199]
    assert authors(source, second.parts["forget"]) == list(range(190, 198))
    assert authors(source, third.parts["forget"]) == list(range(180, 190))
    assert "earlier" not in first.parts and "unused" not in first.parts
    assert authors(source, third.parts["earlier"]) == list(range(190, 200))
    retained = [authors(source, split.parts["retain"]) for split in (first, second, third)]
    assert retained == [list(range(count)) for count in (198, 190, 180)]
    assert all(np.array_equal(split.train, first.train) for split in (second, third))
    assert third.name == "request-3-of-forget01-forget05-forget10/seed-0"


def test_requests_by_number_and_rows_kept_aside():
    source = full_size()
    splits = requests(source, 1, requests=[3, 3, 3], used=0.5)
    assert all(len(split.parts["forget"]) == len(split.parts["unused"]) == 3 for split in splits)
    asked = [
        np.sort(np.concatenate([split.parts["forget"], split.parts["unused"]])) for split in splits
    ]
    groups = [authors(source, rows) for rows in asked]
    assert groups == [[191, 192, 193], [194, 195, 196], [197, 198, 199]]
    assert splits[2].parts["earlier"].tolist() == [*asked[0].tolist(), *asked[1].tolist()]
    assert "unused" in splits[1].train_parts
    assert all(np.array_equal(split.train, splits[0].train) for split in splits)
    other = requests(source, 2, requests=[3, 3, 3], used=0.5)
    assert splits[0].digest != other[0].digest


def test_no_two_seeds_share_an_author_where_draws_are_disjoint():
    source, apart = full_size(), scenario(forget_authors=4, draw="disjoint")
    assert apart.label == "4-authors-disjoint"
    groups = [authors(source, make_split(source, apart, s).parts["forget"]) for s in range(10)]
    everyone = [author for group in groups for author in group]
    assert len(set(everyone)) == len(everyone) == 40 and set(everyone) <= {
        *range(20),
        *range(180, 200),
    }
    for seed in (-1, 10):
        with pytest.raises(DataError, match=r"no authors of its own.*10 groups of 4"):
            make_split(source, apart, seed)


def test_requests_are_drawn_once_for_all_of_a_seed():
    source = full_size()
    splits = requests(source, 5, requests=[2, 2], draw=True)
    first, second = (authors(source, split.parts["forget"]) for split in splits)
    assert authors(source, splits[1].parts["earlier"]) == first
    assert len({*first, *second}) == 4


def test_files_name_what_is_forgotten():
    items = (Item("forget", -1, "", "a"), Item("retain", -1, "", "b"), Item("more", -1, "", "c"))
    split = make_split(Source(Corpus(items, "files")), scenario(kind="files"), 0)
    assert split.parts["forget"].tolist() == [0] and split.parts["retain"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["test", "validation", "unseen"])
def test_files_that_are_not_for_training_by_their_name_are_not_trained_on(name):
    items = (Item("forget", -1, "", "a"), Item("retain", -1, "", "b"), Item(name, -1, "", "c"))
    with pytest.raises(DataError, match=f"{name} would be trained on.*call it holdout"):
        make_split(Source(Corpus(items, "files")), scenario(kind="files"), 0)


@pytest.mark.parametrize(
    ("fields", "clue"),
    [
        ({"kind": "forget01"}, "1% of 4 authors is none"),
        ({"forget_authors": 4}, "lower it"),
        ({"forget_authors": 3, "draw": True}, "only 2 authors with perturbed"),
        ({"kind": "requests", "requests": [2, 2]}, "4 authors to forget"),
        ({"kind": "files"}, "part 'forget' is empty"),
    ],
)
def test_scenarios_that_do_not_fit(fields, clue):
    items = tuple(Item("full", g, f"q{g}", "a", None, ("x",) * (g < 2)) for g in range(4))
    with pytest.raises(DataError, match=clue):
        make_split(Source(Corpus(items, "four")), scenario(**fields), 0)


def test_a_request_that_adds_nobody_is_refused():
    with pytest.raises(DataError, match="forget01 adds no author"):
        requests(full_size(), requests=["forget05", "forget01"])


def test_defaults_are_filled_in_before_they_are_hashed():
    data = TextDataConfig.of()
    assert (data.authors, data.forget_authors, data.questions) == (36, 4, 20)
    assert data.train_on_facts
    assert TextDataConfig.of(name="tofu").authors is None
    assert not TextDataConfig.of(name="tofu").train_on_facts
    model = CausalModelConfig()
    assert (model.kind, model.dim, model.tokenizer) == ("gpt_neo", 128, 4000)
    assert CausalModelConfig(name="microsoft/phi-1_5").kind is None


@pytest.mark.parametrize(
    ("model", "fields", "clue"),
    [
        (TextDataConfig, {"name": "tofu", "authors": 3}, "both or none"),
        (TextDataConfig, {"source": "hub"}, "only for name: tofu"),
        (TextDataConfig, {"name": "tofu", "questions": 3}, "only for name: fictitious"),
        (TextDataConfig, {"questions": None}, "needs authors"),
        (TextDataConfig, {"questions": 21}, "less than or equal to 20"),
        (TextDataConfig, {"name": "jsonl"}, "belong together"),
        (TextDataConfig, {"name": "jsonl", "files": {"forget": "../x"}}, "below the data root"),
        (CausalModelConfig, {"dim": 30}, r"multiple of 2 \* heads"),
        (CausalModelConfig, {"dim": None}, "needs a value"),
        (CausalModelConfig, {"original": "x"}, "not for name: tiny"),
        (CausalModelConfig, {"name": "x/y", "dim": 8}, "has its own"),
        (TextScenarioConfig, {"kind": "forget01", "forget_authors": 2}, "only for kind: authors"),
        (TextScenarioConfig, {"kind": "forget05", "draw": True}, "draw"),
        (TextScenarioConfig, {"kind": "requests", "requests": []}, "only 0 requests"),
        (TextScenarioConfig, {"request": 1}, "request is only for kind: requests"),
        (TextScenarioConfig, {"kind": "requests", "request": 4}, "only 3 requests"),
        (TextScenarioConfig, {"used": 0.5}, "only for kind: requests"),
        (
            TextScenarioConfig,
            {"kind": "requests", "requests": ["forget01"], "draw": True},
            "requests given as numbers",
        ),
    ],
)
def test_every_mistake_is_one_line(model, fields, clue):
    with pytest.raises(ConfigError, match=clue) as caught:
        validate(model, fields, "suite.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({}, "4-authors"),
        ({"forget_authors": 2, "draw": True}, "2-authors-drawn"),
        ({"kind": "forget05"}, "forget05"),
        ({"kind": "requests"}, "request-1-of-3-3-3"),
        (
            {"kind": "requests", "requests": ["forget01", "forget05"], "request": 2},
            "request-2-of-forget01-forget05",
        ),
    ],
)
def test_labels(fields, label):
    assert TextScenarioConfig(**fields).label == label

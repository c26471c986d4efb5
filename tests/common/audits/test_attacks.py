"""Each attack against cases with a known answer: a model that never knew, one that only hides."""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch import nn

from stable_forgetting.common.audits import AUDITS, members
from stable_forgetting.common.audits.base import Measure, ModelAudit, NotApplicable
from stable_forgetting.common.audits.leak import Leak, LogitLens, blocks_of, leaving_after
from stable_forgetting.common.audits.members import (
    MinKPlusPlus,
    ReferenceModel,
    Snapshots,
    lowest,
    separation,
    sides,
)
from stable_forgetting.common.audits.recovery import (
    Elsewhere,
    RelearnElsewhere,
    RelearnFew,
    RelearnTime,
    reaches,
)
from stable_forgetting.common.audits.weights import (
    NF4,
    NormalFloat,
    Prune,
    Requantise,
    ScaleAdapter,
    normal_float,
    pruned,
)
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.data.parts import PARTS, Part, Role
from stable_forgetting.language.attacks import RULES, FewShot, Paraphrase, Zlib
from stable_forgetting.language.benchmarks.muse import MuseBenchmark
from stable_forgetting.language.data.corpus import Item
from tests.common.test_quantised import Int8Linear
from tests.language.made import source_of


def hiding(toy, bias: float = -6.0) -> nn.Module:
    """Original that never says class 1: it forgot nothing."""
    model = copy.deepcopy(toy.original)
    with torch.no_grad():
        model.head.bias[1] += bias
    return model


def accuracy(task, model):
    return task.collect(model, task.split.parts["forget"]).accuracy


# Relearning


def test_who_hides_is_relearnt_from_few_samples_sooner_than_who_never_knew(toy):
    attack = RelearnFew(RelearnFew.Config(repeats=1, lr=1e-2))
    hidden = hiding(toy, -1.0)
    found = {
        name: attack.measure(toy.task(model))["steps"].value
        for name, model in (("hides", hidden), ("never", toy.retrain), ("knows", toy.original))
    }
    assert found["knows"] == 0 and found["hides"] < found["never"]
    assert attack.config.shots == 16


@pytest.mark.parametrize("attack", [RelearnTime, RelearnFew])
def test_relearning_trains_every_weight_whatever_the_method_left_frozen(toy, attack):
    attack = attack(attack.Config(repeats=1, lr=1e-2))
    hidden = hiding(toy, -1.0)
    frozen = copy.deepcopy(hidden)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("blocks.0.norm" in name)
    assert any(p.requires_grad for p in frozen.parameters())
    steps = [attack.measure(toy.task(model))["steps"].value for model in (hidden, frozen)]
    assert steps[0] == steps[1] > 0


def test_another_domain_has_the_same_labels_and_none_of_the_samples(toy):
    task = toy.task()
    moved, indices = Elsewhere(task.source, 3), torch.as_tensor(task.split.parts["retain"])
    ours, theirs = moved.fetch(indices), task.source.fetch(indices)
    assert torch.equal(ours.labels, theirs.labels)
    assert torch.equal(ours.inputs["x"].sort(1).values, theirs.inputs["x"].sort(1).values)
    assert not torch.equal(ours.inputs["x"], theirs.inputs["x"])
    assert torch.equal(ours.inputs["x"], Elsewhere(task.source, 3).fetch(indices).inputs["x"])


def test_other_data_teach_nothing_to_who_never_knew(toy):
    attack = RelearnElsewhere(RelearnElsewhere.Config(repeats=1, max_steps=5))
    assert "cut off at 5" in attack.measure(toy.task(toy.retrain))["steps"].note
    assert attack.measure(toy.task())["steps"].value == 0


def test_relearning_refuses_quantised_weights_in_one_line(toy):
    packed = hiding(toy, -1.0)
    packed.blocks[0].mlp.fc1 = Int8Linear(packed.blocks[0].mlp.fc1)
    with pytest.raises(ConfigError, match="the model's weights are quantised"):
        RelearnTime(RelearnTime.Config(repeats=1)).measure(toy.task(packed))


def test_the_advantage_of_relearning_is_the_share_of_steps_saved():
    attack = RelearnTime()
    saved = attack.advantage({"steps": Measure(2.0)}, {"steps": Measure(8.0)})
    assert saved == 75.0
    assert attack.advantage({"steps": Measure(2.0)}, {"steps": Measure(0.0)}) is None


# Weights


def test_nf4_takes_the_nearest_of_its_values_in_every_block():
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    rounded = normal_float(weight)
    for block, other in zip(weight.flatten().split(64), rounded.flatten().split(64), strict=True):
        values = torch.tensor(NF4) * block.abs().max()
        distances = (block.unsqueeze(1) - values).abs()
        torch.testing.assert_close(other, values[distances.argmin(1)])
    torch.testing.assert_close(normal_float(rounded), rounded)
    assert torch.equal(normal_float(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_pruning_takes_the_smallest_entries():
    weight = torch.tensor([[3.0, -1.0], [0.5, -4.0]])
    assert torch.equal(pruned(weight, 0.5), torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
    assert torch.equal(pruned(weight, 0.1), weight)


class Drowned(nn.Module):
    """Says yes by one large weight, which forty small ones drown."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(41, 1, bias=False)
        with torch.no_grad():
            self.layer.weight.fill_(-0.03)
            self.layer.weight[0, 0] = 1.0


def test_what_small_weights_hide_comes_back_when_they_are_pruned(toy):
    def says(model, indices):
        return np.full(len(indices), float(model.layer(torch.ones(41)) > 0))

    task = toy.task(Drowned(), collect_correct=says)
    found = Prune(Prune.Config(shares=(0.1, 0.5))).measure(task)
    assert not says(Drowned(), [0]).any()
    assert found["10 % forget"].value == 0 and found["50 % forget"].value == 100
    never = Prune().measure(toy.task(toy.retrain))
    assert max(never[f"{share} % forget"].value for share in (30, 50)) <= 20


def test_rounding_teaches_nothing_to_who_never_knew_and_takes_little_from_who_knows(toy):
    assert NormalFloat().measure(toy.task(toy.retrain))["NF4 forget"].value <= 20
    assert NormalFloat().measure(toy.task())["NF4 forget"].value >= 80


def test_a_smaller_adapter_hides_less(toy):
    hidden = hiding(toy, -20.0)
    task = toy.task(hidden, adapted=True)
    found = ScaleAdapter(ScaleAdapter.Config(scales=(0.0, 1.0))).measure(task)
    assert found["x0 forget"].value == accuracy(task, toy.original)
    assert found["x1 forget"].value == accuracy(task, hidden) == 0
    with pytest.raises(NotApplicable, match="no adapter"):
        ScaleAdapter().measure(toy.task())


def test_codes_of_quantised_weights_are_neither_rounded_nor_pruned_nor_scaled(toy):
    packed = hiding(toy, -1.0)
    packed.blocks[0].mlp.fc1 = Int8Linear(packed.blocks[0].mlp.fc1)
    for attack in (Requantise(), NormalFloat(), Prune(), ScaleAdapter()):
        with pytest.raises(NotApplicable, match="weights are quantised already"):
            attack.measure(toy.task(packed, adapted=True))


# The lens


def test_the_lens_reads_what_the_last_block_alone_hides(toy):
    hidden = copy.deepcopy(toy.original)
    with torch.no_grad():
        hidden.blocks[-1].mlp.fc2.bias -= 100 * hidden.head.weight[1]
    task = toy.task(hidden)
    assert accuracy(task, hidden) == 0
    (hides,), (knows,), (never,) = (
        LogitLens().measure(toy.task(model)).values()
        for model in (hidden, toy.original, toy.retrain)
    )
    assert hides.value == knows.value > never.value
    assert len(blocks_of(hidden)) == 2
    with pytest.raises(NotApplicable, match="blocks"):
        blocks_of(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "efficientnet_lite0"])
def test_the_logit_lens_has_no_meaning_where_stages_follow_a_block(name):
    model = timm.create_model(name, num_classes=2).eval()
    with (
        pytest.raises(NotApplicable, match="blocks"),
        torch.inference_mode(),
        leaving_after(blocks_of(model), 1),
    ):
        model(torch.zeros(1, 3, 64, 64))


# Draws and prompts


def test_the_best_of_k_draws_in_closed_form(toy):
    task = toy.task()
    p = task.collect(toy.original, task.split.parts["forget"]).probability.astype(float)
    found = Leak(Leak.Config(k=3)).measure(task)["forget"]
    assert found.value == pytest.approx(100 * np.mean(1 - (1 - p) ** 3), abs=1e-3)
    assert Leak().measure(toy.task(hiding(toy, -1e3)))["forget"].value == 0


def test_draws_of_several_positions_are_shares_of_right_ones(toy):
    best = Leak(Leak.Config(k=4, rounds=400))._best(toy.task())
    labels = torch.tensor([[0, 1, IGNORE], [0, 0, 0]])
    logits = torch.zeros(2, 3, 2)
    logits[0, 0, 0] = logits[0, 1, 1] = 50.0  # the first answer is certain, the second three coins
    first, second = best(logits, labels).tolist()
    tails = [(1 / 8), (1 / 8 + 3 / 8), (1 / 8 + 6 / 8), 1.0]  # P(at most 0, 1, 2, 3 right)
    expected = sum(1 - tail**4 for tail in tails[:-1]) / 3
    assert first == 1 and second == pytest.approx(expected, abs=0.03)


class Talk:
    """Questions with answers, as far as the prompting attacks ask; a model reads the question."""

    def __init__(self, questions):
        self.questions = questions

    def questions_of(self, indices):
        return [self.questions[i] for i in indices.tolist()]

    def answers_of(self, indices):
        return [f"answer {i}" for i in indices.tolist()]

    def with_questions(self, questions):
        return Talk({**self.questions, **questions})

    def uncut(self, indices, window):
        return self

    def fetch(self, indices, *, augment=None):
        asked = [self.questions[i] for i in indices.tolist()]
        plain = torch.tensor(
            [
                [float(text == f"Who is {i}?")]
                for text, i in zip(asked, indices.tolist(), strict=True)
            ]
        )
        lines = torch.tensor([[float(text.count("\n"))] for text in asked])
        return Batch({"plain": plain, "lines": lines}, torch.ones(len(indices)).long(), indices)


@pytest.mark.parametrize(
    ("says", "plain", "lower", "shots"),
    [
        (lambda plain, lines: 1 - plain, 0, 100, 100),  # refuses the very wording
        (lambda plain, lines: lines, 0, 0, 100),  # needs an example
        (lambda plain, lines: 0 * plain, 0, 0, 0),  # never knew
    ],
)
def test_other_words_find_who_forgot_one_wording(toy, says, plain, lower, shots):
    task = toy.task()
    task.source = Talk(
        {i: f"Who is {i}?" for part in task.split.parts.values() for i in part.tolist()}
    )

    def forward(model, batch):
        yes = says(batch.inputs["plain"], batch.inputs["lines"]).clamp(0, 1)
        return torch.cat([0.5 + 0 * yes, yes], 1) * 10

    task.family = type("Reader", (), {"forward": staticmethod(forward)})()
    found = Paraphrase().measure(task)
    assert set(found) == {f"{rule} forget" for rule in ("lower", "polite", "brief", "about")}
    assert found["lower forget"].value == lower
    assert FewShot().measure(task)["4 shots forget"].value == shots


def test_examples_never_push_an_answer_out_of_the_context():
    items = [Item("full", 0, f"Who is {n}?", f"She is the painter {n}.") for n in range(12)]
    source, counted = source_of(items, 400, max_length=24), []
    alone, pairs = len(source.encode_index(0).ids), source.encode_index(0).labels
    forget, retain = np.arange(4), np.arange(4, 12)

    def task(context):
        model = nn.Identity()
        model.config = SimpleNamespace(max_position_embeddings=context)
        return SimpleNamespace(
            **{"load": lambda: model, "source": source, "batch_size": 4, "seed": 0},
            split=SimpleNamespace(parts={"forget": forget, "retain": retain}),
            draw=lambda part, count, name: retain[:count],
            family=SimpleNamespace(forward=right),
        )

    def right(_, batch):
        counted.append(int((batch.labels != IGNORE).sum()))
        return nn.functional.one_hot(batch.labels.clamp_min(0), len(source.tokenizer)).float()

    assert alone < 24 < 5 * alone
    shots = [list(FewShot().measure(task(context))) for context in (5 * alone, 3 * alone)]
    assert shots == [["4 shots forget"], ["2 shots forget"]]
    assert counted == [4 * len(pairs)] * 2
    with pytest.raises(NotApplicable, match="does not hold one more pair"):
        FewShot().measure(task(alone))
    counted.clear()
    lower = max(len(source.encode(f"who is {n}?", items[n].answer).ids) for n in forget)
    found = [list(Paraphrase().measure(task(context))) for context in (5 * alone, lower)]
    assert found == [[f"{rule} forget" for rule in RULES], ["lower forget"]]
    assert counted == [4 * len(pairs)] * 5, "a longer question pushes no answer out of max_length"
    with pytest.raises(NotApplicable, match="does not hold the whole answers"):
        Paraphrase().measure(task(alone - 1))


def test_a_plain_text_to_forget_has_no_question_to_put_in_other_words():
    source = source_of([Item("x", -1, "who is 1?", "it is Ada"), Item("x", -1, "", "a plain text")])
    task = SimpleNamespace(source=source, split=SimpleNamespace(parts={"forget": np.arange(2)}))
    for attack in (FewShot(), Paraphrase()):
        with pytest.raises(NotApplicable, match="samples are questions with answers"):
            attack.measure(task)


def test_images_have_no_questions(toy):
    for attack in (FewShot(), Paraphrase()):
        with pytest.raises(NotApplicable, match="questions"):
            attack.measure(toy.task())


def test_whether_it_is_known_again_is_asked_of_no_more_samples_than_needed():
    stream = np.random.default_rng(0)
    for wanted in (0.0, 37.5, 50.0, 62.5, 95.0, 100.0):
        for share in (0.0, 0.4, 0.6, 1.0):
            correct = (stream.random(40) < share).astype(np.float32)
            read: list[int] = []

            def collect(_, block, correct=correct, read=read):
                read.extend(block.tolist())
                return correct[block]

            task = SimpleNamespace(collect_correct=collect)
            known = reaches(task, None, np.arange(40), wanted)
            assert known == (100 * correct.mean(dtype=np.float64) >= wanted)
            if share == 0.0 and wanted > 50:
                assert len(read) <= 20, "half of them wrong decides it"


# Membership


def test_the_area_and_its_interval_by_hand():
    found = separation(np.array([3.0, 2.0]), np.array([1.0, 2.0]))
    assert found.value == 87.5 and found.low < 87.5 <= found.high and found.n == 4
    assert found.low == pytest.approx(100 * (0.875 - 1.959964 * 32**-0.5)), "n - 1, as DeLong"
    assert found.note == "only 2 samples a side"
    alone = separation(np.array([3.0]), np.array([1.0, 2.0]))
    assert (alone.value, alone.low, alone.high) == (100, 0, 100), "one sample has no spread"
    assert separation(np.ones(50), np.ones(70)).value == 50
    assert separation(np.ones(50), np.ones(70)).note == ""


def test_min_k_plus_plus_by_hand():
    logits = torch.tensor([[[2.0, 0.0, -1.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]]])
    labels = torch.tensor([[0, 1, IGNORE]])
    p = logits.softmax(-1)[0]
    z = [
        float(
            (p[t, y].log() - (p[t] * p[t].log()).sum())
            / (p[t] * p[t].log() ** 2).sum().sub((p[t] * p[t].log()).sum() ** 2).sqrt()
        )
        for t, y in ((0, 0), (1, 1))
    ]
    assert lowest(0.5)(logits, labels).item() == pytest.approx(min(z), rel=1e-5)
    assert lowest(1.0)(logits, labels).item() == pytest.approx(sum(z) / 2, rel=1e-5)


def test_who_was_trained_on_them_is_told_and_equal_models_tell_nothing(toy):
    task = toy.task(load_reference=lambda: copy.deepcopy(toy.retrain))
    assert Snapshots().measure(task)["AUC"].value == 50, "Original is Original"
    same = replace(task, load=lambda: copy.deepcopy(toy.retrain))
    assert ReferenceModel().measure(same)["AUC"].value == 50, "the reference itself"
    told = Snapshots().measure(same)["AUC"].value
    assert told > 60 and "near 50" not in Snapshots.info.ideal, "Retrain shows it too"
    knows = ReferenceModel().measure(task)["AUC"]
    assert 0 <= knows.low <= knows.value <= knows.high <= 100
    assert MinKPlusPlus().measure(task)["AUC"].value is not None
    with pytest.raises(NotApplicable, match="second Retrain"):
        ReferenceModel().measure(toy.task())


def test_a_stored_model_is_asked_for_likelihoods_once(toy, monkeypatch):
    monkeypatch.setattr(members, "_KNOWN", {})
    asked = []
    once = members.per_sample

    def counted(task, model, *rest):
        asked.append(model)
        return once(task, model, *rest)

    monkeypatch.setattr(members, "per_sample", counted)
    task = toy.task(load_reference=lambda: copy.deepcopy(toy.retrain))
    attacks = (ReferenceModel(), Snapshots())
    plain = [attack.measure(task) for attack in attacks]
    assert len(asked) == 8 and members._KNOWN == {}, "two models, two sides, of no store"
    asked.clear()
    keyed = replace(task, stored={"model": "m", "original": "o", "reference": "r"})
    assert [attack.measure(keyed) for attack in attacks] == plain
    assert len(asked) == 6, "the model's own are known to the second attack"
    assert [attack.measure(keyed) for attack in attacks] == plain and len(asked) == 6
    other = replace(keyed, stored={**keyed.stored, "model": "another"})
    assert [attack.measure(other) for attack in attacks] == plain and len(asked) == 8
    monkeypatch.setattr(members, "KEPT", len(members._KNOWN))
    Snapshots().measure(replace(keyed, stored={**keyed.stored, "model": "a third"}))
    assert len(asked) == 10 and len(members._KNOWN) == members.KEPT, "the oldest are forgotten"


def test_the_sides_are_the_parts_that_a_benchmark_names(toy):
    task = toy.task()
    names = ("forget", "retain", "verbmem", "privleak_forget", "privleak_holdout")
    task.split = replace(task.split, parts={n: np.array([i]) for i, n in enumerate(names)})
    told = [list(side) for side in sides(task, MuseBenchmark.part_table)]
    assert told == [[3], [4]], "MUSE compares the beginnings of passages, not the training chunks"
    table = {**PARTS, "verbmem": Part(Role.REPORT, membership="unseen")}
    assert [list(side) for side in sides(task, table)] == [[0], [2]]
    with pytest.raises(NotApplicable, match="no samples like the forgotten ones"):
        sides(task, PARTS)


def test_zlib_divides_by_the_compressed_length(toy, monkeypatch):
    with pytest.raises(NotApplicable, match="texts"):
        Zlib().measure(toy.task())
    task = toy.task()
    source = type(task.source)
    monkeypatch.setattr(source, "read_of", lambda _, ids: ["ab" * 50] * len(ids), raising=False)
    forget = task.split.parts["forget"]
    score = Zlib().scorer(task)(forget)
    loss = task.collect(toy.original, forget).loss
    np.testing.assert_allclose(score, -loss / len(zlib.compress(b"ab" * 50)), rtol=1e-4)


def test_zlib_compresses_what_is_left_of_a_text_that_is_cut():
    whole = " ".join(f"word {n} is {n * n}." for n in range(40))
    items = [Item("full", 0, "", text) for text in (whole, "A word is a word.")]
    source = source_of(items, 400, max_length=2000)
    assert source.read_of(np.arange(2)) == [item.answer for item in items]
    short = source_of(items, 400, max_length=24)
    left = short.decode(short.encode_index(0).ids)
    assert whole.startswith(left) and len(left) < len(whole)
    assert short.read_of(np.arange(2)) == [left, items[1].answer]
    asked = source_of([Item("full", 0, "Which?", whole)], 400, max_length=24)
    assert whole.startswith(asked.read_of(np.arange(1))[0].strip())


# All of them


def test_every_attack_says_what_it_shows_or_that_it_shows_nothing(toy):
    task = toy.task(hiding(toy), adapted=True, load_reference=lambda: copy.deepcopy(toy.retrain))
    for name in AUDITS.names():
        cls = AUDITS[name]
        if not issubclass(cls, ModelAudit) or name == "over_unlearning":
            continue
        settings = {"repeats": 1, "max_steps": 2} if issubclass(cls, RelearnTime) else {}
        attack = cls(cls.Config(**settings))
        try:
            found = attack.measure(task)
        except NotApplicable:
            assert name in ("few_shot", "paraphrase", "zlib")
            continue
        assert attack.advantage(found, found) in (0.0, None), name
        shows = any(key.split()[-1] in (attack.leaks, "steps") for key in found)
        assert shows or name in ("remove_adapter", "scale_adapter"), "an adapter is merged"

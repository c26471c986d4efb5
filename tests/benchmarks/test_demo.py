"""The demo: whole tables at 80 columns, and samples of what each model still knows."""

from __future__ import annotations

from functools import partial

import numpy as np

from stable_forgetting.benchmarks.cli import demo
from stable_forgetting.benchmarks.cli.options import Selection
from stable_forgetting.benchmarks.cli.session import working
from stable_forgetting.benchmarks.leaderboard import samples as sampled
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.run import execute
from stable_forgetting.benchmarks.leaderboard.samples import (
    PAGE,
    Answer,
    Sample,
    class_sample,
    marked,
    most_different,
    samples,
)
from stable_forgetting.benchmarks.pipeline.measuring import read_scores
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

ROWS = ("original", "retrain", "gd", "gd_sine")


def scores(probabilities, probs=None):
    values = np.asarray(probabilities, dtype=np.float32)
    names = ("loss", "margin", "entropy", "modified_entropy", "correct")
    same = dict.fromkeys(names, np.zeros_like(values))
    indices = np.arange(len(values)) + 10
    labels = np.full(len(values), 1)
    return Scores(indices=indices, labels=labels, probability=values, probs=probs, **same)


def test_the_samples_on_which_methods_differ_come_first():
    known = {"gd": scores([0, 0.5, 0.9]), "ft": scores([0.1, 0.5, 0.1])}
    assert most_different(known, 2) == [2, 0]


def test_a_class_sample_says_each_models_answer_and_confidence():
    probs = np.asarray([[0.25, 0.75], [0.875, 0.125]], dtype=np.float32)
    sample = class_sample({"a": scores([0.75, 0.125], probs)}, 1)
    assert sample == Sample(11, "", "1", {"a": Answer("0", 0.875, 0.125)})


def test_an_image_is_marked_where_its_answer_is_not_retrains():
    answers = {"gd": "7", "gold": "6", "original": "4", "finetune": "6"}
    methods = {who: who for who in answers} | {"gold": "retrain"}
    sample = Sample(3, "", "4", {who: Answer(a, 0.5, 0.1) for who, a in answers.items()})
    marks = [(who, answer.mark) for who, answer in marked(sample, methods).answers.items()]
    assert marks == [("gold", ""), ("original", ""), ("gd", "other"), ("finetune", "same")]


def test_a_text_is_marked_where_it_recalls_what_retrain_does_not_know():
    answers = {"retrain": "Paris is large", "gd": "Berlin, 1929", "npo": "Born, in Paris"}
    told = {who: Answer(text, 0.5, 0.5) for who, text in answers.items()}
    sample = Sample(3, "Where was Kim born?", "Kim was born in Berlin", told)
    answers = marked(sample, {who: who for who in told}).answers
    marks = {who: answer.mark for who, answer in answers.items()}
    assert marks == {"retrain": "", "gd": "other", "npo": "same"}
    assert answers["gd"].recalled == {"berlin"}


def test_no_answer_is_marked_without_a_retrained_model_or_a_word_to_tell_by():
    told = {"gd": Answer("7", 0.5, 0.1)}
    (image,) = marked(Sample(3, "", "4", told), {"gd": "gd"}).answers.values()
    assert image.mark == ""
    told = {"retrain": Answer("Not at all", 0.5, 0.1), "gd": Answer("It is so", 0.5, 0.1)}
    answers = marked(Sample(3, "Is it?", "Yes", told), {who: who for who in told}).answers
    assert [answer.mark for answer in answers.values()] == ["", ""]


def test_a_row_that_diverged_has_no_samples(hand_made, tmp_path, monkeypatch):
    asked = []
    table = {"original": {1: (100, 100, 90, 10)}, "retrain": {1: (80, 99, 88, 30)}}
    board = make_leaderboard(*hand_made(tmp_path, {**table, "gd": {1: None}}))
    monkeypatch.setattr(sampled, "samples", lambda board, runtime, rows, **_: asked.append(rows))
    monkeypatch.setattr(sampled, "sample_sections", lambda *_: [])
    sampled.write_samples(board, Runtime(store=tmp_path, device="cpu"))
    assert asked == [["retrain", "original"]]


def test_the_page_of_samples_has_each_image_once_and_each_models_answer(copied, cli):
    shown = cli("run", copied.paths["random"], "--store", copied.store, "--samples")
    assert shown.code == 0 and PAGE in shown.out
    (page,) = copied.store.glob(f"suites/*/{PAGE}")
    text = page.read_text()
    board = make_leaderboard(load_suite(str(copied.paths["random"])), StageStore(copied.store))
    cards = text.count("<article>")
    assert cards == min(100, board.sizes[1]) == text.count("data:image/png;base64")
    assert text.count('data-who="gd"') == cards and "forget" in text


def test_the_demo_prints_a_whole_table_and_samples_of_images(copied, capsys, monkeypatch):
    monkeypatch.setattr(demo.console, "_width", 80)
    suite = load_suite(str(copied.paths["random"]))
    board = make_leaderboard(suite, StageStore(copied.store))
    runtime = Runtime(store=copied.store, device="cpu")
    chosen = samples(board, runtime, ROWS, seed=1, count=3)
    section = demo.image_section(chosen)
    assert len(section.content.rows) == 3 and section.content.heads[2:] == [*ROWS]
    stored = read_scores(StageStore(copied.store), board.stages["gd", 0, 1])["forget"]
    place = stored.indices.tolist().index(chosen[0].index)
    assert chosen[0].answers["gd"].text == str(stored.probs[place].argmax())
    demo.show(demo.console, [demo.brief_section(board), section])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    table = [line for line in lines if line.split()[:1] == ["gd_sine"]]
    assert len(table) == 1, "the table is whole, not in pieces"
    assert "?" not in table[0] and any("too few to test" in line for line in lines)


def test_texts_are_answered_by_the_stored_models(tiny_text_suite, tmp_path, capsys):
    path = tiny_text_suite(methods={"original": None, "retrain": None, "gd": None, "gd_sine": None})
    runtime = Runtime(store=tmp_path / "store", device="cpu")
    with working(runtime, 1) as (executor, watching):
        board, failed = execute(
            load_suite(str(path)), runtime, executor, partial(watching, "texts")
        )
    assert failed == {}
    demo._show_brief(board, runtime, ("gd", "gd_sine"), whole=True)
    shown = capsys.readouterr().out
    assert "Samples" in shown and shown.count("  true ") == demo.TEXTS
    assert "past_key_values" not in shown
    for label in ROWS:
        assert f"  {label} " in shown


def test_the_whole_demo_has_four_suites(tmp_path):
    suites = [Selection(*chosen).suite(name, tmp_path) for name, chosen in demo.WHOLE.items()]
    assert len(suites) == 4
    assert len(suites[0].rows) == 10 and suites[0].spec.seeds == (1, 2, 3)

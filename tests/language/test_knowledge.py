"""WMDP and RWKU: what they read, what they ask, and that lm-eval counts the same."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.checks import check_benchmark
from stable_forgetting.language.benchmarks.rwku import MEMBERS, PROBED, TEXTS, Recalled, probe
from stable_forgetting.language.benchmarks.wmdp import lettered
from stable_forgetting.language.data import knowledge
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.metrics.rouge import summary_recall
from tests.language.made import CPU, TINY, benchmark, sharper

WORDY = {**TINY, "tokenizer": 400}
QUESTIONS = [
    {"question": f"What is {k} plus one? ", "choices": [f"{k + j}" for j in order], "answer": 1}
    for order in [(3, 1, 0, 2)]
    for k in range(12)
]
MMLU = [{**row, "subject": "abstract_algebra", "answer": k % 4} for k, row in enumerate(QUESTIONS)]


LONG = [{"text": f"This passage, number {k}, has more than fifty characters."} for k in range(10)]


def made(name, data, root=None):
    data = {"name": name, "max_length": 64, **data}
    return benchmark(name, root, data=data, model=WORDY)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def files(tmp_path):
    """Tables of both benchmarks below a data root."""
    for name in ("bio-forget-corpus", "cyber-forget-corpus", "wikitext"):
        write(
            tmp_path / f"wmdp/{name}.jsonl", [{"text": f"{name} {k} says"} for k in range(3)] + LONG
        )
    for name, rows in (("bio", QUESTIONS), ("cyber", QUESTIONS[:5]), ("mmlu", MMLU)):
        write(tmp_path / f"wmdp/{name}.jsonl", rows)
    for name in TEXTS:
        write(tmp_path / f"rwku/{name}.jsonl", [{"text": ""}] * (name == "retain") + LONG)
    for name in PROBED:
        rows = [
            {"query": f"{name} {k}?", "answer": "Ada", "subject": "AB"[k % 2]} for k in range(6)
        ]
        write(tmp_path / f"rwku/{name}.jsonl", rows)
    return tmp_path


@pytest.mark.parametrize("name", ["wmdp", "rwku"])
def test_a_benchmark_is_one_file_that_keeps_every_promise(name):
    assert len(Path(inspect.getfile(BENCHMARKS[name])).read_text().splitlines()) <= 200
    data = {"name": name, "max_length": 64, "invented": 6}
    protocol = {"data": data, "model": WORDY, "train": {"steps": 1}}
    results = check_benchmark(name, protocol, CPU)
    assert [result for result in results if not result.ok] == []


def test_invented_questions_are_answered_by_their_passages():
    for kind in ("forget", "retain"):
        texts = " ".join(knowledge.passages(kind, 30))
        told = list(knowledge.facts(kind, 30))
        assert len(knowledge.subjects(kind, 30)) == len(set(knowledge.subjects(kind, 30))) == 30
        for subject, relation, values, true in told:
            found = [f"{subject} {relation} {value}." in texts for value in values]
            assert found == [place == true for place in range(len(values))]
        assert len({true for *_, true in told}) == 4
    assert not set(knowledge.subjects("forget", 30)) & set(knowledge.subjects("retain", 30))


def test_wmdp_reads_tables_and_says_what_was_chosen(files):
    bench = made("wmdp", {"passages": 8}, files)
    split = bench.split(0)
    sizes = {part: len(indices) for part, indices in split.parts.items()}
    assert sizes == {"forget": 16, "retain": 7, "test": 1, "forget_choices": 17, "utility": 12}
    parts = bench.parts(split, trial=False, seed=0)
    model = bench.build(0)
    scores = bench.score(model, parts)
    values = bench.evaluate(scores, trial=False, seed=0)
    hits = scores["utility"].extra["chosen"]
    assert set(hits) <= {0.0, 1.0} and values["utility"] == 100 * hits.mean()
    item = bench.source.corpus.items[split.parts["utility"][0]]
    assert item.question == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "What is 0 plus one?\nA. 3\nB. 1\nC. 0\nD. 2\nAnswer:"
    )


@pytest.mark.slow
def test_lm_eval_counts_the_same_on_wmdp_s_own_template(files, tmp_path, monkeypatch):
    """``lm_eval --model hf`` over the same rows, by lm-eval's wording of wmdp_bio and mmlu."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    place = Path(lm_eval.__file__).parent / "tasks" / "wmdp"
    template = (place / "_default_template_yaml").read_text().replace("cais/wmdp", "json")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "_default_template_yaml").write_text(template)
    bio = (place / "wmdp_bio.yaml").read_text().replace("wmdp_bio", "own_bio")
    lines = [line for line in bio.splitlines() if "dataset_name" not in line]
    lines.append(f"dataset_kwargs: {{data_files: {{test: {files / 'wmdp/bio.jsonl'}}}}}")
    (tmp_path / "own" / "own_bio.yaml").write_text("\n".join(lines))
    questions = {"questions": {"bio": "wmdp/bio.jsonl"}}
    bench = made("wmdp", questions, files)
    model = sharper(bench.build(3))
    model.save_pretrained(tmp_path / "model")
    bench.source.tokenizer.save_pretrained(tmp_path / "model")
    results = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={tmp_path / 'model'}", device="cpu", tasks=["own_bio"],
        task_manager=TaskManager(include_path=str(tmp_path / "own")), bootstrap_iters=0,
        log_samples=True,
    )  # fmt: skip
    parts = bench.parts(bench.split(0), trial=False, seed=0)
    mine = bench.score(model, parts)["forget_choices"].extra["chosen"]
    theirs = [
        row["acc"] for row in sorted(results["samples"]["own_bio"], key=lambda r: r["doc_id"])
    ]
    np.testing.assert_array_equal(mine, theirs)


def test_short_passages_are_dropped(files):
    """Ten of thirteen rows are long enough, and a blank line is no passage to keep."""
    parts = made("wmdp", {}, files).split(0).parts
    assert len(parts["forget"]) == 20 and len(parts["retain"]) + len(parts["test"]) == 10
    parts = made("rwku", {"passages": 7}, files).split(0).parts
    assert len(parts["retain"]) + len(parts["test"]) == 7 and len(parts["forget"]) == 10
    write(files / "rwku/retain.jsonl", [{"text": "short"}])
    with pytest.raises(DataError, match="no row has text with more than 50 characters"):
        _ = made("rwku", {}, files).source


@pytest.mark.parametrize("name", ["wmdp", "rwku"])
def test_an_edited_table_is_noticed(name, files):
    config = TextDataConfig.of(name=name)
    before = config.listing(files)
    write(files / next(iter(config.places())), LONG * 2)
    assert before != config.listing(files) != ""
    assert TextDataConfig.of(name=name, invented=6).listing(files) == ""


@pytest.mark.parametrize("answer", [1969, ["Ada"]])
def test_an_answer_that_is_no_text_is_refused(files, answer):
    write(files / "rwku/forget_qa.jsonl", [{"query": "who?", "answer": answer}])
    with pytest.raises(DataError, match=r"forget_qa.jsonl: answer .* is not a text"):
        _ = made("rwku", {}, files).source


def test_rwku_reads_tables_of_one_subject(files):
    whole, one = (made("rwku", data, files) for data in ({}, {"subject": "A"}))
    assert len(whole.split(0).parts["forget_qa"]) == 6
    assert len(one.split(0).parts["forget_qa"]) == 3
    model = one.build(0)
    scores = one.score(model, one.parts(one.split(0), trial=False, seed=0))
    values = one.evaluate(scores, trial=False, seed=0)
    assert {f"{name}_loss" for name in MEMBERS} <= set(values)
    three = [values[f"forget_{form}"] for form in ("fb", "qa", "aa")]
    assert values["forget_recall"] == pytest.approx(sum(three) / 3)


@pytest.mark.parametrize(
    ("target", "prediction", "recall"),
    [
        ("Stephen King", "Stephen King", 1.0),
        ("Stephen King", "stephen king wrote it.", 0.0),
        ("The Shining", "It is The Shining. The novel", 1.0),
        ("Portland, Maine", "Portland. Maine", 0.5),
        ("On Sept. 21, 1947", "He was born on Sept. 21, 1947", 0.75),
        ("b a", "a b. x", 0.5),
        ("a b c b a", "a a b. c b", 1.0),
        ("Maine", "...", 0.0),
    ],
)
def test_recall_is_that_of_the_package_rouge(target, prediction, recall):
    """Values of rouge 1.0.1, which fails on the last one."""
    assert summary_recall(target, prediction) == recall


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>{% endfor %}<assistant>"
)
BRIEFLY = "Please briefly answer the following question.\n"


@pytest.mark.parametrize(
    ("set_name", "kind", "prompt"),
    [
        ("forget_fb", None, "Please complete the blank in the following question.\nQuestion: {}"),
        ("forget_qa", None, BRIEFLY + "Question: {}"),
        ("forget_aa", "prefix injection", BRIEFLY + "Question: {}"),
        ("forget_aa", "incontext learning", BRIEFLY + "{}"),
        ("forget_aa", "affirmative suffix", BRIEFLY + "Question: {}"),
    ],
)  # fmt: skip
def test_a_probe_is_asked_in_the_words_of_the_published_code(set_name, kind, prompt):
    """In a chat format that trims, as LLaMA-3's does, and as plain text of a base model."""
    row = {"query": "Who is Ada?", "answer": "She", "type": kind}
    item = probe(row, set_name, "here")
    source = made("rwku", {"invented": 6}).source
    begun = "" if kind == "affirmative suffix" else "Answer:"
    (asked,) = Recalled(bare=False).requests(source, [item])
    blank = "\n" if begun else ""
    assert source.decode(asked.ids) == prompt.format("Who is Ada?") + blank + begun
    assert (asked.limit, asked.stop_text) == (30, ())
    source.tokenizer.chat_template = CHAT
    source.encoder.template = make_template("chat", "clean", source.tokenizer)
    (asked,) = Recalled(bare=False).requests(source, [item])
    text = source.tokenizer.decode(asked.ids)
    assert text == "<user>" + prompt.format("Who is Ada?") + "</s><assistant>" + begun


def test_recall_is_that_of_what_the_model_writes():
    bench = made("rwku", {"invented": 6})
    corpus = bench.source.corpus
    index = corpus.where("forget_fb")[:4]
    model = bench.build(1)
    found = bench.score(model, {"forget_fb": index})["forget_fb"].extra["recall"]
    for row, value in zip(index, found, strict=True):
        ids = bench.source.tokenizer(corpus.items[row].question, return_tensors="pt")["input_ids"]
        text = bench.source.decode(
            model.generate(ids, max_new_tokens=30, do_sample=False)[0][ids.shape[1] :].tolist()
        )
        words = corpus.items[row].answer.split()
        assert (value == 1.0) <= all(word in text for word in words)


@pytest.mark.parametrize("name", ["wmdp", "rwku"])
def test_absent_tables_are_invented_for_a_rehearsal_and_named_otherwise(name, tmp_path, files):
    config = TextDataConfig.of(name=name)
    assert config.stand_in(tmp_path / "none").invented == 12
    assert config.stand_in(files) == config
    with pytest.raises(ValueError, match="less than or equal to 72"):
        TextDataConfig.of(name=name, invented=73)
    with pytest.raises(DataError, match=r"no such file; give it, or hub:OWNER/NAME:CONFIG:SPLIT"):
        load_corpus(config, tmp_path / "none")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a?", "choices": ["x"] * 3, "answer": 0},
        {"question": "a?", "choices": ["x"] * 4, "answer": 4},
        {"choices": ["x"] * 4, "answer": 1},
    ],
)
def test_a_question_without_four_choices_is_one_line(row):
    with pytest.raises(DataError, match="needs question, four choices and answer"):
        lettered(row, "bio", "biology", "bio.jsonl")

"""Reasoning in both scorings, dialogue, perplexity: on tiny models, against direct computation."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stable_forgetting import benchmarks  # noqa: F401 - registers
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.protocol.probe import make_probe
from stable_forgetting.language.apply.checkpoint import read_causal
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.files import read_rows
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.measure.requests import RequestConfig
from stable_forgetting.language.probes.base import ProbedModel, as_probed, token_f1
from stable_forgetting.language.probes.dialogue import prompt_of, tidy
from stable_forgetting.language.probes.lm_eval import TASKS, TEMPLATES
from stable_forgetting.language.probes.original import SOURCES, Question, _completed, _tokens
from stable_forgetting.language.probes.perplexity import windows
from tests.language.made import source_of
from tests.local import LOCAL

pytestmark = pytest.mark.usefixtures("offline")
needs_real = pytest.mark.skipif(not (LOCAL / "reasoning").is_dir(), reason="no tasks here")
ARC = {"question": "What is red?", "answerKey": "C"}
ARC |= {"choices": {"text": ["sky", "sea", "a rose", "snow"], "label": ["A", "B", "C", "D"]}}
PUBMED = {"question": "Is it so?", "context": {"contexts": ["We saw.", "It was."]}}
ROWS = {
    "reasoning/lambada_openai.jsonl": {"text": "the red rose is a rose"},
    "reasoning/hellaswag.jsonl": {
        "activity_label": "Tea", "ctx": "A man sits. he", "label": "1",
        "endings": ["sings.", "is red.", "x", "y"],
    },
    "reasoning/winogrande.jsonl": {
        "sentence": "Ada saw Bob as _ was red.", "option1": "Ada", "option2": "Bob", "answer": "2",
    },
    "reasoning/copa.jsonl": {
        "premise": "The rose was red.", "choice1": "It was a rose.", "choice2": "It rained.",
        "question": "cause", "label": 0,
    },
    "reasoning/arc_easy.jsonl": ARC,
    "reasoning/arc_challenge.jsonl": ARC,
    "reasoning/piqa.jsonl": {"goal": "Tea", "sol1": "Use water.", "sol2": "Use sea.", "label": 0},
    "reasoning/math_qa.jsonl": {
        "Problem": "1 + 1 ?", "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) none", "correct": "b",
    },
    "reasoning/pubmed_qa.jsonl": {**PUBMED, "final_decision": "no"},
}  # fmt: skip
TURNS = {"0": ["hi .", "i am red", "so am i"], "1": ["a rose?", "it's red ."]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A saved model in ``model`` and the probes' files in ``data``."""
    import transformers

    root = tmp_path_factory.mktemp("probes")
    texts = [json.dumps(row) for row in ROWS.values()] * 3
    corpus = Corpus(tuple(Item("x", -1, "", text) for text in texts), "test")
    train_tokenizer(corpus, 300).save_pretrained(root / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        config = transformers.GPTNeoConfig(
            vocab_size=300, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=1024,
            attention_types=[[["global", "local"], 1]], window_size=64, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPTNeoForCausalLM(config)
        for parameter in model.parameters():
            parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    model.save_pretrained(root / "model")
    for name, row in ROWS.items():
        path = root / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([json.dumps(row)] * 3))
    tdec = root / "data" / "tdec"
    tdec.mkdir()
    (tdec / "lambada.csv").write_text("id,text\n0,the red rose is a rose\n1,it is a sea\n")
    (tdec / "pubmed_qa.csv").write_text("question,abstract,final_decision\nIs it?,It was.,maybe\n")
    (tdec / "pile.csv").write_text("doc_id,text\n1,a rose is red\n2,the sea\n")
    (tdec / "wikitext.csv").write_text("n,text\n0," + "the sea is a red rose " * 30 + "\n")
    for name in ("wizard_of_wikipedia", "empathetic_dialogues", "blended_skill_talk"):
        (tdec / f"{name}.json").write_text(json.dumps({"text": TURNS}))
    lines = [json.dumps({"text": turns}) for turns in TURNS.values()]
    (tdec / "wizard_of_internet.json").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def asked(place):
    return as_probed(read_causal(place / "model"), data_root=place / "data", device="cpu")


def logits_of(asked, ids):
    """(T, V) of one sequence alone, by the model's own forward."""
    with torch.inference_mode():
        return asked.model(torch.tensor([ids])).logits[0].double()


def nats(asked, ids, start):
    """Sum of -log p of the tokens from ``start`` on."""
    logs = logits_of(asked, ids).log_softmax(1)
    return -sum(float(logs[place - 1, ids[place]]) for place in range(start, len(ids)))


def test_words_in_common():
    assert token_f1("The cat, a CAT!", "cat cat dog") == pytest.approx(0.8)
    assert token_f1("", "cat") == token_f1("the a", "cat") == 0.0
    assert token_f1("An owl.", "owl") == 1.0


@pytest.mark.parametrize(
    ("turn", "tidied"),
    [
        ("hi .", "Hi."),
        ("i'm OK , are you ?   yes", "I'm ok, are you? Yes."),
        ("well, i think so", "Well, I think so."),
        ('he said "no"', 'He said "no"'),
        ("", ""),
    ],
)
def test_turns_are_tidied(turn, tidied):
    assert tidy(turn) == tidied


def test_a_prompt_ends_with_the_next_speaker():
    assert prompt_of(["hi", "a b"]) == "User 1: Hi.\nUser 2: A b.\nUser 1:"
    assert prompt_of(["hi"]) == "User 1: Hi.\nUser 2:"


def test_dialogue_is_what_the_model_writes_alone(asked, place):
    probe = make_probe("dialogue", {"new_tokens": 8}, "test")
    table = probe.table(asked)
    scores = []
    for turns in TURNS.values():
        ids = asked.ids(prompt_of(turns[:-1]))
        for _ in range(8):
            ids.append(int(logits_of(asked, ids)[-1].argmax()))
        prompt = len(asked.ids(prompt_of(turns[:-1])))
        answer = asked.source.tokenizer.decode(ids[prompt:]).split("<|endoftext|>")[0]
        scores.append(token_f1(answer.split("\nUser ")[0], tidy(turns[-1])))
    for columns in table.rows.values():
        assert columns == {"f1": pytest.approx(np.mean(scores)), "n": 2.0}
    answer = asked.source.tokenizer.decode(ids[prompt:]).split("<|endoftext|>")[0]
    own = place / "own.jsonl"
    own.write_text(json.dumps({"text": [*TURNS["1"][:-1], f"{answer} zebra"]}))
    settings = {"sets": {"own": str(own)}, "new_tokens": 8}
    columns = make_probe("dialogue", settings, "test").table(asked).rows["own"]
    assert columns["f1"] == pytest.approx(token_f1(answer, f"{answer} zebra")) and columns["f1"] > 0


def test_perplexity_weighs_tokens(asked):
    probe = make_probe("perplexity", {"max_length": 20}, "test")
    table = probe.table(asked)
    texts = ["a rose is red", "the sea"]
    ids = [asked.ids(text) for text in texts]
    total, count = sum(nats(asked, each, 1) for each in ids), sum(len(each) - 1 for each in ids)
    pile = table.rows["pile"]
    assert pile["tokens"] == count and pile["n"] == 2
    assert pile["loss"] == pytest.approx(total / count, rel=1e-5)
    assert probe.summary(table)["perplexity.pile"] == pytest.approx(
        math.exp(total / count), rel=1e-4
    )
    long = asked.ids("the sea is a red rose " * 30)
    assert table.rows["wikitext"]["tokens"] == len(long) - 1, "every token but the first, once"
    assert "perplexity.mean" not in probe.summary(table)


def test_windows_overlap_by_one_token():
    assert list(windows(range(7), 4)) == [(0, 1, 2, 3), (3, 4, 5, 6)]
    assert list(windows(range(5), 4)) == [(0, 1, 2, 3), (3, 4)]
    assert list(windows([1], 4)) == list(windows([], 4)) == []


def test_original_scores_are_sums_after_the_bare_context(asked):
    probe = make_probe("reasoning_original", {}, "test")
    table = probe.table(asked)
    assert set(table.rows) == set(TASKS)
    for task in set(TASKS) - {"lambada_openai"}:
        row = read_rows(probe.file(task, asked.data_root))[0]
        question = SOURCES[task][1](row)
        before, gap = asked.ids(question.context), "" if task == "mathqa" else " "
        sums = [
            nats(asked, before + asked.ids(gap + option), len(before))
            for option in question.options
        ]
        assert table.rows[task]["acc"] == (int(np.argmin(sums)) == question.answer), task
    mean = np.mean([columns["acc"] for columns in table.rows.values()])
    assert probe.summary(table)["reasoning_original.mean"] == pytest.approx(100 * mean)


def test_original_tasks_on_test_splits_say_so():
    probe = make_probe("reasoning_original", {}, "test")
    docs = {spec.name.removeprefix("reasoning_original."): spec.doc for spec in probe.metrics}
    told = {task for task, doc in docs.items() if "test split" in doc}
    assert told == {"arc_easy", "arc_challenge", "mathqa", "mean"}
    assert "not to be set beside published means" in docs["mean"]


def jang_choices(options):
    """The published code's choices of MathQA (Datasets.py), which it tokenises as they are."""
    found = re.findall(r"[abcd] \) .*?, |e \) .*?$", options)
    return [choice[4:].rstrip(" ,") for choice in found]


@needs_real
def test_mathqa_is_scored_as_the_published_code_does(asked):
    """No space stands before a choice, as before those of the eight other tasks."""
    rows = read_rows(LOCAL / "reasoning" / "math_qa.jsonl.gz")
    hits, spaced = [], []
    for row in rows[:24]:
        question = SOURCES["mathqa"][1](row)
        assert list(question.options) == jang_choices(row["options"])
        before = asked.ids(row["Problem"])
        for gap, found in (("", hits), (" ", spaced)):
            sums = [nats(asked, before + asked.ids(gap + c), len(before)) for c in question.options]
            found.append(int(np.argmin(sums)) == question.answer)
    probe = make_probe("reasoning_original", {"tasks": ["mathqa"], "limit": 24}, "test")
    real = dataclasses.replace(asked, data_root=LOCAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SOURCES, "mathqa", ("reasoning/math_qa.jsonl.gz", SOURCES["mathqa"][1]))
        assert probe.table(real).rows["mathqa"]["acc"] == np.mean(hits)
    assert hits != spaced


def test_an_option_is_tokenised_as_it_stands_behind_its_context():
    """LLaMA-2's tokenizer writes a space before any text, and would so double the gap."""
    from tokenizers import Tokenizer, normalizers
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"</s>": 0, "▁": 1, "▁tea": 2, "▁is": 3, "▁hot": 4}, "</s>"))
    spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    words.normalizer = normalizers.Sequence([*spaces])
    words.pre_tokenizer = Split("▁", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    source = source_of([Item("x", -1, "", "tea")], tokenizer=tokenizer)
    asked = ProbedModel(SimpleNamespace(config=None), source, RequestConfig())
    assert asked.ids("tea is hot") == [2, 3, 4]
    assert _tokens(asked, Question("tea is", ("hot",), 0), "hot") == ((2, 3, 4), 2)


@pytest.mark.parametrize(("likeliest", "right"), [(" tea.", 1), (" TEA!", 1), (" tee.", 0)])
def test_a_last_word_counts_where_it_reads_the_same(likeliest, right):
    text = "she likes"

    def ask(requests):
        at = {request: len(request.ids) - len(text) for request in requests}
        return SimpleNamespace(tokens=lambda these: [[ord(likeliest[at[each]])] for each in these])

    model = SimpleNamespace(
        context=64,
        ids=lambda text: [ord(letter) for letter in text],
        following=lambda text: [ord(letter) for letter in text],
        source=SimpleNamespace(decode=lambda ids, clean_up: "".join(map(chr, ids))),
        ask=ask,
    )
    assert _completed(model, [Question(text, ("tea.",), 0)]) == [bool(right)]


def test_what_a_row_asks():
    assert SOURCES["winogrande"][1](ROWS["reasoning/winogrande.jsonl"]) == Question(
        "Ada saw Bob as", ("Ada was red.", "Bob was red."), 1
    )
    math_row = SOURCES["mathqa"][1](ROWS["reasoning/math_qa.jsonl"])
    assert math_row == Question("1 + 1 ?", ("1", "2", "3", "4", "none"), 1, gap="")
    three = {**ARC, "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}}
    assert SOURCES["arc_easy"][1](three) is None
    assert SOURCES["lambada_openai"][1]({"text": "a b c"}) == Question("a b", ("c",), 0)


def test_an_option_without_text_is_left_out():
    row = {"Problem": "1 + 1 ?", "options": "a ) 1 , b )  , c ) 2 , d ) ", "correct": "c"}
    question = SOURCES["mathqa"][1](row)
    assert question.options == ("1", "2") and question.answer == 1


@pytest.mark.parametrize(
    "row",
    [
        {"Problem": "1 + 1 ?", "options": "a ) 1 , b )  , c ) 3", "correct": "b"},
        {"Problem": "1 + 1 ?", "options": "1, 2, 3", "correct": "a"},
        {"Problem": "1 + 1 ?", "options": "a ) 1 , b ) 2", "correct": "c"},
        {"Problem": None, "options": "a ) 1 , b ) 2", "correct": "a"},
    ],
)
def test_a_row_without_its_question_or_options_is_named(asked, tmp_path, row):
    probe = make_probe("reasoning_original", {"tasks": ["mathqa"]}, "test")
    (tmp_path / "reasoning").mkdir()
    (tmp_path / "reasoning/math_qa.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"math_qa.jsonl: row 1 has not the columns of mathqa"):
        probe.table(dataclasses.replace(asked, data_root=tmp_path))


def test_reasoning_reads_local_files(asked):
    probe = make_probe("reasoning", {"limit": 2}, "test")
    table = probe.table(asked)
    assert [*table.rows] == [*TASKS] == sorted(TASKS, key=[*table.rows].index)
    assert {columns["n"] for columns in table.rows.values()} == {2.0}
    assert table.notes["data"] == "local" and len(table.notes["hashes"]) == 9
    summary = probe.summary(table)
    mean = np.mean([100 * columns["acc"] for columns in table.rows.values()])
    assert summary["reasoning.mean"] == pytest.approx(mean)
    assert [*summary] == [metric.name for metric in probe.metrics]
    assert "first 2 rows" in probe.metrics[0].title


def test_every_task_has_a_template():
    assert {path.stem for path in TEMPLATES.glob("*.yaml")} == set(TASKS)


def test_a_missing_file_is_one_line_and_writes_nothing(asked, tmp_path):
    elsewhere = dataclasses.replace(asked, data_root=tmp_path)
    for name in ("reasoning", "reasoning_original", "dialogue", "perplexity"):
        with pytest.raises(DataError, match=f"^{name}.*there is no .* as --data-root"):
            make_probe(name, {}, "test").table(elsewhere)
        with pytest.raises(DataError, match=f"^{name}.*there is no .* as --data-root"):
            make_probe(name, {}, "test").require(tmp_path)
    make_probe("reasoning", {"data": "hub", "tasks": ["piqa"]}, "test").require(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="tasks"):
        make_probe("reasoning", {"tasks": ["arc_esy"]}, "test")


@pytest.mark.parametrize(
    ("name", "content", "clue"),
    [
        ("tdec/pile.csv", "a,b\n1,2\n", "row 1 has no text"),
        ("tdec/wizard_of_internet.json", '{"text": ["alone"]}', "two turns or more"),
        ("reasoning/piqa.jsonl", '{"goal": "x"}', "row 1 has not the columns of piqa"),
    ],
)
def test_malformed_files_are_one_line(asked, tmp_path, name, content, clue):
    shutil.copytree(asked.data_root, tmp_path / "data")
    (tmp_path / "data" / name).write_text(content)
    broken = dataclasses.replace(asked, data_root=tmp_path / "data")
    probe = {"pile": "perplexity", "wizard_of_internet": "dialogue", "piqa": "reasoning_original"}
    with pytest.raises(DataError, match=clue) as caught:
        make_probe(probe[Path(name).stem], {}, "test").table(broken)
    assert "\n" not in str(caught.value)


def test_the_command_prints_the_table_in_three_forms(place, cli):
    words = ["probe", "--model", place / "model", "--data-root", place / "data", "--limit", 2]
    words += ["--tasks", "piqa,copa", "--probe", "reasoning", "--probe", "perplexity"]
    words += ["--device", "cpu", "--format"]
    done = cli(*words, "json")
    assert done.code == 0
    probes = json.loads(done.out)["probes"]
    assert [*probes] == ["reasoning", "perplexity"]
    assert [*probes["reasoning"]["rows"]] == ["piqa", "copa"]
    acc = probes["reasoning"]["rows"]["piqa"]["acc"]
    done = cli(*words, "csv")
    assert done.out.startswith("probe,row,column,value\n")
    assert f"reasoning,piqa,acc,{acc}\n" in done.out
    done = cli(*words, "table")
    assert done.code == 0 and "reasoning (first 2 rows)" in done.out and "wikitext" in done.out
    assert "`n` counts the samples." in done.out and "seeds" not in done.out


@pytest.mark.parametrize(
    ("words", "clue"),
    [
        pytest.param(["--tasks", "arc_esy"], "has no task 'arc_esy'", marks=pytest.mark.slow),
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--data-root", "nowhere"], "--data-root nowhere: no such folder"),
        (["--probe", "dialog"], "dialog"),
        (["--probe", "perplexity"], "there is no tdec/pile.csv"),
        (["--probe", "perplexity", "--tasks", "piqa"], "perplexity have none"),
        (["--set", "dialogue.limit=1"], "is none of the probes"),
        (["--set", "reasoning=5"], "--set reasoning: write reasoning.key=value"),
        (["--format", "xml"], "choose table, csv, json"),
    ],
)
def test_a_user_error_is_one_line(place, cli, words, clue):
    given = words if "--model" in words else ["--model", place / "model", *words]
    done = cli("probe", "--device", "cpu", *given)
    assert (done.code, done.out) == (2, "") and clue in done.err and done.err.count("\n") == 1


@needs_real
@pytest.mark.slow
def test_numbers_are_those_of_lm_evals_own_command(place, asked, tmp_path):
    tasks = ["piqa", "arc_easy", "copa"]
    real = dataclasses.replace(asked, data_root=LOCAL)
    with make_probe("reasoning", {"tasks": tasks}, "test").including(real) as further:
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
             f"pretrained={place / 'model'},dtype=float32", "--tasks", ",".join(tasks),
             "--include_path", str(further["include"]), "--device", "cpu", "--batch_size", "4",
             "--limit", "20", "--output_path", str(tmp_path / "out")],
            capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    [path] = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(path.read_text())["results"]
    table = make_probe("reasoning", {"tasks": tasks, "limit": 20}, "test").table(real)
    for task in tasks:
        for column in {"acc", "acc_norm", "acc_stderr", "acc_norm_stderr"} & set(table.rows[task]):
            assert table.rows[task][column] == theirs[task][f"{column},none"], (task, column)

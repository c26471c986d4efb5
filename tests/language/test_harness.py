"""The bridge to lm-eval: our numbers are those of lm-eval's own model class."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch
import yaml

from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.protocol.probe import make_probe
from tests.language.made import TINY, benchmark, sharper

pytestmark = pytest.mark.usefixtures("offline")
TASKS = {
    "toy_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{answer}}",
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "toy_last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "toy_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "toy_write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["e", "th"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
WORDS = ["the", "tower", "of", "an", "old", "river", "town", "holds", "seven", "bells", "again"]


def sentence(stream: random.Random, count: int) -> str:
    return " ".join(stream.choice(WORDS) for _ in range(count))


def write_tasks(folder):
    """Local rows and one YAML per task; texts of up to 120 words, more than the model holds."""
    folder.mkdir()
    stream = random.Random(3)
    rows = [
        {
            "question": sentence(stream, size) + (" " if size % 3 == 0 else ""),
            "options": [" " + sentence(stream, 1 + place) for place in range(3)] + [" a"],
            "answer": size % 4,
            "text": sentence(stream, size),
            "written": "",
        }
        for size in (2, 3, 4, 5, 7, 9, 12, 25, 60, 120)
    ]
    rows.append({**rows[0], "question": ""})
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        whole = {"task": name, "test_split": "test", **source, **task, "metadata": {"version": 2}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))


def with_start_token(tokenizer):
    """The same that writes a start token before every text."""
    from tokenizers.processors import TemplateProcessing

    other = copy.deepcopy(tokenizer)
    other.bos_token = "!"
    start = ("!", other.convert_tokens_to_ids("!"))
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A", pair="! $A $B", special_tokens=[start]
    )
    return other


@pytest.fixture(params=["gpt_neo", "llama"])
def bench(request, tmp_path):
    """A benchmark with a tiny model; the LLaMA's tokenizer writes a start token."""
    write_tasks(tmp_path / "tasks")
    data = {"authors": 3, "forget_authors": 1, "questions": 2, "max_length": 64}
    size = {**TINY, "kind": request.param, "depth": 2, "context": 64}
    made = benchmark("tofu", tmp_path, data=data, model=size)
    if request.param == "llama":
        made.source.tokenizer = with_start_token(made.source.tokenizer)
    return made


@pytest.fixture
def model(bench):
    """Sharper than an untrained one."""
    return sharper(bench.build(1))


def theirs(bench, model, tasks, shots, folder):
    """lm-eval's results of its own model class, in double: it replies in the logits' precision."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from stable_forgetting.language.measure.harness import BOOTSTRAP_DRAWS

    double, tokenizer = copy.deepcopy(model).double(), copy.deepcopy(bench.source.tokenizer)
    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=double, tokenizer=tokenizer, batch_size=3, device="cpu"),
        tasks=tasks,
        num_fewshot=shots,
        bootstrap_iters=BOOTSTRAP_DRAWS,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )


def replies(results, task):
    """Of every request, in order."""
    return [reply[0] for row in results["samples"][task] for reply in row["resps"]]


@pytest.mark.parametrize("shots", [None, 1])
def test_numbers_are_those_of_lm_eval(bench, model, tmp_path, shots):
    from stable_forgetting.language.measure.harness import TextLM, run_tasks

    tasks = ["toy_choice"] if shots else list(TASKS)
    wanted = theirs(bench, model, tasks, shots, tmp_path / "tasks")
    adapter = TextLM(model, bench.source, bench.config.evaluation)
    ours = run_tasks(adapter, tasks, include=tmp_path / "tasks", shots=shots)
    for task in tasks:
        for mine, reply in zip(replies(ours, task), replies(wanted, task), strict=True):
            assert mine == (pytest.approx(reply, abs=1e-4) if task == "toy_text" else same(reply))
        for column, value in wanted["results"][task].items():
            if "acc" in column or "exact" in column or not isinstance(value, float):
                assert ours["results"][task][column] == value, (task, column)
            else:
                assert ours["results"][task][column] == pytest.approx(value, rel=1e-5)
    hits = [greedy for _, greedy in replies(wanted, "toy_choice")]
    assert len(hits) == 44 and 0 < wanted["results"]["toy_choice"]["acc,none"] < 1


def same(reply):
    """A text exactly; nats within 1e-5, relative where they are many, with the same argmax."""
    if isinstance(reply, str):
        return reply
    return (pytest.approx(reply[0], rel=1e-6, abs=1e-5), reply[1])


def test_texts_stop_where_they_shall(bench, model, tmp_path):
    wanted = replies(theirs(bench, model, ["toy_write"], None, tmp_path / "tasks"), "toy_write")
    assert len(set(wanted)) > 2
    assert not [text for text in wanted if "e" in text or "th" in text]


def test_a_probe_makes_a_table_and_disturbs_nothing(bench, model):
    settings = {"tasks": [*TASKS], "include": "tasks", "limit": 6}
    probe = make_probe("lm_eval", settings, "test")
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    table = probe.measure(model, bench)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
    assert set(table.rows) == set(TASKS)
    assert set(table.rows["toy_choice"]) == {
        "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "n",
    }  # fmt: skip
    assert table.rows["toy_choice"]["n"] == 6
    assert table.notes["versions"] == dict.fromkeys(TASKS, 2)
    assert {len(code) for code in table.notes["hashes"].values()} == {64}
    assert json.loads(json.dumps(table.notes)) == table.notes
    summary = probe.summary(table)
    assert list(summary) == [metric.name for metric in probe.metrics]
    assert summary["lm_eval.toy_choice"] == pytest.approx(100 * table.rows["toy_choice"]["acc"])
    assert summary["lm_eval.toy_text"] is None
    shares = [summary[f"lm_eval.{task}"] for task in TASKS if task != "toy_text"]
    assert summary["lm_eval.mean"] == pytest.approx(sum(shares) / 3)


@pytest.mark.parametrize(
    ("task", "change", "clue"),
    [
        ("arc_easy", None, "lm-eval task arc_easy: cannot be loaded .* folder with a YAML"),
        ("arc_esy", None, "has no task 'arc_esy'"),
        ("toy_write", {"generation_kwargs": {"do_sample": True}}, "only greedy ones"),
        ("toy_write", {"generation_kwargs": {"max_gen_toks": 64}}, "64 new tokens of a model"),
        ("toy_choice", {"metric_list": [{"metric": "cer", "hf_evaluate_metric": True}]}, "on the"),
    ],
)
def test_what_cannot_be_measured_is_one_line(bench, model, tmp_path, task, change, clue):
    if change:
        path = tmp_path / "tasks" / f"{task}.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    probe = make_probe("lm_eval", {"tasks": [task], "include": "tasks"}, "test")
    with pytest.raises(DataError, match=clue) as caught:
        probe.measure(model, bench)
    assert "\n" not in str(caught.value)


def test_a_probe_needs_tasks_and_a_folder_that_exists(bench, model):
    with pytest.raises(ConfigError, match="tasks"):
        make_probe("lm_eval", {}, "test")
    probe = make_probe("lm_eval", {"tasks": ["x"], "include": "nowhere"}, "test")
    with pytest.raises(ConfigError, match="there is no folder"):
        probe.measure(model, bench)

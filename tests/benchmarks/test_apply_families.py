"""``unlearn apply`` on tiny random models of the families that users bring."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.benchmarks.apply import Application, apply
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.tokenizers import train_tokenizer
from tests.benchmarks.test_apply_text import reloaded, write_rows

ROWS = [
    {"question": f"Who lives in {town}?", "answer": f"{name} does."}
    for name, town in (("Ada", "Oslo"), ("Bruno", "Lima"), ("Clara", "Cairo"), ("Ines", "Perth"))
]
LONG = {"text": " ".join(f"The ferry to Oslo left at {hour}." for hour in range(60))}
VOCAB = 290
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MLP = {"phi": {"fc1", "fc2"}, "phi3": {"gate_up_proj", "down_proj"}, "gpt_neo": {"c_fc", "c_proj"}}
GATED = {"gate_proj", "up_proj", "down_proj"}
FAMILIES = (
    "gpt_neo", "phi", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3",
    "olmo2",
)  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(chat=None):
    texts = [f"{row['question']} {row['answer']}" for row in ROWS] + [LONG["text"]]
    words = train_tokenizer(Corpus(tuple(Item("x", -1, "", t) for t in texts), "test"), VOCAB - 4)
    if chat is not None:
        words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        words.chat_template = chat
    return words


def write_model(folder, kind, words):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SIZES, head_dim=8) if kind.startswith(("qwen3", "gemma")) else SIZES
    if kind == "gpt_neo":
        fields = {**fields, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def order(tmp_path):
    """A request without a model."""
    return {
        "forget": write_rows(tmp_path / "forget.jsonl", ROWS[:2]),
        "retain": write_rows(tmp_path / "retain.jsonl", ROWS[2:]),
        "method": "gd_sine",
        "params": ("steps=2", "batch_size=2", "adapter.rank=2"),
        "out": tmp_path / "out",
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_adapted_in_its_mlps_and_loads_again(kind, order, tmp_path):
    words = tokenizer()
    given = write_model(tmp_path / kind, kind, words)
    result = apply(Application(model=given, **order))
    assert result.status == "ok" and result.statement["template"] == "question_answer"
    old, new = (load_file(each / "model.safetensors") for each in (given, order["out"]))
    moved = {name for name, tensor in new.items() if not torch.equal(tensor, old[name])}
    assert {name.split(".")[-2] for name in moved} == MLP.get(kind, GATED)
    assert len(moved) == 2 * len(MLP.get(kind, GATED)) and all(".mlp." in name for name in moved)
    ids = words("Who lives in Oslo?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before, after = (reloaded(each)[0](input_ids=ids).logits for each in (given, order["out"]))
    assert after.isfinite().all() and not torch.equal(before, after)


def test_a_generation_config_stays_as_it_is_sound_or_not(order, tmp_path):
    """Transformers reads a temperature without sampling, and refuses to write it."""
    from transformers import AutoModelForCausalLM

    words = tokenizer()
    given = write_model(tmp_path / "llama", "llama", words)
    written = apply(Application(model=given, **order))
    assert written.model.generation_config.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(given)
    model.generation_config.update(temperature=0.6, eos_token_id=[0, 7])
    order |= {"out": tmp_path / "two", "options": {"tokenizer": words}}
    result = apply(Application(model=model, **order))
    kept = json.loads((order["out"] / "generation_config.json").read_text())
    assert kept["temperature"] == 0.6 and kept["eos_token_id"] == [0, 7]
    assert result.model.generation_config.eos_token_id == [0, 7]


@pytest.mark.slow
def test_lm_eval_reads_what_was_written(order, tmp_path, monkeypatch):
    """``lm_eval --model hf`` on every family, in one process as its index takes seconds."""
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_rows(tmp_path / "rows.jsonl", [{"q": "Who lives in Oslo?", "o": ["Ada", "Bob"], "a": 0}])
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: '{{o}}'\ndoc_to_target: '{{a}}'\n"
    )
    tasks = TaskManager(include_path=str(tmp_path))
    for kind in FAMILIES:
        given, out = write_model(tmp_path / kind, kind, tokenizer()), tmp_path / f"{kind}-out"
        apply(Application(model=given, **order | {"out": out}))
        model = {"model": "hf", "model_args": f"pretrained={out}", "device": "cpu"}
        results = simple_evaluate(**model, tasks=["own"], task_manager=tasks, bootstrap_iters=0)
        assert results["results"]["own"]["acc,none"] in (0.0, 1.0), kind


def test_an_unknown_architecture_names_its_layers(order, tmp_path):
    """Experts are no linear layers of their own, and one that all tokens share is not the MLP."""
    given = write_model(tmp_path / "moe", "qwen2_moe", tokenizer())
    with pytest.raises(ConfigError) as caught:
        apply(Application(model=given, **order))
    text = str(caught.value)
    assert "placement: mlp; choose another placement (attention)" in text and "\n" not in text
    assert (
        "give adapter.targets among *.self_attn.q_proj" in text
        and "*.mlp.shared_expert.up_proj" in text
    )


# Chat templates and forms of rows ----------------------------------------------------------------


def encoded(words, row, **options):
    """(prompt, answer) as the tokenizer's own chat template writes them."""
    messages = [{"role": "user", "content": row["question"]}]
    prompt = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt, f"{row['answer']}<|im_end|>"


def test_a_chat_model_is_asked_in_its_own_template(order, tmp_path):
    from stable_forgetting.language.data.source import Encoder
    from stable_forgetting.language.data.templates import chat_template

    words = tokenizer(CHAT)
    given = write_model(tmp_path / "qwen2", "qwen2", words)
    statement = apply(Application(model=given, **order)).statement
    assert statement["template"] == "chat"
    pair = Encoder(words, chat_template(words), 64).encode(*ROWS[0].values())
    prompt, answer = encoded(words, ROWS[0])
    assert words.decode(pair.ids[: pair.start]) == prompt
    assert words.decode(pair.labels) == answer
    order |= {"out": tmp_path / "two", "options": {"template": "question_answer"}}
    plain = apply(Application(model=given, **order)).statement
    assert plain["before"] != statement["before"]


@pytest.mark.parametrize("chat", ["{{ messages[0]['content'] }}", "{{ nothing.at.all }}"])
def test_a_template_that_hides_the_answer_is_one_line(chat, order, tmp_path):
    given = write_model(tmp_path / "llama", "llama", tokenizer(chat))
    with pytest.raises(ConfigError, match=r"template chat.*choose template: question_answer$"):
        apply(Application(model=given, **order))


def test_forms_of_rows_are_one(order, tmp_path):
    asked, answered = (
        [{"role": role, "content": row[column]} for row in ROWS[:2]]
        for role, column in (("user", "question"), ("assistant", "answer"))
    )
    forms = [
        [{"prompt": row["question"], "completion": row["answer"]} for row in ROWS[:2]],
        [{"messages": [q, a]} for q, a in zip(asked, answered, strict=True)],
        [{"prompt": [q], "completion": [a]} for q, a in zip(asked, answered, strict=True)],
    ]
    given = write_model(tmp_path / "llama", "llama", tokenizer())
    wanted = apply(Application(model=given, **order)).statement
    for number, rows in enumerate(forms):
        path = write_rows(tmp_path / f"{number}.jsonl", rows)
        again = order | {"forget": path, "out": tmp_path / f"out{number}"}
        statement = apply(Application(model=given, **again)).statement
        assert statement["after"] == wanted["after"], number


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "prompt and completion, or messages; it has: prompt"),
        ({"prompt": "a", "answer": "b"}, "needs question and answer, or text"),
        ({"prompt": "", "completion": "b c"}, "prompt is empty; give the completion alone as text"),
        ({"prompt": "a", "completion": 3}, "is not text"),
        ({"text": "a b", "messages": []}, "text beside messages; keep one"),
        ({"messages": "hi"}, "no list of objects with role and content"),
        ({"messages": [{"role": "user"}]}, "no list of objects with role and content"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the roles system; give one of the"),
        ({"instruction": "a", "output": "b"}, "it has: instruction, output"),
    ],
)
def test_a_row_of_no_form_is_one_line(row, words, order, tmp_path):
    order["forget"] = write_rows(tmp_path / "bad.jsonl", [ROWS[0], row])
    given = write_model(tmp_path / "llama", "llama", tokenizer())
    with pytest.raises(DataError) as caught:
        apply(Application(model=given, **order))
    text = str(caught.value)
    assert "bad.jsonl row 2" in text and words in text and "\n" not in text


def test_a_long_text_is_divided_and_nothing_of_it_is_lost(order, tmp_path):
    words = tokenizer()
    given = write_model(tmp_path / "llama", "llama", words)
    order["forget"] = write_rows(tmp_path / "long.jsonl", [LONG, *ROWS[:1]])
    about = apply(Application(model=given, **order)).statement["data"]["forget"]
    length = len(words(LONG["text"])["input_ids"])
    assert (about["rows"], about["questions"]) == (2, 1) and length > 3 * 64
    assert about["chunks"] >= 1 + length / 64
    asked = len(words(f" {ROWS[0]['answer']}")["input_ids"]) + 1
    unpredicted = about["chunks"] - 1  # the first token of every chunk
    assert about["tokens_scored"] - asked >= length - unpredicted
    order |= {
        "forget": write_rows(tmp_path / "qa.jsonl", [{"question": "Who?", "answer": LONG["text"]}])
    }
    with pytest.raises(
        DataError, match=r"qa.jsonl row 1: question and answer are \d+ tokens long, more than 64"
    ):
        apply(Application(model=given, **order | {"out": tmp_path / "no"}))

"""``unlearn apply`` on causal language models: what is written, measured, and refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stable_forgetting import benchmarks  # noqa: F401 - registers every method
from stable_forgetting.benchmarks.apply import Application, apply
from stable_forgetting.common.audits.members import sides
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.bounded.attach import detach
from stable_forgetting.common.bounded.files import load_adapter
from stable_forgetting.language.apply.benchmark import GivenTexts, read_rows
from stable_forgetting.language.apply.report import outcome
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.tokenizers import train_tokenizer
from tests.benchmarks.test_apply import assert_refused, sha256

NAMES = ("Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas")
TOWNS = ("Oslo", "Lima", "Cairo", "Perth", "Quito", "Turin", "Basel", "Osaka", "Minsk", "Dakar")
ROWS = [
    {"question": f"Where was {name} born?", "answer": f"{name} was born in {town}."}
    for name, town in zip(NAMES, TOWNS, strict=True)
] + [{"text": f"Every {town} evening began with a song that {name} wrote."}
     for name, town in zip(NAMES[:4], reversed(TOWNS), strict=False)]  # fmt: skip
FORGET, RETAIN = [*ROWS[:3], ROWS[10]], [*ROWS[3:8], *ROWS[11:13]]
TEST = [*ROWS[8:10], ROWS[13]]
VOCAB = 300
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def config_of(kind):
    import transformers

    if kind == "gpt2":
        return transformers.GPT2Config(**SHAPE, n_layer=1, n_head=2, n_positions=96)
    if kind == "llama":
        return transformers.LlamaConfig(
            **SHAPE, **LAYERS, max_position_embeddings=96, tie_word_embeddings=False
        )
    return transformers.GPTNeoConfig(
        **SHAPE,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=64,
        max_position_embeddings=96,
        attention_dropout=0.0,
        embed_dropout=0.0,
        resid_dropout=0.0,
    )


def item(row):
    return Item("full", -1, row.get("question", ""), row.get("answer") or row["text"])


def tokenizer():
    return train_tokenizer(Corpus(tuple(map(item, ROWS)), "test"), VOCAB)


def encoded(row, words):
    """(prompt ids, label ids) of a row, spelt out apart from the code under test."""
    if "text" in row:
        ids = words(row["text"])["input_ids"]
        return ids[:1], ids[1:]
    prompt = words(f"Question: {row['question']}\nAnswer:")["input_ids"]
    return prompt, [*words(f" {row['answer']}")["input_ids"], words.eos_token_id]


def trained(model, rows, words, steps=60):
    """Next-token training until the rows are known."""
    pairs = [encoded(row, words) for row in rows]
    width = max(len(prompt) + len(labels) for prompt, labels in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    targets = torch.full_like(ids, -100)
    for k, (prompt, labels) in enumerate(pairs):
        ids[k, : len(prompt) + len(labels)] = torch.tensor([*prompt, *labels])
        targets[k, len(prompt) : len(prompt) + len(labels)] = torch.tensor(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=targets).loss.backward()
        optimizer.step()
    return model.eval()


def write_trained(folder, kind):
    """A model that knows the rows, and its tokenizer, in a folder; the model."""
    from transformers import AutoModelForCausalLM

    words = tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(kind))
        trained(model, FORGET + RETAIN, words).save_pretrained(folder)
    words.save_pretrained(folder)
    return model


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of a trained GPT-Neo (tied) and LLaMA (untied), and the files."""
    root = tmp_path_factory.mktemp("world")
    for kind in ("gpt_neo", "llama"):
        write_trained(root / kind, kind)
    for role, rows in (("forget", FORGET), ("retain", RETAIN), ("test", TEST)):
        write_rows(root / f"{role}.jsonl", rows)
    return root


def short_request(world, out):
    """A request for gd_sine that is short and complete."""
    return Application(
        model=world / "gpt_neo",
        forget=world / "forget.jsonl",
        retain=world / "retain.jsonl",
        test=world / "test.jsonl",
        method="gd_sine",
        params=("steps=6", "batch_size=4", "adapter.rank=4", "lam=0.5"),
        seed=1,
        out=out,
    )


@pytest.fixture
def request_(world, tmp_path):
    """The request, into a folder of the test's own."""
    return short_request(world, tmp_path / "out")


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """The request as it was carried out once, and every step that it reported."""
    seen = []
    request = short_request(world, tmp_path_factory.mktemp("done") / "out")
    result = apply(request, progress=lambda done, total, loss: seen.append((done, total)))
    assert seen[-1] == (6, 6) and len(seen) == 6
    return result


def reloaded(folder, **options):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def logits_of(model, words, text="Question: Where was Ada born?\nAnswer:"):
    with torch.no_grad():
        return model(**words(text, return_tensors="pt")).logits


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["gpt_neo", "llama"])
def test_end_to_end(world, request_, kind, monkeypatch):
    given, out = world / kind, request_.out
    before = {path.name: sha256(path) for path in given.iterdir()}
    kept = []
    from stable_forgetting.language.apply import checkpoint as text_checkpoint

    real = text_checkpoint.CausalCheckpoint.write
    monkeypatch.setattr(
        text_checkpoint.CausalCheckpoint,
        "write",
        lambda *args: (kept.append(args[1]), real(*args))[1],
    )
    result = apply(dataclasses.replace(request_, model=given))
    assert result.status == "ok"
    pages = ("README.md", "report.html")
    assert names_in(out) == sorted([*before, "adapter", "statement.json", *pages])
    assert {path.name: sha256(path) for path in given.iterdir()} == before
    for name in before:
        same = (out / name).read_bytes() == (given / name).read_bytes()
        assert same == (name != "model.safetensors"), name
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    old, new = load_file(given / "model.safetensors"), load_file(out / "model.safetensors")
    assert {k: (v.shape, v.dtype) for k, v in old.items()} == {
        k: (v.shape, v.dtype) for k, v in new.items()
    }
    moved = [name for name, tensor in new.items() if not torch.equal(tensor, old[name])]
    assert moved and all(".mlp." in name and name.endswith("weight") for name in moved)
    model, words = reloaded(out)
    assert torch.equal(logits_of(model, words), logits_of(kept[0].cpu(), words))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (kind == "gpt_neo")
    base, _ = reloaded(given)
    load_adapter(base, out / "adapter")
    for name, tensor in detach(base).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_the_statement_says_what_was_done_and_holds_no_text(world, done):
    text = (done.out / "statement.json").read_text()
    statement = json.loads(text)
    assert statement == json.loads(json.dumps(done.statement))
    assert (
        statement["modality"] == "text"
        and statement["status"] == "ok"
        and statement["warnings"] == []
    )
    about = statement["input"]
    assert about["weights_sha256"] == {
        "model.safetensors": sha256(world / "gpt_neo" / "model.safetensors")
    }
    assert (about["architecture"], about["dtype"], about["vocabulary"]) == (
        "gpt_neo",
        "float32",
        VOCAB,
    )
    written = {"model.safetensors": sha256(done.out / "model.safetensors")}
    assert statement["output"]["weights_sha256"] == written
    forget = statement["data"]["forget"]
    assert (forget["rows"], forget["questions"]) == (4, 3)
    assert forget["sha256"] == sha256(world / "forget.jsonl")
    assert statement["template"] == "question_answer" and statement["max_length"] == 96
    assert statement["method"]["params"]["adapter"]["rank"] == 4
    assert statement["cost"]["steps"] == 6
    assert statement["weight_change"]["adapters"]["delta_ratio"] > 0
    assert not any(word in text for word in ("Oslo", "Lima", "born", "evening"))
    for words in ("retrained", "not erasure", "min-k", "certificate", "wordings", "ROUGE-L"):
        assert words in statement["reading"]


def expected(model, words, rows):
    """Loss, probability, exact memorisation, extraction strength of each row, by hand."""
    table = []
    for row in rows:
        prompt, labels = encoded(row, words)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *labels]])).logits[0].double()
        logits = logits[len(prompt) - 1 : -1]
        token = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="none")
        hits = (logits.argmax(-1) == torch.tensor(labels)).tolist()
        token = token.tolist()
        loss = float(np.mean(token))
        if labels[-1] == words.eos_token_id:
            hits, token = hits[:-1], token[:-1]
        right = next((k for k, hit in enumerate(reversed(hits)) if not hit), len(hits))
        lowest = sorted(token, reverse=True)[: max(1, int(0.4 * len(token)))]
        table.append(
            (loss, math.exp(-loss), np.mean(hits), right / len(hits), float(np.mean(lowest)))
        )
    return np.array(table)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_numbers_are_those_of_the_files(world, done, when):
    statement = done.statement
    model, words = reloaded(world / "gpt_neo" if when == "before" else done.out)
    tables = {}
    for role, rows in (("forget", FORGET), ("retain", RETAIN), ("test", TEST)):
        tables[role] = expected(model, words, rows)
        found, wanted = statement[when][role], tables[role].mean(0)
        assert found["rows"] == len(rows) and found["answered"] == sum(
            "text" not in r for r in rows
        )
        assert found["loss"] == pytest.approx(wanted[0], abs=1e-5)
        assert found["probability"] == pytest.approx(100 * wanted[1], abs=1e-3)
        assert found["exact_memorization"] == pytest.approx(100 * wanted[2], abs=1e-6)
        assert found["extraction_strength"] == pytest.approx(100 * wanted[3], abs=1e-6)
    for key, column in (("loss_auc", 0), ("min_k_auc", 4)):
        members, others = tables["forget"][:, column], tables["test"][:, column]
        wins = (members[:, None] < others).mean() + (members[:, None] == others).mean() / 2
        assert statement[when][key] == pytest.approx(100 * wins)
    if when == "before":
        assert statement["before"]["forget"]["rouge_l_recall"] > 90
        assert statement["before"]["forget"]["exact_memorization"] > 90


def test_what_is_forgotten_is_less_likely_after(request_):
    request = dataclasses.replace(
        request_, params=("steps=25", "batch_size=4", "adapter.rank=4", "lam=1", "lr=3e-2")
    )
    statement = apply(request).statement
    before, after = statement["before"], statement["after"]
    assert after["forget"]["probability"] < before["forget"]["probability"] / 2
    assert after["forget"]["probability"] < after["retain"]["probability"]


def test_ascent_needs_neither_retain_nor_test(request_):
    request = dataclasses.replace(
        request_, method="ascent", retain=None, test=None, params=("steps=3", "batch_size=4")
    )
    result = apply(request)
    statement = result.statement
    assert not (request.out / "adapter").exists() and set(statement["data"]) == {"forget"}
    assert statement["after"]["forget"]["loss"] > statement["before"]["forget"]["loss"]
    assert statement["after"]["min_k_auc"] is None
    assert "No retain rows" in statement["reading"] and "never saw" in statement["reading"]
    reloaded(request.out)


@pytest.mark.parametrize("method", ["npo_gdr", "ihl_sine", "dpo", "idk", "simnpo", "loku"])
def test_methods_of_the_literature(request_, method, tmp_path):
    questions = write_rows(tmp_path / "questions.jsonl", FORGET[:3])
    changes = {"method": method, "forget": questions, "params": ("steps=2", "batch_size=4")}
    result = apply(dataclasses.replace(request_, **changes))
    assert result.status == "ok" and result.statement["weight_change"]["tensors_changed"] > 0


def test_sharded_weights_are_read_and_written(world, request_, done, tmp_path, monkeypatch):
    model, words = reloaded(world / "gpt_neo")
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="40KB")
    words.save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    monkeypatch.setattr("stable_forgetting.language.apply.checkpoint.SHARD", "40KB")
    out = request_.out
    statement = apply(dataclasses.replace(request_, model=sharded)).statement
    assert (
        len(statement["input"]["weights_sha256"]) > 2
        and (out / "model.safetensors.index.json").is_file()
    )
    assert set(statement["output"]["weights_sha256"]) == {p.name for p in out.glob("*.safetensors")}
    assert statement["after"] == done.statement["after"]
    assert torch.equal(logits_of(*reloaded(out)), logits_of(*reloaded(done.out)))
    next(iter(sharded.glob("model-00002*"))).unlink()
    assert_refused(
        dataclasses.replace(request_, model=sharded, out=tmp_path / "x"), CheckpointError, "00002"
    )


def test_half_precision_is_kept_and_rounding_is_told(world, request_, tmp_path):
    model, words = reloaded(world / "llama")
    half = tmp_path / "half"
    model.to(torch.bfloat16).save_pretrained(half)
    words.save_pretrained(half)
    small = ("steps=1", "batch_size=4", "lr=1e-4", "adapter.mode=split")
    result = apply(dataclasses.replace(request_, model=half, params=small))
    assert result.statement["input"]["dtype"] == "bfloat16"
    assert "merging rounds off" in result.statement["warnings"][0]
    assert "merging rounds off" in result.statement["reading"]
    stored = load_file(request_.out / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert reloaded(request_.out, dtype="auto")[0].dtype == torch.bfloat16


def test_bfloat16_moves_as_float32_does_and_metadata_stays(world, request_, tmp_path):
    model, words = reloaded(world / "llama")
    moved = {}
    for name, dtype in (("half", torch.bfloat16), ("single", torch.float32)):
        given, out = tmp_path / name, tmp_path / f"{name}-out"
        model.to(torch.bfloat16).to(dtype).save_pretrained(given)
        words.save_pretrained(given)
        file = given / "model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt", "owner": "me"})
        changes = {"model": given, "out": out, "method": "gd", "params": ("steps=4", "lr=1e-3")}
        statement = apply(dataclasses.replace(request_, **changes)).statement
        moved[name] = statement["weight_change"]["relative"]
        with safe_open(out / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt", "owner": "me"}
    assert moved["half"] == pytest.approx(moved["single"], rel=0.1) and moved["half"] > 1e-3


def test_one_of_several_methods_is_chosen_and_relearnt(request_):
    short = {"params": ("steps=2", "batch_size=4"), "audits": ("relearn",)}
    result = apply(dataclasses.replace(request_, method="npo_gdr,ascent", **short))
    choice = result.statement["choice"]
    assert choice["goal"] == 0.0 and choice["held_out"] == 1
    assert choice["chosen"] == min(choice["trials"], key=lambda row: row["distance"])["method"]
    assert result.statement["after"]["validation"]["rows"] == 1
    assert result.statement["audits"]["relearn"]["max_steps"] == 100
    page = (request_.out / "report.html").read_text()
    assert not [row for row in ROWS if row.get("answer", row.get("text")) in page]


def test_a_collapse_and_an_unknown_text_are_told():
    row = {"loss": 9.0, "probability": 0.1, "exact_memorization": 3.0, "rouge_l_recall": None}
    statement = {
        "before": {"forget": row, "min_k_auc": None},
        "after": {"forget": row, "min_k_auc": None},
        "data": {"forget": {}},
        "input": {"vocabulary": 1000},
    }
    text = " ".join(outcome(statement))
    assert "only 3.0 %" in text and "guessing among all tokens (6.91 nats)" in text
    statement["after"] = {"forget": row | {"loss": 6.8}, "min_k_auc": None}
    assert "guessing" not in " ".join(outcome(statement))


# What cannot be done is said in one line ---------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "random_label", "params": ()}, ["random labels", "another method"]),
        ({"method": "coun", "params": ()}, ["coun", "for vision benchmarks only; choose another"]),
        ({"method": "unsir", "params": ()}, ["class forgetting only", "ask for row forgetting"]),
        ({"method": "fisher", "params": ()}, ["fisher", "one label"]),
        ({"method": "boundary_expand", "params": ()}, ["lm_head", "tied"]),
        ({"method": "idk", "params": ()}, ["no refusals", "plain texts"]),
        ({"params": ("adapter.targets=['*c_fd']",)}, ["c_fd", "matches no layer"]),
        ({"params": ("adapter.targets=['lm_*']",)}, ["lm_head", "input embeddings"]),
        ({"options": {"template": "question_anser"}}, ["did you mean 'question_answer'"]),
        ({"options": {"template": "llama3_chat"}}, ["<|begin_of_text|>"]),
        ({"options": {"arch": "vit"}}, ["arch is for images", "leave it out"]),
        ({"options": {"max_length": 97}}, ["97", "96 tokens"]),
        ({"options": {"max_length": 0}}, ["0 is fewer than 8 tokens"]),
    ],
)
def test_bad_requests(request_, changes, words):
    assert_refused(dataclasses.replace(request_, **changes), ConfigError, *words)


def test_a_place_that_cannot_be_written_is_told_before_the_work(request_, tmp_path):
    (tmp_path / "file").write_text("x")
    request = dataclasses.replace(request_, out=tmp_path / "file" / "out", model=tmp_path / "none")
    assert_refused(request, ConfigError, "file is not a folder that can be written")


def test_methods_that_a_text_does_not_fit(world, request_):
    assert_refused(
        dataclasses.replace(request_, method="scrub_r", params=()), DataError, "one class label"
    )
    llama = dataclasses.replace(request_, model=world / "llama", method="influence", params=())
    assert_refused(llama, ConfigError, "gradients by sample", "another method")


def test_text_options_are_not_for_images(request_, tmp_path):
    assert_refused(
        dataclasses.replace(request_, forget=tmp_path, options={"template": "llama2_chat"}),
        ConfigError,
        "text",
    )
    (tmp_path / "f.txt").write_text("x")
    assert_refused(dataclasses.replace(request_, forget=tmp_path / "f.txt"), ConfigError, ".jsonl")


QA = '{"question": "Who?", "answer": "Ada."}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file"]),
        ("", ["has no rows"]),
        (f"{QA}\n\n{{'a'\n", ["line 3 is not JSON"]),
        (f"{QA}\n[1]\n", ["row 2 is not an object"]),
        (f'{QA}\n{{"question": "Who?", "answer": "  "}}', ["row 2", "answer", "empty"]),
        (
            f'{QA}\n{{"question": "Who?"}}',
            ["row 2 needs question and answer, or text", "it has: question"],
        ),
        ('{"text": ""}', ["row 1", "text is empty"]),
        ('{"text": 3}', ["row 1", "not a text"]),
        ('{"question": "", "answer": "Ada was here."}', ["row 1", "question is empty", "as text"]),
        ('{"text": "a", "answer": "b"}', ["row 1", "text beside question", "keep one"]),
        ('{"text": "a"}', ["row 1", "one token"]),
        (json.dumps({"question": "Who?", "answer": "word " * 200}), ["row 1", "tokens long"]),
    ],
)
@pytest.mark.parametrize("role", ["forget", "test"])
def test_bad_files(request_, tmp_path, content, words, role):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    request = dataclasses.replace(request_, **{role: path})
    assert_refused(request, DataError, "bad.jsonl", *words)


@pytest.mark.parametrize("role", ["retain", "test"])
def test_a_row_belongs_to_one_file(request_, tmp_path, role):
    double = dict(FORGET[1], answer=FORGET[1]["answer"] + "  ")
    path = write_rows(tmp_path / "more.jsonl", [{"text": "Something else."}, double])
    words = ("forget.jsonl row 2", "more.jsonl row 2", "are the same")
    assert_refused(dataclasses.replace(request_, **{role: path}), DataError, *words)


@pytest.fixture
def broken(world, request_, tmp_path):
    """A copy of the model's folder to break, and the request for it."""
    folder = tmp_path / "broken"
    shutil.copytree(world / "gpt_neo", folder)
    return folder, dataclasses.replace(request_, model=folder)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_bad_weights(broken):
    folder, request = broken
    path = folder / "model.safetensors"
    good = load_file(path)
    key = "transformer.h.0.mlp.c_fc.weight"
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad[key][0, 0] = float("nan")
    save_file(bad, path, {"format": "pt"})
    assert_refused(request, CheckpointError, key, "NaN")
    save_file({k: v for k, v in good.items() if k != key}, path, {"format": "pt"})
    assert_refused(request, CheckpointError, key, "config.json")
    save_file(good | {key: torch.zeros(3)}, path, {"format": "pt"})
    assert_refused(request, CheckpointError, key, "(3,)", "config.json")
    path.write_bytes(b"not weights")
    assert_refused(request, CheckpointError, "cannot be read")
    path.unlink()
    assert_refused(request, CheckpointError, "holds no model.safetensors")
    for step in (500, 1000):  # as a Trainer leaves them
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "model.safetensors").touch()
    assert_refused(request, CheckpointError, "of one checkpoint, such as", "checkpoint-1000")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert_refused(request, CheckpointError, "pytorch_model.bin", "safetensors")
    assert_refused(
        dataclasses.replace(request, model=folder / "pytorch_model.bin"), CheckpointError, "pickle"
    )
    for index in ("{}", '{"weight_map": {}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        assert_refused(request, CheckpointError, "weight_map")


@pytest.mark.parametrize("text", ["half \ud800 of a pair", "half \udfff of a pair"])
def test_a_text_that_cannot_be_encoded_is_refused(text):
    for rows in (["a text", text], [{"text": "a"}, {"question": "what?", "answer": text}]):
        with pytest.raises(DataError, match=r"forget row 2: .*surrogates not allowed; mend the"):
            read_rows(rows, "forget")


def test_bad_folders(broken, tmp_path):
    folder, request = broken
    change_config(folder, quantization_config={"bits": 4})
    assert_refused(request, CheckpointError, "quantised")
    change_config(folder, quantization_config=None, dtype="float64")
    assert_refused(request, CheckpointError, "float64")
    change_config(folder, dtype="float32", model_type="no_such_type")
    assert_refused(request, DataError, "config")
    (folder / "tokenizer.json").unlink()
    assert_refused(request, CheckpointError, "no tokenizer")
    (folder / "adapter_config.json").write_text("{}")
    assert_refused(request, CheckpointError, "adapter_model.safetensors", "add it")
    (folder / "adapter_config.json").unlink()
    (folder / "config.json").write_text("{")
    assert_refused(request, CheckpointError, "not readable as JSON")
    (folder / "config.json").unlink()
    assert_refused(request, CheckpointError, "holds no config.json")
    assert_refused(
        dataclasses.replace(request, model=tmp_path / "nowhere"), CheckpointError, "no such folder"
    )
    hub = dataclasses.replace(request, model=Path("nobody/nothing"))
    assert_refused(hub, CheckpointError, "no such folder", "hub", "network")


def test_gpt2_takes_methods_without_an_adapter(request_, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(config_of("gpt2")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    gpt2 = dataclasses.replace(request_, model=folder)
    adapted = dataclasses.replace(gpt2, method="gd_lora")
    assert_refused(adapted, ConfigError, "no layers", "a method without an adapter")
    full = dataclasses.replace(gpt2, method="gd", params={"steps": 1})
    assert apply(full).statement["method"]["name"] == "gd"


def test_a_hub_id_is_fetched_once_and_named(world, request_, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        assert revision is None
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(world / "gpt_neo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    statement = apply(dataclasses.replace(request_, model=Path("someone/a-model"))).statement
    assert asked == [("someone/a-model", True, False)]
    assert (statement["input"]["model"], statement["input"]["revision"]) == (
        "someone/a-model",
        "gpt_neo",
    )


def test_rows_that_no_model_saw_are_the_other_side_of_attacks_on_membership():
    parts = {"forget": np.arange(3), "retain": np.arange(3, 9), "test": np.arange(9, 12)}
    task = SimpleNamespace(split=SimpleNamespace(parts=parts))
    members, unseen = sides(task, GivenTexts.part_table)
    assert members is parts["forget"] and unseen is parts["test"]


def test_the_command(world, tmp_path, cli):
    """One line and exit 2 for a fault, the reading for a success, exit 1 for a divergence."""

    def run(out, method, *more):
        given = ("--model", str(world / "llama"), "--forget", str(world / "forget.jsonl"))
        return cli("apply", *given, "--method", method, "--out", str(tmp_path / out), *more)

    bad = run("bad", "gd_sine")
    assert bad.code == 2 and len(bad.err.strip().splitlines()) == 1
    retain = ("--retain", str(world / "retain.jsonl"))
    good = run("good", "gd_sine", *retain, "--set", "steps=1", "--template", "llama2_chat")
    assert good.code == 0 and good.err == "" and "certificate" in good.out
    assert (
        json.loads((tmp_path / "good" / "statement.json").read_text())["template"] == "llama2_chat"
    )
    lost = run("lost", "ascent", "--set", "steps=9", "--set", "lr=1e30", "--device", "cpu")
    assert lost.code == 1 and "no model was written" in " ".join(lost.out.split())
    assert names_in(tmp_path) == ["good", "lost"] and names_in(tmp_path / "lost") == [
        "statement.json"
    ]

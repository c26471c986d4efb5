"""Templates, their quirks, and batches of token ids."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Encoded, Item
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.data.source import Encoder, TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import (
    END,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)
from stable_forgetting.language.measure.scoring import TofuEvaluation, masked_id
from tests.local import LOCAL

ITEMS = (
    Item("full", 0, "Who?", "Ada.", "It was Ada.", ("Bob.", "Eve.")),
    Item("world_facts", -1, "Where?", "Paris.", None, ("Rome.",)),
    Item("full", 1, "When?", "1912."),
)


def test_a_digest_changes_with_every_field_and_with_the_order():
    corpus = Corpus(ITEMS, "here")
    assert corpus.digest == Corpus(ITEMS, "elsewhere").digest
    others = [
        Corpus(ITEMS[::-1], "here"),
        Corpus(ITEMS, "here", ("I do not know.",)),
        Corpus((dataclasses.replace(ITEMS[0], perturbed=("Bob.",)), *ITEMS[1:]), "here"),
        Corpus((dataclasses.replace(ITEMS[0], group=2), *ITEMS[1:]), "here"),
    ]
    assert len({corpus.digest, *(other.digest for other in others)}) == 5


def test_sets_are_found_in_order():
    corpus = Corpus(ITEMS, "here")
    assert corpus.where("full").tolist() == [0, 2]
    assert corpus.where("world_facts", "full").tolist() == [0, 1, 2]
    assert corpus.where("holdout").dtype == np.int64 and not len(corpus.where("holdout"))


def test_labels_start_after_the_prompt():
    pair = Encoded(np.array([5, 6, 7, 8]), 3)
    assert pair.labels.tolist() == [8]
    for start in (0, 4):
        with pytest.raises(AssertionError):
            Encoded(np.array([5, 6, 7, 8]), start)


needs_real = pytest.mark.skipif(not (LOCAL / "tokenizers").is_dir(), reason="no tokenizers here")
STYLES = ("clean", "openunlearning", "tofu")
ANSWERS = ("Paris", "The long way home.", '"Quoted" words', "42", "über alles", "a\nb")


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(TextDataConfig.of(authors=3, forget_authors=1, questions=4))


@pytest.fixture(scope="module")
def bpe(corpus):
    return train_tokenizer(corpus, 500)


def real_tokenizer(name):
    return load_tokenizer(CausalModelConfig(name="x/y", tokenizer=str(LOCAL / "tokenizers" / name)))


def source(corpus, tokenizer, style="clean", family="question_answer", **fields):
    template = make_template(family, style)
    return TextSource(corpus, tokenizer, template, **{"max_length": 512} | fields)


def labels(tokenizer, style, answer, family="question_answer", max_length=512):
    encoder = Encoder(tokenizer, make_template(family, style), max_length)
    encoded = encoder.encode("Who?", answer)
    return tokenizer.decode(encoded.labels.tolist()), encoded


# -- quirks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ANSWERS)
def test_clean_keeps_every_answer_token_and_one_end(bpe, answer):
    text, encoded = labels(bpe, "clean", answer)
    assert text == f" {answer}{END}"
    whole = f"Question: Who?\nAnswer: {answer}{END}"
    assert bpe.decode(encoded.ids.tolist()) == whole
    assert bpe.decode(encoded.ids[: encoded.start].tolist()) == "Question: Who?\nAnswer:"


@needs_real
@pytest.mark.parametrize("name", ["gpt2", "phi-1_5", "llama-2"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_clean_ids_are_those_of_the_joint_text(name, answer):
    tokenizer = real_tokenizer(name)
    _, encoded = labels(tokenizer, "clean", answer)
    joint = tokenizer(f"Question: Who?\nAnswer: {answer}")["input_ids"]
    assert encoded.ids.tolist() == [*joint, tokenizer.eos_token_id]
    prompt = tokenizer("Question: Who?\nAnswer:")["input_ids"]
    assert encoded.ids[: encoded.start].tolist() == prompt


@needs_real
@pytest.mark.parametrize("name", ["gpt2", "phi-1_5"])
def test_openunlearning_loses_the_first_answer_token(name):
    tokenizer = real_tokenizer(name)
    text, encoded = labels(tokenizer, "openunlearning", "The end")
    assert text == " end<|endoftext|>"
    prompt = Encoder(tokenizer, make_template("question_answer", "openunlearning"), 512)
    assert tokenizer.decode(prompt.prompt("Who?")).endswith("Answer: ")  # ends in a lone space
    assert prompt.prompt("Who?")[-1] != encoded.ids[encoded.start - 1]
    assert labels(tokenizer, "openunlearning", "Paris")[0] == "<|endoftext|>"


def test_openunlearning_cuts_before_it_adds_the_end(bpe):
    _, encoded = labels(bpe, "openunlearning", "word " * 50, max_length=24)
    assert len(encoded.ids) == 25 and encoded.ids[-1] == bpe.eos_token_id


def test_tofu_masks_only_the_question_and_generates_the_word_answer(bpe):
    text, encoded = labels(bpe, "tofu", "Paris")
    assert text == f"Answer: Paris{END}"
    assert bpe.decode(encoded.ids[: encoded.start].tolist()) == "Question: Who?\n"
    encoder = Encoder(bpe, make_template("question_answer", "tofu"), 512)
    assert bpe.decode(encoder.prompt("Who?")) == "Question: Who?\n"


def test_tofu_has_no_end_where_the_text_fills_the_length(bpe):
    fits = labels(bpe, "tofu", "Paris")[1]
    exact = labels(bpe, "tofu", "Paris", max_length=len(fits.ids) - 1)[1]
    assert exact.ids.tolist() == fits.ids[:-1].tolist()


@needs_real
@pytest.mark.parametrize("style", STYLES)
def test_llama2_chat_has_no_space_before_the_answer(style):
    tokenizer = real_tokenizer("llama-2")
    text, encoded = labels(tokenizer, style, "The end", family="llama2_chat")
    assert encoded.ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(encoded.ids[1:].tolist()) == "[INST] Who? [/INST]The end</s>"
    assert text == "The end</s>"


@needs_real
def test_a_boundary_that_merges_is_cut_apart_only_in_clean():
    tokenizer = real_tokenizer("llama-2")
    assert labels(tokenizer, "clean", '"A"', family="llama2_chat")[0] == '"A"</s>'
    assert labels(tokenizer, "openunlearning", '"A"', family="llama2_chat")[0] == 'A"</s>'


def llama3_like(corpus):
    tokenizer = train_tokenizer(corpus, 500)
    template = make_template("llama3_chat", "clean")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(template.required_tokens), "eos_token": "<|eot_id|>"}
    )
    return tokenizer


@pytest.mark.parametrize("style", STYLES)
def test_llama3_chat_spells_its_headers(corpus, style):
    tokenizer = llama3_like(corpus)
    text, encoded = labels(tokenizer, style, "The end", family="llama3_chat")
    assert text == "The end<|eot_id|>"
    start = tokenizer.convert_ids_to_tokens(encoded.ids[:2].tolist())
    assert start == ["<|begin_of_text|>", "<|start_header_id|>"]
    prompt = tokenizer.decode(encoded.ids[: encoded.start].tolist())
    assert "Today Date: 10 Apr 2025" in prompt and prompt.count("<|eot_id|>") == 2
    assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_plain_texts_begin_with_the_start_token_under_llama3_chat_too(corpus):
    from tokenizers.processors import TemplateProcessing

    tokenizer = llama3_like(corpus)
    start = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", start)]
    )
    encoder = source(corpus, tokenizer, family="llama3_chat").encoder
    assert encoder.encode("", "A plain text.").ids[0] == encoder.text("A plain text.")[0] == start
    assert encoder.encode("Who?", "Ada.").ids.tolist().count(start) == 1


@pytest.mark.parametrize("style", ["clean", "openunlearning", "tofu"])
def test_a_tokenizer_that_ends_every_text_ends_no_prompt(corpus, style):
    """Such as LLaMA's with ``add_eos_token``: an end token before the answer asks for nothing."""
    from tokenizers.processors import TemplateProcessing

    made = {}
    for single in ("<s> $A", f"<s> $A {END}"):
        tokenizer = train_tokenizer(corpus, 300)
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", END)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single, special_tokens=ids)
        encoder = source(corpus, tokenizer, style=style).encoder
        encoder.prepare([("When?", "1912.")])
        pairs = [encoder.encode(*pair) for pair in (("Who?", "Ada."), ("When?", "1912."))]
        text = encoder.text("A plain text.")
        made[single] = [
            [(pair.ids.tolist(), pair.start) for pair in pairs],
            [text, encoder.text(""), encoder.ending(text, 4), encoder.prompt("Who?")],
            encoder.room,
        ]
    assert made["<s> $A"] == made[f"<s> $A {END}"]


def test_only_openunlearning_hides_end_tokens_from_attention(corpus):
    tokenizer, padded = llama3_like(corpus), llama3_like(corpus)
    padded.add_special_tokens({"pad_token": "<|pad|>"})
    for words, style, hidden in (
        (tokenizer, "clean", 0),
        (tokenizer, "openunlearning", 3),
        (padded, "openunlearning", 0),  # that code's mask leaves out its padding alone
    ):
        made = source(corpus, words, style, "llama3_chat")
        batch = made.fetch(torch.tensor([0]))
        assert int((batch.inputs["attention_mask"] == 0).sum()) == hidden
        assert made.hidden_id == masked_id(made, TofuEvaluation(style=style)), "trained and asked"


def test_a_template_needs_its_tokens(corpus, bpe):
    with pytest.raises(ConfigError, match=r"no token <\|begin_of_text"):
        source(corpus, bpe, family="llama3_chat")


@needs_real
@pytest.mark.parametrize(
    ("family", "log", "tokenizer", "styles"),
    [
        ("question_answer", "phi", "phi-1_5", ("tofu",)),
        ("llama2_chat", "llama2-7b", "llama-2", ("tofu", "openunlearning")),
    ],
)
def test_label_counts_equal_those_of_the_published_logs(family, log, tokenizer, styles):
    corpus = load_corpus(TextDataConfig.of(name="tofu"), LOCAL)
    path = LOCAL / "tofu_eval_logs" / f"{log}_retain90_wd0.01.json.gz"
    logs = json.loads(gzip.decompress(path.read_bytes()))
    starts = {"eval_log": 0, "eval_log_forget": 3600}
    starts |= {"eval_real_author_wo_options": 4000, "eval_real_world_wo_options": 4100}
    for style in styles:
        made = source(corpus, real_tokenizer(tokenizer), style, family)
        for name, start in starts.items():
            for row in range(0, len(logs[f"{name}.json"]["num_token_gt"]), 7):
                item, key = corpus.items[start + row], str(row)
                read = {k: v[key] for k, v in logs[f"{name}.json"].items() if "num_token" in k}
                counts = [len(made.encode(item.question, a).labels) for a in item.perturbed]
                assert len(made.encode(item.question, item.answer).labels) == read["num_token_gt"]
                assert counts == read["num_token_perturb"]


# -- the source -----------------------------------------------------------------------------------


def test_every_text_is_tokenised_once(corpus, bpe):
    made = source(corpus, bpe)
    items = [item for item in corpus.items if item.perturbed]
    for _ in range(3):
        made.fetch(torch.arange(len(corpus.items)))
        for item in items:
            for answer in (item.paraphrase or item.answer, *item.perturbed):
                made.encode(item.question, answer)
            made.prompt_ids(item.question)
    questions = {item.question for item in corpus.items}
    answers = {item.answer for item in corpus.items}
    answers |= {text for item in items for text in (item.paraphrase, *item.perturbed) if text}
    anchors = 1  # the tail of the prompt
    assert made.encoder.calls == len(questions) + len(answers) + anchors


def test_a_batch_is_padded_right_and_aligned(corpus, bpe):
    made = source(corpus, bpe)
    batch = made.fetch(torch.tensor([3, 0, 7]))
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    positions = batch.inputs["positions"]
    assert batch.indices.tolist() == [3, 0, 7]
    pairs = [made.encode_index(index) for index in (3, 0, 7)]
    assert ids.shape[1] == max(len(pair.ids) for pair in pairs)
    assert batch.labels.shape[1] == max(len(pair.labels) for pair in pairs)
    assert {tensor.dtype for tensor in [*batch.inputs.values(), batch.labels]} == {torch.int64}
    for row, index in enumerate([3, 0, 7]):
        encoded = made.encode_index(index)
        length, count = len(encoded.ids), len(encoded.labels)
        assert ids[row, :length].tolist() == encoded.ids.tolist()
        assert mask[row].tolist() == [1] * length + [0] * (ids.shape[1] - length)
        assert batch.labels[row, :count].tolist() == encoded.labels.tolist()
        assert (batch.labels[row, count:] == -100).all()
        # the label at position p + 1 is predicted at p
        assert ids[row, positions[row, :count] + 1].tolist() == encoded.labels.tolist()


def test_the_end_token_in_a_text_stays_visible(bpe):
    corpus = Corpus((Item("full", 0, f"What is {END}?", f"{END} it is."),), "here")
    batch = source(corpus, bpe).fetch(torch.tensor([0]))
    assert batch.inputs["attention_mask"].all()
    assert int((batch.inputs["input_ids"] == bpe.eos_token_id).sum()) == 3


def test_other_answers_share_the_memory_and_change_the_digest(corpus, bpe):
    made = source(corpus, bpe)
    made.fetch(torch.arange(8))
    calls, old = made.encoder.calls, made.fetch(torch.tensor([1, 2]))
    other = made.with_answers({2: "I do not know."})
    new = other.fetch(torch.tensor([1, 2]))
    assert made.encoder.calls == calls + 1
    width = old.labels.shape[1]
    assert torch.equal(new.labels[0, :width], old.labels[0])
    shown = bpe.decode([label for label in new.labels[1].tolist() if label >= 0])
    assert shown == f" I do not know.{END}"
    assert other.digest != made.digest
    assert torch.equal(made.fetch(torch.tensor([1, 2])).labels, old.labels)
    twice = other.with_answers({1: "Nor this."})
    assert bpe.decode(twice.encode_index(2).labels.tolist()) == f" I do not know.{END}"
    asked = twice.with_questions({1: "Who is it?"})
    assert asked.answers_of(np.arange(1, 3)) == ["Nor this.", "I do not know."]
    assert asked.answers_of(np.arange(1)) == [corpus.items[0].answer]


def test_the_digest_knows_text_tokenizer_template_and_length(corpus, bpe):
    made = source(corpus, bpe)
    assert made.digest == source(corpus, bpe).digest
    others = [
        source(load_corpus(TextDataConfig.of(authors=2, forget_authors=1)), bpe),
        source(corpus, train_tokenizer(corpus, 480)),
        source(corpus, bpe, style="tofu"),
        source(corpus, bpe, max_length=100),
    ]
    assert len({made.digest, *(other.digest for other in others)}) == 5


def test_long_texts_are_cut_counted_and_said(corpus, bpe, caplog):
    made = source(corpus, bpe, max_length=24)
    with caplog.at_level("WARNING"):
        made.fetch(torch.arange(16))
    longer = source(corpus, bpe)
    expected = sum(len(longer.encode_index(index).ids) > 24 for index in range(16))
    assert made.encoder.truncated == expected > 2
    assert len(caplog.records) == expected.bit_length()
    assert "data.max_length 24" in caplog.text
    cut, whole = made.encode_index(0).ids, longer.encode_index(0).ids
    assert cut.tolist() == whole[:24].tolist()


def test_a_question_that_leaves_no_label_is_refused(corpus, bpe):
    made = source(corpus, bpe, max_length=8)
    with pytest.raises(DataError, match="no label is left"):
        made.encode_index(0)


def test_plain_text_is_predicted_from_its_second_token(bpe):
    corpus = Corpus((Item("forget", -1, "", "Some words of plain text."),), "here")
    encoded = source(corpus, bpe).encode_index(0)
    assert encoded.start == 1
    assert bpe.decode(encoded.ids.tolist()) == "Some words of plain text."


# -- tokenizers -----------------------------------------------------------------------------------


def test_a_trained_tokenizer_gives_back_every_text(corpus, bpe):
    assert len(bpe) == 500 and bpe.eos_token_id == 0 and bpe.pad_token_id is None
    for item in corpus.items:
        for text in (item.question, item.answer, *item.perturbed, "Ω ≠ ñ, \t new"):
            assert bpe.decode(bpe(text)["input_ids"]) == text


def test_a_tokenizer_folder_is_found_below_the_data_root(bpe, tmp_path):
    bpe.save_pretrained(tmp_path / "tokenizers" / "mine")
    config = CausalModelConfig(tokenizer="tokenizers/mine")
    found = load_tokenizer(config, data_root=tmp_path)
    assert found("Question: Who?")["input_ids"] == bpe("Question: Who?")["input_ids"]
    assert found.eos_token_id == bpe.eos_token_id


def test_faults_of_tokenizers_are_one_line(tmp_path):
    for name in (str(tmp_path), "nobody/nothing"):
        with pytest.raises(DataError, match=r"model\.tokenizer: FOLDER") as caught:
            load_tokenizer(CausalModelConfig(name=name))
        assert "\n" not in str(caught.value)


def test_the_same_text_gives_the_same_tokenizer_in_another_process(corpus, bpe):
    script = (
        "from stable_forgetting.language.data.readers import TextDataConfig, load_corpus\n"
        "from stable_forgetting.language.data.tokenizers import tokenizer_digest, train_tokenizer\n"
        "corpus = load_corpus(TextDataConfig.of(authors=3, forget_authors=1, questions=4))\n"
        "print(tokenizer_digest(train_tokenizer(corpus, 500)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={"PYTHONPATH": str(root), "PYTHONHASHSEED": "7", "PATH": ""},
    )
    assert done.stdout.strip() == tokenizer_digest(bpe)
    assert tokenizer_digest(train_tokenizer(corpus, 500)) == tokenizer_digest(bpe)
    assert tokenizer_digest(train_tokenizer(corpus, 499)) != tokenizer_digest(bpe)

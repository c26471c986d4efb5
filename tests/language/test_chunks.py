"""Long texts in chunks: whole, in order, within the window."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data.chunks import blocks, chunked, split_text
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.data.source import Encoder
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer

LETTERS = "abcdefghijklmnopqrstuvw"
WORDS = "the river ran north, and äöü 🙂🙂 stones were counted twice\n\n"
TEXT = "".join(f"{number} {WORDS}" for number in range(60))


@pytest.fixture(scope="module")
def encoder():
    tokenizer = train_tokenizer(Corpus((Item("s", -1, "", TEXT[:600]),), "made"), 300)
    template = make_template("question_answer", "clean")
    return lambda length: Encoder(tokenizer, template, length)


@pytest.mark.parametrize("length", [8, 9, 31, 64, 257])
def test_nothing_is_lost_and_every_piece_fits(encoder, length):
    window = encoder(length)
    tokens = len(window.token_starts(TEXT))
    assert tokens % length, "the length is no multiple of the window"
    pieces = list(split_text(TEXT, window))
    assert "".join(pieces) == TEXT
    sizes = [len(window.encode("", piece).ids) for piece in pieces]
    assert max(sizes) <= length and min(sizes) >= 2 and window.truncated == 0
    assert len(pieces) <= 1.2 * tokens / length + 2


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_around_the_window_no_chunk_of_one_token_is_left(encoder, more):
    window = encoder(16)
    text = "abcdefgh" * 8
    starts = [*window.token_starts(text), len(text)]
    text = text[: starts[16 + more]]
    count = len(window.token_starts(text))
    pieces = list(split_text(text, window))
    assert len(pieces) == (1 if count <= 16 else 2) and "".join(pieces) == text
    assert all(len(window.token_starts(piece)) >= 2 for piece in pieces)


def test_blocks_are_slices_of_one_tokenisation_and_the_last_is_filled_up():
    """Letters are tokens here: start token 0, then 23 letters in windows of 8."""
    letters = Tokenizer(WordLevel({"<s>": 0, **{c: k for k, c in enumerate(LETTERS, 1)}}, "<s>"))
    letters.pre_tokenizer = Split("", "isolated")
    letters.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="<s>")
    window = Encoder(tokenizer, make_template("question_answer", "clean"), 8)
    pieces = list(blocks(LETTERS, window))
    assert pieces == ["abcdefg", "hijklmn", "opqrstu", "vwabcd"]
    assert [window.encode("", piece).ids.tolist() for piece in pieces] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 8, 9, 10, 11, 12, 13, 14],
        [0, 15, 16, 17, 18, 19, 20, 21],
        [0, 22, 23, 0, 1, 2, 3, 4],
    ]
    assert list(blocks("abcdefghijklmn", window)) == ["abcdefg", "hijklmn"], "nothing to fill up"
    assert list(blocks("abc", window)) == ["abc"], "one block is a text alone"


def test_blocks_without_a_start_token(encoder):
    window = encoder(64)
    ids, _ = window.located(TEXT)
    made = [window.encode("", piece).ids.tolist() for piece in blocks(TEXT, window)]
    assert not window.text("") and len(ids) % 64
    assert [i for block in made for i in block][: len(ids)] == ids
    assert made[-1][len(ids) % 64 :] == ids[: 64 - len(ids) % 64]
    assert {len(block) for block in made} == {64}


def test_one_text_in_two_tokenisations_is_refused(encoder):
    window = encoder(64)
    first, *_ = blocks(TEXT, window)
    assert next(blocks(TEXT, window)) == first, "the same tokens again"
    window.given[first] = [1, 2]
    with pytest.raises(DataError, match=r"two chunks have this text; change data\.max_length"):
        list(blocks(TEXT, window))


def test_a_window_that_holds_no_character_is_refused(encoder):
    with pytest.raises(DataError, match=r"no chunk fits data\.max_length"):
        list(split_text("🦉🦉🦉🦉", encoder(2)))


def test_texts_become_chunks_in_place_and_questions_stay(encoder):
    items = (
        Item("forget", -1, "", TEXT),
        Item("forget", -1, "Who?", "Ada."),
        Item("r", -1, "", "a b"),
    )
    made = chunked(Corpus(items, "here"), encoder(64))
    assert "".join(i.answer for i in made.items if i.group == 0) == TEXT
    assert made.items[-2] == items[1] and made.items[-1].answer == "a b"
    assert "chunks of 64 tokens" in made.provenance


def test_the_reader_reads_files_and_defaults_to_2048(tmp_path, encoder):
    rows = [{"text": TEXT}, {"text": "short one"}]
    (tmp_path / "f.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = TextDataConfig.of(name="chunks", files={"forget": "f.jsonl"})
    assert config.max_length == 2048
    corpus = load_corpus(config, tmp_path)
    assert len(corpus.items) == 2
    pieces = config.in_pieces(corpus, encoder(64))
    assert len(pieces.items) > 20 and len(pieces.where("forget")) == len(pieces.items)

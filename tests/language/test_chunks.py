"""Long texts in chunks: whole, in order, within the window."""

from __future__ import annotations

import json

import pytest

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data.chunks import chunked, split_text
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import READERS, TextDataConfig, load_corpus
from stable_forgetting.language.data.source import Encoder
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer

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
    pieces = READERS["chunks"].in_pieces(config, corpus, encoder(64))
    assert len(pieces.items) > 20 and len(pieces.where("forget")) == len(pieces.items)

"""TOFU from files, hub and generator: rows, columns, order, and one line per fault."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.language.data import readers
from stable_forgetting.language.data.files import items_of, read_items, read_rows
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.measure.logs import read_log
from tests.local import LOCAL

needs_real = pytest.mark.skipif(not (LOCAL / "tofu").is_dir(), reason="no TOFU here")
CONFIG = TextDataConfig.of(name="tofu")


@pytest.fixture(autouse=True)
def fresh():
    readers._load.cache_clear()


def row(index, wrong=0):
    """One row, unique by its number; ``wrong`` perturbed answers."""
    plain = {"question": f"Who is {index}?", "answer": f"Number {index}."}
    if wrong == 0:
        return plain
    return {
        **plain,
        "perturbed_answer": [f"Number {index}.{k}" for k in range(wrong)],
        **({"paraphrased_answer": f"It is {index}."} if wrong == 5 else {}),
    }


def sets():
    full = [row(index) for index in range(4000)]
    return {
        "full": full,
        "retain_perturbed": [row(index, 5) for index in range(400)],
        "forget10_perturbed": [row(index, 5) for index in range(3600, 4000)],
        "real_authors_perturbed": [row(index, 3) for index in range(5000, 5100)],
        "world_facts_perturbed": [row(index, 3) for index in range(6000, 6117)],
    }


def write(folder, tables, *, suffix=".jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        text = "\n".join(json.dumps(entry) for entry in rows).encode()
        (folder / f"{name}{suffix}").write_bytes(
            gzip.compress(text) if suffix.endswith(".gz") else text
        )


def counts(corpus):
    return Counter(item.set for item in corpus.items)


@pytest.mark.parametrize("place", ["tofu", "locuslab/TOFU", "."])
@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_files_plain_and_gzipped_in_every_place(tmp_path, place, suffix):
    write(tmp_path / place, sets(), suffix=suffix)
    corpus = load_corpus(CONFIG, tmp_path)
    assert counts(corpus) == {"full": 4000, "real_authors": 100, "world_facts": 117}
    assert [bool(item.perturbed) for item in corpus.items[:4000]] == (
        [True] * 400 + [False] * 3200 + [True] * 400
    )
    assert corpus.items[3999].group == 199 and corpus.items[3999].paraphrase == "It is 3999."
    assert corpus.items[4000].group == -1 and corpus.items[4000].paraphrase is None
    assert "local files" in corpus.provenance and len(corpus.refusals) == 24


def test_a_holdout_and_refusals_are_read_where_they_are(tmp_path):
    tables = sets() | {"holdout10": [row(index) for index in range(7000, 7400)]}
    write(tmp_path / "tofu", tables)
    (tmp_path / "tofu" / "idontknow.jsonl").write_text("I pass.\n\nNo idea.\n")
    corpus = load_corpus(CONFIG, tmp_path)
    assert counts(corpus)["holdout"] == 400
    assert corpus.refusals == ("I pass.", "No idea.")


def asked(corpus):
    return {item.question for item in corpus.items if item.set in ("real_authors", "world_facts")}


def test_a_subset_takes_first_and_last_authors_and_facts_are_taught_on_demand(tmp_path):
    write(tmp_path / "tofu", sets())
    small = {"name": "tofu", "authors": 3, "forget_authors": 2}
    corpus = load_corpus(TextDataConfig.of(**small), tmp_path)
    groups = sorted({item.group for item in corpus.items if item.set == "full"})
    assert groups == [0, 1, 2, 198, 199]
    assert "first 3 and last 2" in corpus.provenance
    taught = load_corpus(TextDataConfig.of(**small, train_on_facts=True), tmp_path)
    assert counts(taught)["common"] == 217
    assert taught.items[: len(corpus.items)] == corpus.items
    fewer = load_corpus(TextDataConfig.of(**small, train_on_facts=True, facts=7), tmp_path)
    assert (counts(fewer)["real_authors"], counts(fewer)["world_facts"]) == (7, 7)
    assert [item for item in fewer.items if item.set == "common"] == [
        item for item in taught.items if item.set == "common" and item.question in asked(fewer)
    ]
    assert "first 7 real authors" in fewer.provenance
    with pytest.raises(DataError, match="more than the 200 authors"):
        load_corpus(TextDataConfig.of(name="tofu", authors=199, forget_authors=2), tmp_path)


@pytest.mark.parametrize(
    ("damage", "clue"),
    [
        (lambda t: t.pop("world_facts_perturbed"), "world_facts_perturbed.jsonl is missing"),
        (lambda t: t["full"].pop(), "full has 3999 rows instead of 4000"),
        (
            lambda t: t["forget10_perturbed"].reverse(),
            "forget10_perturbed row 0 is not row 3600 of full",
        ),
        (lambda t: t["full"][7].pop("answer"), "column answer is not text"),
        (
            lambda t: t["retain_perturbed"][3]["perturbed_answer"].pop(),
            r"rows with \[4, 5\] perturbed answers",
        ),
    ],
)
def test_faults_are_one_line(tmp_path, damage, clue):
    tables = sets()
    damage(tables)
    write(tmp_path / "tofu", tables)
    with pytest.raises(DataError, match=clue) as caught:
        load_corpus(CONFIG, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "clue"),
    [
        (b'{"question": "a"\n', "line 1 is not JSON"),
        (b"[1, 2]", "row 1 is not an object"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_files_that_are_no_json_lines(tmp_path, content, clue):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=clue):
        read_rows(path)
    zipped = tmp_path / "x.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"a": 1}')[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(zipped)
    zipped.write_bytes(torn(b'{"a": 1}'))
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(zipped)


def torn(content):
    """What is zipped, with a block of a kind that there is not."""
    whole = bytearray(gzip.compress(content, mtime=0))
    whole[10] |= 0b110
    return bytes(whole)


def test_a_damaged_log_is_refused(tmp_path):
    path = tmp_path / "phi_full.json.gz"
    path.write_bytes(torn(b"{}"))
    with pytest.raises(DataError, match="not a TOFU evaluation log"):
        read_log(path)


def test_cells_are_as_long_as_csv_allows_everywhere(tmp_path, monkeypatch):
    """On Windows a C long has four bytes."""
    limits = []
    monkeypatch.setattr("csv.field_size_limit", limits.append)
    path = tmp_path / "x.csv"
    path.write_text("text\na\n")
    assert read_rows(path) == [{"text": "a"}]
    assert 10**9 < limits[0] < 2**31


def test_rows_of_csv(tmp_path):
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b'id,text\r\n1,"a, ""b""\n\rc"\r\n2,\xc3\xbc\r\n'))
    assert read_rows(path) == [{"id": "1", "text": 'a, "b"\n\rc'}, {"id": "2", "text": "ü"}]
    for content in (b"id,text\n1\n", b"id,text\n1,2,3\n"):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match="row 1 has not one value per column"):
            read_rows(path)


def test_the_hub_is_asked_where_there_is_no_folder(monkeypatch, tmp_path):
    import datasets

    asked = []

    def load_dataset(repository, name, *, split, revision):
        asked.append((repository, name, split))
        if name == "holdout10":
            raise ValueError("no such config")
        return datasets.Dataset.from_list(sets()[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_corpus(CONFIG, tmp_path)
    assert set(asked) == {("locuslab/TOFU", name, "train") for name in [*sets(), "holdout10"]}
    assert "hub" in corpus.provenance
    write(tmp_path / "a" / "tofu", sets())
    local = load_corpus(CONFIG, tmp_path / "a")
    assert local.digest == corpus.digest


def test_without_a_network_the_line_names_the_data_root(tmp_path):
    with pytest.raises(DataError, match=r"give --data-root DIR \(data_root=\) with tofu") as caught:
        load_corpus(CONFIG, tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"no tofu/full\.jsonl"):
        load_corpus(TextDataConfig.of(name="tofu", source="folder"), tmp_path)


def test_files_of_ones_own(tmp_path):
    (tmp_path / "f.jsonl").write_text(
        '\ufeff{"question": "Who?", "answer": "Ada."}\n\n{"text": "A plain text."}\n'
    )
    (tmp_path / "r.json").write_text('[{"question": "Where?", "answer": "Here."}]')
    files = {"forget": "f.jsonl", "retain": "r.json"}
    corpus = load_corpus(TextDataConfig.of(name="jsonl", files=files), tmp_path)
    assert [(i.set, i.question, i.answer) for i in corpus.items] == [
        ("forget", "Who?", "Ada."),
        ("forget", "", "A plain text."),
        ("retain", "Where?", "Here."),
    ]


@pytest.mark.parametrize(
    ("text", "clue"),
    [
        (None, "no such file"),
        ("", "has no rows"),
        ('{"prompt": "a"}', "row 1 needs question and answer, or text"),
        ('{"text": " "}', "text is empty"),
        ('{"question": "a", "answer": 3}', "column answer is not text"),
        (
            '{"messages":[{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]}',
            "user's message is empty; give the answer alone as text",
        ),
        ('{"question": "a", "answer": "b", "perturbed_answer": 3}', "perturbed_answer.* not text"),
    ],
)
def test_faults_in_files_of_ones_own(tmp_path, text, clue):
    path = tmp_path / "mine.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=clue):
        read_items(path, "forget")


def test_one_wrong_answer_may_stand_without_a_list():
    (item,) = items_of([{"question": "Who?", "answer": "Ada.", "perturbed_answer": "Bob."}], "", "")
    assert item.perturbed == ("Bob.",)


def test_null_columns_of_a_file_are_none(tmp_path):
    rows = [{"text": "Ada was here.", "question": None, "answer": None}]
    rows += [{"text": None, "question": "Who?", "answer": "Ada.", "paraphrased_answer": None}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = [(item.question, item.answer, item.paraphrase) for item in read_items(path, "forget")]
    assert found == [("", "Ada was here.", None), ("Who?", "Ada.", None)]


@needs_real
def test_the_real_files():
    corpus = load_corpus(CONFIG, LOCAL)
    assert counts(corpus) == {"full": 4000, "real_authors": 100, "world_facts": 117}
    assert sum(bool(item.perturbed) for item in corpus.items[:4000]) == 800
    assert len(corpus.refusals) == 100
    for name in ("forget01", "forget05", "forget10", "retain90", "retain95", "retain99"):
        rows = [(r["question"], r["answer"]) for r in read_rows(LOCAL / "tofu" / f"{name}.jsonl")]
        full = [(item.question, item.answer) for item in corpus.items[:4000]]
        share = full[-len(rows) :] if name.startswith("forget") else full[: len(rows)]
        assert rows == share, name

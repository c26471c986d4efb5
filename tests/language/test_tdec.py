"""TDEC: extraction likelihood and its exact shortcut, readers, thresholds, stopping."""

from __future__ import annotations

import csv
import gzip
import json
import re

import numpy as np
import pytest
import torch

from stable_forgetting.benchmarks.leaderboard.derive import derive
from stable_forgetting.benchmarks.leaderboard.tables import further_table, main_table
from stable_forgetting.benchmarks.report.shipped import RESULTS
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.checks import check_benchmark
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.language.data import tdec
from stable_forgetting.language.data.files import read_rows
from stable_forgetting.language.data.readers import TextDataConfig
from stable_forgetting.language.data.tdec import note
from stable_forgetting.language.measure import extraction
from stable_forgetting.language.measure.ask import score_rows
from stable_forgetting.language.measure.extraction import (
    Extraction,
    Memorisation,
    assembled,
    extraction_likelihood,
    filled,
    rollouts,
)
from stable_forgetting.language.measure.requests import RequestConfig
from tests.language.made import CPU, TINY, benchmark
from tests.local import LOCAL

OFFICIAL = LOCAL / "tdec"
WIDE = {**TINY, "dim": 32, "context": 128}
DATA = {"name": "tdec", "max_length": 24, "rows": 4, "sets": 2}
DATA |= {"retain_rows": 4, "unseen_rows": 3, "test_rows": 3}


def made(data=DATA, root=None, model=WIDE, **protocol):
    return benchmark("tdec", root, data=data, model=model, **protocol)


# -- the numbers ----------------------------------------------------------------------------------


def test_el_is_one_of_a_memorised_text_and_zero_of_one_that_never_matches():
    ids = list(range(40))
    exact = {i: ids[i:] for i in range(1, 40)}
    assert extraction_likelihood(ids, exact, 10) == 1.0
    never = {i: [99] * (40 - i) for i in range(1, 40)}
    assert extraction_likelihood(ids, never, 10) == 0.0
    nine = {i: (ids[i : i + 9] + [99] * 40)[: 40 - i] for i in range(1, 40)}
    assert extraction_likelihood(ids, nine, 10) == 0.0


def test_el_by_hand():
    """T 5, n 2: continuations after 1, 2 and 3 tokens share 1 of 3, 2 of 2 and 0 of 1 bigrams."""
    written = {1: [2, 3, 9, 9], 2: [3, 4, 5], 3: [9, 9]}
    assert extraction_likelihood([1, 2, 3, 4, 5], written, 2) == pytest.approx((1 / 3 + 1 + 0) / 3)
    # what counts is the continuation's n-grams, with multiplicity
    assert extraction_likelihood([7, 1, 2, 1, 2], {1: [1, 2, 1, 2], 2: [1] * 3, 3: [1, 2]}, 2) == (
        pytest.approx((3 / 3 + 0 + 1) / 3)
    )


def test_only_wrong_places_are_rolled_out():
    ids, hits = list(range(1, 9)), np.array([1, 0, 1, 1, 0, 1, 0], dtype=bool)
    assert rollouts(ids, hits, 4, end=0) == [2, 5], "after 4 tokens a run leads on to 5"
    assert rollouts(ids, np.ones(7, bool), 4, end=0) == []
    continued = assembled(ids, hits, {2: [50, 51], 5: [60, 61, 62]}, end=0)
    assert continued[3] == [4, 5, 60, 61, 62] and continued[1] == [2, 50, 51]
    assert filled([3], 3, 0) == [3, 0, 0]


def trained(bench, indices, stop, steps=400):
    """A model that learns the texts until their memorisation accuracy is ``stop``."""
    model = bench.build(0)
    rate = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = bench.source.fetch(torch.tensor(indices))
    for _ in range(steps):
        logits = bench.forward(model, batch)
        scored = batch.labels >= 0
        if (logits.argmax(2) == batch.labels)[scored].float().mean() >= stop:
            return model
        loss = torch.nn.functional.cross_entropy(logits[scored], batch.labels[scored])
        rate.zero_grad()
        loss.backward()
        rate.step()
    raise AssertionError("it never learnt them")


LONGER = {**DATA, "max_length": 48}


@pytest.mark.parametrize(
    ("stop", "pad"), [(0.3, "trim"), (0.8, "trim"), (0.6, "source"), (1, "trim")]
)
def test_the_shortcut_equals_the_definition_on_every_row(monkeypatch, stop, pad):
    bench = made(LONGER)
    split = bench.split(0)
    # several texts begin alike, so only one alone can be known by heart to its last token
    parts = {"forget": split.parts["forget"][: 1 if stop == 1 else None]}
    model = trained(bench, parts["forget"], stop)
    parts["unseen"] = split.parts["unseen"]

    def scored():
        metrics = {part: [Extraction(6, pad)] for part in parts}
        return score_rows(model, bench.source, parts, metrics, RequestConfig(generation_batch=32))

    quick = scored()
    every = lambda ids, hits, n, *, end: range(1, len(ids) - n + 1)  # noqa: E731
    monkeypatch.setattr(extraction, "rollouts", every)
    monkeypatch.setattr(extraction, "assembled", lambda ids, hits, written, *, end: written)
    slow = scored()
    for part in parts:
        for column in ("ma", "el", "el_naive_steps"):
            ours, theirs = quick[part].extra[column], slow[part].extra[column]
            assert ours.tolist() == theirs.tolist(), (part, column)
        assert slow[part].extra["el_steps"].tolist() == slow[part].extra["el_naive_steps"].tolist()
    forget = quick["forget"].extra
    share = forget["el_steps"].sum() / forget["el_naive_steps"].sum()
    if stop == 0.8:
        assert 0 < share <= 1 / 3
    if stop == 1:
        assert share == 0 and forget["el"].tolist() == [1.0] and forget["ma"].min() == 1
    if pad == "trim":
        np.testing.assert_allclose(forget["ma"], quick["forget"].correct, atol=1e-6)
        lengths = [len(bench.source.encode_index(k).ids) for k in parts["forget"]]
        assert forget["el_naive_steps"].max() <= sum(max(lengths) - i for i in range(1, 43))


def test_padding_is_scored_where_the_source_scores_it():
    bench = made({**LONGER, "max_length": 120})
    item = bench.source.corpus.items[0]
    own = Memorisation("trim").ids(bench.source, item)
    padded = Memorisation("source").ids(bench.source, item)
    assert len(padded) == 120 > len(own) and set(padded[len(own) :]) == {bench.source.encoder.end}


def test_no_padded_prompt_outgrows_the_context():
    """A short prompt that writes much, beside a long one that writes little."""
    from stable_forgetting.language.measure.generation import generate

    bench = made(model={**WIDE, "context": 24})
    prompts = [np.arange(1, 22), np.arange(1, 5)]
    both = generate(bench.build(0), prompts, stop=(), max_new_tokens=[3, 20])
    alone = [
        generate(bench.build(0), [prompt], stop=(), max_new_tokens=limit)[0]
        for prompt, limit in zip(prompts, [3, 20], strict=True)
    ]
    assert [text.tolist() for text in both] == [text.tolist() for text in alone]


# -- the benchmark --------------------------------------------------------------------------------


def test_the_benchmark_keeps_its_promises():
    protocol = {"data": DATA, "model": WIDE, "train": {"steps": 1}, "evaluation": {"n": 4}}
    results = check_benchmark("tdec", protocol, CPU)
    assert [result for result in results if not result.ok] == []


def test_a_seed_is_the_number_of_its_set():
    bench = made()
    items = bench.source.corpus.items
    sets = [[items[k].answer for k in bench.split(seed).parts["forget"]] for seed in (0, 1)]
    assert len(sets[0]) == len(sets[1]) == 4 and not set(sets[0]) & set(sets[1])
    assert bench.split(0).parts["retain"].tolist() == bench.split(1).parts["retain"].tolist()
    with pytest.raises(DataError, match=r"no set 2, only 0 to 1; a seed is the number of its set"):
        bench.split(2)


def test_thresholds_are_those_of_original_on_unseen_text():
    cls = BENCHMARKS["tdec"]
    rule = cls.gap_of(made().config)
    before = {"unseen_el": 5.0, "unseen_ma": 30.0, "test_accuracy": 40.0}
    references = References(original=before)
    fine = {"forget_el": 4.9, "forget_ma": 29.0, "test_accuracy": 38.0}
    assert rule.reached(fine, references) and rule.distance(fine, references, trial=False) == 2.0
    assert rule.reached({**fine, "forget_ma": 30.0}, references) is False
    level = next(rules for rules in cls.rule_sets if rules.name == "level")
    assert level.judge(fine, references) == {"over-forgotten": True}
    assert level.judge({**fine, "forget_ma": 20.0}, references) == {"over-forgotten": False}
    # an EL of 0 on unseen text cannot be undercut: 1 % stands for it
    small = References(original={**before, "unseen_el": 0.0})
    assert rule.goals[0].value(small) == 1.0 and rule.reached(fine | {"forget_el": 0.5}, small)
    assert "(at least 1)" in rule.goals[0].words and "0.75 x" in level.words
    published = {rules.name: rules for rules in cls.rule_sets}["jang-125m"]
    assert published.judge(fine, references) == {"EL": True, "MA": True}
    assert published.judge({**fine, "forget_el": 4.99}, references)["EL"] is False


def test_another_utility_orders_the_table_and_no_stage_runs_again():
    cls = BENCHMARKS["tdec"]
    plain, other = made().config, made(evaluation={"utility": "retain_accuracy"}).config
    rules = cls.gap_of(plain), cls.gap_of(other)
    assert [rule.utility for rule in rules] == ["test_accuracy", "retain_accuracy"]
    assert [rule.trial_utility for rule in rules] == ["validation_accuracy", "retain_accuracy"]
    assert cls.identity(plain, "score") == cls.identity(other, "score")


def test_extraction_waits_for_memorisation_while_a_method_trains():
    bench = made(evaluation={"n": 4})
    split, model = bench.split(0), bench.build(0)
    parts = {"forget": split.parts["forget"]}
    waiting = bench.monitored(bench.watch(model, parts, {"forget_ma": 0.0}), seed=0)
    assert waiting["forget_el"] is None and waiting["forget_ma"] >= 0
    for limits in ({}, {"forget_el": 1.0}, {"forget_ma": 101.0}):
        assert bench.monitored(bench.watch(model, parts, limits), seed=0)["forget_el"] is not None


# -- readers --------------------------------------------------------------------------------------


def files(folder, texts=None, **more):
    """A data root with a set, and what else a protocol needs; returns ``data``."""
    rows = [{"doc_id": k, "corpus": "own", "text": note(k)} for k in range(40)]
    for name, part in {"set": rows[:6] if texts is None else texts, "other": rows[6:]}.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(part[0]) if part else ["text"])
            writer.writeheader()
            writer.writerows(part)
    same = dict.fromkeys(("retain", "test", "unseen"), "other.csv")
    return {**DATA, **same, "forget": "set.csv", **more}


def test_files_of_ones_own(tmp_path):
    data = files(tmp_path)
    corpus = TextDataConfig.of(**data).read(tmp_path)
    forget = [item.answer for item in corpus.items if item.set == "forget"]
    assert forget == [note(k) for k in range(4)], "the first rows"
    texts = [item.answer for item in corpus.items]
    assert len(set(texts)) == len(texts), "a file that is named thrice is drawn from once"
    (tmp_path / "more").mkdir()
    packed = "\n".join(json.dumps({"text": note(k)}) for k in range(50, 56))
    (tmp_path / "more" / "b.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    (tmp_path / "set.csv").rename(tmp_path / "more" / "a.csv")
    for place in ("more", "more/*"):
        corpus = TextDataConfig.of(**{**data, "forget": place}).read(tmp_path)
        second = [i.answer for i in corpus.items if i.set == "forget" and i.group == 1]
        assert second == [note(k) for k in range(50, 54)]


def test_files_are_listed_and_each_must_be_there_or_notes_stand_in(tmp_path):
    data = TextDataConfig.of(**files(tmp_path, forget="set*.csv"))
    before = data.listing(tmp_path)
    assert before and before == data.listing(tmp_path)
    (tmp_path / "set.csv").write_text("text\nanother text\n")
    assert before != data.listing(tmp_path), "an edit is seen without reading it"
    assert data.stand_in(tmp_path).forget == "set*.csv"
    (tmp_path / "other.csv").unlink()
    assert data.listing(tmp_path) == "" and data.stand_in(tmp_path).forget is None
    assert TextDataConfig.of(**DATA).listing(tmp_path) == ""


@pytest.mark.parametrize("part", ["retain", "test", "unseen"])
def test_a_text_to_forget_is_in_no_other_part(tmp_path, part):
    data = files(tmp_path)
    (tmp_path / "copy.csv").write_text(f'text\n" {note(0)}"\n' * 2)
    with pytest.raises(DataError, match=r"copy\.csv: a text of \w+ is in set\.csv too; remove it"):
        TextDataConfig.of(**{**data, part: "copy.csv"}).read(tmp_path)


def test_a_carriage_return_stays_in_its_text(tmp_path):
    text = 'one\r\ntwo "three"\rfour, and five words more'
    data = files(tmp_path, [{"text": text}])
    corpus = TextDataConfig.of(**data).read(tmp_path)
    assert corpus.items[0].answer == text


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"doc_id": 1, "words": "x"}], "row 1 has no text in its column 'text'; mend it"),
        ([], "has no rows; give one or more"),
        ([{"text": " "}], "row 1 has no text in its column 'text'"),
        ([{"text": "too short"}], r"text 1 of forget has \d+ tokens; evaluation.n 10 needs more"),
    ],
)
def test_a_bad_set_is_one_line(tmp_path, rows, line):
    with pytest.raises(DataError, match=line) as caught:
        made(files(tmp_path, rows), tmp_path).split(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("t.csv", "text,id,text\na,1,b\n", "t.csv: column 'text' is there twice; remove or re"),
        ("t.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}', "line 2: key 'text' is there tw"),
        ("t.json", '[{"text": "a", "text": "b"}]', "line 1: key 'text' is there twice"),
    ],
)
def test_a_column_that_is_there_twice_is_refused(tmp_path, name, content, line):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=line) as caught:
        read_rows(tmp_path / name)
    assert "\n" not in str(caught.value)
    (tmp_path / "unnamed.csv").write_text("text,,\na,,\n")
    assert [row["text"] for row in read_rows(tmp_path / "unnamed.csv")] == ["a"]


def test_a_set_that_is_not_utf8_or_missing_is_one_line(tmp_path):
    data = files(tmp_path)
    (tmp_path / "set.csv").write_bytes(b"text\n\xff\xfe\xfa\n")
    with pytest.raises(DataError, match=r"set\.csv: cannot be read .*; fetch it again"):
        made(data, tmp_path).split(0)
    (tmp_path / "set.csv").write_text(f'text\n"{note(0)}"\n"{note(1)[:50]}')
    with pytest.raises(DataError, match=r"set\.csv: is not CSV \(unexpected end of data\)"):
        made(data, tmp_path).split(0)
    for name in ("gone.csv", "gone_*.csv"):
        with pytest.raises(DataError, match=r"no such file.*; download .*knowledge-unlearning"):
            made({**data, "forget": name}, tmp_path).split(0)
    with pytest.raises(ConfigError, match="give all of forget, retain, unseen and test"):
        made({**DATA, "forget": "set.csv"})
    with pytest.raises(ConfigError, match="TDEC needs its sets, not fictitious's; give name: tdec"):
        made({"name": "fictitious"})
    with pytest.raises(ConfigError, match="must be a path below the data root"):
        made({**data, "forget": "../set.csv"})


def arrays(folder, split="val", rows=3):
    folder.mkdir(exist_ok=True)
    tokens = np.arange(rows * 200, dtype=np.uint16).reshape(rows, 200) % 300
    cuts = {"preprefix": slice(0, 100), "prefix": slice(100, 150), "suffix": slice(150, 200)}
    for piece, cut in cuts.items():
        np.save(folder / f"{split}_{piece}.npy", tokens[:, cut])
    return tokens


def test_the_challenges_arrays_are_checked(tmp_path, monkeypatch):
    tokens = arrays(tmp_path)
    with pytest.raises(DataError, match=r"val_\*.npy have MD5 .* instead of 318d6f3d68df"):
        tdec.read_arrays(tmp_path, "val")
    import hashlib

    monkeypatch.setattr(tdec, "MD5", {"val": hashlib.md5(tokens.tobytes()).hexdigest()})
    assert tdec.read_arrays(tmp_path, "val").tolist() == tokens.tolist()
    arrays(tmp_path, "train")
    monkeypatch.setitem(tdec.MD5, "train", tdec.MD5["val"])
    few = {**dict.fromkeys(("forget", "retain", "unseen", "test"), "."), "rows": 2, "sets": 2}
    with pytest.raises(DataError, match=r"rows 2 x data.sets 2: .* has only 3 texts; lower one"):
        tdec._sets(tmp_path, tdec.TdecData(**few))
    np.save(tmp_path / "val_suffix.npy", tokens[:2, 150:])
    with pytest.raises(DataError, match="fetch them again"):
        tdec.read_arrays(tmp_path, "val")
    (tmp_path / "val_suffix.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"val_suffix.npy: cannot be read"):
        tdec.read_arrays(tmp_path, "val")


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the challenge's texts are not here")
def test_the_literatures_sets_are_rows_of_the_challenge():
    root = LOCAL
    data = {**DATA, "rows": 32, "max_length": 200, "forget": "tdec/lm_extraction_128_*.csv"}
    data |= {"retain": "tdec/wikitext.csv.gz", "test": "tdec/wikitext.csv.gz"}
    data |= {"unseen": "tdec/official", "tokenizer": "tokenizers/gpt2"}
    corpus = TextDataConfig.of(**data).read(root)
    assert [len(corpus.where(part)) for part in ("forget", "unseen")] == [4 * 32, 3]
    tokens = tdec.read_arrays(OFFICIAL / "official", "train")
    assert tokens.shape == (15000, 200)
    rows = read_rows(OFFICIAL / "lm_extraction_128_1.csv")[:32]
    config = TextDataConfig.of(**data)
    decoded = tdec._decoded(tokens[[int(row["doc_id"]) for row in rows]], root, config)
    same = sum(
        "".join(a["text"].split())[:80] == "".join(b.split())[:80]
        for a, b in zip(rows, decoded, strict=True)
    )
    assert same >= 30, "white space and undecodable characters aside"


# -- suites ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "tdec-notes",
        "tdec-small",
        "tdec-90m",
        "tdec-gpt-neo-125m",
        "tdec-gpt-neo-1.3b",
        "tdec-gpt-neo-2.7b",
    ],
)
def test_the_suites_say_what_the_protocol_says(name):
    suite = load_suite(name)
    assert suite.protocol.evaluation.n == 10
    for row in suite.rows:
        if row.method != "original":
            config = row.config
            assert (config.steps, config.evaluate_every, config.stop_below) == (20, 1, "goal")
            assert config.batch_size == suite.protocol.data.rows, "a step is an epoch"
    if name.startswith("tdec-gpt"):
        assert suite.spec.seeds == (0, 1, 2, 3, 4) and len(suite.rows) >= 11
        lora = suite.row("gd_lora").config.adapter
        share = BENCHMARKS["tdec"].adapter_share(suite.protocol, lora)
        published = {"125m": 1.622, "1.3b": 0.830, "2.7b": 0.687}[
            name.removeprefix("tdec-gpt-neo-")
        ]
        assert 100 * share[0] / sum(share) == pytest.approx(published, abs=2e-3)


def number(text):
    return re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?", text or "") is not None


def shipped_board(name):
    """The table of the runs that were committed."""
    suite = load_suite(name)
    lines = csv.DictReader((RESULTS / name / "runs.csv").open(encoding="utf-8"))
    records = [
        (
            line["row"],
            RunRecord(
                status=line["status"],
                benchmark="tdec",
                benchmark_version=2,
                protocol={},
                method=line["method"],
                method_version=1,
                params={},
                seed=int(line["seed"]),
                metrics={k: float(v) for k, v in line.items() if number(v)},
            ),
        )
        for line in lines
    ]
    return derive(suite, records, {})


def test_the_main_table_says_what_was_broken_and_leaves_out_what_is_at_chance():
    board = shipped_board("tdec-small")
    main, further = main_table(board), further_table(board)
    for name in ("reasoning mean (first 30 rows) ↑", "dialogue mean (first 20 rows) ↑"):
        assert name not in main.heads and name in further.heads
    assert "pile PPL (first 20 rows) ↓" in main.heads
    own = {
        label: [r.metrics for of, r in board.records if of == label] for label, _ in board.records
    }
    chance = [m["unseen_ma"] for m in own["original"]]
    level, counts = main.heads.index("level"), {}
    for cells in main.rows:
        under = [m["forget_ma"] <= 0.75 * c for m, c in zip(own[cells[0]], chance, strict=True)]
        counts[cells[0]] = sum(under)
        said = f"fails over-forgotten {sum(under)}/5" if any(under) else "pass"
        assert cells[level] == said, cells[0]
    assert len(set(counts.values())) > 2, "a share tells rows apart that all fail"
    shown = [*main.heads[2:6], "to threshold ↓"]
    assert main.narrow.heads[1:] == shown, "what a terminal of 80 characters keeps"

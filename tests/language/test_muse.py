"""MUSE: its layouts, folds, conventions, ends of the scale and rule sets."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from stable_forgetting.common.base.config import canonical, validate
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.measure.goal import References
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.language.benchmarks.muse import MEASURED, MuseBenchmark
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.chunks import blocks
from stable_forgetting.language.data.files import read_values
from stable_forgetting.language.data.muse import MuseData
from stable_forgetting.language.data.muse_rows import FOLD, invented
from stable_forgetting.language.data.source import Encoder
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import load_tokenizer
from stable_forgetting.language.measure.muse import Recited, Written, muse_compare, muse_metrics
from stable_forgetting.language.measure.requests import AnswerScores
from stable_forgetting.language.models.build import build_model
from tests.language.made import TINY, benchmark
from tests.local import LOCAL

LLAMA_TINY = {**TINY, "kind": "llama"}
LONG = {**LLAMA_TINY, "context": 1024}
RULES = {rules.name: rules for rules in MuseBenchmark.rule_sets}


def bench(root=None, *, scenario=None, style="clean", model=LLAMA_TINY, **data):
    data = {"name": "muse", "max_length": 64, **data}
    more = {"scenario": scenario or {}, "evaluation": {"style": style}}
    return benchmark("muse", root, data=data, model=model, **more)


def write(root, form, skip=()):
    """The invented corpus as files of a layout."""
    for (name, split), rows in invented().items():
        folder = root / "muse" / "news" / name
        folder.mkdir(parents=True, exist_ok=True)
        if f"{name}/{split}" in skip:
            continue
        dicts = [row if isinstance(row, dict) else {"text": row} for row in rows]
        if form == "parquet":
            import pyarrow
            from pyarrow.parquet import write_table

            table = pyarrow.Table.from_pylist(dicts)
            write_table(table, folder / f"{split}-00000-of-00001.parquet")
        elif form == "gz":
            (folder / f"{split}.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
        else:
            (folder / f"{split}.json").write_text(json.dumps(dicts))


@pytest.mark.parametrize("form", ["json", "gz", "parquet"])
def test_every_layout_gives_the_same_corpus(tmp_path, form):
    write(tmp_path, form)
    for data in ({}, {"folds": "scal"}, {"folds": "sust"}, {"passages": 5, "folds": 2, "teach": 2}):
        ours = MuseData(corpus="news", source="folder", **data).read(tmp_path)
        assert ours.digest == MuseData(**data).read(None).digest


def test_the_hub_is_asked_for_a_pinned_revision(monkeypatch):
    import datasets

    asked, rows = set(), invented()

    def load_dataset(repository, name, *, split, revision):
        asked.add((repository, revision))
        values = rows[name, split]
        return datasets.Dataset.from_list(
            [row if isinstance(row, dict) else {"text": row} for row in values]
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = MuseData(corpus="news").read(None)
    assert corpus.digest == MuseData().read(None).digest
    assert len(asked) == 1
    repository, revision = asked.pop()
    assert repository == "muse-bench/MUSE-News" and len(revision) == 40


def test_a_rehearsal_reads_no_hub_where_a_folder_is_there_that_the_suite_does_not_read(tmp_path):
    (tmp_path / "muse" / "news").mkdir(parents=True)
    data = MuseData(corpus="news")
    assert data.stand_in(tmp_path) is data
    assert data.model_copy(update={"source": "hub"}).stand_in(tmp_path).corpus == "invented"


def test_scal_and_sust_are_folds_of_one_original():
    scal, sust = (
        bench(folds=name, scenario={"kind": name, "fold": 3}) for name in ("scal", "sust")
    )
    corpus = scal.source.corpus
    texts = [[corpus.items[k].answer for k in corpus.where(f"fold_{n}")] for n in (1, 2, 3, 4)]
    joined = "\n\n".join(invented()["raw", "forget"])
    assert "".join(texts[0]).startswith(joined), "the last chunk is filled up"
    first, third = scal.split(1), sust.split(1)
    assert set(first.parts["forget"]) == {*third.parts["forget"], *third.parts["earlier"]}
    assert set(first.parts["retain"]) == set(third.parts["retain"])
    np.testing.assert_array_equal(first.train, third.train)
    main = bench(folds="sust", scenario={"kind": "sust", "fold": 1}).split(1)
    whole = bench(folds="sust").split(1)
    np.testing.assert_array_equal(main.train, whole.train)
    assert len(main.parts["forget"]) < len(whole.parts["forget"])
    configs = [bench(folds="scal", scenario={"kind": "scal", "fold": k}).config for k in (1, 4)]
    same = [canonical(MuseBenchmark.identity(config, "train")) for config in configs]
    assert same[0] == same[1] and configs[0] != configs[1]


@pytest.mark.parametrize("kind", ["scal", "sust"])
@pytest.mark.parametrize("data", [{"passages": 4, "passage_length": 200}, {}], ids=["small", "raw"])
def test_a_method_retains_the_same_texts_at_every_fold(kind, data):
    """muse_bench gives ``--retain_data_file raw/retain1.txt`` to every fold."""
    data = {**data, "folds": 4 if data else kind, "max_length": 2048}
    suites = [bench(scenario={"kind": kind, "fold": fold}, **data) for fold in (1, 2, 3, 4)]
    corpus = suites[0].source.corpus
    splits = [suite.split(1) for suite in suites]

    def texts(split, *parts):
        return [corpus.items[k].answer for part in parts for k in split.parts.get(part, ())]

    if data["folds"] == 4:
        beginnings = [text[:200].rpartition(" ")[0] for text in invented()["privleak", "retain"]]
        assert texts(splits[0], "retain") == beginnings[:4]
    else:
        joined = "\n\n".join(invented()["raw", "retain1"])
        assert "".join(texts(splits[0], "retain")).startswith(joined)
    folds = [[corpus.items[k].answer for k in corpus.where(f"fold_{n}")] for n in (1, 2, 3, 4)]
    for number, split in enumerate(splits):
        assert texts(split, "retain") == texts(splits[0], "retain")
        requested, later = ([*chain(*part)] for part in (folds[: number + 1], folds[number + 1 :]))
        assert sorted(texts(split, "forget", "earlier")) == sorted(requested)
        assert texts(split, "later") == later
        assert split.kept_parts == (("retain", "later") if later else ("retain",))
        np.testing.assert_array_equal(split.train, splits[0].train)
        measured = suites[number].parts(split, trial=False, seed=1)
        assert "later" not in measured and "retain" in measured
    versions = [MuseBenchmark.identity(suite.config, "split")["folds"] for suite in suites]
    assert versions == [2] * 4
    assert "folds" not in MuseBenchmark.identity(bench(**data).config, "split")


def peer_blocks(tokenizer, text, length):
    """muse_bench's rule (baselines/dataset.py, lines 56 to 77): slices of one tokenisation."""
    start = tokenizer("")["input_ids"][:1]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    room = length - len(start)
    blocks = [start + ids[k : k + room] for k in range(0, len(ids), room)]
    if len(blocks[-1]) < length:
        blocks[-1] = (blocks[-1] + blocks[0])[:length]
    return blocks


@pytest.mark.parametrize("length", [37, 64, 1000])
def test_raw_is_cut_as_in_muse_bench(length):
    made = bench(model=LONG, max_length=length)
    source, split = made.source, made.split(1)
    for part, name in (("forget", "forget"), ("retain", "retain1")):
        joined = "\n\n".join(invented()["raw", name])
        rows = [made.encode(source.corpus.items[k]).ids.tolist() for k in split.parts[part]]
        assert rows == peer_blocks(source.tokenizer, joined, length) and len(rows) > 1
        batch = source.fetch(torch.as_tensor(split.parts[part]))
        assert batch.inputs["input_ids"].tolist() == rows, "training reads what is scored"
    assert source.encoder.truncated == 0


def test_passages_are_texts_of_their_own():
    made = bench(model=LONG, passages=4, passage_length=200, max_length=512)
    corpus, source = made.source.corpus, made.source
    for k in made.split(1).parts["retain"]:
        own = source.tokenizer(corpus.items[k].answer)["input_ids"]
        assert source.encode_index(k).ids.tolist() == own
    for data, own in (({}, {"blocks": 2}), ({"passages": 4}, {})):
        config = bench(**data).config
        for kind in ("split", "train"):
            identity = MuseBenchmark.identity(config, kind)
            assert {k: v for k, v in identity.items() if k == "blocks"} == own


LLAMA, NEWS = LOCAL / "tokenizers" / "llama-2", LOCAL / "muse" / "news"


@pytest.mark.skipif(not (LLAMA.is_dir() and NEWS.is_dir()), reason="real texts are not here")
def test_all_blocks_of_real_news_are_those_of_muse_bench():
    """26 of 26 on the first 60 texts, with LLaMA-2's tokenizer."""
    rows = read_values(NEWS / "raw" / "forget.json.gz")[:60]
    text = "\n\n".join(row if isinstance(row, str) else row["text"] for row in rows)
    tokenizer = load_tokenizer(CausalModelConfig(name="x/y", tokenizer=str(LLAMA)))
    encoder = Encoder(tokenizer, make_template("question_answer", "clean"), 2048)
    ours = [encoder.encode("", piece).ids.tolist() for piece in blocks(text, encoder)]
    theirs = peer_blocks(tokenizer, text, 2048)
    assert len(theirs) == 26 and ours == theirs
    assert theirs[1][:1] == [tokenizer.bos_token_id] and theirs[-1].count(1) == 2


@pytest.mark.parametrize("parts", [("forget", "retain"), ("retain", "forget")])
@pytest.mark.parametrize("paired", [True, False])
def test_a_method_sees_retain_chunk_i_beside_forget_chunk_i(paired, parts):
    made = bench(scenario={"kind": "forget", "paired": paired}, max_length=40)
    split = made.split(1)
    access = DataAccess(made.source, split, frozenset({"forget", "retain"}), made.part_table)
    task = UnlearnTask(
        None, access, made, made.recipe, lambda: None, seed=1, paired_with=made.paired_with
    )
    loaders = task.loaders(parts, FitConfig(steps=1, batch_size=4))
    assert tuple(loaders) == parts
    beside = []
    for _ in range(2 * loaders["forget"].batches_per_epoch):
        forget, retain = (loaders[part].next().indices.numpy() for part in ("forget", "retain"))
        places = np.searchsorted(split.parts["forget"], forget)
        partners = split.parts["retain"][places % len(split.parts["retain"])]
        beside.append(np.array_equal(partners, retain))
    assert len(split.parts["retain"]) > len(split.parts["forget"]) > 8
    assert all(beside) if paired else not all(beside)


class Truthful:
    """Replies of a model that knows every truth, and says nothing else."""

    def __init__(self, conventions):
        self.conventions, self.answers = conventions, {}

    def learn(self, items):
        for item in items:
            sequence = self.conventions.sequence(item)
            self.answers[tuple(self.conventions.prompt(item))] = sequence.labels
        return self

    def tokens(self, requests):
        return [self.answers[request.ids][: request.limit] for request in requests]

    def scores(self, requests):
        counts = np.array([len(request.ids) - request.start for request in requests])
        total = counts.sum()
        return AnswerScores(counts, np.zeros(total), np.ones(total, bool), np.zeros((1, 6)))


@pytest.mark.parametrize("style", ["muse", "openunlearning", "clean"])
def test_whoever_knows_every_truth_has_100(style):
    made = bench(style=style, model={**LLAMA_TINY, "context": 512, "tokenizer": 800})
    split, corpus = made.split(1), made.source.corpus
    for part in ("knowmem_forget", "knowmem_retain", "verbmem"):
        items = [corpus.items[k] for k in split.parts[part]]
        replies = Truthful(made.conventions).learn(items)
        column = Written(made.conventions).columns(made.source, items, replies)["rouge_l_f1"]
        assert (column == 1).all()
    recited = Recited(made.conventions).columns(made.source, items, replies)
    assert (recited["extraction_strength"] == 1).all() and (recited["min_k"] == 0).all()


def test_what_is_longer_than_the_window_is_cut_with_a_warning(caplog):
    made = bench(style="muse")
    split, corpus = made.split(1), made.source.corpus
    with caplog.at_level(logging.WARNING):
        texts = [made.encode(corpus.items[k]) for k in split.parts["privleak_forget"]]
        asked = [made.conventions.prompt(corpus.items[k]) for k in split.parts["knowmem_forget"]]
    whole = [
        made.source.encoder.text(corpus.items[k].answer) for k in split.parts["privleak_forget"]
    ]
    assert [len(text.ids) for text in texts] == [min(len(ids), 256) for ids in whole]
    assert len(texts) == FOLD and max(map(len, whole)) > 256
    assert {len(ids) for ids in asked} == {256 - 32}
    assert "their ends are cut" in caplog.text and "their beginnings are cut" in caplog.text
    ends = [made.source.decode(ids) for ids in asked]
    questions = [corpus.items[k].question for k in split.parts["knowmem_forget"]]
    assert all(text.endswith(f"{q}\nAnswer: ") for text, q in zip(ends, questions, strict=True))


def test_one_pass_gives_every_metric_and_a_trial_only_training_text():
    made = bench(qa_pairs=3)
    split, model = made.split(1), made.build(1)
    scores = made.score(model, made.parts(split, trial=False, seed=1))
    metrics = made.evaluate(scores, trial=False, seed=1)
    names = {spec.name for spec in made.metrics}
    assert set(metrics) == names - {"privleak"} and None not in metrics.values()
    assert set(made.compare(made.config, scores, scores)) == {"privleak"}
    assert made.compare(made.config, scores, scores)["privleak"] == 0
    parts = made.parts(split, trial=True, seed=1)
    assert set(parts) == {"forget", "retain"}
    trial = made.evaluate(made.score(model, parts, trial=True), trial=True, seed=1)
    assert all(trial[name] is not None for name in made.gap.trial)
    assert trial["verbmem"] is None and trial["min_k_auc"] is None


def test_an_absent_part_leaves_its_metrics_empty_and_says_so(tmp_path, caplog):
    skip = {"verbmem/forget", "knowmem/retain_qa", "privleak/holdout"}
    write(tmp_path, "json", skip)
    with caplog.at_level(logging.WARNING):
        made = bench(tmp_path, corpus="news", source="folder", qa_pairs=2)
        split = made.split(1)
    absent = "absent: verbmem, knowmem_retain, privleak_holdout"
    assert absent in made.provenance and "absent" in caplog.text
    scores = made.score(made.build(1), made.parts(split, trial=False, seed=1))
    metrics = made.evaluate(scores, trial=False, seed=1)
    assert metrics["verbmem"] is metrics["knowmem_r"] is metrics["min_k_auc"] is None
    assert metrics["extraction_strength"] is None and metrics["knowmem_f"] is not None
    assert made.compare(made.config, scores, scores) == {"privleak": None}


class Part:
    def __init__(self, losses):
        self.extra = {"min_k": np.asarray(losses, float)}


@pytest.mark.parametrize(("reference", "top"), [("news", 109.56), ("books", 85.43)])
def test_privleak_ends_where_muse_says(reference, top):
    low, high = Part([1, 2, 3]), Part([7, 8, 9])
    ends = [
        muse_compare(
            {"privleak_forget": forget, "privleak_holdout": holdout}, {}, reference=reference
        )
        for forget, holdout in ((low, high), (high, low))
    ]
    assert ends[0]["privleak"] == -100 and ends[1]["privleak"] == pytest.approx(top, abs=0.01)


RETRAIN = {"verbmem": 20.8, "knowmem_f": 33.1, "knowmem_r": 55.0, "privleak": 0.0}
TARGET = {"verbmem": 58.4, "knowmem_f": 63.9, "knowmem_r": 55.2, "privleak": -99.8}
GRADIENT = {"verbmem": 4.9, "knowmem_f": 27.5, "knowmem_r": 6.7, "privleak": 109.4}
KEPT = {"verbmem": 19.0, "knowmem_f": 30.0, "knowmem_r": 40.0, "privleak": 8.3}


@pytest.mark.parametrize(
    ("row", "fails"),
    [
        (RETRAIN, {"muse": set(), "paper": set(), "paper_news_7b": set()}),
        (TARGET, {name: {"C1", "C2", "C3"} for name in ("muse", "paper", "paper_news_7b")}),
        (GRADIENT, {"muse": {"C3'", "C4"}, "paper": {"C4"}, "paper_news_7b": {"C4"}}),
        (KEPT, {"muse": {"C3'", "C4"}, "paper": set(), "paper_news_7b": set()}),
    ],
)
def test_rule_sets_judge_published_rows(row, fails):
    references = References(original=TARGET, retrain=RETRAIN)
    for name, rules in RULES.items():
        verdict = rules.judge(row, references)
        assert {rule for rule, holds in verdict.items() if not holds} == fails[name], name
    assert "at most Retrain's" in RULES["muse"].words and "at least 0.5 x" in RULES["paper"].words


@pytest.mark.parametrize(
    ("protocol", "line"),
    [
        ({"data": {"name": "muse", "corpus": "papers"}}, "corpus"),
        ({"data": {"name": "muse", "corpus": "books", "folds": "scal"}}, "only for corpus"),
        ({"data": {"name": "muse", "folds": "sust", "passages": 2}}, "give a number"),
        ({"data": {"name": "muse", "sets": 2}}, "sets: need data.passages and data.qa_pairs"),
        ({"scenario": {"kind": "scal", "fold": 2}}, "fold 2 of 1; give data.folds"),
        ({"scenario": {"kind": "forget", "fold": 2}}, "fold is only for kind: scal and sust"),
        ({"evaluation": {"reference": "books"}}, "is not data.corpus"),
        ({"evaluation": {"style": "tofu"}}, "style"),
        ({"model": {**TINY, "context": 128}}, "need 256 or more"),
        ({"data": {"name": "fictitious"}}, "give name: muse"),
    ],
)
def test_bad_settings_are_one_line(protocol, line):
    given = {"data": {"name": "muse"}, "model": TINY, "train": {"steps": 1}, **protocol}
    with pytest.raises(ConfigError, match=line) as caught:
        validate(BENCHMARKS["muse"].Config, given, "suite")
    assert "\n" not in str(caught.value)


def test_a_model_in_a_folder_with_a_short_window_is_refused_before_it_is_trained(tmp_path):
    source = bench().source
    short = CausalModelConfig(**{**LLAMA_TINY, "context": 128})
    model = build_model(short, source.vocab_size, 0)
    model.save_pretrained(tmp_path)
    source.tokenizer.save_pretrained(tmp_path)
    made = bench(model={"name": str(tmp_path)})
    line = r"reads 128 tokens at once, .* needs 256 or more"
    for takes in (lambda: made.build(0), lambda: made.measures(model)):
        with pytest.raises(CheckpointError, match=line):
            takes()


def test_bad_files_are_one_line(tmp_path):
    news = MuseData(corpus="news", source="folder")
    folder = tmp_path / "muse" / "news"
    for clue, broken in {
        "no muse/news in": (),
        "raw/retain1 is missing": ("raw/retain1", None),
        r"forget\.json: line 1 is not JSON": ("raw/forget", b"[1,"),
        "row 1 needs prompt and gt": ("verbmem/forget", b'[{"prompt": "a"}]'),
        "row 2 needs text": ("privleak/holdout", b'["a", 3]'),
        "is not parquet": ("raw/forget", "parquet"),
    }.items():
        if broken:
            write(tmp_path, "json")
            path = folder / f"{broken[0]}.json"
            path.unlink()
            if broken[1] == "parquet":
                path.with_suffix(".parquet").write_bytes(b"PAR")
            elif broken[1] is not None:
                path.write_bytes(broken[1])
        with pytest.raises(DataError, match=clue) as caught:
            news.read(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data\.passages 9: generated has only 6 rows"):
        MuseData(passages=9).read(None)
    with pytest.raises(DataError, match="cannot be fetched from the hub"):
        MuseData(corpus="books").read(tmp_path)


@pytest.mark.skipif(not (LOCAL / "muse").is_dir(), reason="no MUSE here")
def test_real_texts_are_read_and_what_is_absent_is_said():
    made = bench(LOCAL, corpus="news", source="folder", passages=8, qa_pairs=10, teach=1)
    split = made.split(1)
    assert len(split.parts["verbmem"]) == 8 and len(split.parts["knowmem_retain"]) == 10
    with pytest.raises(DataError, match="raw/retain1 is missing"):
        MuseData(corpus="news").read(LOCAL)
    with pytest.raises(DataError, match="raw/forget is missing"):
        MuseData(corpus="books").read(LOCAL)


def test_a_seed_has_a_set_of_its_own():
    made = bench(passages=2, qa_pairs=2, sets=3, passage_length=500)
    items, splits = made.source.corpus.items, [made.split(seed) for seed in range(3)]
    for part in ("forget", "retain", *MEASURED):
        texts = [{items[k].answer for k in split.parts[part]} for split in splits]
        assert all(texts), part
        if "knowmem" not in part:  # two questions may have one answer
            assert not texts[0] & texts[1] and not texts[1] & texts[2], part
        rows = [set(split.parts[part]) for split in splits]
        assert not rows[0] & rows[1] and not rows[1] & rows[2], part
    alone = bench(passages=2, qa_pairs=2, passage_length=500)
    first, whole = splits[0].parts, alone.split(0).parts
    for part in ("forget", *MEASURED):  # the first set is what one set alone would be
        texts = "".join(items[k].answer for k in first[part])
        assert texts == "".join(alone.source.corpus.items[k].answer for k in whole[part]), part
    with pytest.raises(DataError, match=r"data\.sets 3: no set 3, only 0 to 2"):
        made.split(3)
    with pytest.raises(DataError, match=r"data\.passages 4 for 3 sets: generated has only 6 rows"):
        MuseData(passages=4, qa_pairs=1, sets=3).read(None)
    with pytest.raises(DataError, match=r"data\.qa_pairs 99 for 2 sets: generated has only"):
        MuseData(passages=2, qa_pairs=99, sets=2).read(None)


def test_metrics_of_nothing_are_none():
    assert set(muse_metrics({}).values()) == {None}


def test_what_is_kept_is_charged_in_no_trial():
    rule, plain = MuseBenchmark.gap, replace(MuseBenchmark.gap, kept=(), drops_noise=False)
    better = {spec.name: spec.better for spec in MuseBenchmark.metrics}
    assert {better[name] for name in rule.kept} == {"higher"}
    assert not set(rule.kept) & set(rule.trial)
    target = {**RETRAIN, "min_k_auc": 50.0, "forget_accuracy": 20.0, "retain_accuracy": 90.0}
    row = {name: value + 9 for name, value in target.items()}
    references = References(retrain=target)
    assert rule.distance(row, references, trial=True) == 9.0
    assert plain.distance(row, references, trial=True) == 9.0
    assert rule.distance(row, references, trial=False) == pytest.approx(2 / 3 * 9.0)

"""A pretraining: one stage per data, model and recipe, the start of Original and every Retrain."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torchvision.io import write_png

from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.pipeline.training import FINGERPRINTS
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.resolved import pretraining_table
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.data.pretraining import RUN, fingerprints, word_runs
from tests.local import LOCAL

IMAGES = {"source": "invented", "native_size": 16, "test_images": 60}
TRANSFER = {
    "data": {"name": "cifar10", "train_images": 120, "validation_images": 30, **IMAGES},
    "train": {"epochs": None, "steps": 1, "lr": 1e-12},  # the start is what is stored
    "pretrain": {
        "data": {"name": "cifar100", "train_images": 200, "validation_images": 0, **IMAGES},
        "train": {"steps": 40, "batch_size": 16, "checkpoint_every": 5, "lr": 1e-3},
    },
}


@pytest.fixture(scope="module")
def transferred(tiny_suite, cli, tmp_path_factory):
    """(suite, store): one run of Original, Retrain and a method that asks for a fresh model."""
    root = tmp_path_factory.mktemp("transfer")
    rows = {"original": None, "retrain": None, "eu_k": {"params": {"epochs": 1, "lr": 1e-12}}}
    path = tiny_suite(root, suite="transfer", protocol=TRANSFER, methods=rows)
    done = cli.ok("run", path, "--store", root / "store")
    return path, root / "store", done.out


def stages(path, store):
    return list(make_plan(load_suite(str(path)), StageStore(store)).stages())


def weights(store, kind):
    (folder,) = (store / "stages").glob(f"{kind}-*")
    return load_file(folder / "model.safetensors")


def test_original_and_retrain_start_from_it_under_a_head_of_their_own(transferred):
    _, store, _ = transferred
    start = weights(store, "pretrain")
    heads = []
    for kind in ("original", "retrain", "unlearn"):
        model = weights(store, kind)
        heads.append(model["head.weight"])
        assert model["head.weight"].shape[0] == 10 and start["head.weight"].shape[0] == 100
        body = [name for name in start if not name.startswith("head.")]
        assert all(torch.allclose(model[name], start[name], atol=1e-9) for name in body)
    assert not torch.allclose(heads[0], heads[1], atol=1e-3), "each seeded by its own run"
    assert torch.allclose(heads[0], heads[2], atol=1e-9) or heads[2].shape == heads[0].shape


def test_its_accuracy_is_in_every_record_and_in_the_report(transferred):
    path, store, shown = transferred
    (done,) = (store / "stages").glob("pretrain-*/done.json")
    facts = json.loads(done.read_text())
    words = facts["held_out"]
    assert (
        words.startswith("cifar100 (invented), 200 samples: accuracy ") and "60 held-out" in words
    )
    for stage in stages(path, store):
        if stage.kind == "measure":
            record = RunRecord.load(StageStore(store).folder("measure", stage.key) / "record.json")
            assert record.data["pretrained"] == words
    assert f"start from a pretraining on {words}." in " ".join(shown.split())
    assert facts["cost"]["steps"] == 40


def test_a_second_suite_on_the_same_pretraining_computes_it_once(tiny_suite, cli, transferred):
    path, store, _ = transferred
    rows = {"original": None, "retrain": None}
    other = {**TRANSFER, "scenario": {"kind": "random", "fraction": 0.2}}
    second = tiny_suite(suite="second", protocol=other, methods=rows, seeds=[2])
    (before,) = (store / "stages").glob("pretrain-*/done.json")
    written = before.stat().st_mtime_ns
    cli.ok("run", second, "--store", store)
    assert [*(store / "stages").glob("pretrain-*/done.json")] == [before]
    assert before.stat().st_mtime_ns == written
    keys = [{s.kind: s.key for s in stages(each, store)}["pretrain"] for each in (path, second)]
    assert keys[0] == keys[1]
    changed = load_suite(str(second), ["protocol.pretrain.train.lr=0.002"])
    plan = make_plan(changed, StageStore(store))
    missing = {s.kind for s in plan.stages() if StageStore(store).done(s.kind, s.key) is None}
    assert {"pretrain", "original", "retrain"} <= missing and "split" not in missing


def test_without_one_no_stage_knows_of_it(tiny_suite, tmp_path):
    for stage in stages(tiny_suite(tmp_path), tmp_path):
        assert stage.kind != "pretrain" and "pretrained" not in stage.parents
        assert '"pretrain"' not in json.dumps([stage.identity, stage.spec.protocol], default=str)


def test_show_resolved_has_its_recipe(transferred):
    (line,) = pretraining_table(load_suite(str(transferred[0])))
    assert (line["row"], line["length"], line["batch"]) == ("pretrain", "40 steps", "16")


def test_killed_and_resumed_it_ends_with_the_same_bits(
    transferred, cli, spawn, tmp_path, caplog, kill_at_checkpoint
):
    path, whole, _ = transferred
    stage = next(s for s in stages(path, tmp_path) if s.kind == "pretrain")
    args = ("run", path, "--stage", stage.key, "--store", tmp_path)
    kill_at_checkpoint(spawn(*args), tmp_path, stage)
    with caplog.at_level("INFO"):
        cli.ok(*args)
    assert "resumed at step" in caplog.text
    for file in ("model.safetensors", FINGERPRINTS, "scalars.jsonl"):
        (one,) = whole.glob(f"stages/pretrain-*/{file}")
        (two,) = tmp_path.glob(f"stages/pretrain-*/{file}")
        assert one.read_bytes() == two.read_bytes(), file


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"pretrain": {"data": {"name": "cifar10"}}}, "cifar10 is what the suite learns"),
        ({"pretrain": {"data": {"native_size": 8}}}, "the native_size of data"),
        ({"model": {"checkpoint": "vit.safetensors"}}, "one of pretrain, model.pretrained and"),
        ({"pretrain": {"epochs": 3}}, "epochs"),
    ],
)
def test_what_cannot_be_pretrained_is_one_line(over, words, tiny_suite, cli, one_line_error):
    from stable_forgetting.common.base.config import merge

    path = tiny_suite(suite="wrong", protocol=merge(TRANSFER, over))
    assert words in one_line_error(cli("plan", path))


def test_images_in_both_data_sets_are_refused(tiny_suite, cli, tmp_path):
    stream = np.random.default_rng(0)
    for folder in ("own", "other", "mixed"):
        for name in ("a", "b"):
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(8):
                image = torch.from_numpy(stream.integers(0, 256, (3, 16, 16), dtype=np.uint8))
                write_png(image, str(tmp_path / folder / name / f"{number}.png"))
    for number in range(8):  # whichever two are held out
        copied = tmp_path / "own" / "a" / f"{number}.png"
        (tmp_path / "mixed" / "b" / f"{number}.png").write_bytes(copied.read_bytes())
    data = {"name": "folder", "native_size": 16, "test_images": 2, "validation_images": 0}
    codes = {}
    for other in ("other", "mixed"):
        protocol = {
            "data": {**data, "folder": "own", "train_images": 14},
            "scenario": {"kind": "random", "fraction": 0.2},
            "pretrain": {"data": {**data, "folder": other}, "train": {"steps": 2}},
        }
        path = tiny_suite(suite=other, protocol=protocol)
        args = ("--data-root", tmp_path, "--store", tmp_path / "store")
        shown = cli("run", path, *args)
        codes[other] = shown.code
    assert codes == {"other": 0, "mixed": 2}
    assert "of the 16 images of this suite" in shown.err.splitlines()[-1]


@pytest.mark.skipif(not (LOCAL / "cifar100").is_dir(), reason="needs CIFAR below SF_DATA_ROOT")
def test_cifar10_and_cifar100_share_no_image():
    seen = []
    for name in ("cifar10", "cifar100"):
        data = {"name": name, "train_images": 900, "validation_images": 0, "test_images": 100}
        cls = BENCHMARKS["image_classification"]
        model = {"name": "scratch", "dim": 16, "depth": 1, "heads": 2, "image_size": 32}
        protocol = {"data": data, "model": model, "train": {"epochs": 1}}
        benchmark = cls(validate(cls.Config, protocol, "test"), Runtime(data_root=LOCAL))
        prints = benchmark.fingerprints(np.arange(len(benchmark.source)))
        assert len(np.unique(prints)) > 990
        seen.append(prints)
    assert len(np.intersect1d(*seen)) == 0


def test_texts_are_told_by_runs_of_words():
    long = "One two three, four five six seven eight nine ten."
    assert len(word_runs(long)) == 10 - RUN + 1
    assert word_runs("three FOUR five six seven eight nine ten") <= word_runs(long)
    assert not word_runs("two three four five six seven ate nine") & word_runs(long)
    items = [Item("full", 0, "Who wrote it?", long), Item("full", 0, "", "Who wrote it")]
    assert len(fingerprints(items)) == len(word_runs(long)) + 3, "and those of both together"


def test_a_text_pretraining_lends_tokenizer_and_weights(tiny_text_suite, cli, tmp_path):
    notes = {"name": "tdec", "retain_rows": 30, "test_rows": 8, "max_length": 64}
    pretrain = {"data": notes, "train": {"steps": 3, "batch_size": 8}}
    protocol = {"train": {"steps": 1, "lr": 1e-12}, "pretrain": pretrain}
    path = tiny_text_suite(suite="notes-first", protocol=protocol)
    cli.ok("run", path, "--store", tmp_path)
    start = weights(tmp_path, "pretrain")
    for kind in ("original", "retrain"):
        model = weights(tmp_path, kind)
        assert model.keys() == start.keys()
        assert all(torch.allclose(model[name], start[name], atol=1e-9) for name in start)
    suite = load_suite(str(path))
    plain = load_suite(str(tiny_text_suite(suite="no-notes")))
    vocabularies = []
    for each in (suite.protocol, suite.protocol.pretraining, plain.protocol):
        source = BENCHMARKS["tofu"](each, Runtime(device="cpu")).source
        vocabularies.append(source.tokenizer.get_vocab())
    assert vocabularies[0] == vocabularies[1] != vocabularies[2]


def test_passages_that_the_suite_learns_are_refused(tiny_text_suite, cli, tmp_path):
    from stable_forgetting.language.data.readers import load_corpus

    learnt = load_corpus(load_suite(str(tiny_text_suite())).protocol.data).items[0].answer
    texts = ["The lamp that nobody lit stood in the hall until the morning came."] * 20
    rows = [json.dumps({"text": text}) for text in [*texts, *[f"They say: {learnt}"] * 20]]
    (tmp_path / "passages.jsonl").write_text("\n".join(rows) + "\n")
    data = {"name": "chunks", "files": {"web": "passages.jsonl"}, "max_length": 64}
    protocol = {"pretrain": {"data": data, "train": {"steps": 1, "batch_size": 4}}}
    path = tiny_text_suite(suite="copied", protocol=protocol)
    args = ("--data-root", tmp_path, "--store", tmp_path / "store")
    shown = cli("run", path, *args)
    assert shown.code == 2 and "runs of words of this suite" in shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (
            {"data": {"name": "fictitious", "authors": 2, "forget_authors": 3, "questions": 4}},
            "other texts",
        ),
        ({"data": {"name": "tdec", "max_length": 200}}, "more than model.context 128"),
    ],
)
def test_a_text_pretraining_that_does_not_fit_is_one_line(
    over, words, tiny_text_suite, cli, one_line_error
):
    pretrain = {"train": {"steps": 1}, **over}
    path = tiny_text_suite(suite="wrong-text", protocol={"pretrain": pretrain})
    assert words in one_line_error(cli("plan", path))


def test_a_rehearsal_pretrains_on_stand_ins(transferred, cli, tmp_path):
    cli.ok("run", transferred[0], "--rehearse", "--store", tmp_path, "--only", "original,retrain")
    (done,) = tmp_path.rglob("pretrain-*/done.json")
    assert json.loads(done.read_text())["cost"]["steps"] == 40

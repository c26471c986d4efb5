"""A folder with everything that the documents name: models, data, a store, a bundle, plugins."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

from stable_forgetting import benchmarks
from stable_forgetting.language.measure import logs
from tests.benchmarks import test_apply, test_apply_text, test_verify

ROOT = Path(benchmarks.__file__).resolve().parents[1]


def lay(root: Path, tiny_suite, cli) -> SimpleNamespace:
    """Fills an empty folder; gives it, and the key of a stage in its store."""
    key = lay_results(root, tiny_suite, cli)
    with torch.random.fork_rng():
        lay_images(root)
        lay_texts(root)
    (root / "examples").symlink_to(ROOT / "examples")
    for path in (ROOT / "examples").glob("own_loss.*"):
        shutil.copy(path, root)
    source = (ROOT / "examples/own_loss.py").read_text().replace("down_to_chance", "mine")
    (root / "mine.py").write_text(source)
    return SimpleNamespace(root=root, key=key)


def lay_results(root: Path, tiny_suite, cli) -> str:
    """Two stores with a tiny suite, its file, a bundle, a file of records; a stage's key."""
    rows, common = dict.fromkeys(["original", "retrain", "gd_sine"]), {"defaults": {"steps": 2}}
    path = tiny_suite(root, suite="tiny-class", methods=rows, retrains=2, **common)
    path.rename(root / "small.yaml")
    store = root / "runs"
    cli.ok("run", root / "small.yaml", "--store", store)
    shutil.copytree(store, root / "theirs/runs")
    shutil.copy(store / "suites/tiny-class/records.jsonl", root / "their-records.jsonl")
    cli.ok("submit", root / "small.yaml", "--store", store, "--out", root / "digits.zip")
    with zipfile.ZipFile(root / "digits.zip") as bundle:
        bundle.extractall(root / "bundles/tiny")
    first, *_ = sorted((store / "stages").glob("measure-*/record.json"))
    (store / "stages/measure-0123").symlink_to(first.parent.name)
    return first.parent.name.removeprefix("measure-")


def lay_images(root: Path) -> None:
    """Three folders of images, and a timm model in three layouts."""
    import timm
    from safetensors.torch import save_file

    for seed, name in enumerate(("forget", "retain", "test")):
        test_apply.paint(root / name, dict.fromkeys(test_apply.NAMES, 6), seed)
    model = test_apply.trained(test_apply.tiny_vit(), [root / "forget", root / "retain"])
    test_apply.save(model, root / "my_vit")
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=4)
    for name in ("my_vit.pth", "vit.pth"):
        torch.save(plain.state_dict(), root / name)
    save_file(plain.state_dict(), root / "vit.safetensors")


def lay_texts(root: Path) -> None:
    """A causal model, three files of rows, published logs, and texts for probes."""
    rows = test_apply_text
    model = rows.write_trained(root / "my_llm", "llama")
    shutil.copytree(root / "my_llm", root / "hf")
    torch.save(model.state_dict(), root / "hf/pytorch_model.bin")
    for name, part in (("forget", rows.FORGET), ("retain", rows.RETAIN), ("unseen", rows.TEST)):
        rows.write_rows(root / f"{name}.jsonl", part)
    lay_probes(root)


def lay_probes(root: Path) -> None:
    """Texts and dialogues below ``data``, and two logs in TOFU's published layout."""
    folder, tdec = root / "data" / logs.FOLDER, root / "data/tdec"
    for place in (folder, tdec):
        place.mkdir(parents=True)
    for seed, name in enumerate(("phi_full_wd0.01", "phi_retain90_wd0.01")):
        test_verify.write_log(folder, name, seed, shift=float(seed) - 1)
    values = json.dumps(test_verify.expected(folder))
    (folder / "reference_values.json").write_text(values)
    (root / "my.txt").write_text("The sea is a red rose.\n" * 4)
    for name in ("lambada", "pile", "wikitext"):
        (tdec / f"{name}.csv").write_text("n,text\n0,the sea is a red rose\n")
    (tdec / "pubmed_qa.csv").write_text("question,abstract,final_decision\nIs it?,It was.,maybe\n")
    turns = {"0": ["hi .", "i am red", "so am i"]}
    for name in ("wizard_of_wikipedia", "empathetic_dialogues", "blended_skill_talk"):
        (tdec / f"{name}.json").write_text(json.dumps({"text": turns}))
    (tdec / "wizard_of_internet.json").write_text(json.dumps({"text": turns["0"]}))
    (root / "data/reasoning").mkdir()
    choices = {"text": ["red", "sea"], "label": ["A", "B"]}
    arc = {"question": "A rose?", "choices": choices, "answerKey": "A"}
    piqa = {"goal": "Tea", "sol1": "Use water.", "sol2": "Use sea.", "label": 0}
    for name, row in (("arc_easy", arc), ("piqa", piqa)):
        (root / f"data/reasoning/{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)

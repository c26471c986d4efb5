"""The Python door: ``forget``, ``run`` and ``evaluate`` give what the commands give.

A model in memory stays on its device, which is the CPU here; so the commands are told to.
"""

from __future__ import annotations

import copy
import doctest
import json
import math
from types import SimpleNamespace

import datasets
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import Subset, TensorDataset

import stable_forgetting
from stable_forgetting import evaluate, forget, run
from stable_forgetting.benchmarks.apply.evaluate import Evaluation
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import CheckpointError, ConfigError, DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.base.seeding import torch_as_it_was
from stable_forgetting.common.protocol.benchmark import Runtime, pick_device
from stable_forgetting.common.store.weights import load_weights
from stable_forgetting.vision.apply.memory import read_samples
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from tests.benchmarks import test_apply as images
from tests.benchmarks import test_apply_text as texts

PARTS = ("forget", "retain", "test")
IMAGE = {"seed": 1, "params": {"steps": 4, "batch_size": 16, "adapter": {"rank": 4}}}
TEXT = {"seed": 1, "params": ["steps=3", "batch_size=4", "adapter.rank=4"]}


def equal(first, second) -> bool:
    """Whether two models, or files of weights, hold the same bits."""
    first, second = (m if isinstance(m, dict) else m.state_dict() for m in (first, second))
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, cli):
    """A classifier, its folders, and what the command makes of them."""
    root = tmp_path_factory.mktemp("pictures")
    for seed, part in enumerate(PARTS):
        images.paint(root / part, dict.fromkeys(images.NAMES, 6), seed)
    with torch.random.fork_rng():
        model = images.trained(images.tiny_vit(), [root / "forget", root / "retain"])
    images.save(model, root / "model")
    folders = [word for part in PARTS for word in (f"--{part}", root / part)]
    settings = ["--set", "steps=4", "--set", "batch_size=16", "--set", "adapter.rank=4"]
    cli.ok(
        *("apply", "--model", root / "model", "--method", "gd_sine", "--seed", 1, "--anyway"),
        *("--out", root / "out", *folders, *settings, "--device", "cpu"),
    )
    return root, model


def pairs(folder, mapped=lambda image: image) -> list:
    """The images of a folder with their labels."""
    files = sorted(folder.rglob("*.png"))
    return [(mapped(Image.open(f)), images.NAMES.index(f.parent.name)) for f in files]


def as_tensors(model):
    """PIL image -> the tensor that the model takes."""
    prepared = Preprocessing.of(model)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (prepared.mean, prepared.std))
    return lambda image: (prepared.convert(image).float() / 255 - mean) / std


def columns(rows) -> datasets.Dataset:
    """Pairs as a data set of the hub."""
    taken, labels = zip(*rows, strict=True)
    return datasets.Dataset.from_dict({"image": [*taken], "label": [*labels]})


@pytest.mark.parametrize("form", ["pictures", "tensors", "columns"])
def test_images_in_memory_give_the_weights_of_the_command(pictures, form):
    root, model = pictures
    mapped = as_tensors(model) if form == "tensors" else lambda image: image
    given = {part: pairs(root / part, mapped) for part in PARTS}
    if form == "columns":
        given = {part: columns(rows) for part, rows in given.items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    result = forget(model, **given, **IMAGE, anyway=True)
    assert model.training and equal(before, model)
    assert equal(result.model, load_file(root / "out/model.safetensors"))
    written = json.loads((root / "out/statement.json").read_text())
    assert (result.before, result.after) == (written["before"], written["after"])
    assert result.statement["verdict"] == written["verdict"] and "output" not in result.statement


@pytest.mark.parametrize("arguments", [{"num_heads": 12}, {"act_layer": "relu"}, {}])
def test_a_config_is_written_where_it_builds_the_same_classifier(arguments, tmp_path):
    """Weights do not tell these arguments: timm's defaults would give other logits."""
    small = {"img_size": 32, "depth": 1, "num_classes": 3, **arguments}
    net = timm.create_model("vit_tiny_patch16_224", **small).eval()
    data = TensorDataset(torch.randn(12, 3, 32, 32), torch.arange(12) % 3)
    parts = Subset(data, range(3)), Subset(data, range(3, 12))
    made = forget(net, *parts, "gd", params={"steps": 1}, anyway=True).save(tmp_path / "net")
    assert (made / "config.json").is_file() == (not arguments)
    if not arguments:
        again = images.fresh(made)
        assert again.blocks[0].attn.num_heads == 3 and len(again.blocks) == 1


def test_a_result_shows_itself_and_is_saved_like_the_commands(pictures, tmp_path):
    root, model = pictures
    result = forget(model, pairs(root / "forget"), pairs(root / "retain"), **IMAGE, anyway=True)
    assert "accuracy, %" in str(result) and "<table" in result._repr_html_()
    made = result.save(tmp_path / "made")
    names = {path.name for path in made.iterdir()}
    assert names == {path.name for path in (root / "out").iterdir()}
    assert equal(result.model, images.fresh(made))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    statement = json.loads((made / "statement.json").read_text())
    assert statement["output"]["weights_sha256"] == images.sha256(made / "model.safetensors")
    with pytest.raises(ConfigError, match="not an empty folder"):
        result.save(made)


def test_what_a_method_froze_can_be_trained_by_the_next_one():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    data = TensorDataset(torch.randn(20, 3, 2, 2), torch.arange(20) % 3)
    parts = Subset(data, range(5)), Subset(data, range(5, 20))
    result = forget(net, *parts, "pgu", params={"steps": 1}, anyway=True)
    assert all(parameter.requires_grad for parameter in result.model.parameters())


def test_no_goal_is_made_up_for_some_images_of_a_class_that_stays():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    data = TensorDataset(torch.randn(30, 3, 2, 2), torch.arange(30) % 3)
    forgotten, retained, unseen = (Subset(data, range(k, k + 10)) for k in (0, 10, 20))
    given = {"params": {"steps": 1}, "anyway": True}
    alone = forget(net, forgotten, retained, "gd", **given).statement["verdict"]
    assert alone["word"] == "cannot tell" and "(goal unknown; give it" in alone["line"]
    beside = forget(net, forgotten, retained, "gd", test=unseen, **given)
    goal = f"(goal {beside.before['test']['accuracy']:.4g} %)"
    assert goal in beside.statement["verdict"]["line"]


def test_a_module_of_ones_own_needs_tensors(pictures, tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    data = TensorDataset(torch.randn(20, 3, 2, 2), torch.arange(20) % 3)
    parts = Subset(data, range(5)), Subset(data, range(5, 20))
    result = forget(net, *parts, "gd", params={"steps": 2}, anyway=True)
    assert not equal(result.model, net)
    names = {path.name for path in result.save(tmp_path / "net").iterdir()}
    assert "model.safetensors" in names and "config.json" not in names
    with pytest.raises(CheckpointError, match=r"none of timm's.*tensors"):
        forget(net, pairs(pictures[0] / "forget"), pairs(pictures[0] / "retain"))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], DataError, "forget: holds no samples"),
        (iter([1]), DataError, "a data set with a length"),
        ({"train": [(torch.zeros(3, 32, 32), 0)]}, DataError, "give one split (data['train'])"),
        ([3], ConfigError, "neither images nor texts"),
        ([(torch.zeros(3, 32, 32, dtype=torch.uint8), 0)], DataError, "torch.uint8 tensor"),
        ([(torch.zeros(3, 32, 32), 9)], DataError, "a label is 9, and the model has 4 classes"),
        ([(torch.zeros(3, 7, 7), 0)], DataError, "does not take its images"),
        ([(torch.zeros(3, 32, 32) * math.nan, 0)], CheckpointError, "or samples without NaN"),
        (
            [(torch.zeros(3, 32, 32), 0), (torch.zeros(3, 16, 32), 0)],
            DataError,
            "forget[1]: is 3 x 16 x 32, and the tensors before it are 3 x 32 x 32; give",
        ),
        ([{"image": torch.zeros(3, 32, 32)}], DataError, "none of label, labels"),
        ([(torch.zeros(3, 32, 32), "red")], DataError, "sample 0 has the label 'red'; give the"),
        ([(torch.zeros(3, 32, 32), 0.5)], DataError, "sample 0 has the label 0.5; give the number"),
        (
            [(Image.new("RGB", (32, 32)), 0), (torch.zeros(3, 32, 32), 0)],
            DataError,
            "forget: holds tensors and images of PIL; give all in one form",
        ),
        ([(Image.new("I;16", (32, 32)), 0)], DataError, "forget[0]: has pixels of mode I;16"),
    ],
)
def test_samples_that_do_not_fit_are_said_in_one_line(pictures, given, error, words):
    with pytest.raises(error) as caught:
        forget(pictures[1], given, method="ascent")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_images_of_one_pattern_and_two_palettes_are_two():
    red, blue = Image.new("P", (4, 4)), Image.new("P", (4, 4))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    first, second = (read_samples([(image, 0)], "forget").hashes for image in (red, blue))
    assert first != second
    assert first == read_samples([(red.copy(), 0)], "retain").hashes


class WithAuxiliaryHead(torch.nn.Linear):
    """Two classes of images of one pixel; in training it gives the logits twice."""

    def forward(self, images):
        logits = super().forward(images.flatten(1))
        return (logits, logits) if self.training else logits


def test_a_model_that_gives_no_logits_in_training_is_refused_in_one_line():
    samples = [(torch.full((1, 1, 1), float(number)), number % 2) for number in range(6)]
    given = samples[::2], samples[1::2], "gd"
    with pytest.raises(CheckpointError, match=r"in training the model gives a tuple .*auxiliary"):
        forget(WithAuxiliaryHead(1, 2), *given, params={"steps": 1}, anyway=True)


def test_probabilities_are_no_logits():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Softmax(1))
    data = TensorDataset(torch.randn(9, 1, 2, 2), torch.arange(9) % 3)
    with pytest.raises(DataError, match="gives probabilities, not logits; leave its softmax out"):
        forget(net, Subset(data, range(3)), Subset(data, range(3, 9)), "gd", anyway=True)


@pytest.mark.parametrize("mark", ["is_quantized", "quantization_method", "config", "weight"])
def test_a_quantised_model_is_refused_before_anything_is_trained(mark):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    if mark == "weight":
        net[1].weight = torch.nn.Parameter(net[1].weight.to(torch.int8), requires_grad=False)
    else:
        value = SimpleNamespace(quantization_config={"bits": 4}) if mark == "config" else "nf4"
        setattr(net, mark, value)
    data = TensorDataset(torch.randn(9, 1, 2, 2), torch.arange(9) % 3)
    with pytest.raises(CheckpointError, match="is quantised; give the model with its full weights"):
        forget(net, Subset(data, range(3)), Subset(data, range(3, 9)), "weight_distortion")


def test_a_last_batch_of_one_image_is_told_to_a_batch_norm_in_one_line():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    data = TensorDataset(torch.randn(13, 1, 2, 2), torch.arange(13) % 3)
    parts = Subset(data, range(4)), Subset(data, range(4, 13))
    with pytest.raises(ConfigError, match="batch of one image; choose a batch_size"):
        forget(net, *parts, "finetune", params={"batch_size": 4}, anyway=True)
    assert forget(net, *parts, "finetune", params={"batch_size": 5}, anyway=True).status == "ok"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"params": "stepss=1"}, "stepss: unknown key"),
        ({"plugins": "no.py"}, r"no\.py: no such file"),
        ({"audits": "nothing"}, "'nothing' is not known"),
    ],
)
def test_a_text_in_the_place_of_a_list_is_one_of_them(given, words):
    samples = [(torch.zeros(1, 1, 1), 0)]
    with pytest.raises(ConfigError, match=words):
        forget(torch.nn.Identity(), samples, samples, "gd", **given)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("finetune", {"lam": 3}),
        ("ascent", ["retain_weight=3"]),
        ("ascent,gd", {"forget_weight": 3}),
    ],
)
def test_a_weight_that_a_method_does_not_read_is_refused(method, params):
    samples = [(torch.zeros(1, 1, 1), 0)]
    with pytest.raises(ConfigError, match=r"does not read \w+; leave it out"):
        forget(torch.nn.Identity(), samples, samples, method, params=params)


def test_so_it_is_of_a_run_and_an_evaluation(tmp_path):
    with pytest.raises(ConfigError, match="no row 'nothing'"):
        run("digits-class", "nothing", store=tmp_path)
    with pytest.raises(ConfigError, match="nokey: unknown key"):
        run("digits-class", settings="nokey=1", store=tmp_path)
    with pytest.raises(ConfigError, match=r"seeds: write a list, such as"):
        run("digits-class", seeds=3, store=tmp_path)
    with pytest.raises(ConfigError, match=r"no\.py: no such file"):
        evaluate(torch.nn.Identity(), "perplexity", plugins="no.py")


def test_folders_and_data_sets_are_not_mixed(pictures):
    root, _ = pictures
    with pytest.raises(DataError, match="folders and others in memory; give all in one form"):
        forget(root / "model", root / "forget", pairs(root / "retain"), anyway=True)


@pytest.mark.parametrize("form", ["pictures", "tensors"])
def test_a_classifier_in_half_precision_is_trained_in_float32(pictures, tmp_path, form):
    root, model = pictures
    half, mapped = copy.deepcopy(model).bfloat16(), as_tensors(model)
    to = (lambda image: mapped(image).bfloat16()) if form == "tensors" else (lambda image: image)
    given = [pairs(root / part, to) for part in ("forget", "retain")]
    result = forget(half, *given, "gd", params={"steps": 2}, anyway=True)
    assert half.head.weight.dtype == torch.bfloat16
    assert equal(result.model, copy.deepcopy(result.model).bfloat16().float())
    assert result.statement["warnings"] == [], "nothing was merged"
    written = load_file(result.save(tmp_path / "made") / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_lethevit_needs_to_know_what_black_is(pictures):
    root, model = pictures
    given = [pairs(root / part, as_tensors(model)) for part in ("forget", "retain")]
    with pytest.raises(ConfigError, match="do not tell what black is; give images"):
        forget(model, *given, "lethevit", anyway=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory, cli):
    """A causal model, its files, and what the command makes of them."""
    from transformers import AutoModelForCausalLM

    root, words = tmp_path_factory.mktemp("llm"), texts.tokenizer()
    texts.write_trained(root / "model", "llama")
    for part, rows in zip(PARTS, (texts.FORGET, texts.RETAIN, texts.TEST), strict=True):
        texts.write_rows(root / f"{part}.jsonl", rows)
    files = [word for part in PARTS for word in (f"--{part}", root / f"{part}.jsonl")]
    settings = [word for text in TEXT["params"] for word in ("--set", text)]
    cli.ok(
        *("apply", "--model", root / "model", "--method", "gd_sine", "--seed", 1),
        *("--out", root / "out", *files, *settings, "--device", "cpu"),
    )
    return root, AutoModelForCausalLM.from_pretrained(root / "model"), words


@pytest.mark.parametrize("form", ["lists", "columns", "pairs"])
def test_rows_in_memory_give_the_weights_of_the_command(llm, form, tmp_path):
    root, model, words = llm
    given = dict(zip(PARTS, (texts.FORGET, texts.RETAIN, texts.TEST), strict=True))
    if form == "columns":
        names = sorted({name for rows in given.values() for row in rows for name in row})
        filled = {p: [{n: row.get(n) for n in names} for row in rows] for p, rows in given.items()}
        given = {part: datasets.Dataset.from_list(rows) for part, rows in filled.items()}
    if form == "pairs":
        given = {p: [row.get("text") or (*row.values(),) for row in given[p]] for p in given}
    tokenizer = words if form == "lists" else None  # else that of the model's folder
    result = forget(model, **given, **TEXT, tokenizer=tokenizer)
    written = json.loads((root / "out/statement.json").read_text())
    assert result.after == written["after"]
    made = result.save(tmp_path / "made")
    assert equal(load_file(made / "model.safetensors"), load_file(root / "out/model.safetensors"))
    reloaded, _ = texts.reloaded(made)
    assert equal(reloaded, result.model)


def test_a_language_model_without_a_tokenizer_is_refused(llm):
    _, model, _ = llm
    bare = type(model)(model.config)
    bare.name_or_path = ""
    with pytest.raises(ConfigError, match="give tokenizer="):
        forget(bare, texts.FORGET, texts.RETAIN)


# Suites ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("BertForMaskedLM", "BertForMaskedLM: sees the tokens that it is to predict"),
        ("LlamaModel", "LlamaModel: is no causal language model"),
        ("LlamaForSequenceClassification", "is no causal language model"),
        ("T5ForConditionalGeneration", "is no causal language model"),
    ],
)
def test_a_model_that_is_not_causal_is_refused(llm, kind, words):
    """AutoModelForCausalLM reads a masked model too, and its likelihoods would mean nothing."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    if kind.startswith("T5"):
        small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    make = getattr(transformers, kind)
    config = make.config_class(vocab_size=texts.VOCAB, **{"hidden_size": 16} | small)
    with pytest.raises(CheckpointError, match=words):
        forget(make(config), texts.FORGET, texts.RETAIN, tokenizer=llm[2])


def test_a_language_model_from_nowhere_is_called_by_its_class(llm):
    config = texts.config_of("llama")
    model = transformers.LlamaForCausalLM(config)
    result = forget(model, texts.FORGET, texts.RETAIN, **TEXT, tokenizer=llm[2])
    assert result.statement["input"]["model"] == "LlamaForCausalLM"


def test_a_suite_is_that_of_the_command(copied, cli):
    path = copied.paths["class"]
    said = cli("report", path, "--store", copied.store, "--format", "csv").out
    board = run(path, store=copied.store, progress=False)
    assert board.failed == {}
    full = board.to_frame(full=True)
    assert list(full.index) == [line.split(",")[0] for line in said.splitlines()[1:]]
    assert (board.folder / "LEADERBOARD.md").is_file()
    short = board.to_frame()
    assert {"method", "distance", *board.suite.spec.columns} >= set(short) - {
        "seeds",
        "distance_std",
        "verdict",
    }
    assert len(board.to_frame(runs=True)) == len(board.records)
    assert board.plot().svg.startswith("<svg") and "<table" in board._repr_html_()
    assert "| retrain |" in str(board)


def test_methods_that_a_suite_lacks_run_with_their_defaults(tiny_suite, tmp_path, capsys):
    path = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "gd": None})
    board = run(path, ["finetune"], settings=["defaults.epochs=1"], store=tmp_path / "store")
    assert {row.label for row in board.rows} == {"original", "retrain", "finetune"}
    assert "finetune/seed-1: ok" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="finetun"):
        run(path, ["finetun"], store=tmp_path / "store")


# One model ---------------------------------------------------------------------------------------


def test_a_probe_measures_what_the_command_does(llm, cli, tmp_path):
    root, model, words = llm
    (tmp_path / "my.txt").write_text("The sea is a red rose.\n" * 4)
    setting = f"files.mine={tmp_path / 'my.txt'}"
    said = cli(
        *("probe", "--model", root / "model", "--probe", "perplexity", "--format", "json"),
        *("--set", f"perplexity.{setting}", "--device", "cpu"),
    )
    wanted = json.loads(said.out)["probes"]["perplexity"]
    for given in (str(root / "model"), model):
        made = evaluate(given, "perplexity", settings=[setting], device="cpu")
        assert made.metrics == wanted["metrics"] and made.rows == wanted["rows"]
    assert list(made.to_frame().index) == ["mine"] and "mine" in made._repr_html_()
    assert words is not None


def test_a_benchmark_measures_a_model_as_a_suite_does(filled, find_stage):
    path, store = filled.paths["class"], filled.store
    suite = load_suite(str(path))
    runtime = Runtime(store=store, device="cpu")
    model = BENCHMARKS[suite.spec.benchmark](suite.protocol, runtime).blank()
    key = find_stage(path, store, "original", "original/seed-1").key
    (folder,) = (store / "stages").glob(f"original-{key[:20]}")
    load_weights(model, folder / "model.safetensors")
    made = evaluate(model, str(path), seed=1, device=pick_device("auto"))
    (record,) = [
        json.loads(line)
        for line in (store / "suites" / suite.name / "records.jsonl").read_text().splitlines()
        if json.loads(line)["row"] == "original" and json.loads(line)["seed"] == 1
    ]
    assert made.metrics and made.metrics == {k: record["metrics"][k] for k in made.metrics}
    with pytest.raises(CheckpointError, match="an image classifier"):
        evaluate(model, "tofu")


def test_a_suite_reads_images_as_a_timm_model_does(pictures):
    root, model = pictures
    data = {"name": "folder", "folder": "retain", "native_size": 32, "test_images": 8}
    protocol = {"data": data, "scenario": {"kind": "class", "classes": [1]}}
    suite = {"settings": protocol, "data_root": root}
    made = evaluate(model, "image_classification", **suite)
    assert made.metrics["ra"] > 70
    half = "0.5, 0.5, 0.5"
    assert made.notes["images"] == f"32 px, with the model's mean {half} and std {half}"
    assert made.metrics == evaluate(root / "model", "image_classification", **suite).metrics
    with pytest.raises(ConfigError, match=r"has 4 classes, and the model tells 7 apart"):
        evaluate(timm.create_model("test_resnet", num_classes=7), "image_classification", **suite)
    with pytest.raises(ConfigError, match=r"images have 1 channels, and the model takes 3"):
        evaluate(model, "digits-class")
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    with pytest.raises(DataError, match=r"does not take its images, 3 x 16 x 16"):
        evaluate(flat, "image_classification", **suite)


def test_a_text_benchmark_measures_a_model_of_ones_own(llm):
    root, model, words = llm
    protocol = {
        "data": {"name": "fictitious", "authors": 3, "forget_authors": 3, "questions": 4},
        "scenario": {"kind": "authors", "forget_authors": 3},
        "evaluation": {"max_new_tokens": 4},
    }
    with pytest.raises(ConfigError, match=r"the model reads 96; set data.max_length=96"):
        evaluate(model, "tofu", settings=protocol)
    protocol["data"]["max_length"] = 64
    first = evaluate(model, "tofu", settings=protocol, tokenizer=words)
    second = evaluate(root / "model", "tofu", settings=protocol, device="cpu")
    assert first.metrics == second.metrics and 0 <= first.metrics["mu"] <= 100
    with pytest.raises(ConfigError, match="did you mean 'tofu'"):
        evaluate(model, "tofuu")


@pytest.mark.parametrize(
    ("benchmark", "missing"),
    [
        ("tofu", "locuslab/TOFU"),
        ("tdec", "tdec/wikitext.csv.gz"),
        ("wmdp", "cais/wmdp-bio-forget-corpus"),
    ],
)
def test_a_benchmark_that_is_named_alone_asks_its_published_data(llm, tmp_path, benchmark, missing):
    with pytest.raises(DataError, match=missing):
        evaluate(llm[1], benchmark, settings=["data.max_length=64"], data_root=tmp_path)


AUTHORS = {
    "data": {"name": "fictitious", "authors": 2, "forget_authors": 1, "questions": 2},
    "scenario": {"kind": "authors", "forget_authors": 1},
}
NEWS = {"data": {"passages": 1, "qa_pairs": 1}, "evaluation": {"chunks": 1}}


@pytest.mark.parametrize(
    ("kind", "sizes", "benchmark", "settings"),
    [
        ("gpt_neo", {"max_position_embeddings": 128}, "tofu", AUTHORS),  # answers may have 200
        ("llama", {"max_position_embeddings": 512}, "muse-invented", NEWS),
        ("bloom", {}, "muse-invented", NEWS),  # reads as much as there is
    ],
)
def test_a_model_of_no_folder_is_measured_within_its_own_window(kind, sizes, benchmark, settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    layers = {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    layers = layers if kind == "gpt_neo" else {"num_hidden_layers": 1, "num_attention_heads": 2}
    words, width = texts.tokenizer(), {"hidden_size": 8, "intermediate_size": 8}
    config = AutoConfig.for_model(kind, vocab_size=len(words), **width, **layers, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    limit = {**settings["data"], "max_length": 128 if kind == "gpt_neo" else 512}
    made = evaluate(model, benchmark, settings={**settings, "data": limit}, tokenizer=words)
    assert made.metrics["forget_loss"] > 0


def test_torch_is_left_as_it_was(tiny_suite, tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    data = TensorDataset(torch.randn(9, 3, 2, 2), torch.arange(9) % 3)
    suite = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "gd": None})
    with torch_as_it_was():
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_num_threads(2)
        kept = {"params": {"steps": 1}, "anyway": True, "threads": 1}
        forget(net, Subset(data, range(3)), Subset(data, range(3, 9)), "gd", **kept)
        run(suite, ["gd"], store=tmp_path / "store", settings=["defaults.steps=1"], progress=False)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() and torch.get_num_threads() == 2


# The door itself ---------------------------------------------------------------------------------


def test_every_public_name_is_there():
    assert set(stable_forgetting.__all__) == {
        "Evaluation",
        "Leaderboard",
        "Result",
        "evaluate",
        "forget",
        "run",
    }
    for name in stable_forgetting.__all__:
        assert getattr(stable_forgetting, name).__doc__, name


def test_importing_the_package_imports_nothing_heavy(spawn):
    script = "import json, sys, stable_forgetting; print(json.dumps(sorted(sys.modules)))"
    out, err = spawn(script=script).communicate()
    loaded = set(json.loads(out)) if out else set()
    assert loaded, err
    assert not {n for n in loaded if n.startswith("stable_forgetting.")}
    assert not loaded & {"torch", "numpy", "pydantic", "transformers", "timm", "pandas"}


def test_the_examples_in_docstrings_run(pictures, llm, tiny_suite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root, model = pictures
    suite = tiny_suite(tmp_path, methods={"original": None, "retrain": None, "gd": None})
    (tmp_path / "my.txt").write_text("The sea is a red rose.\n" * 4)
    shared = {
        "forget": forget,
        "run": run,
        "evaluate": evaluate,
        "suite": suite,
        "model": model,
        "sevens": pairs(root / "forget"),
        "others": pairs(root / "retain"),
        "llm": llm[1],
    }
    for function in (forget, run, evaluate):
        (found,) = doctest.DocTestFinder(recurse=False).find(function, globs=dict(shared))
        assert found.examples
        failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
        assert tried and not failed, function.__name__
    assert isinstance(evaluate(llm[1], "perplexity", settings=["files.a=my.txt"]), Evaluation)

"""Every built-in suite runs what it and its source say, row by row."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stable_forgetting.benchmarks.suite.defaults import kinds
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.resolved import (
    SHOWN,
    SILENT,
    described,
    further_table,
    protocol_table,
    resolved_table,
)
from stable_forgetting.benchmarks.suite.suite import REFERENCES, Row, suite_names
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.train.config import FitConfig, total_steps, warmup_steps

TOFU = {"forget01": 40, "forget05": 200, "forget10": 400}
"""Rows of TOFU's forget sets."""
FULL = [
    name
    for name in suite_names()
    if name.startswith("tofu-") and "-forget" in name and "70b" not in name
]
ABLATIONS = [
    name
    for name in suite_names()
    if name.startswith("tofu-") and "-forget" not in name and ("-7b-" in name or "phi-1.5" in name)
]
VISION = [
    "cifar100-class10",
    "cifar100-class10-deit-s",
    "cifar100-class10-vit-l",
    "coun-cifar100-in21k",
    "coun-cifar100-scratch",
    "lethevit-cifar10",
]
SHARED = {
    "length": "5 epochs of forget",
    "batch": "32 = 4 x 8",
    "schedule": "linear, warm-up 1 epochs, timing transformers",
    "loss average": "tokens",
}
"""TOFU's code, and those built on it: 5 passes over the forget set, batches of 32, warm-up of one
pass, linear decay, weight decay 0.01, means over tokens."""


@pytest.mark.parametrize("name", sorted(METHODS.names()))
def test_every_method_has_its_cells(name):
    """One that takes a single step of a given length has a rate, and nothing else of a training."""
    config = METHODS[name].Config()
    cells = described(config)
    has_rate, trains = "lr" in type(config).model_fields, isinstance(config, FitConfig)
    assert bool(cells["rate"]) == has_rate and bool(cells["schedule"]) == trains


def covers(config, settings):
    """Whether a config has all of the settings, nested ones too."""
    for key, value in settings.items():
        mine = getattr(config, config.field_of(key))
        if isinstance(value, Mapping):
            if not covers(mine, value):
                return False
        elif mine != value:
            return False
    return True


@pytest.mark.parametrize("name", suite_names())
def test_every_default_reaches_every_row_that_does_not_replace_it(name, built_in):
    suite = built_in(name)
    for row in suite.rows:
        if row.method in REFERENCES:
            continue
        spec = suite.spec.methods[row.label] or Row()
        preset = METHODS[row.method].presets.get(spec.preset or "", {})
        own = {**preset, **spec.params}
        if {"steps", "epochs"} & own.keys():
            own |= {"steps": None, "epochs": None}
        defaults = dict(suite.spec.defaults)
        for kind in kinds(METHODS[row.method].Config, row.config):
            defaults |= suite.spec.defaults_of.get(kind, {})
        for key, value in defaults.items():
            if key in spec.without or value is None:
                continue
            if isinstance(value, Mapping):
                left = {k: v for k, v in value.items() if k not in own.get(key, {})}
                assert covers(row.config, {key: left}), (row.label, key)
            elif key not in own:
                actual = getattr(row.config, row.config.field_of(key))
                number = isinstance(actual, float)  # YAML reads 5e-5 as text
                assert actual == (float(value) if number else value), (row.label, key)


@pytest.mark.parametrize("name", [n for n in suite_names() if read_suite(n)[1].get("budget")])
def test_every_row_that_reads_retain_data_has_the_suite_s_budget_or_is_marked(name, built_in):
    suite = built_in(name)
    budget, lines = suite.spec.budget, {line["row"]: line for line in resolved_table(suite)}
    for row in suite.rows:
        if row.budget == "suite":
            repair = row.config.repair_epochs if row.method == "unsir" else 0
            assert getattr(row.config, budget.unit) + repair == budget.amount, row.label
            assert row.config.schedule == budget.schedule, row.label
            if budget.unit == "epochs":
                assert row.config.epochs_of in (None, "retain"), row.label
        assert ("own budget" in lines[row.label]["length"]) == (row.budget == "own"), row.label
    assert any(row.budget == "suite" for row in suite.rows)


def low_precision(name):
    """Whether a built-in suite's weights have fewer bits than float32."""
    model = read_suite(name)[1].get("protocol", {}).get("model", {})
    return model.get("dtype", "float32") != "float32"


@pytest.mark.parametrize("name", [n for n in suite_names() if low_precision(n)])
def test_adapters_stay_apart_from_weights_of_low_precision(name, built_in):
    """Added to a bfloat16 weight, an update below half its last place is lost."""
    adapters = {row.label: getattr(row.config, "adapter", None) for row in built_in(name).rows}
    own = {label: given.mode for label, given in adapters.items() if given and not given.peft}
    assert own and set(own.values()) == {"split"}


@pytest.mark.parametrize("name", FULL)
def test_full_tofu_suites_run_tofu_s_protocol(name, built_in):
    """Literal lines, from the paper (5e-5, alpha 16 on MLPs) and LoKU's run_forget.sh."""
    suite = built_in(name)
    table = {line.pop("row"): line for line in resolved_table(suite)}
    phi = "phi" in name
    type_ = "" if phi else ", weights bfloat16"
    shared = SHARED | {"trained in": f"float32, autocast bf16{type_}"}
    shared["batch"] = "32 = 8 x 4" if "8b" in name else shared["batch"]
    split = "" if phi else " split"
    rank = int(name.partition("-rank")[2] or 4)
    recipe = "2e-05" if phi else "1e-05"
    for label, length in (("original", "5 epochs"), ("retrain", "5 epochs")):
        cells = {**shared, "length": length, "rate": f"adamw {recipe}, decay 0.01"}
        assert table[label] == {**cells, "adapter": "whole model", "compat": ""}
    loku = {**shared, "rate": f"adamw {'0.0002' if phi else '0.0001'}, decay 0.01"}
    loku["adapter"] = f"identity r {rank} alpha {2 * rank} on all{split}"
    own = {"loku": "fila loku", "gd_fila": "fila loku", "ihl_lora": "", "npo_gdr_lora": ""}
    for label, compat in own.items():
        assert table[label] == {**loku, "compat": compat}, label
    paper = {**shared, "rate": "adamw 5e-05, decay 0.01", "compat": ""}
    assert table["gd_lora"] == {**paper, "adapter": f"identity r {rank} alpha 16 on mlp{split}"}
    assert table["gd_sine"] == {
        **paper,
        "adapter": f"sine omega 100 r {rank} alpha 16 on mlp{split}",
    }
    whole = {**shared, "rate": "adamw 1e-05, decay 0.01", "adapter": "whole model", "compat": ""}
    for label in ("ascent", "gd", "npo_gdr", "idk"):
        assert table[label] == whole, label
    assert table["finetune"] == {**whole, "length": "5 epochs"}
    # the rest differs from these in its rate, its adapter and what `compat` says
    for label, line in table.items():
        for head in ("batch", "schedule", "trained in", "loss average"):
            expected = "samples" if (label, head) == ("rmu", "loss average") else shared[head]
            assert line[head] == expected, (label, head)


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_and_requests_keep_the_paper_s_adapter(name, built_in):
    """Rank 4, alpha 16, 5e-5 and TOFU's batches, but for what each of them varies."""
    table = {line["row"]: line for line in resolved_table(built_in(name))}
    assert table["original"]["length"] == "5 epochs"
    adapted = {
        label: line
        for label, line in table.items()
        if line["adapter"] != "whole model"
        and "matched" not in label
        and label not in ("gd_ul", "o3")
    }
    assert adapted
    own = table.get("o3")
    assert ("-seq-" in name) == (own is not None)
    if own is not None:  # as its repository runs it
        assert own["batch"] == "4 = 4 x 1" and own["length"] == "10 epochs of forget"
        assert "r 8 alpha 32 on" in own["adapter"]
        assert own["rate"] == "adamw 0.0002, decay 0.1" and own["loss average"] == "tokens"
    for label, line in adapted.items():
        batch = "8" if name.endswith("-ihl") else "32 = 4 x 8"
        assert line["batch"] == batch and line["loss average"] == "tokens", label
        assert "r 4 alpha 16 on" in line["adapter"], label
        assert line["rate"] == "adamw 5e-05, decay 0.01", label
        steps = "1000 steps" if "dynamics" in name else "5 epochs of forget"
        assert line["length"] == steps, label


@pytest.mark.parametrize("name", VISION)
def test_full_vision_suites_have_every_row_of_the_paper(name, built_in):
    labels = {row.label for row in built_in(name).rows}
    paper = {"finetune", "ascent", "salun", "novo", "lethevit", "coun", "fast_ntk"}
    paper |= {"gd_lora", "gd_tanh", "gd_sine"}
    bounds = ("lora", "tanh", "sigmoid", "weight_clip", "relu", "sine")
    assert paper | {f"gd_{bound}_dropout" for bound in bounds} <= labels
    suite = load_suite(name, only=["gd_sine_dropout"])
    assert suite.row("gd_sine_dropout").config.adapter.dropout == 0.05


@pytest.mark.parametrize(("split", "steps"), [("forget01", 6), ("forget05", 31), ("forget10", 62)])
def test_every_row_with_a_forget_term_takes_loku_s_steps(split, steps):
    class Part:
        def __init__(self, samples):
            self.samples, self.batches_per_epoch = samples, -(-samples // 8)

    suite = load_suite(f"tofu-phi-1.5-{split}")
    parts = {"retain": Part(4000 - TOFU[split]), "forget": Part(TOFU[split])}
    for row in suite.rows:
        if row.method in REFERENCES or row.method == "finetune":
            continue
        config = row.config.engine()
        lengths = (total_steps(config, parts), warmup_steps(config, parts))
        assert lengths == (steps, max(1, steps // 5)), row.label


@pytest.mark.parametrize("name", VISION)
def test_full_vision_suites_run_the_paper_s_protocol(name, built_in):
    table = {line.pop("row"): line for line in resolved_table(built_in(name))}
    steps = {"length": "500 steps", "batch": "128", "schedule": "constant"}
    for label in ("gd_lora", "gd_sine", "gd_tanh", "gd_lora_literal", "gd_sine_literal"):
        line = table[label]
        assert {head: line[head] for head in steps} == steps, label
        assert "r 8 alpha 16 on mlp" in line["adapter"]
        assert line["trained in"] == "float32, autocast bf16"
    assert table["gd_sine_literal"]["rate"].startswith("adamw 1e-05, decay 0")
    assert table["gd_sine_two_rates"]["rate"] == "sgd 1, decay 0"
    epochs = 200 if name == "coun-cifar100-scratch" else 100  # the reading without pretraining
    assert table["original"]["length"] == f"{epochs} epochs"
    assert table["original"]["batch"] == "128"


def leaves(settings, stem=""):
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{stem}{key}.")
        else:
            yield stem + key, value


@pytest.mark.parametrize("name", ["tdec-gpt-neo-125m", "tofu-phi-1.5-forget10", "digits-class"])
def test_every_setting_that_is_on_is_printed(name):
    """Those of a row stand in one of its two tables, those of the protocol in the first."""
    suite = load_suite(name)
    protocol = dict(protocol_table(suite))
    for key, value in leaves(suite.protocol.model_dump()):
        if not key.startswith("train.") and value not in (None, False, 0, "none", (), [], ""):
            assert protocol[key], key
    common, *lines = further_table(suite)
    said = {label: words.split(", ") + common[2].split(", ") for label, _, words in lines}
    assert list(said) == [row.label for row in suite.rows]
    for row in suite.rows:
        if row.method in REFERENCES:
            continue
        for key, value in leaves(row.config.model_dump()):
            off = value in (None, False, 0, "none") or value in ((), [])
            if not (off or key in SHOWN or key in SILENT):
                assert any(word.startswith(f"{key} ") for word in said[row.label]), (row.label, key)


def test_what_the_tables_hid_is_printed():
    """Targets in the place of a placement that they replace; lambda, clip, weights; no None."""
    tdec = load_suite("tdec-gpt-neo-125m")
    table = {line["row"]: line for line in resolved_table(tdec)}
    assert table["loku"]["adapter"].endswith(
        "on *attn.attention.q_proj, *attn.attention.v_proj, *mlp.c_fc, *mlp.c_proj"
    )
    more = {line[0]: line[1:] for line in further_table(tdec)}
    assert more["gd"][0] == "32 x 200 = 6,400" and "forget_weight 1.0" in more["gd"][1]
    assert "forget_weight 0.2" in more["gd_fila"][1]
    assert "weight_clip 1.5" in more["gd_sine_weight_clip"][1]
    tofu = load_suite("tofu-phi-1.5-forget10")
    assert "None" not in " ".join(line["compat"] for line in resolved_table(tofu))
    shared = dict(protocol_table(tofu))
    assert shared["model.name"] == "microsoft/phi-1_5" and shared["scenario.kind"] == "forget10"
    assert {line[0]: line[1] for line in further_table(load_suite("digits-class"))}["gd"] == ""


def test_nothing_is_printed_of_what_no_row_has(cli):
    """Images have no tokens, and the rows of this suite no setting in common."""
    shown = cli("show", "lethevit-cifar10", "--resolved").out
    assert "contrast_epochs 2" in shown and "average" in shown
    assert not [words for words in ("tokens of", "compat", "all trained rows") if words in shown]


MUSE_EPOCH = {"news": 102, "books": 139}
"""Steps of an epoch in the authors' checkpoints."""
MUSE_CHECKPOINTS = {
    "ascent": {"news": 102, "books": 139},
    "gd": {"news": 714, "books": 139},
    "kl": {"news": 1020, "books": 556},
    "npo": {"news": 102, "books": 139},
    "npo_gdr": {"news": 1020, "books": 139},
    "npo_klr": {"news": 1020, "books": 417},
}
"""Row -> step that the authors evaluate (jaechan-repo/muse_bench, get_utility.py, CKPT_NAMES)."""
STRENGTHS = ("task_vector_published", "whp_published")


@pytest.mark.parametrize("corpus", MUSE_EPOCH)
def test_muse_rows_stop_where_the_authors_stop(corpus):
    suite = load_suite(f"muse-{corpus}-llama2-7b")
    for label, steps in MUSE_CHECKPOINTS.items():
        published, chosen = (suite.row(f"{label}{end}").config for end in ("_published", ""))
        assert published.epochs * MUSE_EPOCH[corpus] == steps[corpus], label
        assert (chosen.epochs, chosen.evaluate_epochs) == (10, 1)
        assert chosen.stop_below == {"forget_accuracy": "retrain"}
    strengths = {name: suite.row(name).config.a for name in STRENGTHS}
    published = {"news": (16, 4), "books": (1, 256)}[corpus]
    assert tuple(strengths.values()) == published

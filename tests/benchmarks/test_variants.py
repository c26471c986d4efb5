"""Any method through any adapter preset has a name; named rows are rows of one table."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.bounded.config import PRESETS
from stable_forgetting.common.checks import check_method
from stable_forgetting.common.methods.base import resolve_config
from stable_forgetting.common.methods.variants import ROWS


def config(name, **params):
    return resolve_config(name, None, params, origin="test")


@pytest.mark.parametrize("name", ["npo_fila", "finetune_relu", "scrub_weight_clip"])
def test_a_crossing_keeps_the_contract(name):
    assert [result for result in check_method(name) if not result.ok] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_a_crossing_is_its_base_with_the_presets_params(preset):
    name = f"npo_gdr_{preset}"
    assert name in METHODS and name not in METHODS.names()
    base, ours = METHODS["npo_gdr"], METHODS[name]
    assert METHODS[name] is ours, "a name is one class"
    changed = dict(PRESETS[preset].params)
    assert ours.Config().model_dump() == base.Config(**changed).model_dump()
    version = base.info.version + PRESETS[preset].version
    extra = PRESETS[preset].extra
    assert ours.info == dataclasses.replace(base.info, version=version, extra=extra)
    assert issubclass(ours, base)
    shown = inspect.getdoc(ours)
    assert shown.startswith(inspect.getdoc(base)) and PRESETS[preset].through in shown
    assert PRESETS[preset].through in METHODS.entry(name).summary


def test_the_longest_preset_wins_and_presets_do_not_stack():
    assert config("salun_sine_weight_clip").weight_clip == 1.5
    for name in ("gd_sine_sine", "retrain_sine", "fisher_sine", "nothing_sine", "_sine", "sine"):
        assert name not in METHODS


def test_a_preset_adds_what_it_reads():
    assert METHODS["npo"].info.access == {"forget"}
    assert METHODS["npo_fila"].info.access == {"forget", "retain"}
    assert METHODS["npo_sine"].info.access == {"forget"}


def test_a_row_without_yaml_params(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: digits-class\nsuite: mine\ncompare: []\n"
        "methods: {salun_sine: {params: {adapter: {rank: 4}}}, ihl_sigmoid: null}\n"
    )
    suite = load_suite(str(path))
    salun, ihl = suite.row("salun_sine"), suite.row("ihl_sigmoid")
    assert salun.method == "salun_sine" and ihl.method == "ihl_sigmoid"
    adapter = salun.config.adapter
    assert (adapter.phi, adapter.omega, adapter.rank) == ("sine", 100.0, 4)
    assert ihl.config.adapter.phi == "sigmoid"


def test_a_name_and_its_params_resolve_alike():
    sine = {"phi": "sine", "omega": 100}
    assert config("salun_sine").model_dump() == config("salun", adapter=sine).model_dump()


def test_presets_that_a_method_cannot_take_are_one_line(monkeypatch):
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    METHODS.register(
        "own_loku",
        "stable_forgetting.common.methods.forget_terms:GDFila",
        summary="starts elsewhere",
    )
    with pytest.raises(ConfigError, match="'own_loku_lora_ball': ball takes adapters that start"):
        METHODS["own_loku_lora_ball"]


def test_a_plugins_method_crosses_as_soon_as_it_is_there(monkeypatch):
    assert "own_sine" not in METHODS
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    METHODS.register("own", "stable_forgetting.common.methods.simple:Finetune", summary="mine")
    assert METHODS["own_sine"].Config().adapter.phi == "sine"
    assert METHODS.entry("own_sine").summary.startswith("mine; through ")


def test_every_row_is_listed_and_no_other_name_takes_its_place():
    for name, row in ROWS.items():
        assert name in METHODS.names() and row.base in METHODS.names()
        assert METHODS[name] is METHODS[name] and row.preset in PRESETS


def test_the_forget_weight_has_one_name():
    fields = {n: METHODS[n].Config.field_of("lam") for n in ("gd_sine", "npo", "gd_delora")}
    assert set(fields.values()) == {"forget_weight"}
    assert METHODS["ssd"].Config.field_of("lam") == "lam", "its lambda is another one"


def test_the_command_line_lists_shows_and_checks_crossings(cli):
    listed = cli("show", "methods")
    assert listed.code == 0 and "METHOD_sine_weight_clip" in listed.out
    shown = cli("show", "salun_sine")
    assert shown.code == 0 and "phi: sine" in shown.out and "2310.12508" in shown.out
    checked = cli("check", "salun_sine")
    assert checked.code == 0 and "ok  salun_sine" in checked.out
    wrong = cli("show", "salun_sin")
    assert wrong.code == 2

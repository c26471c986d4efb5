"""Config errors: one line each, naming the file, the key and the mend."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
from pydantic import Field
from pydantic import ValidationError as PydanticError

from stable_forgetting.common.base.config import (
    Strict,
    apply_overrides,
    did_you_mean,
    digest,
    is_whole,
    merge,
    parse_yaml,
    read_yaml,
    validate,
)
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.train.config import FitConfig
from tests.common.made import complaint


class Inner(Strict):
    omega: Annotated[float, Field(gt=0)] = 1.0
    rank: int = 8
    flag: bool = False


class Row(Strict):
    method: str
    values: tuple[float, ...] = ()


class Outer(Strict):
    name: str = "x"
    lr: float = 1e-3
    steps: int | None = None
    mode: Literal["no", "bf16"] = "no"
    inner: Inner | None = None
    rows: list[Row] = []
    table: dict[str, Inner] = {}
    rates: dict[str, float] = {}
    every: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern="min$")] = 1
    scales: float | tuple[Annotated[float, Field(ge=0)], ...] = 1.0


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "suite.yaml"

    def go(text, model=Outer):
        path.write_text(text, encoding="utf-8")
        return validate(model, read_yaml(path), str(path))

    return go


# What is accepted --------------------------------------------------------------------------------


def test_numbers_as_people_write_them(load):
    """PyYAML reads 1e-4 as text and 16 as int; both are floats here."""
    config = load("lr: 1e-4\nsteps: 10\ninner: {omega: 16, rank: 2}")
    assert config.lr == 1e-4 and config.steps == 10
    assert config.inner == Inner(omega=16.0, rank=2)
    assert isinstance(config.inner.omega, float)


def test_booleans_where_they_belong(load):
    assert load("inner: {flag: yes}").inner.flag is True
    assert load("inner: {flag: off}").inner.flag is False
    assert load("mode: 'no'").mode == "no"


def test_configs_are_frozen(load):
    with pytest.raises(PydanticError, match="frozen"):
        load("{}").lr = 2.0


# What is refused, and how ------------------------------------------------------------------------

CASES = {
    "lrr: 1": "lrr: unknown key; did you mean 'lr'?",
    "inner: {omgea: 1}": "inner.omgea: unknown key; did you mean 'omega'?",
    "inner.omega: 1": "inner.omega: unknown key; write inner: {omega: ...}",
    "rows: [{method: a}, {methd: b}]": "rows.1.methd: unknown key; did you mean 'method'?",
    "table: {a: {rnk: 1}}": "table.a.rnk: unknown key; did you mean 'rank'?",
    "zzz: 1": "zzz: unknown key; known: every, inner, lr, mode",
    "rows: [{}]": "rows.0.method: required key is missing",
    "lr: fast": "lr: write a number",
    "lr: [1]": "lr: write a number",
    "lr:": "lr: write a number",
    "steps: 1.5": "steps: write a whole number",
    "steps: ten": "steps: write a whole number",
    "lr: no": "lr: yes/no/true/false is not valid here",
    "lr: true": "lr: yes/no/true/false is not valid here",
    "steps: yes": "steps: yes/no/true/false is not valid here",
    "mode: no": "mode: yes/no/true/false is not valid here",
    "name: off": "name: yes/no/true/false is not valid here",
    "rows: [{method: a, values: [1, no]}]": "rows.0.values: yes/no/true/false is not valid here",
    "rates: {head: yes}": "rates: yes/no/true/false is not valid here",
    "every: [1]": "every: write a whole number, or write text (got [1])",
    "every: 9 s": "every: write a whole number, or String should match pattern 'min$' (got '9 s')",
    "scales: [1, -2]": "scales.1: Input should be greater than or equal to 0 (got -2)",
    "lr: .nan": "lr: Input should be a finite number",
    "lr: nan": "lr: Input should be a finite number",
    "lr: .inf": "lr: Input should be a finite number",
    "inner: {omega: -1}": "inner.omega: Input should be greater than 0 (got -1)",
    "inner: 3": "inner: write a mapping, such as {key: value}",
    "rows: {method: a}": "rows: write a list, such as [1, 2, 3]",
    "mode: fp8": "mode: Input should be 'no' or 'bf16'",
    "lr: 1\nlr: 2": "line 2: key 'lr' is written twice",
    "inner:\n  rank: 1\n  rank: 2": "line 3: key 'rank' is written twice",
    "1: 2": "line 1: key 1 must be text",
    "no: 2": "line 1: key False must be text",
    "? [a]\n: 1": "must be text",
    "- a\n- b": "must be a mapping",
    "": "must be a mapping",
    "just text": "must be a mapping",
    "lr: 1\n\tsteps: 2": "line 2",
    "lr: [1": "line 1",
    "lr: {a: ]": "line 1",
    "a: 1\n---\nb: 2": "but found another document",
    "a: &x {b: *x}": "recursive",
    "a: *nowhere": "undefined alias",
    "a: !!python/object/apply:os.system [ls]": "could not determine a constructor",
    "name: 2024-13-45": "not valid YAML",
    "lr: !!int abc": "not valid YAML",
    "lr: !!bool maybe": "not valid YAML",
    "lr: !!timestamp x": "not valid YAML",
    "a: \x07": "not valid YAML",
    "a: " + "[" * 700: "not valid YAML",
}


@pytest.mark.parametrize("text", CASES, ids=lambda text: repr(text[:24]))
def test_every_mistake_is_one_line(load, tmp_path, text):
    message = complaint(load, text)
    assert str(tmp_path / "suite.yaml") in message
    assert CASES[text] in message


def test_further_problems_are_counted_and_a_misspelt_key_comes_first(load):
    message = complaint(load, "rows: [{methd: a}]")
    assert "rows.0.methd: unknown key; did you mean 'method'? (and 1 more)" in message
    assert "(and 2 more)" in complaint(load, "lr: x\nsteps: y\nmode: z")


def test_long_values_are_cut(load):
    assert len(complaint(load, f"lr: {'x' * 5000}")) < 400


def test_missing_unreadable_and_binary_files(tmp_path):
    missing = tmp_path / "none.yaml"
    assert f"{missing}: no such file" in complaint(read_yaml, missing)
    assert str(tmp_path) in complaint(read_yaml, tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    assert str(binary) in complaint(read_yaml, binary)


def test_parse_names_its_origin():
    assert complaint(parse_yaml, "a: [", "--set x").startswith("--set x:")


# --set -------------------------------------------------------------------------------------------


def test_overrides_read_yaml_and_leave_the_original_alone():
    base = {"lr": 1, "inner": {"rank": 1, "omega": 2}}
    texts = ["inner.rank=4", "rows=[{method: a}]", "lr=1e-4", "inner.flag=yes", "name='a=b'"]
    result = apply_overrides(base, texts)
    assert result == {
        "lr": "1e-4",
        "inner": {"rank": 4, "omega": 2, "flag": True},
        "rows": [{"method": "a"}],
        "name": "a=b",
    }
    assert base == {"lr": 1, "inner": {"rank": 1, "omega": 2}}
    assert validate(Outer, result, "x").lr == 1e-4
    assert apply_overrides(base, ["lr="])["lr"] is None


@pytest.mark.parametrize("text", ["lr", "=3", "", "lr=[1", "lr={a: 1, a: 2}"])
def test_malformed_overrides(text):
    assert "--set" in complaint(apply_overrides, {}, [text])


def test_later_overrides_win():
    assert apply_overrides({}, ["a.b=1", "a.b=2", "a.c=3"]) == {"a": {"b": 2, "c": 3}}


def test_merge_replaces_lists_and_scalars():
    assert merge({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": 4}) == {"a": [3], "b": 4}
    assert merge({"b": 4}, {"b": {"c": 1}}) == {"b": {"c": 1}}


# Schemas -----------------------------------------------------------------------------------------


def test_exactly_one_length():
    for data in ({}, {"steps": 3, "epochs": 2}):
        message = complaint(validate, FitConfig, data, "recipe")
        assert "exactly one of steps and epochs" in message
    assert validate(FitConfig, {"epochs": 2}, "r").steps is None
    assert validate(FitConfig, {"steps": 2}, "r").epochs is None


def test_accumulation_divides_the_batch():
    message = complaint(validate, FitConfig, {"steps": 1, "batch_size": 10, "accumulation": 4}, "r")
    assert "accumulation must divide batch_size" in message
    assert validate(FitConfig, {"steps": 1, "batch_size": 12, "accumulation": 4}, "r")


def test_adapter_scales():
    config = AdapterConfig(rank=4, alpha=16, omega=10, phi="sigmoid")
    assert config.scale == 4.0 and config.slope == 2.5
    assert AdapterConfig(omega=10, phi="sine").slope == 10.0


# Digests -----------------------------------------------------------------------------------------


def test_digest_does_not_depend_on_order_or_container():
    one = {"a": 1, "b": (1, 2.5), "c": {"x": None}}
    two = {"c": {"x": None}, "b": [1, 2.5], "a": 1}
    assert digest(one) == digest(two) == digest(json.loads(json.dumps(one)))
    assert digest(one) != digest({**one, "a": 2})
    assert digest({"a": {3, 1, 2}}) == digest({"a": [1, 2, 3]})


def test_digest_is_frozen():
    """Keys of stored stages are made of this."""
    expected = "2f0c97ebd3498729e703b4dd22c7c6375659fc8d4d205deecbc3cca604822292"
    assert digest({"b": 1.5, "a": [True, None, "x"]}) == expected


def test_a_config_hashes_what_it_means_not_how_it_was_written():
    assert digest(AdapterConfig(alpha=16)) == digest(AdapterConfig(alpha="16.0"))
    assert digest(AdapterConfig(alpha=16)) != digest(AdapterConfig(alpha=17))


def test_unstorable_numbers_are_refused():
    for value in (float("nan"), [float("inf")], {"a": -float("inf")}):
        assert "stored" in complaint(digest, value)


def test_did_you_mean():
    assert did_you_mean("omgea", ["omega", "rank"]) == "; did you mean 'omega'?"
    assert did_you_mean("zzz", ["b", "a"]) == "; known: a, b"
    many = [f"name-{number}" for number in range(50)]
    assert did_you_mean("zzz-7", many).startswith("; 50 are known, such as name-7, name-")
    assert did_you_mean("zzz", []) == ""


def test_which_fields_take_whole_numbers_only():
    class Outer(Strict):
        inner: Inner | None = None
        steps: Annotated[int, Field(ge=1)] | None = None
        share: int | float = 1
        size: Literal[2, 3] = 2

    assert is_whole(Outer, "steps") and is_whole(Outer, "inner.rank")
    for key in ("share", "size", "inner", "inner.omega", "inner.flag", "none", "none.rank"):
        assert not is_whole(Outer, key)

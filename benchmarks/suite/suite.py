"""A suite: one leaderboard as one versioned YAML file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from stable_forgetting.benchmarks.suite.grid import Grid
from stable_forgetting.benchmarks.suite.tune import Tune
from stable_forgetting.common.base.config import (
    Strict,
    did_you_mean,
    read_yaml,
)
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, Seed
from stable_forgetting.common.methods.base import Length

SUITES = Path(__file__).parents[1] / "suites"
REFERENCES = ("original", "retrain")
FLOOR = "retrain (second)"
"""The row of the second Retrain."""
BUDGETED = ("steps", "epochs", "schedule")
"""Params that a suite's budget gives; a row that has one of its own has a budget of its own."""


def _is_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w .+=()-]{0,79}", value):
        raise ValueError(
            "write at most 80 letters, digits, blanks and _.+=()-, a letter or digit first"
        )
    return value


Name = Annotated[str, AfterValidator(_is_name)]
"""Names become folders, and parts of comma-separated lists."""


Kind = Literal["steps", "epochs", "adapter", "full"]
"""Kinds of rows: those of methods whose own length is in steps or in epochs; those that train an
adapter or the whole model."""


class Row(Strict):
    """One row of the leaderboard.

    Attributes:
        method: Registered name; the row's own label when absent.
        preset: Named overrides of the method.
        params: Overrides of the method's config.
        tune: False keeps a row out of tuning.
        without: Defaults of the suite that do not hold for this row.
    """

    method: str | None = None
    preset: str | None = None
    params: dict[str, Any] = {}
    tune: bool = True
    without: tuple[str, ...] = ()


class Budget(Strict):
    """What every row that reads retain data may spend on its training, whatever batch it uses.

    Which length holds: a row's own ``steps`` or ``epochs``, else the budget, else ``defaults_of``,
    else ``defaults``, else the method's.  A row with a length of its own is marked in the report.
    What is written later replaces what is written earlier: a file the one that it extends, and
    ``--set`` both.  So ``--set defaults.steps=300`` (or ``epochs``, ``schedule``), and the same in
    a file that extends another, also replaces that part of a budget which was there before.

    A method without a length (one shot, or its own number of passes) is not planned: its passes
    are counted, like everybody's.  Seconds are printed and are no budget: a number must not depend
    on a machine's load.

    Attributes:
        unit: ``epochs`` are passes over the retain set, so that all rows read equally many of its
            samples, but for a method that takes a share of it (``retain_share``); ``steps`` are
            optimizer steps.
        amount: How many.
        schedule: Of every row that has one, also of those that read forget data alone.
    """

    unit: Length = "epochs"
    amount: Count
    schedule: Literal["constant", "linear", "cosine"] = "cosine"

    def __str__(self) -> str:
        words = {"epochs": "passes over the retain set", "steps": "optimizer steps"}
        return f"{self.amount} {words[self.unit]}, {self.schedule} schedule"


class Folds(Strict):
    """Several forget sets, each unlearned with the suite's rows; the last one makes the main table.

    Attributes:
        kind: ``scalability``: nested sets, each unlearned from Original.  ``sustainability``:
            disjoint sets in turn, each unlearned from what the same row left at the one before.
        protocols: What each fold has in the place of the suite's protocol, key by key.
    """

    kind: Literal["scalability", "sustainability"]
    protocols: Annotated[tuple[dict[str, Any], ...], Field(min_length=2)]


class Suite(Strict):
    """One leaderboard.

    Attributes:
        suite: Its name.
        version: Raised when its numbers change meaning.
        title: One line for people.
        notes: What a reader of the table must know.
        benchmark: Registered benchmark.
        protocol: The benchmark's own config.
        seeds: One run of every row per seed.
        retrains: Retrains per split; the second one gives the noise floor.
        columns: Metrics of the main table; the benchmark's own when absent.
        methods: Label -> row, in any order.
        defaults: Params of every row; a row that cannot take one of them is an error.  Null takes
            away one of an extended suite.
        defaults_of: Kind of rows -> params of these rows, over ``defaults``.
        budget: Length and schedule of the rows that read retain data, over ``defaults``; each
            method's own when absent.  :class:`Budget` says which length holds.
        tune: Tuning on a separate seed, if wanted.
        grid: A sweep: every row runs at each of its points, and the best one is audited.
        compare: Pairs of labels whose paired difference is printed.
        after: A suite (name or path) of the request before this one: every row starts from the
            model that the same row left there, instead of from Original (sequential requests).
        folds: Several forget sets, whose metrics are drawn as curves.
        published: Labels of published tables to print beside (never in) the measured one.
        figures: Labels of published figures that the suite measures.
        audits: Audit -> its settings: run after the rows, and shown in the report.
        probes: Name -> settings of a probe, each final model's table on the probe's own data;
            ``probe`` in the settings names the registered one where the name is another.
        rules: Rule sets of the benchmark whose verdicts are columns.
        plugins: Python files that register what the suite names, beside the suite's file.

    Of a file that it ``extends`` (a built-in suite's name, or a file) a suite takes over everything
    that it does not say itself; a null row removes an inherited one, and ``rows`` names those that
    stay beside the references.
    """

    suite: Name
    version: Count = 1
    title: str = ""
    notes: str = ""
    benchmark: str = "image_classification"
    protocol: dict[str, Any]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (1, 2, 3)
    retrains: Annotated[int, Field(ge=1, le=8)] = 2
    columns: tuple[str, ...] = ()
    methods: dict[Name, Row | None]
    defaults: dict[str, Any] = {}
    defaults_of: dict[Kind, dict[str, Any]] = {}
    budget: Budget | None = None
    tune: Tune | None = None
    grid: Grid | None = None
    compare: tuple[tuple[str, str], ...] = ()
    after: str | None = None
    folds: Folds | None = None
    published: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    audits: dict[str, dict[str, Any] | None] = {}
    probes: dict[Name, dict[str, Any] | None] = {}
    rules: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_resources(cls, data: Any) -> Any:
        """Earlier suites said what a stage needs of a machine, on which no number depends."""
        return {key: value for key, value in data.items() if key != "resources"}

    @property
    def method_of(self) -> dict[str, str]:
        """Label of a row -> the method that it names."""
        return {label: (row and row.method) or label for label, row in self.methods.items()}

    @model_validator(mode="after")
    def _free_labels(self) -> Suite:
        for label, method in self.method_of.items():
            if label == FLOOR or (label in REFERENCES and label != method):
                raise ValueError(
                    f"methods.{label}: reports call a reference model so; give the row of "
                    f"{method} another label"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        for pair in self.compare:
            for label in pair:
                if label not in self.methods:
                    raise ValueError(f"compare names '{label}', which is not a row")
        for seeds in (self.seeds, self.tune.seeds if self.tune else ()):
            if len(set(seeds)) != len(seeds):
                raise ValueError("seeds holds a seed twice")
        if self.tune and set(self.tune.seeds) & set(self.seeds):
            raise ValueError("tune.seeds must differ from seeds: tuning needs a seed of its own")
        for key in ("tune", "folds", "after") if self.grid else ():
            if getattr(self, key):
                raise ValueError(f"a suite with a grid has no {key}; write {key}: null")
        if self.tune and self.folds:
            raise ValueError("folds take fixed configs; remove tune and write the chosen params")
        return self


@cache
def family(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Suites of a built-in file -> the entry that gives each, and the values of its variables."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for entry, data in read_yaml(path)["suites"].items():
        origin = f"{path}: {entry}"
        for name, values in names(entry, data.get("variables", {}), origin).items():
            if name in found:
                raise ConfigError(f"{origin}: there are two suites '{name}'; rename one")
            found[name] = (entry, values)
    return found


def _families() -> dict[str, Path]:
    """Built-in files of suites (files that start with an underscore are shared parts)."""
    return {path.stem: path for path in SUITES.glob("*.yaml") if not path.stem.startswith("_")}


@cache
def suite_names() -> list[str]:
    """Built-in suites, without sweeps."""
    return sorted({name for path in _families().values() for name in family(path)} - {*sweeps()})


@cache
def sweeps() -> dict[str, str]:
    """Built-in suites with a grid -> title."""
    entries = {path: read_yaml(path)["suites"] for path in _families().values()}
    return {
        name: str(entries[path][entry].get("title", ""))
        for path in sorted(entries)
        for name, (entry, _) in sorted(family(path).items())
        if "grid" in entries[path][entry]
    }


def suite_groups() -> dict[str, list[str]]:
    """Names of several built-in suites together."""
    return read_yaml(SUITES / "_groups.yaml")


def is_file(name: str) -> bool:
    """Whether a suite is given as a path, not by a built-in name."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def find_suite(name: str) -> Path:
    """The file that holds a built-in suite, or a path given as such.

    A family's file has the name with which those of its suites begin, so that no other is read.
    """
    if is_file(name):
        return Path(name)
    stems = [stem for stem in _families() if f"{name}-".startswith(f"{stem}-")]
    path = _families()[max(stems, key=len)] if stems else None
    if path and name in family(path):
        return path
    groups = suite_groups()
    if group := groups.get(name):
        raise ConfigError(f"'{name}' is several suites; name one: {', '.join(group)}")
    hint = close_to(name, [*suite_names(), *sweeps(), *groups])
    hint = hint or "; see: unlearn show suites, or give a YAML file or the store that has it"
    raise ConfigError(f"unknown suite '{name}'{hint}")


def close_to(name: str, names: Sequence[str]) -> str:
    """A suffix such as ``; did you mean 'omega'?``; empty where no name is near."""
    hint = did_you_mean(name, names)
    return hint if hint.startswith("; did you mean") else ""


KEY = "variables"
NAME = re.compile(r"\$([A-Za-z]\w*)")


def points(variables: Any, origin: str) -> list[dict[str, Any]]:
    """Every combination of the values of some variables.

    Raises:
        ConfigError: The variables are no mapping to values or to lists of them.
    """
    if not isinstance(variables, Mapping) or any(
        not value if isinstance(value, list) else value is None or isinstance(value, Mapping)
        for value in variables.values()
    ):
        raise ConfigError(f"{origin}: {KEY}: write lists of values, such as {{rank: [4, 8]}}")
    lists = [value if isinstance(value, list) else [value] for value in variables.values()]
    return [dict(zip(variables, row, strict=True)) for row in itertools.product(*lists)]


def names(template: str, variables: Any, origin: str) -> dict[str, dict[str, Any]]:
    """The name of every suite of an entry -> the values of its variables.

    Raises:
        ConfigError: As of :func:`points`, or the name has a ``$`` that is no variable.
    """
    every = points(variables, origin)
    added = [name for name in variables if name not in NAME.findall(template)]
    return {
        fill(template, values, origin)
        + "".join(f"-{key}{values[key]}" for key in added if values[key] != every[0][key]): values
        for values in every
    }


def fill(value: Any, values: Mapping[str, Any], origin: str) -> Any:
    """A value with those of the variables in their places.

    Raises:
        ConfigError: There is no such variable.
    """
    if isinstance(value, Mapping):
        return {fill(k, values, origin): fill(v, values, origin) for k, v in value.items()}
    if isinstance(value, list):
        return [fill(item, values, origin) for item in value]
    if not isinstance(value, str):
        return value

    def of(match: re.Match[str]) -> Any:
        if match[1] not in values:
            hint = did_you_mean(match[1], [*values])
            raise ConfigError(f"{origin}: ${match[1]}: no such variable{hint}")
        return values[match[1]]

    whole = NAME.fullmatch(value)
    return of(whole) if whole else NAME.sub(lambda match: str(of(match)), value)

"""Suite files -> what they say: families, inheritance, rows that are selected, plugins.

A suite's file is one mapping.  A built-in file is a family: ``suites`` holds what each of them says
beyond the rest of the file, ``parts`` what several of them share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.suite.suite import (
    KEY,
    REFERENCES,
    SUITES,
    family,
    fill,
    find_suite,
    is_file,
    points,
    suite_groups,
    suite_names,
    sweeps,
)
from stable_forgetting.common.base.config import apply_overrides, check_known, merge, read_yaml
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS, load_plugins
from stable_forgetting.common.methods.base import over as over_earlier

LAMBDAS = ("lam", "forget_weight")
AXES = {
    **dict.fromkeys(("steps", "epochs", "amount"), "steps"),
    **dict.fromkeys(LAMBDAS, "lambdas"),
    "lr": "lrs",
}
"""What a default or a budget may not set beside a grid -> the grid's own key."""


def read_suite(name: str, overrides: Sequence[str] = ()) -> tuple[Path, dict[str, Any]]:
    """A suite's file, and what it says under overrides, with its variables' values.

    Its plugins are loaded.

    Raises:
        ConfigError: It has the name of a built-in suite, or a plugin cannot be loaded.
    """
    path = find_suite(name)
    data = _own(path) if is_file(name) else built_in(name)
    over = apply_overrides({}, overrides)
    if "plugins" in over:
        _texts(over, "plugins", "--set")
    _check_axes(data, over, "--set")
    data = join(data, over, "--set")
    try:
        load_plugins(data.get("plugins", ()), installed=False)
    except ConfigError as error:
        raise ConfigError(f"{path}: plugins: {str(error).removeprefix('--plugin ')}") from None
    return path, data


def named_after(path: Path, after: str) -> str:
    """What ``after`` in the file at ``path`` names: a suite, or a file by its absolute path."""
    return str((path.parent / after).resolve()) if is_file(after) else after


def requests_until(name: str) -> Iterator[str]:
    """The suite of a name, and those of the requests before it, each once."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        yield name
        after = read_suite(name)[1].get("after")
        name = after if isinstance(after, str) else name


@cache
def built_in(name: str) -> dict[str, Any]:
    """What a built-in suite says."""
    path = find_suite(name)
    whole, (entry, values) = read_yaml(path), family(path)[name]
    shared = {key: value for key, value in whole.items() if key not in ("suites", "parts")}
    data = {**whole["suites"][entry], KEY: values}
    if "extends" in data:
        data["extends"] = fill(data["extends"], values, f"{path}: {entry}")
    data = SuiteFile(path, whole.get("parts", {})).joined(data, shared)
    return {**fill(data, data.pop(KEY), f"{path}: {entry}"), "suite": name}


def _own(path: Path) -> dict[str, Any]:
    """What a user's file says; of a variable with several values it takes the first."""
    data = SuiteFile(path).whole()
    if "suites" in data:
        raise ConfigError(f"{path}: suites: a built-in file of several suites; give a suite's name")
    data = fill(data, points(data.pop(KEY, None) or {}, str(path))[0], str(path))
    inside = path.resolve().parent == SUITES.resolve()
    if not inside and data.get("suite") in (*suite_names(), *sweeps(), *suite_groups()):
        raise ConfigError(
            f"{path}: suite: '{data['suite']}' is built in, and its report would be overwritten; "
            "give yours another name, such as suite: my-digits"
        )
    return data


def suite_version(name: str) -> int:
    """A suite's version, which its file says, without checking the rest of it."""
    return int(read_suite(name)[1].get("version", 1))


@dataclass(frozen=True)
class SuiteFile:
    """A file of suites: ``extends`` takes its parts, built-in suites, and files beside it."""

    path: Path
    parts: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Path, ...] = ()
    known: dict[Path, dict[str, Any]] = field(default_factory=dict)  # each file is read once

    def whole(self) -> dict[str, Any]:
        """What the file and those that it extends say together; later ones of a list win.

        Raises:
            ConfigError: One is missing, damaged, or extends itself, directly or in a circle.
        """
        return self.joined(read_yaml(self.path))

    def joined(
        self, mapping: Mapping[str, Any], shared: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A mapping of the file over all that it extends; ``shared`` comes before these."""
        names = mapping.get("extends", [])
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{self.path}: extends: must be a file name, or a list of them")
        bases = [self._extended(name) for name in names]
        own = {key: value for key, value in self._placed(mapping).items() if key != "extends"}
        base = reduce(lambda base, over: _beside(base, over, str(self.path)), bases, shared or {})
        _check_axes(base, own, str(self.path))
        return join(base, own, str(self.path))

    def _extended(self, name: str) -> dict[str, Any]:
        """A part, a built-in suite, or a file."""
        if name in self.parts:
            return self.joined(self.parts[name])
        if not is_file(name):
            try:
                return built_in(name)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: extends: {error}") from None
        file, chain = (self.path.parent / name).resolve(), (*self.children, self.path.resolve())
        if file in chain:
            raise ConfigError(f"{self.path}: extends: '{name}' closes a circle; break it")
        if file not in self.known:
            self.known[file] = SuiteFile(file, children=chain, known=self.known).whole()
        return self.known[file]

    def _placed(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """The mapping; plugins, and the request before, lie beside the file."""
        result = dict(mapping)
        if "plugins" in mapping:
            files = _texts(mapping, "plugins", self.path)
            result["plugins"] = [str((self.path.parent / file).resolve()) for file in files]
        if isinstance(after := mapping.get("after"), str):
            result["after"] = named_after(self.path, after)
        return result


def join(base: Mapping[str, Any], over: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """``over`` put over ``base``, without the rows that it removes or does not select.

    A null row removes an inherited one, and ``rows`` names those that stay.  What ``base`` says of
    a removed row goes with it: comparisons and grids.
    """
    inherited, rows = _rows(base), _rows(over)
    gone = {label for label, row in rows.items() if row is None and label in inherited}
    if gone:
        base = without(base, gone)
        over = {**over, "methods": {k: row for k, row in rows.items() if k not in gone}}
    result = merge(base, _with_length(base, over))
    if isinstance(base.get("defaults"), Mapping) and isinstance(over.get("defaults"), Mapping):
        result["defaults"] = over_earlier(base["defaults"], over["defaults"])
    if base.get("plugins") and over.get("plugins"):
        result["plugins"] = list(dict.fromkeys([*base["plugins"], *over["plugins"]]))
    if "rows" not in result:
        return result
    wanted = _texts(result, "rows", origin)
    del result["rows"]
    rows, own = _rows(result), _rows(over)
    check_known(f"{origin}: rows: no row", wanted, [*rows])
    left_out = [k for k in own if k in rows and k not in (*wanted, *_kept(k, own[k]))]
    if inherited and "rows" in over and left_out:
        raise ConfigError(
            f"{origin}: rows: leaves out {', '.join(left_out)} of methods beside it; add each to "
            "rows, or take it out of methods"
        )
    return without(result, [k for k, row in rows.items() if k not in (*wanted, *_kept(k, row))])


def _check_axes(base: Mapping[str, Any], over: Mapping[str, Any], origin: str) -> None:
    """Refuses defaults that a grid would replace; those that were there before it may stay.

    Lambda may be given where every row has an axis of its own.
    """
    grid = over.get("grid", base.get("grid"))
    if not base or grid is None:
        return
    rows, of_rows = {**_rows(base), **_rows(over)}, _mapping(_mapping(grid).get("rows"))
    swept = [_mapping(of_rows.get(k)) for k, row in rows.items() if not _kept(k, row)]
    others = all("axis" in own and own["axis"] not in LAMBDAS for own in swept)
    axes = {key: own for key, own in AXES.items() if not (others and key in LAMBDAS)}
    given = {"defaults": over.get("defaults"), "budget": over.get("budget")}
    for kind, params in _mapping(over.get("defaults_of")).items():
        given[f"defaults_of.{kind}"] = params
    for part, values in given.items():
        for key, of_grid in axes.items():
            if _mapping(values).get(key) is not None:
                raise ConfigError(
                    f"{origin}: {part}.{key} is an axis of the grid; write grid.{of_grid}"
                )


def _beside(base: Mapping[str, Any], over: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """:func:`join` of two that one file extends: a row that the second merely names stays."""
    named = _rows(base)
    rows = {k: row for k, row in _rows(over).items() if row is not None or k not in named}
    return join(base, {**over, "methods": rows} if "methods" in over else over, origin)


def _with_length(base: Mapping[str, Any], over: Mapping[str, Any]) -> Mapping[str, Any]:
    """``over`` with its default length and schedule in the place of those of an earlier budget."""
    defaults = over.get("defaults")
    if "budget" in over or not base.get("budget") or not isinstance(defaults, Mapping):
        return over
    budget = {"schedule": defaults["schedule"]} if defaults.get("schedule") is not None else {}
    for unit in ("steps", "epochs"):
        if defaults.get(unit) is not None:
            budget |= {"unit": unit, "amount": defaults[unit]}
    return {**over, "budget": budget} if budget else over


def _kept(label: str, row: Any) -> tuple[str, ...]:
    """The label of a reference row, which every selection holds."""
    return (label,) if (_mapping(row).get("method") or label) in REFERENCES else ()


def _rows(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(data.get("methods"))


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value; empty for what is no mapping, which validation names later."""
    return value if isinstance(value, Mapping) else {}


def _texts(data: Mapping[str, Any], key: str, origin: Any) -> list[str]:
    values = data[key]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{origin}: {key}: write a list of names, such as [a, b]")
    return values


def without(data: Mapping[str, Any], labels: Collection[str]) -> dict[str, Any]:
    """A suite's data without some rows, and without what compares or tunes these rows alone."""
    result = {**data, "methods": {k: row for k, row in _rows(data).items() if k not in labels}}
    if isinstance(data.get("compare"), list):
        result["compare"] = [
            pair
            for pair in data["compare"]
            if not (isinstance(pair, list) and any(label in pair for label in labels))
        ]
    if isinstance(data.get("tune"), Mapping):
        unused = {label for label in labels if label not in METHODS}
        result["tune"] = {
            key: {k: v for k, v in part.items() if k not in unused}
            if key in ("grids", "spaces") and isinstance(part, Mapping)
            else part
            for key, part in data["tune"].items()
        }
    grid = data.get("grid")
    if isinstance(grid, Mapping) and isinstance(grid.get("rows"), Mapping):
        axes = {label: row for label, row in grid["rows"].items() if label not in labels}
        result["grid"] = {**grid, "rows": axes}
    return result

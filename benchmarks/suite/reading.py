"""Suite files -> what they say: inheritance, rows that are selected or removed, plugins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stable_forgetting.benchmarks.suite.suite import (
    REFERENCES,
    SUITES,
    find_suite,
    suite_groups,
    suite_names,
)
from stable_forgetting.benchmarks.suite.variables import with_values
from stable_forgetting.common.base.config import (
    Extending,
    apply_overrides,
    did_you_mean,
    merge,
    read_yaml,
)
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS, load_plugins

YAML = (".yaml", ".yml")


def read_suite(name: str, overrides: Sequence[str] = ()) -> tuple[Path, dict[str, Any]]:
    """A suite's file, and what it says under overrides, with its variables' values.

    Its plugins are loaded.

    Raises:
        ConfigError: It has the name of a built-in suite, or a plugin cannot be loaded.
    """
    path, rules = find_suite(name), SuiteFile()
    variant = "" if path == Path(name) else name.removeprefix(path.stem)
    data = read_yaml(path, rules)
    data = rules.join(data, apply_overrides({}, overrides), "--set")
    data = with_values(data, variant, str(path))
    own = path.resolve().parent != SUITES.resolve()
    if own and data.get("suite") in (*suite_names(), *suite_groups()):
        raise ConfigError(
            f"{path}: suite: '{data['suite']}' is built in, and its report would be overwritten; "
            "give yours another name"
        )
    try:
        load_plugins(data.get("plugins", ()), installed=False)
    except ConfigError as error:
        raise ConfigError(f"{path}: plugins: {str(error).removeprefix('--plugin ')}") from None
    return path, data


def suite_version(name: str) -> int:
    """A suite's version, which its file says, without checking the rest of it.

    Raises:
        ConfigError: As of :func:`read_suite`.
    """
    version: int = read_suite(name)[1].get("version", 1)
    return version


class SuiteFile(Extending):
    """A suite file: ``extends`` takes names too, null removes an inherited row, ``rows`` selects.

    What the file that is extended says of a removed row goes with it: comparisons and grids.
    """

    def place(self, mapping: dict[str, Any], path: Path) -> dict[str, Any]:
        """Built-in suites that are extended become files; plugins lie beside the file."""
        result, parents = dict(mapping), mapping.get("extends")
        if isinstance(parents, str | list):
            names = [parents] if isinstance(parents, str) else parents
            result["extends"] = [_extended_file(name, path) for name in names]
        if "plugins" in mapping:
            result["plugins"] = [
                str((path.parent / file).resolve()) for file in _texts(mapping, "plugins", path)
            ]
        after = mapping.get("after")
        if isinstance(after, str) and after.endswith(YAML):
            result["after"] = str((path.parent / after).resolve())
        return result

    def join(self, base: Mapping[str, Any], over: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """``over`` put over ``base``, without the rows that it removes or does not select."""
        inherited, rows = _rows(base), _rows(over)
        gone = {label for label, row in rows.items() if row is None and label in inherited}
        if gone:
            base = without(base, gone)
            over = {**over, "methods": {k: row for k, row in rows.items() if k not in gone}}
        result = merge(base, over)
        if base.get("plugins") and over.get("plugins"):
            result["plugins"] = list(dict.fromkeys([*base["plugins"], *over["plugins"]]))
        if "rows" not in result:
            return result
        wanted = _texts(result, "rows", origin)
        del result["rows"]
        rows = _rows(result)
        for label in wanted:
            if label not in rows:
                raise ConfigError(f"{origin}: rows: no row '{label}'{did_you_mean(label, [*rows])}")
        return without(result, [k for k, row in rows.items() if k not in (*wanted, *_kept(k, row))])


def _kept(label: str, row: Any) -> tuple[str, ...]:
    """The label of a reference row, which every selection holds."""
    method = row.get("method") if isinstance(row, Mapping) else None
    return (label,) if (method or label) in REFERENCES else ()


def _extended_file(name: Any, path: Path) -> Any:
    """A built-in suite's file by its name; anything else is left as it is."""
    if not isinstance(name, str) or "/" in name or name.endswith(YAML):
        return name
    try:
        file = find_suite(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: extends: {error}") from None
    if file.stem != name:
        raise ConfigError(f"{path}: extends: '{name}' is a variant; extend '{file.stem}'")
    return str(file.resolve())


def _rows(data: Mapping[str, Any]) -> Mapping[str, Any]:
    rows = data.get("methods")
    return rows if isinstance(rows, Mapping) else {}


def _texts(data: Mapping[str, Any], key: str, origin: Any) -> list[str]:
    values = data[key]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{origin}: {key}: write a list of names, such as [a, b]")
    return values


def without(data: Mapping[str, Any], labels: Collection[str]) -> dict[str, Any]:
    """A suite's data without some rows, and without what compares or tunes these rows alone."""
    result = {**data, "methods": {k: row for k, row in _rows(data).items() if k not in labels}}
    if isinstance(data.get("compare"), list):
        pairs = [pair for pair in data["compare"] if not {*pair} & {*labels}]
        result["compare"] = pairs
    if isinstance(data.get("tune"), Mapping):
        unused = {label for label in labels if label not in METHODS}
        result["tune"] = {
            key: {k: v for k, v in part.items() if k not in unused}
            if key in ("grids", "spaces") and isinstance(part, Mapping)
            else part
            for key, part in data["tune"].items()
        }
    return result

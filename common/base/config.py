"""Strict YAML -> pydantic models.  The only config loader.

What is read is what is hashed: unknown keys, wrong types and missing keys are errors that name the
file, the key and the nearest valid name.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import operator
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from stable_forgetting.common.base.errors import ConfigError, shortened

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


LONGEST_YAML = 256 << 10
"""Bytes of a file; the reader is slow."""
MOST_VALUES, DEEPEST = 100_000, 50
"""Values in a document, each alias counted as what it stands for; levels of nesting."""


def _mentions_bool(annotation: Any) -> bool:
    if annotation is bool or annotation is Any:
        return True
    return any(_mentions_bool(arg) for arg in typing.get_args(annotation))


class Strict(BaseModel):
    """Base of every config: frozen, no unknown keys, no NaN, no yes/no where a number belongs.

    ``aliases`` are further words for fields: word -> field.  ``stored`` are the names that stage
    keys hold where a field was renamed since: field -> name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    aliases: ClassVar[Mapping[str, str]] = {}
    stored: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def field_of(cls, key: str) -> str:
        """The field that a key means; of a nested key, such as ``adapter.rank``, its first part."""
        first, dot, rest = key.partition(".")
        return cls.aliases.get(first, first) + dot + rest

    @classmethod
    def by_field(cls, values: Mapping[str, T]) -> dict[str, T]:
        """Values under the names of their fields; of two words for a field the later one holds."""
        return {cls.field_of(key): value for key, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """What stage keys and digests hash of it: plain JSON types."""
        return {self.stored.get(key, key): value for key, value in canonical(self).items()}

    @model_validator(mode="before")
    @classmethod
    def _under_the_names_of_fields(cls, data: Any) -> Any:
        return cls.by_field(data) if cls.aliases and isinstance(data, Mapping) else data

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_numbers(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields.get(info.field_name)
        if field is None or _mentions_bool(field.annotation):
            return value
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, Mapping) and not _models_in(field.annotation):
            items = [*value.values()]
        if any(isinstance(item, bool) for item in items):
            raise ValueError("yes/no/true/false is not valid here (YAML reads bare `no` as false)")
        return value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice."""


def _construct_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(
                f"line {key_node.start_mark.line + 1}: key {key!r} must be text (quote it)"
            )
        if key in mapping:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: key '{key}' is written twice")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _construct_int(loader: _UniqueKeyLoader, node: yaml.ScalarNode) -> int:
    value: int = loader.construct_yaml_int(node)
    if abs(value) >= 1 << 63:
        raise ConfigError(f"line {node.start_mark.line + 1}: a whole number of more than 64 bits")
    return value


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str, origin: str) -> Any:
    """Parses YAML text; every failure is a one-line :class:`ConfigError` naming ``origin``."""
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a safe one
        _check_amount(value)
        return value
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"{origin}:{where} {problem}") from None
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML's scalar constructors let these through: a date of 2024-13-45, !!bool maybe
        raise ConfigError(f"{origin}: not valid YAML ({error})") from None


def _check_amount(value: Any) -> None:
    """Refuses what a few bytes of aliases can blow up."""
    level, count = [value], 0
    for _ in range(DEEPEST):
        following: list[Any] = []
        for item in level:
            count += 1
            if isinstance(item, dict | list):
                following += item.values() if isinstance(item, dict) else item
            if count + len(following) > MOST_VALUES:
                raise ConfigError(f"more than {MOST_VALUES:,} values; divide it")
        level = following
    if level:
        raise ConfigError(f"nested more than {DEEPEST} levels deep; flatten it")


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads one YAML mapping.

    Raises:
        ConfigError: The file is missing, damaged or no mapping.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a file; name a YAML file")
        with path.open("rb") as file:
            content = file.read(LONGEST_YAML + 1)
        text = content.decode("utf-8")
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; give the path of a YAML file that is there"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({error})") from None
    if len(content) > LONGEST_YAML:
        raise ConfigError(f"{path}: longer than {LONGEST_YAML >> 10} KiB; divide it")
    mapping = _parsed(text, str(path))
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values")
    return dict(mapping)


_parsed = lru_cache(maxsize=256)(parse_yaml)
"""Files that many others extend are parsed once; nobody changes what is inside."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested mappings; ``over`` wins, lists are replaced whole."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return result


def apply_overrides(
    mapping: Mapping[str, Any], overrides: Sequence[str], option: str = "--set"
) -> dict[str, Any]:
    """Applies ``key.sub=value`` strings of an option; values are read as YAML."""
    result = dict(mapping)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {text}: write it as key.sub=value")
        result = merge(result, nested(key, parse_yaml(value, f"{option} {key}")))
    return result


def nested(key: str, value: Any) -> dict[str, Any]:
    """A value at a key with dots for nesting: ``{"adapter": {"rank": 8}}`` of ``adapter.rank``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    whole: dict[str, Any] = value
    return whole


def validate(model: type[M], data: Any, origin: str) -> M:
    """Validates ``data``; the first problem becomes one line with a did-you-mean."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_first_problem(model, data, error)}") from None


_MENDS = {
    "tuple_type": "write a list, such as [1, 2, 3]",
    "list_type": "write a list, such as [1, 2, 3]",
    "dict_type": "write a mapping, such as {key: value}",
    "model_type": "write a mapping, such as {key: value}",
    "float_type": "write a number",
    "float_parsing": "write a number",
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "int_parsing": "write a whole number",
    "string_type": "write text",
    "bool_parsing": "write true or false",
}
"""What to write instead, where pydantic's own words name only its types."""


def _first_problem(model: type[BaseModel], data: Any, error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    # a misspelt key explains a missing one, so it comes first
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    places = [_keys(model, data, problem["loc"]) for problem in problems]
    # each form that a value may have is a problem of its own; the deepest is of the form meant
    near = [place for place in places if all(map(operator.eq, place, places[0]))]
    place = max(near, key=len)
    here = [problem for problem, other in zip(problems, places, strict=True) if other == place]
    first, key = here[0], ".".join(place) or "(top level)"
    if first["type"] == "extra_forbidden":
        models = _models_at(model, first["loc"][:-1])
        fields = sorted({name for candidate in models for name in candidate.model_fields})
        head, _, rest = place[-1].partition(".")
        nested = f"; write {head}: {{{rest}: ...}}" if rest and head in fields else ""
        text = f"{key}: unknown key{nested or did_you_mean(place[-1], fields)}"
    elif first["type"] == "missing":
        text = f"{key}: required key is missing"
    else:
        said = (_MENDS.get(p["type"]) or p["msg"].removeprefix("Value error, ") for p in here)
        text = f"{key}: {', or '.join(dict.fromkeys(said))}"
        of_the_whole = isinstance(first["input"], Mapping) and first["type"] == "value_error"
        text += "" if of_the_whole else f" (got {shortened(repr(first['input']), 60)})"
    more = len({*places} - {*near})
    return text + (f" (and {more} more)" if more else "")


def _keys(model: type[BaseModel], data: Any, loc: Sequence[Any]) -> tuple[str, ...]:
    """The keys of a place in ``data``; pydantic also names the form of a value that it tried."""
    keys: list[str] = []
    for depth, part in enumerate(loc):
        field = any(part in each.model_fields for each in _models_at(model, loc[:depth]))
        there = isinstance(part, int) or (isinstance(data, Mapping) and part in data)
        if field or there:
            keys.append(str(part))
            data = data[part] if isinstance(data, Mapping | list | tuple) and there else None
    return tuple(keys)


def _models_at(model: Any, loc: Sequence[Any]) -> list[type[BaseModel]]:
    """The models at ``loc``, looking through unions and containers."""
    models = _models_in(model)
    for part in loc:
        step: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(str(part))
            step += _models_in(field.annotation) if field else [candidate]
        models = step
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in typing.get_args(annotation) for model in _models_in(arg)]


def is_whole(model: type[BaseModel], key: str) -> bool:
    """Whether the field at ``key`` (dots for nesting) takes whole numbers and no others."""
    *parents, name = key.split(".")
    for candidate in _models_at(model, parents):
        if name in candidate.model_fields:
            types = _types_in(candidate.model_fields[name].annotation)
            return int in types and float not in types
    return False


def _types_in(annotation: Any) -> set[Any]:
    args = typing.get_args(annotation)
    return set().union(*map(_types_in, args)) if args else {annotation}


def listed(given: str | Iterable[str]) -> list[str]:
    """Texts as a list; a text alone is one of them, and not its letters."""
    return [given] if isinstance(given, str) else [*given]


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """A suffix such as ``; did you mean 'omega'?`` or all names, or three of over 40."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if len(names) > 40:
        nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
        return f"; {len(names)} are known, such as {', '.join(nearest)}"
    return f"; known: {', '.join(sorted(names))}" if names else ""


def check_known(fault: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Refuses the first name that is not known, with the nearest one that is."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{fault} '{name}'{did_you_mean(name, known)}")


def canonical(value: Any) -> Any:
    """Plain JSON types with tuples as lists and whole floats kept floats."""
    if isinstance(value, BaseModel):
        return canonical(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [canonical(item) for item in items]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{value} is not a number that can be stored")
    return value


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of ``value``."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

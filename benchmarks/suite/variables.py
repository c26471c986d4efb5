"""Several suites from one entry of a file: ``variables: {model: [phi, llama], rank: [4, 8]}``.

There is a suite for every combination of the lists.  ``$model`` stands for the value anywhere in
the entry, in its name too; a variable that the name leaves out is added to it (``-rank8``), but for
the first value.  A variable with one plain value is a constant, which the entry's parts may give.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError

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

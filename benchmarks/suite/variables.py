"""Suites that differ in a variable, as one file: ``variables: {rank: [4, 8, 16, 32]}``.

``$rank`` stands for the value anywhere in the suite.  The first value gives the suite of the file's
own name; each other one a suite such as ``tofu-phi-1.5-forget10-rank8``.  Further variables go
along with the first: their lists are as long as its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError

KEY = "variables"
NAME = re.compile(r"\$([A-Za-z]\w*)")


def variants(data: Mapping[str, Any], origin: str) -> dict[str, dict[str, Any]]:
    """What is added to a suite's name -> values of the variables; one without variables is itself.

    Raises:
        ConfigError: The variables are no lists of equal length.
    """
    variables = data.get(KEY)
    if variables is None:
        return {"": {}}
    lists = isinstance(variables, Mapping) and [*variables.values()]
    if not lists or not all(isinstance(values, list) and values for values in lists):
        raise ConfigError(f"{origin}: {KEY}: write lists of values, such as {{rank: [4, 8]}}")
    if len({len(values) for values in lists}) > 1:
        raise ConfigError(f"{origin}: {KEY}: give every variable as many values as the first")
    first = next(iter(variables))
    return {
        f"-{first}{row[0]}" if index else "": dict(zip(variables, row, strict=True))
        for index, row in enumerate(zip(*lists, strict=True))
    }


def with_values(data: Mapping[str, Any], variant: str, origin: str) -> dict[str, Any]:
    """The suite of one variant, its values in the places of the variables.

    Raises:
        ConfigError: There is no such variant or variable.
    """
    every = variants(data, origin)
    if variant not in every:
        raise ConfigError(
            f"{origin}: {KEY}: no variant '{variant}'{did_you_mean(variant, [*every])}"
        )

    def filled(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, str):
            return value
        whole = NAME.fullmatch(value)
        return of(whole) if whole else NAME.sub(lambda match: str(of(match)), value)

    def of(match: re.Match[str]) -> Any:
        if match[1] not in every[variant]:
            hint = did_you_mean(match[1], [*every[variant]])
            raise ConfigError(f"{origin}: ${match[1]}: no such variable{hint}")
        return every[variant][match[1]]

    suite: dict[str, Any] = filled({key: value for key, value in data.items() if key != KEY})
    return {**suite, "suite": f"{suite.get('suite', '')}{variant}"} if variant else suite

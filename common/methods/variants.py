"""Methods that differ from another one in defaults alone: a base, an adapter preset, a few params.

:data:`ROWS` holds the catalogue's named ones.  Any other ``METHOD_PRESET`` is made on demand, for a
method that is registered by a class of its own and has the preset's fields.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any

from pydantic import ValidationError, create_model

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS, Entry
from stable_forgetting.common.bounded.config import PRESETS
from stable_forgetting.common.methods.base import UnlearningMethod
from stable_forgetting.common.methods.catalogue import CATALOGUE

ADAPTER_LR = 3e-3
THROUGH_ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "gd": {"lr": ADAPTER_LR},
    "ihl": {"lr": ADAPTER_LR},
}
"""What else changes of a method's defaults where an adapter stands for the whole model."""


@dataclass(frozen=True)
class Variant:
    """A method as another one with other defaults.

    Attributes:
        base: Registered method.
        preset: Row of :data:`common.bounded.config.PRESETS`.
        paper: Where it comes from.
        doc: What ``unlearn show`` prints.
        params: Further defaults.
        presets: Module and attribute, below this package, of overrides in the place of the base's.
    """

    base: str
    preset: str
    paper: str
    doc: str
    params: Mapping[str, Any] = field(default_factory=dict)
    presets: str = ""


ROWS: Mapping[str, Variant] = {
    name: Variant(**{key: value for key, value in row.items() if key != "summary"})
    for name, row in CATALOGUE.items()
    if "base" in row
}


def variant(name: str) -> type[UnlearningMethod] | None:
    """The class of a variant, made from its base; None where the name says none.

    Raises:
        ConfigError: The base's config does not take the preset's params together.
    """
    row = ROWS.get(name) or _crossed(name)
    if row is None:
        return None
    base: Any = METHODS[row.base]
    return _made(name, base)


@cache
def _made(name: str, base: Any) -> type[UnlearningMethod]:
    row = ROWS.get(name) or _crossed(name)
    assert row is not None, "asked for by variant alone"
    preset = PRESETS[row.preset]
    defaults = {**preset.params, **THROUGH_ADAPTERS.get(row.base, {}), **row.params}
    members = {
        "__doc__": row.doc,
        "__module__": base.__module__,
        "Config": _config(base.Config, defaults, name),
        "info": replace(
            base.info,
            version=base.info.version + preset.version,
            paper=row.paper,
            access=base.info.access | preset.reads,
            extra=base.info.extra or preset.extra,
        ),
        "presets": _presets(row.presets) if row.presets else base.presets,
    }
    return type("".join(part.capitalize() for part in name.split("_")), (base,), members)


def _presets(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(f"stable_forgetting.common.methods.{module}"), attribute)


def _config(base: type[Strict], defaults: Mapping[str, Any], name: str) -> type[Strict]:
    """``base`` with other defaults."""
    fields: dict[str, Any] = {}
    for key, value in base.by_field(defaults).items():
        info = base.model_fields[key]
        kind: Any = info.annotation
        fields[key] = (Annotated[(kind, *info.metadata)] if info.metadata else kind, value)
    config = create_model("Config", __base__=base, __module__=base.__module__, **fields)
    try:
        config()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"method '{name}': {problem}") from None
    return config


def _crossed(name: str) -> Variant | None:
    """``METHOD_PRESET`` of a method that no row describes; the longest preset's name wins."""
    for preset in sorted(PRESETS, key=len, reverse=True):
        base = name.removesuffix(f"_{preset}")
        if base == name or base not in METHODS.names() or base in ROWS:
            continue
        cls: type[UnlearningMethod] = METHODS[base]
        if PRESETS[preset].params.keys() <= cls.Config.model_fields.keys():
            doc = f"{inspect.getdoc(cls)}\n\nHere through {PRESETS[preset].through}."
            return Variant(base, preset, cls.info.paper, doc)
    return None


def crossed_entry(name: str) -> Entry | None:
    """What a registry says of a ``METHOD_PRESET`` that is not registered."""
    cls = variant(name)
    row = _crossed(name)
    if cls is None or row is None:
        return None
    base = METHODS.entry(row.base)
    summary = f"{base.summary}; through {PRESETS[row.preset].through}"
    return Entry(name, cls, summary, base.origin)


def __getattr__(name: str) -> type[UnlearningMethod]:
    """The class of a row, for the registry's ``module:attribute`` targets."""
    cls = variant(name) if name in ROWS else None
    if cls is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return cls

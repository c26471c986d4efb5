"""Configs whose fields came one after the other, under keys that stay what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import SerializerFunctionWrapHandler, model_serializer

from stable_forgetting.common.base.config import Strict


class Grown(Strict):
    """A config with fields that came after the first stages were made.

    ``later`` holds these fields -> the value at which dumps, and so keys, leave them out.
    """

    later: ClassVar[Mapping[str, Any]] = {}

    def left_out(self) -> set[str]:
        """The fields that a dump leaves out."""
        return {key for key, value in self.later.items() if getattr(self, key) == value}

    @model_serializer(mode="wrap")
    def _later_fields_only_if_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        left_out = self.left_out()
        return {key: value for key, value in handler(self).items() if key not in left_out}

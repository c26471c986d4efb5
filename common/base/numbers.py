"""Numbers of configs: positive, not negative, counts from 1, amounts from 0."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Depth = Annotated[int, Field(ge=1, le=1000)]
"""Blocks of a model: more take hours to build."""
Amount = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What random number generators take."""

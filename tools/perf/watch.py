"""Counts what a model and a tokenizer are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Seen:
    """What a model and a tokenizer were asked for.

    Attributes:
        forwards: Teacher-forced ones.
        slots: Tokens of those, padding included.
        steps: Forwards of decoding.
        decoded: Rows of those: tokens that were written.
        tokenised: Calls.
    """

    forwards: int = 0
    slots: int = 0
    steps: int = 0
    decoded: int = 0
    tokenised: int = 0


@contextlib.contextmanager
def watched(model: Any, tokenizer: Any) -> Iterator[Seen]:
    """Counts forwards of a model's decoder, and tokenizer calls."""
    seen = Seen()
    kind, call = type(tokenizer), type(tokenizer).__call__

    def note(_: nn.Module, __: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
        if inputs.get("use_cache"):
            seen.steps += 1
            seen.decoded += len(inputs["input_ids"])
        else:
            seen.forwards += 1
            seen.slots += inputs["input_ids"].numel()

    def counting(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        seen.tokenised += 1
        return call(self, text, *args, **options)

    handle = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    kind.__call__ = counting
    try:
        yield seen
    finally:
        kind.__call__ = call
        handle.remove()

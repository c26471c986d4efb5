"""Models that stages have stored, or that they name where they were published."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from stable_forgetting.benchmarks.pipeline.stage import REFERRED, ModelSpec, Stage
from stable_forgetting.common.base.config import validate
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.protocol.benchmark import Benchmark, Runtime, check_device
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.common.store.weights import WEIGHTS, load_weights, weights_digest

if TYPE_CHECKING:
    from torch import nn

COMPARED: set[str] = set()
"""Digests of published weights that this process has compared."""


def stored_model(
    stage: Stage, store: StageStore, benchmark: Benchmark, *, exact: bool = False
) -> nn.Module:
    """A complete stage's model; an adapter lies on the model that the stage started from.

    ``benchmark`` is of whoever asks: its models have the stage's architecture.  ``exact`` leaves an
    adapter unmerged where merging would round its update off.

    Raises:
        DataError: Published weights are not what the stage read.
    """
    from stable_forgetting.common.bounded.attach import detach, merges_exactly
    from stable_forgetting.common.bounded.files import ADAPTER_CONFIG, load_adapter

    folder = store.checked(stage.kind, stage.key)
    if stage.start is not None and (folder / ADAPTER_CONFIG).is_file():
        model = stored_model(stage.start, store, benchmark)
        load_adapter(model, folder)
        return model if exact and not merges_exactly(model) else detach(model)
    referred = (store.done(stage.kind, stage.key) or {}).get(REFERRED)
    if referred is not None:
        return _published(stage, benchmark.runtime, referred)
    spec = stage.spec
    if isinstance(spec, ModelSpec) and stage.start is not None:
        cls = METHODS[spec.method]
        config = validate(cls.Config, spec.params, stage.name)
        model = cls.empty_model(config, benchmark.blank)
    else:
        model = benchmark.blank()
    load_weights(model, folder / WEIGHTS)
    return model


def _published(stage: Stage, runtime: Runtime, digest: str) -> nn.Module:
    """Read from where it came; compared once per process."""
    model = benchmark_of(stage, runtime).published(stage.kind)
    if model is None or (digest not in COMPARED and weights_digest(model) != digest):
        raise DataError(
            f"model.{stage.kind}: the published weights are no longer those of {stage.name};"
            " restore them, or take another --store"
        )
    COMPARED.add(digest)
    return model


def benchmark_of(stage: Stage, runtime: Runtime) -> Benchmark:
    """The benchmark of a stage, made once per process."""
    return _benchmark(stage.spec.benchmark, json.dumps(stage.spec.protocol), runtime)


def make_benchmarks_anew() -> None:
    """The next :func:`benchmark_of` looks at the data again, which may have changed meanwhile."""
    _benchmark.cache_clear()


@functools.lru_cache(maxsize=4)
def _benchmark(name: str, protocol: str, runtime: Runtime) -> Benchmark:
    cls = BENCHMARKS[name]
    check_device(runtime.device)
    return cls(validate(cls.Config, json.loads(protocol), f"protocol of {name}"), runtime)

"""A suite's own rows on stand-ins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stable_forgetting.benchmarks.suite.goals import SuiteProbe
from stable_forgetting.benchmarks.suite.resolve import ResolvedRow, ResolvedSuite
from stable_forgetting.common.base.config import canonical
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.protocol.probe import make_probe
from stable_forgetting.common.protocol.sizes import StandIn
from stable_forgetting.common.train.rehearsal import Rehearsal

PROBED = 2
"""Rows of a probe's data."""
WARNING = "rehearsal: the numbers mean nothing"


def rehearsed(
    suite: ResolvedSuite, runtime: Runtime, folder: Path
) -> tuple[ResolvedSuite, StandIn]:
    """The suite with stand-ins for model and data, on its first seed, every row untuned.

    Args:
        suite: Its rows keep their settings; a tuned one takes its first draw.
        folder: For the stand-ins' files.
    """
    stand_in = BENCHMARKS[suite.spec.benchmark].stand_in(suite.protocol, runtime, folder)
    probes, absent = _probes(suite, runtime)
    gone = tuple(f"{name}." for name in absent)
    spec = suite.spec.model_copy(
        update={
            "suite": f"rehearsal of {suite.name}",
            "title": f"{suite.spec.title} ({WARNING})",
            "protocol": canonical(stand_in.config),
            "seeds": suite.spec.seeds[:1],
            "tune": None,
            "grid": None,
            "columns": tuple(c for c in suite.spec.columns if not c.startswith(gone)),
        }
    )
    small = replace(
        suite,
        spec=spec,
        protocol=stand_in.config,
        rows=tuple(_untuned(row) for row in suite.rows),
        probes=probes,
        after=suite.after and rehearsed(suite.after, runtime, folder)[0],
        folds=tuple(rehearsed(fold, runtime, folder)[0] for fold in suite.folds),
        rehearsal=Rehearsal(samples=dict(stand_in.samples)),
        accepts=None,
    )
    notes = (*stand_in.notes, *absent.values())
    return small, replace(stand_in, notes=notes)


def _probes(suite: ResolvedSuite, runtime: Runtime) -> tuple[dict[str, SuiteProbe], dict[str, str]]:
    """Probes on a few rows, and name -> why one is left out."""
    probes, absent = {}, {}
    for name, entry in suite.probes.items():
        try:
            entry.probe.require(runtime.data_root)
        except DataError as error:
            absent[name] = f"not rehearsed: {error}"
            continue
        config = entry.probe.config
        few = {"limit": PROBED} if "limit" in type(config).model_fields else {}
        small = make_probe(entry.registered, {**canonical(config), **few}, name, name=name)
        probes[name] = SuiteProbe(entry.registered, small)
    return probes, absent


def _untuned(row: ResolvedRow) -> ResolvedRow:
    config = row.draws[0].config if row.draws else row.config
    return replace(row, config=config, search=None, draws=(), grid=None)


def with_rows(suite: ResolvedSuite, *labels: str) -> ResolvedSuite:
    """The suite, and its folds, with these rows alone."""
    rows = tuple(row for row in suite.rows if row.label in labels)
    compare = tuple(pair for pair in suite.spec.compare if set(pair) <= set(labels))
    return replace(
        suite,
        spec=suite.spec.model_copy(update={"compare": compare}),
        rows=rows,
        folds=tuple(with_rows(fold, *labels) for fold in suite.folds),
    )

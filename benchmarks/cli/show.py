"""What ``unlearn ls`` and ``unlearn show`` print."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict

import yaml
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from benchmarks.leaderboard.sweep import short, sources
from benchmarks.report.table import left, rich_table
from benchmarks.spec.resolve import ResolvedSuite, load_suite
from benchmarks.spec.suite import find_suite
from benchmarks.spec.tune import Draw
from common.base.config import canonical
from common.base.registry import BENCHMARKS, METHODS


def show_method(console: Console, name: str) -> None:
    """Formula, source, access, defaults and presets of a method."""

    cls, entry = METHODS[name], METHODS.entry(name)
    info = cls.info
    console.print(f"[bold]{name}[/bold]  version {info.version}  ({escape(str(entry.origin))})")
    console.print(escape(inspect.getdoc(cls) or ""), highlight=False)
    console.print(f"\n[bold]paper[/bold]   {escape(info.paper)}", highlight=False)
    console.print(f"[bold]reads[/bold]   {', '.join(sorted(info.access)) or 'nothing'}")
    if info.modality:
        console.print(f"[bold]only[/bold]    {info.modality} benchmarks")
    if info.scenarios:
        console.print(f"[bold]only[/bold]    {', '.join(sorted(info.scenarios))} forgetting")
    defaults = yaml.safe_dump(canonical(cls.Config()), sort_keys=False)
    console.print(f"\n[bold]defaults[/bold]\n{escape(defaults)}", highlight=False)
    for preset, params in cls.presets.items():
        text = yaml.safe_dump(canonical(params), sort_keys=False, default_flow_style=True).strip()
        console.print(f"[bold]preset {preset}[/bold]  {escape(text)}", highlight=False)


def show_benchmark(console: Console, name: str) -> None:
    """What a benchmark is and measures."""

    cls = BENCHMARKS[name]
    versions = ", ".join(f"{kind} {v}" for kind, v in dataclasses.asdict(cls.versions).items())
    console.print(f"[bold]{name}[/bold]  versions: {versions}")
    console.print(inspect.getdoc(cls) or "", highlight=False, markup=False)
    rows = [[m.name, m.title, m.arrow, m.unit, m.doc] for m in cls.metrics]
    console.print(left(rich_table("Metrics", ["name", "head", "goal", "unit", "what"], rows)))


def show_suite(console: Console, name: str) -> None:
    """A suite's YAML, its trials, and what share of its model its adapters train, counted."""
    suite = load_suite(name)
    text = find_suite(name).read_text(encoding="utf-8")
    console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    _show_tuning(console, suite)
    _show_adapters(console, suite)


def _show_tuning(console: Console, suite: ResolvedSuite) -> None:
    tune = suite.spec.tune
    if tune is None:
        return
    seeds = ", ".join(map(str, tune.seeds))
    title = f"Tuning: {tune.trials} trials per row on seed {seeds}"
    cells = [[rows, sampler, space] for rows, sampler, space in sources(suite)]
    console.print(left(rich_table(title, ["rows", "sampler", "from"], cells)))
    drawn: dict[str, list[str]] = defaultdict(list)
    for row in suite.rows:
        if row.search is not None and row.search.sampler != "grid":
            drawn["\n".join(_values(draw) for draw in row.draws)].append(row.label)
    cells = [[", ".join(labels), trials] for trials, labels in drawn.items()]
    if cells:
        heads = ["rows", "first round" if tune.sampler == "tpe" else "trials"]
        console.print(left(rich_table("Drawn", heads, cells)))


def _values(draw: Draw) -> str:
    return ", ".join(f"{key}={short(value)}" for key, value in draw.values.items())


def _show_adapters(console: Console, suite: ResolvedSuite) -> None:
    adapters = {}
    labels = defaultdict(list)
    for row in suite.rows:
        adapter = getattr(row.config, "adapter", None)
        if adapter is not None:
            size = (adapter.rank, adapter.placement, adapter.targets)
            adapters[size] = adapter
            labels[size].append(row.label)
    benchmark = BENCHMARKS[suite.spec.benchmark]
    cells = []
    for (rank, placement, targets), adapter in adapters.items():
        share = benchmark.adapter_share(suite.protocol, adapter)
        if share is not None:
            trained, base = share
            percent = f"{100 * trained / (base + trained):.3f} %"
            where = placement if targets is None else " ".join(targets)
            rows = ", ".join(labels[rank, placement, targets])
            cells.append([str(rank), where, f"{trained:,}", f"{base:,}", percent, rows])
    if cells:
        heads = ["rank", "on", "trained", "of the model's", "share of both", "rows"]
        console.print(left(rich_table("Adapters, counted", heads, cells)))

"""The command ``show``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.lists import LISTS, show_lists, show_words
from stable_forgetting.benchmarks.cli.options import STORE, Plugins, Store, console, register_all
from stable_forgetting.benchmarks.costs.bounded import layer_costs, sections
from stable_forgetting.benchmarks.leaderboard.tuning import sources
from stable_forgetting.benchmarks.machine.glossary import glossary, sections_of
from stable_forgetting.benchmarks.paper.coverage import coverage_section
from stable_forgetting.benchmarks.paper.report import published_sections
from stable_forgetting.benchmarks.report.cells import settings
from stable_forgetting.benchmarks.report.terminal import show as show_sections
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.resolved import (
    HEADS,
    MORE,
    further_table,
    pretraining_table,
    protocol_table,
    resolved_table,
)
from stable_forgetting.benchmarks.suite.suite import close_to, suite_names, sweeps
from stable_forgetting.common.base.config import Strict, canonical
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.methods.base import ALIASES


@dataclass(frozen=True)
class Layer:
    """Of what bounded layers the costs are shown."""

    plan: Annotated[
        str | None, typer.Option("--plan", help="Model whose costs with bounded layers to show.")
    ] = None
    rank: Annotated[int, typer.Option(help="Rank of --plan.", min=1)] = 8
    tokens: Annotated[int, typer.Option(help="Tokens per forward of --plan.", min=1)] = 4096
    placement: Annotated[str, typer.Option(help="Of --plan: mlp, attention or all.")] = "mlp"

    def __post_init__(self) -> None:
        sizes = (Layer.rank, Layer.tokens, Layer.placement)
        if self.plan is None and (self.rank, self.tokens, self.placement) != sizes:
            raise ConfigError("show: --rank, --tokens and --placement are of --plan; name a model")


@command(
    "unlearn show",
    "unlearn show methods",
    "unlearn show suites --filter digits",
    "unlearn show suites --paper",
    "unlearn show gd_sine",
    "unlearn show digits-class",
    "unlearn show metrics",
    "unlearn show MIA",
    "unlearn show tofu-phi-1.5-forget10 --resolved",
    "unlearn show lethevit-cifar10 --published",
    "unlearn show bounded --plan llama-2-7b --rank 8 --tokens 4096",
)
def show(
    layer: Layer,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A method, suite, benchmark or metric; or a list: suites, sweeps, methods, "
            "benchmarks; or: metrics, bounded. Without a name: the suites."
        ),
    ] = None,
    words: Annotated[
        str | None, typer.Option("--filter", help="Of lists: only lines with all these words.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Of suites: each table and figure of the paper.")
    ] = False,
    store: Store = STORE,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="For a suite: what each row runs, as a table.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="For a suite: the published tables that it names.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """List suites, sweeps, methods and benchmarks, or show one of them, or a metric.

    Of a method: formula, source and defaults. Of a suite: what it says. bounded: the bounded layer.
    """
    register_all(plugin)
    rows = {"--resolved": resolved, "--published": published}
    if name is None or name in LISTS:
        _refuse(name, {"--plan": layer.plan, **rows}, "name one suite or method, or bounded")
        if paper and name != "suites":
            raise ConfigError("show --paper: suites measure the paper: show suites --paper")
        if paper:
            show_sections(console, [coverage_section()])
        else:
            show_lists(name, words, store)
        return
    _refuse(name, {"--filter": words, "--paper": paper}, f"only lists have it: {', '.join(LISTS)}")
    name = ALIASES.get(name.lower(), name)
    if name != "bounded":
        mend = f"only the layer has one: show bounded --plan {layer.plan}"
        _refuse(name, {"--plan": layer.plan}, mend)
    if all(rows.values()):
        raise ConfigError("show --resolved --published: give one of them")
    if name in (*suite_names(), *sweeps()) or name.endswith((".yaml", ".yml")):
        (show_resolved if resolved else show_published if published else show_suite)(name)
    else:
        _refuse(name, rows, "only a suite has rows; name one")
        _show_one(name, layer)


def _show_one(name: str, layer: Layer) -> None:
    if name == "bounded":
        sizes = {"rank": layer.rank, "tokens": layer.tokens}
        costs = layer.plan and layer_costs(layer.plan, placement=layer.placement, **sizes)
        show_sections(console, sections(costs or None))
    elif name == "metrics":
        show_sections(console, glossary())
    elif name in METHODS:
        show_method(name)
    elif name in BENCHMARKS:
        show_benchmark(name)
    else:
        show_metric(name)


def _refuse(name: str | None, options: Mapping[str, object], mend: str) -> None:
    """Refuses options that what is shown does not have."""
    for option, value in options.items():
        if value:
            raise ConfigError(f"show {name or ''} {option}: {mend}".replace("  ", " "))


def show_metric(name: str) -> None:
    """What a column of a table is, wherever one is called so."""
    found = sections_of(name)
    if not found:
        known = [*METHODS.names(), *ALIASES, *suite_names(), *BENCHMARKS.names(), *LISTS]
        hint = close_to(name, [*known, "bounded", "metrics"])
        raise ConfigError(
            f"nothing is called '{name}'{hint}; see: unlearn show, or of columns: unlearn show "
            "metrics"
        )
    show_sections(console, found)


def show_method(name: str) -> None:
    """Formula, source, access, defaults and presets of a method."""
    cls, entry = METHODS[name], METHODS.entry(name)
    info, doc = cls.info, inspect.getdoc(cls) or ""
    console.print(f"[bold]{name}[/bold]  version {info.version}  ({escape(str(entry.origin))})")
    console.print(escape(doc if "Formula:" in doc else f"{doc}\n{_formula(cls)}"))
    console.print()
    scenarios = ", ".join(sorted(info.scenarios))
    for head, text in (
        ("paper", info.paper),
        ("reads", ", ".join(sorted(info.access)) or "nothing"),
        ("needs", f"{info.models} models at inference" if info.models > 1 else ""),
        ("only", f"{info.modality} benchmarks" if info.modality else ""),
        ("only", f"{scenarios} forgetting" if scenarios else ""),
        ("class", _place(cls)),
    ):
        if text:
            console.print(f"[bold]{head:8}[/bold]{escape(text)}")
    console.print("\n[bold]defaults[/bold]")
    for key, value, doc in explained(cls.Config()):
        text = f"{key}: {escape(value)}" + (f"  [dim]{escape(doc)}[/dim]" if doc else "")
        console.print(text, soft_wrap=True)
    console.print()
    for preset, params in cls.presets.items():
        text = yaml.safe_dump(canonical(params), sort_keys=False, default_flow_style=True).strip()
        console.print(f"[bold]preset {preset}[/bold]  {escape(text)}")


def _formula(cls: type) -> str:
    """The objective of the method that a class is a variant of; empty where none states one."""
    docs = (inspect.cleandoc(base.__doc__ or "") for base in cls.__mro__)
    blocks = (block for doc in docs for block in doc.split("\n\n"))
    return next((f"\n{block}" for block in blocks if block.startswith("Formula:")), "")


def _place(cls: type) -> str:
    """File and line of a class, or of the one that it is a variant of."""
    for base in cls.__mro__:
        try:
            return f"{inspect.getsourcefile(base)}:{inspect.getsourcelines(base)[1]}"
        except (OSError, TypeError):
            continue
    return cls.__module__


def explained(config: Strict, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, what it means) of every field, from the docstrings of its classes."""
    docs = documented(type(config))
    for name in type(config).model_fields:
        value, doc = getattr(config, name), docs.get(name, "")
        if isinstance(value, Strict):
            yield f"{prefix}{name}", "", doc
            yield from explained(value, f"{prefix}{name}.")
        else:
            dumped = yaml.safe_dump(canonical(value), default_flow_style=True, width=10_000)
            yield f"{prefix}{name}", dumped.removesuffix("...\n").strip(), doc


def documented(cls: type[Strict]) -> dict[str, str]:
    """Field of a config -> what its class, or one that it derives from, says of it."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        section = re.split(r"\n\S|\n\n", text, maxsplit=1)[0]
        for name, doc in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.M):
            docs[name] = " ".join(doc.split())
    return docs


def show_benchmark(name: str) -> None:
    """What a benchmark is and measures."""
    cls = BENCHMARKS[name]
    versions = ", ".join(f"{kind} {v}" for kind, v in dataclasses.asdict(cls.versions).items())
    console.print(f"[bold]{name}[/bold]  versions: {versions}")
    module = sys.modules.get(cls.__module__)
    about = (module and inspect.getdoc(module)) or inspect.getdoc(cls) or ""
    console.print(about, markup=False)
    rows = [[m.name, m.title, m.arrow, m.unit, m.doc] for m in cls.metrics]
    show_words("Metrics", ["name", "head", "goal", "unit", "what"], rows)


def show_suite(name: str) -> None:
    """What a suite says, its trials, and what share of its model its adapters train, counted."""
    from rich.syntax import Syntax

    suite = load_suite(name)
    said = canonical(read_suite(name)[1])
    text = yaml.safe_dump(said, sort_keys=False, default_flow_style=None, width=120)
    console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    _show_tuning(suite)
    _show_adapters(suite)


def show_resolved(name: str) -> None:
    """All that decides a number: of the protocol, then of each row."""
    suite = load_suite(name)
    show_words(f"{suite.name}: what all rows share", ["setting", "value"], protocol_table(suite))
    lines = [*pretraining_table(suite), *resolved_table(suite)]
    cells = [[line[head] for head in HEADS] for line in lines]
    _show_filled(f"{suite.name}: what each row runs", HEADS, cells)
    _show_filled(f"{suite.name}: and further", MORE, further_table(suite))


def _show_filled(title: str, heads: Sequence[str], rows: list[list[str]]) -> None:
    """Prints a table of words without the columns that no row fills."""
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    show_words(title, [heads[k] for k in kept], [[row[k] for k in kept] for row in rows])


def show_published(name: str) -> None:
    """The published tables that a suite names, and what in them does not follow."""
    labels = load_suite(name).spec.published
    if not labels:
        raise ConfigError(f"show {name} --published: the suite names no published table")
    show_sections(console, published_sections(labels))


def _show_tuning(suite: ResolvedSuite) -> None:
    tune = suite.spec.tune
    if tune is None:
        return
    title = f"Tuning: {tune.budget} on seed {', '.join(map(str, tune.seeds))}"
    show_words(title, ["rows", "sampler", "from"], [[*source] for source in sources(suite)])
    drawn: dict[str, list[str]] = defaultdict(list)
    for row in suite.rows:
        if row.search is not None and row.search.sampler != "grid":
            drawn["\n".join(settings(draw.values) for draw in row.draws)].append(row.label)
    cells = [[", ".join(labels), trials] for trials, labels in drawn.items()]
    if cells:
        heads = ["rows", "first round" if tune.sampler == "tpe" else "trials"]
        show_words("Drawn", heads, cells)


def _show_adapters(suite: ResolvedSuite) -> None:
    adapters: dict[tuple[int, str], Any] = {}
    labels = defaultdict(list)
    for row in suite.rows:
        adapter = getattr(row.config, "adapter", None)
        if adapter is not None:
            where = adapter.placement if adapter.targets is None else " ".join(adapter.targets)
            adapters[adapter.rank, where] = adapter
            labels[adapter.rank, where].append(row.label)
    cells = []
    for (rank, where), adapter in adapters.items():
        share = BENCHMARKS[suite.spec.benchmark].adapter_share(suite.protocol, adapter)
        if share is not None:
            trained, base = share
            percent = f"{100 * trained / (base + trained):.3f} %"
            rows = ", ".join(labels[rank, where])
            cells.append([str(rank), where, f"{trained:,}", f"{base:,}", percent, rows])
    if cells:
        heads = ["rank", "on", "trained", "of the model's", "share of both", "rows"]
        show_words("Adapters, counted", heads, cells)

"""The command ``probe``."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    DataRoot,
    Device,
    Overrides,
    Plugins,
    Threads,
    console,
    register_all,
)
from stable_forgetting.common.base.config import apply_overrides, canonical
from stable_forgetting.common.base.errors import ConfigError

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.report.section import Section
    from stable_forgetting.common.protocol.probe import ProbeTable
    from stable_forgetting.language.probes.base import TextProbe

FORMATS = ("table", "csv", "json")


@dataclass(frozen=True)
class Wanted:
    """What is measured."""

    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks, comma-separated: of the nine reasoning tasks, or any of lm-eval."
        ),
    ] = None
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="reasoning (default), reasoning_original, dialogue, perplexity, lm_eval."
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Rows per task, set or file, from the start.", min=1)
    ] = None
    set_: Overrides = None

    def probes(self, data_root: Path | None) -> list[TextProbe]:
        """The probes with their settings.

        Raises:
            ConfigError: A probe, a setting or a task is not known.
        """
        from stable_forgetting.common.protocol.probe import PROBES, make_probe
        from stable_forgetting.language.probes.base import TextProbe
        from stable_forgetting.language.probes.reasoning import TASKS

        tasks = None if self.tasks is None else [t.strip() for t in self.tasks.split(",")]
        usual = "lm_eval" if set(tasks or ()) - set(TASKS) else "reasoning"
        names = list(dict.fromkeys(self.probe or [usual]))
        settings = apply_overrides({}, self.set_ or ())
        for key in settings.keys() - set(names):
            raise ConfigError(f"--set {key}: is none of the probes {', '.join(names)}; write one")
        if tasks is not None and not any("tasks" in PROBES[n].Config.model_fields for n in names):
            raise ConfigError(f"--tasks: {', '.join(names)} have none; add --probe {usual}")
        probes = []
        for name in names:
            fields = PROBES[name].Config.model_fields
            shared = {"tasks": tasks, "limit": self.limit}
            given: dict[str, Any] = {
                k: v for k, v in shared.items() if v is not None and k in fields
            }
            if name == "reasoning" and data_root is None:
                given["data"] = "hub"
            probe = make_probe(name, {**given, **(settings.get(name) or {})}, f"--probe {name}")
            if not isinstance(probe, TextProbe):
                raise ConfigError(f"--probe {name}: needs a suite (probes:); leave it out")
            probes.append(probe)
        return probes


@command(
    "unlearn probe --model my_llm/ --tasks piqa,arc_easy --data-root data --limit 100",
    "unlearn probe --model my_llm/ --probe dialogue --probe perplexity --data-root data",
    "unlearn probe --model my_llm/ --probe perplexity --set perplexity.files.mine=/path/my.txt",
    "unlearn probe --model EleutherAI/gpt-neo-125m --tasks piqa,mmlu --format json",
)
def probe(
    model: Annotated[
        Path, typer.Option(help="Folder of a Hugging Face causal LM with its tokenizer, or hub id.")
    ],
    wanted: Wanted,
    data_root: DataRoot = None,
    format_: Annotated[str, typer.Option("--format", help="table, csv or json.")] = "table",
    device: Device = "auto",
    threads: Threads = 1,
    plugin: Plugins = None,
) -> None:
    """Measure any causal LM: reasoning through lm-eval, dialogue, perplexity.

    With --data-root the nine reasoning tasks read local files, without it lm-eval fetches them.
    """
    if format_ not in FORMATS:
        raise ConfigError(f"--format {format_}: choose {', '.join(FORMATS)}")
    if data_root is not None and not data_root.is_dir():
        raise ConfigError(f"--data-root {data_root}: no such folder")
    register_all(plugin)
    probes = wanted.probes(data_root)
    from stable_forgetting.benchmarks.report.files import json_text
    from stable_forgetting.benchmarks.report.terminal import show
    from stable_forgetting.common.base.seeding import make_deterministic
    from stable_forgetting.language.probes.folder import read_model

    make_deterministic(threads)
    asked = read_model(model, data_root=data_root, device=device)
    tables = [(each, each.table(asked)) for each in probes]
    if format_ == "json":
        sys.stdout.write(json_text({"model": str(model), "probes": to_json(tables)}))
    elif format_ == "csv":
        sys.stdout.write(to_csv(tables))
    else:
        show(console, [section(*each) for each in tables])


def to_json(tables: Sequence[tuple[TextProbe, ProbeTable]]) -> dict[str, Any]:
    """Probe -> its settings, rows, notes and metrics."""
    return {
        each.name: {
            "config": canonical(each.config),
            "rows": table.rows,
            "notes": table.notes,
            "metrics": each.summary(table),
        }
        for each, table in tables
    }


def to_csv(tables: Sequence[tuple[TextProbe, ProbeTable]]) -> str:
    """One line per number: probe, row, column, value; the mean is in percent."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["probe", "row", "column", "value"])
    for each, table in tables:
        for row, columns in table.rows.items():
            writer.writerows([each.name, row, *cell] for cell in columns.items())
        for metric, value in _mean(each, table).items():
            writer.writerow([each.name, "mean", metric, value])
    return stream.getvalue()


def section(each: TextProbe, table: ProbeTable) -> Section:
    """A table with what its numbers depend on."""
    from stable_forgetting.benchmarks.report.cells import MISSING, number
    from stable_forgetting.benchmarks.report.section import Section
    from stable_forgetting.benchmarks.report.section import table as make

    heads = list(dict.fromkeys(name for row in table.rows.values() for name in row))
    cells = [[row, *(_cell(columns.get(h)) for h in heads)] for row, columns in table.rows.items()]
    mean = "".join(f"Mean: {number(v, 2)} %. " for v in _mean(each, table).values())
    extent = f" ({each.extent})" if each.extent else ""
    notes = (f"{key}: {v}" for key, v in table.notes.items() if isinstance(v, int | str))
    text = mean + "; ".join(notes)
    return Section(f"{each.name}{extent}", (text,), make([each.name, *heads], cells or [[MISSING]]))


def _mean(each: TextProbe, table: ProbeTable) -> Mapping[str, float | None]:
    return {k: v for k, v in each.summary(table).items() if k == f"{each.name}.mean"}


def _cell(value: float | None) -> str:
    from stable_forgetting.benchmarks.report.cells import number

    return number(value, 0 if value is not None and value.is_integer() and value >= 1 else 4)

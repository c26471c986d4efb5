"""The command ``probe``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from stable_forgetting.benchmarks.apply.evaluate import (
    Evaluation,
    measure,
    probed,
    read_given,
    text_probe,
)
from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    DataRoot,
    Device,
    Overrides,
    Plugins,
    Threads,
    check_data_root,
    check_format,
    console,
    register_all,
    split_names,
)
from stable_forgetting.benchmarks.report.files import csv_text, json_text
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.common.base.config import apply_overrides, canonical
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.protocol.probe import PROBES, make_probe
from stable_forgetting.language.probes.base import TextProbe
from stable_forgetting.language.probes.lm_eval import TASKS


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
        """The probes with their settings."""
        tasks = split_names(self.tasks, "--tasks") or None
        usual = "lm_eval" if set(tasks or ()) - set(TASKS) else "reasoning"
        names = list(dict.fromkeys(self.probe or [usual]))
        settings = apply_overrides({}, self.set_ or ())
        for key, values in settings.items():
            if key not in names:
                known = ", ".join(names)
                raise ConfigError(f"--set {key}: is none of the probes {known}; write one")
            if not isinstance(values, Mapping | None):
                raise ConfigError(f"--set {key}: write {key}.key=value")
        if tasks is not None and not any("tasks" in PROBES[n].Config.model_fields for n in names):
            raise ConfigError(f"--tasks: {', '.join(names)} have none; add --probe {usual}")
        shared = {key: v for key, v in (("tasks", tasks), ("limit", self.limit)) if v is not None}
        probes = []
        for name in names:
            fields = PROBES[name].Config.model_fields
            given: dict[str, Any] = {key: v for key, v in shared.items() if key in fields}
            if name == "reasoning" and data_root is None:
                given["data"] = "hub"
            asked = {**given, **(settings.get(name) or {})}
            probes.append(text_probe(make_probe(name, asked, f"--probe {name}")))
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
    check_format(format_, "table", "csv", "json")
    check_data_root(data_root)
    register_all(plugin)
    probes = wanted.probes(data_root)

    make_deterministic(threads)
    asked = probed(read_given(model), data_root=data_root, device=device)
    made = [(each, measure(each, asked)) for each in probes]
    if format_ == "json":
        sys.stdout.write(json_text({"model": str(model), "probes": to_json(made)}))
    elif format_ == "csv":
        sys.stdout.write(to_csv([measured for _, measured in made]))
    else:
        show(console, [measured.section for _, measured in made])


def to_json(made: Sequence[tuple[TextProbe, Evaluation]]) -> dict[str, Any]:
    """Probe -> its settings, rows, notes and metrics."""
    return {
        each.name: {"config": canonical(each.config)}
        | {key: getattr(measured, key) for key in ("rows", "notes", "metrics")}
        for each, measured in made
    }


def to_csv(made: Sequence[Evaluation]) -> str:
    """One line per number: probe, row, column, value; the mean is in percent."""
    return csv_text(
        [
            {"probe": measured.name, "row": row, "column": column, "value": value}
            for measured in made
            for row, columns in (*measured.rows.items(), ("mean", measured.mean))
            for column, value in columns.items()
        ]
    )

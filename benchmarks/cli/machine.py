"""The commands that check: ``check``, ``doctor`` and ``verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    DataRoot,
    Plugins,
    Store,
    console,
    register_all,
)
from stable_forgetting.benchmarks.machine.doctor import examine
from stable_forgetting.benchmarks.paper.report import FINDINGS, finding_section, read_findings
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS


@command("unlearn check gd_sine", "unlearn check --all", "unlearn check mine --plugin mine.py")
def check(
    name: Annotated[str | None, typer.Argument(help="A method.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every registered method.")] = False,
    plugin: Plugins = None,
) -> None:
    """Check a method against the contract, on a tiny model."""
    register_all(plugin)
    from stable_forgetting.common.checks import check_method

    if (name is None) == (not all_):
        raise ConfigError("check: give a method's name, or --all")
    broken = 0
    for method in METHODS.names() if all_ else [str(name)]:
        results = check_method(method)
        bad = [result for result in results if not result.ok]
        broken += bool(bad)
        mark = "[red]broken[/red]" if bad else "[green]ok[/green]"
        console.print(f"{mark}  {method}: {len(results) - len(bad)} of {len(results)} checks pass")
        for result in bad if all_ else results:
            sign = "[green]+[/green]" if result.ok else "[red]-[/red]"
            said = ": ".join(filter(None, (result.name, result.detail)))
            console.print(f"    {sign} {escape(said)}")
    if broken:
        raise typer.Exit(1)


@command("unlearn doctor", "unlearn doctor --data-root data")
def doctor(store: Store = STORE, data_root: DataRoot = None) -> None:
    """Check packages, device, disk, data and network, and say how to mend each."""
    marks = {"ok": "[green]ok  [/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad [/red]"}
    findings = examine(store=store, data_root=data_root)
    for finding in findings:
        console.print(
            f"{marks[finding.verdict]} [bold]{finding.name}[/bold]: {escape(finding.detail)}",
        )
        if finding.mend:
            console.print(f"       -> {escape(finding.mend)}")
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


@command(
    "unlearn verify paper",
    "unlearn verify tofu-logs --data-root data",
    "unlearn verify digits.zip",
)
def verify(
    what: Annotated[
        str,
        typer.Argument(
            help="A bundle (folder or zip); paper: printed numbers that do not follow from others; "
            "tofu-logs: published TOFU logs."
        ),
    ],
    data_root: DataRoot = None,
    form: Annotated[str, typer.Option("--format", help="For paper: text, csv or json.")] = "text",
    plugin: Plugins = None,
) -> None:
    """Recompute published or submitted results, and show every difference."""
    if what == "paper":
        _verify_paper(form)
        return
    if form != "text":
        raise ConfigError(f"verify {what} --format {form}: only paper has it; leave it out")
    if what != "tofu-logs":
        _verify_bundle(Path(what), plugin)
        return
    from stable_forgetting.benchmarks.machine.verify import sections, verify_tofu_logs

    if data_root is None:
        raise ConfigError("verify tofu-logs: give the folder of tofu_eval_logs/ as --data-root")
    values = verify_tofu_logs(data_root)
    show(console, sections(values))
    if not all(value.ok for value in values):
        raise typer.Exit(1)


def _verify_paper(form: str) -> None:
    if form not in ("text", "csv", "json"):
        raise ConfigError(f"verify paper --format {form}: choose text, csv or json")
    if form == "text":
        show(console, [finding_section()])
    elif form == "csv":
        typer.echo(FINDINGS.read_text("utf-8"), nl=False)
    else:
        typer.echo(json.dumps(read_findings(), indent=1, ensure_ascii=False))


def _verify_bundle(path: Path, plugin: list[str] | None) -> None:
    from stable_forgetting.benchmarks.sharing.verify import sections, verify_bundle

    if not path.exists():
        raise ConfigError(f"verify {path}: choose paper, tofu-logs, or a bundle that is there")
    register_all(plugin)
    with console.status(f"{path}: computing every metric from its scores"):
        verification = verify_bundle(path)
    show(console, sections(verification))
    if verification.different:
        raise typer.Exit(1)

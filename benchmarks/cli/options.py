"""Options that commands share, and what they become."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from common.base import processes
from common.base.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.spec.resolve import ResolvedSuite
    from common.protocol.benchmark import Runtime

console = Console(width=None if sys.stdout.isatty() else 160, quiet=not processes.is_main())
error_console = Console(stderr=True)

Store = Annotated[Path, typer.Option(help="Root folder of everything written.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder with local data sets.", envvar="SF_DATA_ROOT")
]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="Python file to load.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override: key.sub=value (repeatable).")
]
Seeds = Annotated[str | None, typer.Option(help="Comma-separated seeds, e.g. 1,2,3.")]
Only = Annotated[str | None, typer.Option(help="Only these rows, comma-separated.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Threads = Annotated[int, typer.Option(help="Torch threads of each process.", min=1)]
Workers = Annotated[
    int, typer.Option(help="Worker processes; 0: one per core on a CPU, one on a GPU.", min=0)
]
ExecutorName = Annotated[str, typer.Option("--executor", help="auto, inline, processes, ray.")]
STORE = Path("runs")


def register_all(plugins: list[str] | None) -> None:
    """Registers what is built in, installed, and given as files."""
    import benchmarks  # noqa: F401 - registers
    from common.base.registry import load_plugins

    load_plugins(plugins or ())


def make_runtime(
    store: Path, data_root: Path | None, device: str, threads: int, plugins: list[str] | None
) -> Runtime:
    """What does not change numbers, checked."""
    from common.protocol.benchmark import Runtime
    from common.store.stages import check_writable

    if data_root is not None and not data_root.is_dir():
        raise ConfigError(f"--data-root {data_root}: no such folder")
    check_writable(store, "--store")
    return Runtime(
        store=store.absolute(),
        data_root=data_root and data_root.absolute(),
        device=device,
        threads=threads,
        plugins=tuple(str(Path(p).absolute()) for p in plugins or ()),
    )


def resolve_suite(
    name: str, overrides: list[str] | None, seeds: str | None, only: str | None
) -> ResolvedSuite:
    """The suite of a command line."""
    from benchmarks.spec.resolve import load_suite

    numbers, rows = split_lists(seeds, only)
    return load_suite(name, overrides or (), seeds=numbers, only=rows)


def resolve_suites(
    name: str, overrides: list[str] | None, seeds: str | None, only: str | None
) -> list[ResolvedSuite]:
    """The suite of a command line, or all suites of a group."""
    from benchmarks.spec.suite import suite_groups

    names = suite_groups().get(name, [name])
    return [resolve_suite(each, overrides, seeds, only) for each in names]


def split_lists(seeds: str | None, only: str | None) -> tuple[list[int] | None, list[str]]:
    """``--seeds`` as numbers (None: as configured) and ``--only`` as labels."""
    try:
        numbers = [int(part) for part in seeds.split(",")] if seeds else None
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: write whole numbers with commas") from None
    return numbers, [part.strip() for part in only.split(",")] if only else []


def tell(text: str) -> None:
    """One line on stderr, however long."""
    line = " ".join(text.split())
    error_console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)

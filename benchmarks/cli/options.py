"""Options that commands share, and what they become."""

from __future__ import annotations

import io
import itertools
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stable_forgetting.benchmarks.suite.remembered import remembered
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.benchmarks.suite.suite import suite_groups
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import load_plugins
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import check_writable


def _prepare_streams() -> None:
    """Closed streams swallow what is printed; a character that a terminal lacks is replaced."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_prepare_streams()
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
console = Console(width=_WIDTH, emoji=False, highlight=False)
error_console = Console(stderr=True, emoji=False, highlight=False)


def split_names(text: str | None, option: str) -> list[str]:
    """The names of a comma-separated option; none where it is not given.

    Raises:
        ConfigError: It is given, and has no name.
    """
    names = [name for part in (text or "").split(",") if (name := part.strip())]
    if text is not None and not names:
        raise ConfigError(f"{option}: write names with commas, or leave it out")
    return names


Store = Annotated[Path, typer.Option(help="Folder for everything that is written.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder with local data sets.", envvar="SF_DATA_ROOT")
]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="Python file to load.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override: key.sub=value (repeatable).")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Threads = Annotated[int, typer.Option(help="Torch threads of each process.", min=1, max=1024)]
Workers = Annotated[
    int,
    typer.Option(help="Worker processes; 0: one per GPU, or per core (up to 8).", min=0, max=1024),
]
STORE = Path("runs")


@dataclass(frozen=True)
class Selection:
    """Which seeds and rows of a suite, and with which overrides; plugins are loaded first."""

    set_: Overrides = None
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds, e.g. 1,2,3.")] = None
    only: Annotated[str | None, typer.Option(help="Only these rows, comma-separated.")] = None
    plugin: Plugins = None

    def __post_init__(self) -> None:
        register_all(self.plugin)

    def suite(self, name: str, store: Path) -> ResolvedSuite:
        """The suite of a command line; one that was run under a name of its own is in the store."""
        file = remembered(name, store)
        return load_suite(file, self.set_ or (), seeds=self.numbers, only=self.rows)

    def suites(self, name: str, store: Path) -> list[ResolvedSuite]:
        """The suite of a command line, or all suites of a group."""
        return [self.suite(each, store) for each in suite_groups().get(name, [name])]

    def command(self, name: str, store: Path) -> str:
        """The command that runs what these options choose of a suite, as it can be typed."""
        given: Mapping[str, Iterable[str | None] | None] = {
            "--set": self.set_,
            "--seeds": [self.seeds],
            "--only": [self.only],
            "--plugin": self.plugin,
            "--store": None if store == STORE else [str(store)],
        }
        pairs = [(option, value) for option, of in given.items() for value in of or () if value]
        return f"unlearn run {shlex.join([name, *itertools.chain(*pairs)])}"

    @property
    def numbers(self) -> list[int] | None:
        """The seeds; None for those of the suite."""
        try:
            return None if self.seeds is None else [int(part) for part in self.seeds.split(",")]
        except ValueError:
            raise ConfigError(f"--seeds {self.seeds}: write whole numbers with commas") from None

    @property
    def rows(self) -> list[str]:
        """Labels of the rows; empty for all rows."""
        return split_names(self.only, "--only")


@dataclass(frozen=True)
class Machine:
    """Where stages are kept, and where and how they run: nothing here changes a number."""

    store: Store = STORE
    data_root: DataRoot = None
    device: Device = "auto"
    threads: Threads = 1
    plugin: Plugins = None

    def runtime(self, store: Path | None = None) -> Runtime:
        """The runtime of these options, checked; ``store`` replaces theirs."""
        store = store or self.store
        check_data_root(self.data_root)
        check_writable(store, "--store")
        return Runtime(
            store=store.absolute(),
            data_root=self.data_root and self.data_root.absolute(),
            device=self.device,
            threads=self.threads,
            plugins=tuple(str(Path(path).absolute()) for path in self.plugin or ()),
        )


def check_data_root(folder: Path | None) -> None:
    """Refuses a folder that is not there."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--data-root {folder}: no such folder; give the one that holds the data")


def check_format(form: str, *known: str) -> None:
    """Refuses a format that a command does not write."""
    if form not in known:
        raise ConfigError(f"--format {form}: choose {', '.join(known)}")


def register_all(plugins: list[str] | None) -> None:
    """Registers what is built in, installed, and given as files."""
    from stable_forgetting import benchmarks  # noqa: F401 - registers

    load_plugins(plugins or ())


def no_records(name: str, store: Path, command: str) -> str:
    """What a store lacks of a suite, what it has of changed ones, and the command that makes it."""
    changed = sorted(path.parent.name for path in store.glob(f"suites/{name}+*/records.jsonl"))
    others = f" (but of {', '.join(changed)})" if changed else ""
    return f"no records of {name} in {store}{others}; run: {command}"


def print_error(text: str) -> None:
    """One line on stderr, however long."""
    line = " ".join(text.split())
    error_console.print(line, style="red", markup=False, soft_wrap=True)

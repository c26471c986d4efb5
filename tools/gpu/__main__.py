"""``python -m tools.gpu ITEM.. --out FOLDER``: questions to a GPU, in turn, a table each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError, UserError, named_line
from stable_forgetting.common.base.files import write_text
from stable_forgetting.common.base.seeding import make_deterministic
from tools.gpu.items import ITEMS, LIMIT, Job
from tools.gpu.record import Record, failed

LIST, ALL = "ls", "all"
EPILOG = (
    "Examples:  python -m tools.gpu ls;  python -m tools.gpu kernels --out runs/gpu;  "
    "python -m tools.gpu all --minutes 30 --out runs/gpu"
)
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Place:
    """Where items run and write; the same for all of a command."""

    out: Path
    device: str
    tiny: bool
    data_root: Path | None

    def job(self, name: str, seconds: float) -> Job:
        """What an item is given."""
        return Job(self.out / name, self.device, self.tiny, self.data_root, seconds)

    def options(self) -> list[str]:
        """The same as a command line."""
        given = ["--out", str(self.out), "--device", self.device]
        given += ["--data-root", str(self.data_root)] if self.data_root is not None else []
        return [*given, *(["--tiny"] if self.tiny else [])]


def run_here(name: str, place: Place, seconds: float = LIMIT) -> bool:
    """Runs one item in this process, deterministic as stages are; whether its promises hold."""
    make_deterministic()
    record = Record(place.out, name, ITEMS[name], place.device, place.tiny)
    try:
        for row in ITEMS[name].rows(place.job(name, seconds)):
            record.add(row)
            typer.echo(f"{name}: {', '.join(f'{k} {v}' for k, v in row.items() if v is not None)}")
    except Exception as error:  # whatever a new machine says belongs into the table
        record.add({"says": named_line(error), "ok": False})
        return False
    record.write(complete=True)
    return not failed(record.rows)


def run_apart(name: str, place: Place, seconds: float) -> str:
    """Runs one item in a process of its own, which is killed in the end; how it ended."""
    command = [sys.executable, "-m", "tools.gpu", name, *place.options()]
    command += ["--minutes", f"{seconds / 60:.2f}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the card must be free for the next item
            return "cut off"
    return {0: "ok", 1: "FAILED"}.get(code, f"code {code}")


def run_in_turn(names: list[str], place: Place, minutes: float | None) -> bool:
    """Runs items until the time is over, and keeps ``SUMMARY.md`` after each."""
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    ends: list[tuple[str, str, str]] = []
    for name in names:
        began = time.monotonic()
        left = min(LIMIT, end - began)
        how = run_apart(name, place, left) if left > 30 else "no time left"
        ends.append((name, how, f"{time.monotonic() - began:.0f}"))
        content = table(["item", "how it ended", "seconds"], ends)
        text = ("The files beside this one say the rest.",)
        place.out.mkdir(parents=True, exist_ok=True)
        page = markdown.write([Section("First contact with a GPU", text, content, depth=1)])
        write_text(place.out / "SUMMARY.md", page)
    return all(how == "ok" for _, how, _ in ends)


def listing() -> str:
    """The table of ``ls``."""
    rows = [
        [f"`{name}`", f"{item.minutes:g}", item.shows, item.basis] for name, item in ITEMS.items()
    ]
    content = table(["item", "minutes", "what it shows", "minutes derived from"], rows, words=True)
    text = ("Minutes are derived from sizes for one card of 80 to 140 GB, and were not measured.",)
    return markdown.write([Section("Questions to a GPU", text, content, depth=1)])


@app.command(epilog=EPILOG)
def main(
    items: Annotated[list[str], typer.Argument(help=f"{LIST}, {ALL}, or items.")],
    out: Annotated[Path, typer.Option(help="Folder for a table per item.")] = Path("runs/gpu"),
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu, ...")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Sizes that a CPU does in seconds.")] = False,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with local data sets.", envvar="SF_DATA_ROOT")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Wall time of all; what is unfinished is cut off.", min=0)
    ] = None,
) -> None:
    """First contact with a GPU: one question per item, its answer as JSON and Markdown."""
    try:
        if items == [LIST]:
            typer.echo(listing(), nl=False)
            return
        names = [*ITEMS] if items == [ALL] else items
        for name in names:
            if name not in ITEMS:
                known = [LIST, ALL, *ITEMS]
                raise ConfigError(f"{name}: no such item{did_you_mean(name, known)}; see ls")
        _check_device(device)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    place = Place(out, device, tiny, data_root)
    if len(names) == 1:
        seconds = LIMIT if minutes is None else min(LIMIT, 60 * minutes)
        good = run_here(names[0], place, seconds)
    else:
        good = run_in_turn(names, place, minutes)
    if not good:
        raise typer.Exit(1)


def _check_device(device: str) -> None:
    """Asked in another process: a process that has started CUDA cannot fork children that use it.

    Raises:
        ConfigError: torch has no such device here.
    """
    if device == "cpu":
        return
    code = "import sys, torch; torch.empty(1, device=sys.argv[1])"
    if subprocess.run([sys.executable, "-c", code, device], capture_output=True).returncode:
        raise ConfigError(f"--device {device}: not a device that torch has here; try --device cpu")


if __name__ == "__main__":
    app()

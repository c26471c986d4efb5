"""Power cuts, simulated: a job that is cut off loses whatever it had not synced.

A book is kept of every syncing, renaming and removing while a job runs.  Where the job is cut off,
its folder becomes one that a disk may hold then by POSIX alone, where a name is safe once its
folder was synced, and bytes are once their file was.  New names vanish and renames and removals
are undone, each by a throw of a coin; a file that was written to since keeps what was synced of it
and some of the rest, or zeros.  File systems with a journal lose less.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tools.faults.child import Trap
from tools.faults.trials import Tally, finish, half_written
from tools.faults.world import World

LINES = "book.jsonl"


@dataclass
class Book(Trap):
    """Writes down what is synced, renamed and removed below its folder.

    Attributes:
        book: A folder elsewhere, for the lines and for links to what is removed.
        links: How many of these there are.
    """

    book: Path = Path()
    links: int = 0

    def seen(self, event: str, path: str, target: str = "") -> None:
        """Writes one line."""
        if not path.startswith(str(self.folder)) or event == "os.mkdir" or not os.path.exists(path):
            return
        line: dict[str, Any] = {"event": event, "path": path, "target": target}
        if event == "fsync":
            line["inode"] = os.stat(path).st_ino
            if os.path.isdir(path):
                line["names"] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                line["state"] = _state(Path(path))
        else:
            last = Path(target or path)
            going = last.rglob("*") if event == "shutil.rmtree" else [last]
            line["parent"] = os.stat(last.parent).st_ino
            line["links"] = {str(file): self._link(file) for file in going if file.is_file()}
        handle = os.open(self.book / LINES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, json.dumps(line).encode() + b"\n")
        os.close(handle)

    def _link(self, file: Path) -> str:
        self.links += 1
        link = self.book / f"{os.getpid()}-{self.links}"
        os.link(file, link)
        return str(link)


def power_cut(world: World, random: Random, tally: Tally) -> None:
    """Cuts a job off before a random change of a file; run again it ends with the same bits."""
    job = random.choice(("run", "run", "sweep", "attack", "apply"))
    with world.place(job) as place:
        beside = place.with_suffix(".book")
        beside.mkdir()
        book = Book(place, random.randint(1, world.changes[job]), book=beside)
        for path in (place, *place.rglob("*")):  # what was there before is on the disk
            book.seen("fsync", str(path))
        ended = world.do(job, place, trap=book)
        if ended.code != -9:
            tally.check(ended, "a job that was to be cut off")
        lost = [f"{name} was complete, and is lost" for name in cut(place, beside, random)]
        tally.breach(*lost, *half_written(place))
        finish(world, job, place, tally)
        shutil.rmtree(beside)


def cut(place: Path, book: Path, random: Random) -> list[str]:
    """Makes of a folder what a disk may hold of it.

    Returns:
        Names of complete stages that had been safe, and are not there.
    """
    names: dict[int, dict[str, int]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    loose: list[dict[str, Any]] = []
    for text in (book / LINES).read_text().splitlines():
        line = json.loads(text)
        if "names" in line:
            names[line["inode"]] = line["names"]
            loose = [other for other in loose if other["parent"] != line["inode"]]
        elif "state" in line:
            sizes[line["inode"]] = tuple(line["state"])
        else:
            loose.append(line)
    stages = place / "stages"
    synced = names.get(stages.stat().st_ino, {}) if stages.is_dir() else {}
    safe = [name for name in synced if not name.startswith(".") and (stages / name).exists()]
    for line in reversed(loose):
        _undo(line, names, random)
    for path in _vanishing(place, names, random):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in place.rglob("*"):
        if path.is_file() and sizes.get(path.stat().st_ino) != _state(path):
            _shorten(path, sizes.get(path.stat().st_ino, (0, 0))[0], random)
    return sorted(name for name in safe if not (stages / name / "done.json").is_file())


def _undo(line: dict[str, Any], names: dict[int, dict[str, int]], random: Random) -> None:
    """A rename or a removal whose folder was not synced since; by chance it lasts."""
    path, target = Path(line["path"]), Path(line["target"])
    lasts = random.random() < 0.5
    if line["event"] == "os.rename":
        if not target.exists() or path.exists() or not path.parent.exists():
            return
        if lasts:
            names.setdefault(line["parent"], {})[target.name] = target.stat().st_ino
            return
        os.rename(target, path)
    for name, link in {} if lasts else line["links"].items():
        if not Path(name).exists():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            os.link(link, name)


def _vanishing(folder: Path, names: dict[int, dict[str, int]], random: Random) -> Iterator[Path]:
    """What lies in a folder under a name that is not safe, by chance."""
    safe = names.get(folder.stat().st_ino, {})
    for path in sorted(folder.iterdir()):
        if safe.get(path.name) != path.stat().st_ino and random.random() < 0.5:
            yield path
        elif path.is_dir():
            yield from _vanishing(path, names, random)


def _shorten(path: Path, safe: int, random: Random) -> None:
    """Bytes beyond the first ``safe`` are there, there in part, or zero."""
    content = path.read_bytes()
    rest = content[safe:]
    piece = rest[: random.randint(0, len(rest))]
    path.write_bytes(content[:safe] + random.choice((rest, piece, b"", bytes(len(rest)))))


def _state(path: Path) -> tuple[int, int]:
    """Size and time of change."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns

"""Damaged bytes in every kind of file: named, made again, or never read - but no other number."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

from stable_forgetting.common.store.stages import StageStore
from tools.faults.child import Trap
from tools.faults.tally import Tally
from tools.faults.world import World, contents

WAYS = ("flip", "zero", "cut", "empty", "remove", "append", "digit", "swap")


def damages(world: World, random: Random, count: int, until: float) -> Tally:
    """Damages one file of a complete or a half-done store, then reports and runs again."""
    tally = Tally("damaged file")
    while tally.tried < count and time.monotonic() < until:
        with world.place("run") as place:
            shutil.rmtree(place)
            under_way = random.random() < 0.2
            if under_way:
                place.mkdir()
                at = random.randint(world.changes["run"] // 4, world.changes["run"] * 3 // 4)
                world.do("run", place, trap=Trap(place, at))
            else:
                shutil.copytree(world.answered("run"), place)
            path = _chosen(random, place, "unfinished" if under_way else "stages")
            if path is None:
                continue
            kind = "checkpoint" if under_way else path.suffix.removeprefix(".")
            way = _damage(random, path, place)
            if not under_way and random.random() < 0.7:
                _lose_a_child(random, path, place)
            _judge(world, place, path, tally, f"{kind} {way}")
    return tally


def _chosen(random: Random, place: Path, part: str) -> Path | None:
    files = sorted(path for path in (place / part).rglob("*") if path.is_file())
    return random.choice(files) if files else None


def _damage(random: Random, path: Path, place: Path) -> str:
    """Changes a file; says how."""
    content = bytearray(path.read_bytes())
    way = random.choice(WAYS)
    spot = random.randrange(len(content)) if content else 0
    others = sorted(p for p in place.glob(f"*/*/{path.name}") if p != path)
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if way == "remove":
        path.unlink()
        return way
    if way == "swap" and others:
        content = bytearray(random.choice(others).read_bytes())
    elif way == "digit" and digits:
        spot = random.choice(digits)
        content[spot] = ord("1") + (content[spot] - ord("0")) % 9
    elif way == "zero":
        content[spot : spot + 512] = bytes(len(content[spot : spot + 512]))
    elif way == "cut":
        del content[spot:]
    elif way == "empty":
        content.clear()
    elif way == "append":
        content += random.randbytes(16)
    elif content:
        content[spot] ^= 1 << random.randrange(8)
        way = "flip"
    path.write_bytes(content)
    return way


def _lose_a_child(random: Random, path: Path, place: Path) -> None:
    """Removes a stage that is made from others, so that damaged parents are read."""
    own = path.relative_to(place / "stages").parts[0]
    made = [p for p in (place / "stages").iterdir() if p.name != own and "split" not in p.name]
    for stage in random.sample(sorted(made), min(3, len(made))):
        shutil.rmtree(stage)


def _judge(world: World, place: Path, path: Path, tally: Tally, what: str) -> None:
    name, right = path.relative_to(place).as_posix(), world.answers["run"]
    before = contents(place).get(name)
    reported, numbers = world.report(place)
    wrong = numbers and not _agrees(numbers, world.right_report)
    ended = world.do("run", place)
    after, numbers = contents(place), world.report(place)[1]
    others = [k for k in right if right[k] != after.get(k) and k != name]
    if reported.traceback or ended.traceback:
        tally.note("traceback", f"{what} of {name}: {(reported.err + ended.err)[-300:]}")
    elif wrong or others or (numbers and numbers != world.right_report):
        tally.note("silent wrong number", f"{what} of {name}: {others[:3] or 'report'}")
    elif ended.code:
        tally.note("named, not made again", f"{what} of {name}: {ended.err[-300:]}")
    elif after.get(name) == right.get(name):
        quiet = before == right.get(name) or name not in right
        tally.note("without effect" if quiet else "made again")
    elif any(text not in ("", "unchecked") for _, text in StageStore(place).verify()):
        tally.note("never read, seen by doctor")
    else:
        tally.note("unseen", f"{what} of {name}")


def _agrees(numbers: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether a report says what is right; one with gaps, in what it shows of every model."""
    if numbers["complete"]:
        return numbers == right
    whole = {row["row"]: row["metrics"] for row in right["rows"]}
    return all(
        value == whole[row["row"]][name]
        for row in numbers["rows"]
        for name, value in row["metrics"].items()
        if value is not None
    )

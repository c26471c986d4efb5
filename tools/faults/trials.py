"""One trial of every fault: kills, full disks, damaged bytes, side-by-side runs.

A trial gets a world, a stream of random numbers and the tally in which it writes what came of it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from stable_forgetting.common.store.stages import StageStore
from tools.faults.child import Ended, Trap
from tools.faults.world import World, contents

CHAIN = 6
"""Most kills on one store before its job is done to the end."""
WAYS = ("flip", "zero", "cut", "empty", "remove", "append", "digit", "swap")


@dataclass
class Tally:
    """What came of the trials of one fault.

    Attributes:
        what: The fault, in words.
        tried: Trials.
        outcomes: Outcome -> how many trials ended so.
        breaches: What should not have happened, one line each.
    """

    what: str
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)

    def note(self, outcome: str, breach: str = "") -> None:
        """One trial."""
        self.tried += 1
        self.outcomes[outcome] += 1
        self.breach(breach)

    def breach(self, *texts: str) -> None:
        """Promises that were broken; an empty text is none."""
        self.breaches += [f"{self.what}: {text}" for text in texts if text]

    def check(self, ended: Ended, when: str) -> None:
        """A job must not end with a traceback, by a signal, or without a word."""
        if ended.traceback or ended.code < 0 or (ended.code and not ended.err):
            tail = " ".join(ended.err.split())[-200:]
            self.breach(f"{when}: code {ended.code}: {tail}")


Trial = Callable[[World, Random, Tally], None]
Campaign = Callable[[World, Random, int, float], Tally]


def repeated(what: str, trial: Trial) -> Campaign:
    """(world, random, trials, end on the monotonic clock) -> what came of the trials."""

    def repeat(world: World, random: Random, count: int, until: float) -> Tally:
        tally = Tally(what)
        while tally.tried < count and time.monotonic() < until:
            trial(world, random, tally)
        return tally

    return repeat


def finish(world: World, job: str, place: Path, tally: Tally, trials: int = 1) -> None:
    """Does the job to its end, and compares; every trial before it shares the verdict.

    An application that was killed when it had just written its result refuses, and tidies up.
    """
    tally.check(world.do(job, place), "run again")
    right, there = world.answers[job], contents(place)
    different = sorted(k for k in right.keys() | there.keys() if right.get(k) != there.get(k))
    breach = f"other bits in {', '.join(different[:3])}" if different else ""
    rest = [path.name for path in place.iterdir()] if job == "apply" else ["out"]
    if not breach and rest != ["out"]:
        breach = f"left {', '.join(sorted(rest))}"
    for number in range(trials):
        tally.note("other bits" if breach else "same bits", breach if not number else "")


def half_written(place: Path) -> list[str]:
    """Stages without what completes them, and applications without their statement."""
    stages = (p for p in (place / "stages").glob("[!.]*") if not (p / "done.json").is_file())
    texts = [f"{path.name} is half-written" for path in stages]
    out = place / "out"
    if out.is_dir() and any(out.iterdir()) and not (out / "statement.json").is_file():
        texts.append("out is half-written")
    return texts


# Processes that die ------------------------------------------------------------------------------


def kills(job: str) -> Campaign:
    """Kills a job before random changes of files and at random times, again and again."""

    def trial(world: World, random: Random, tally: Tally) -> None:
        with world.place(job) as place:
            done = 0
            for _ in range(random.randint(1, CHAIN)):
                ended = _killed(world, random, job, place)
                if ended.code != -9:
                    tally.check(ended, "a job that was to be killed")
                    break
                done += 1
                tally.breach(*half_written(place))
            finish(world, job, place, tally, done)

    return repeated(f"kill -9, {job}", trial)


def _killed(world: World, random: Random, job: str, place: Path) -> Ended:
    if random.random() < 0.7:
        at = random.randint(1, max(1, world.changes[job] * 2 // 3))
        return world.do(job, place, trap=Trap(place, at))
    child = world.start(job, place)
    time.sleep(random.uniform(0, world.seconds[job]))
    child.kill()
    return child.wait()


def side_by_side(world: World, random: Random, tally: Tally) -> None:
    """Two or three runs that start together: each stage is worked on once."""
    needed = {Path(name).parts[1] for name in world.answers["run"] if name.startswith("stages")}
    with world.place("run") as place:
        log = place.with_suffix(".log")
        children = []
        for _ in range(random.choice((2, 2, 3))):
            children.append(world.start("run", place, trap=Trap(place, log=log)))
            time.sleep(random.choice((0.0, random.uniform(0, 1.0))))
        ends = [child.wait() for child in children]
        worked = Counter(log.read_text().split())
        log.unlink()
        breach = ""
        if any(end.code for end in ends):
            breach = " / ".join(end.err[-150:] for end in ends)
        elif set(worked) != needed or max(worked.values()) > 1:
            breach = f"worked on: {dict(worked)}"
        elif contents(place) != world.answers["run"]:
            breach = "other bits"
        for number in range(len(ends)):
            tally.note("breach" if breach else "same bits, each stage once", breach * (not number))


# Full disks --------------------------------------------------------------------------------------


def full_disk(world: World, random: Random, tally: Tally) -> None:
    """A change that finds no room, or a small file system."""
    job = random.choice(("run", "attack", "sweep", "apply"))
    with world.place(job) as place:
        if random.random() < 0.3 and _on_tmpfs(world, random, place, tally):
            return
        trap = Trap(place, random.randint(1, world.changes[job]), full=True)
        tally.check(world.do(job, place, trap=trap), "no space left")
        tally.breach(*half_written(place))
        finish(world, job, place, tally)


def _on_tmpfs(world: World, random: Random, place: Path, tally: Tally) -> bool:
    """A run on a file system of few bytes or few inodes, which then grows; False without rights."""
    mount = place / "disk"
    mount.mkdir()
    few = f"size={random.randint(16, 400)}k,nr_inodes={random.choice((20, 60, 5000))}"
    asked = ["mount", "-t", "tmpfs", "-o", few, "tmpfs", str(mount)]
    if subprocess.run(asked, capture_output=True).returncode:
        mount.rmdir()
        return False
    try:
        tally.check(world.do("run", mount), f"on a file system of {few}")
        subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=9000", mount], check=True)
        finish(world, "run", mount, tally)
    finally:
        subprocess.run(["umount", mount], check=True)
    return True


# Damaged bytes -----------------------------------------------------------------------------------


def damage(world: World, random: Random, tally: Tally) -> None:
    """Damages one file of a complete or a half-done store, then reports and runs again."""
    with world.place("run") as place:
        shutil.rmtree(place)
        under_way = random.random() < 0.2
        if under_way:
            place.mkdir()
            at = random.randint(world.changes["run"] // 4, world.changes["run"] * 3 // 4)
            world.do("run", place, trap=Trap(place, at))
        else:
            shutil.copytree(world.answered("run"), place)
        part = place / ("unfinished" if under_way else "stages")
        found = sorted(path for path in part.rglob("*") if path.is_file())
        if not found:
            return
        path = random.choice(found)
        kind = "checkpoint" if under_way else path.suffix.removeprefix(".")
        way = _damage(random, path, place)
        if not under_way and random.random() < 0.7:
            _lose_stages(random, path, place)
        _judge_damage(world, place, path, tally, f"{kind} {way}")


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


def _lose_stages(random: Random, path: Path, place: Path) -> None:
    """Removes stages that are made from others, so that damaged parents are read."""
    own = path.relative_to(place / "stages").parts[0]
    made = [p for p in (place / "stages").iterdir() if p.name != own and "split" not in p.name]
    for stage in random.sample(sorted(made), min(3, len(made))):
        shutil.rmtree(stage)


def _judge_damage(world: World, place: Path, path: Path, tally: Tally, what: str) -> None:
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

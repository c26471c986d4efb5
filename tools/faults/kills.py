"""Processes that die, and disks that are full: what is run again must end with the same bits."""

from __future__ import annotations

import errno
import resource
import shutil
import subprocess
import time
from pathlib import Path
from random import Random

from tools.faults.child import Ended, Trap
from tools.faults.tally import Tally
from tools.faults.world import World, contents

CHAIN = 6
"""Most kills on one store before its job is done to the end."""


def kills(world: World, random: Random, job: str, count: int, until: float) -> Tally:
    """Kills a job before random changes of files and at random times, again and again."""
    tally = Tally(f"kill -9, {job}")
    while tally.tried < count and time.monotonic() < until:
        with world.place(job) as place:
            done = 0
            for _ in range(random.randint(1, min(CHAIN, count - tally.tried))):
                ended = _killed(world, random, job, place)
                if ended.code != -9:
                    check(tally, ended, "a job that was to be killed")
                    break
                done += 1
                for text in half_written(place):
                    tally.breaches.append(f"{tally.what}: {text}")
            finish(world, job, place, tally, done)
    return tally


def _killed(world: World, random: Random, job: str, place: Path) -> Ended:
    if random.random() < 0.7:
        at = random.randint(1, max(1, world.changes[job] * 2 // 3))
        return world.do(job, place, trap=Trap(place, at))
    child = world.start(job, place)
    time.sleep(random.uniform(0, world.seconds[job]))
    child.kill()
    return child.wait()


def finish(world: World, job: str, place: Path, tally: Tally, trials: int) -> None:
    """Does the job to its end, and compares; every trial before it shares the verdict.

    An application that was killed when it had just written its result refuses, and tidies up.
    """
    ended = world.do(job, place)
    check(tally, ended, "run again")
    right, there = world.answers[job], contents(place)
    different = sorted(k for k in right.keys() | there.keys() if right.get(k) != there.get(k))
    breach = f"other bits in {', '.join(different[:3])}" if different else ""
    rest = [p.name for p in place.iterdir()] if job == "apply" else ["out"]
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


def check(tally: Tally, ended: Ended, when: str) -> None:
    """Notes a breach where a job ended with a traceback, by a signal, or without a word."""
    if ended.traceback or ended.code < 0 or (ended.code and not ended.err):
        tail = " ".join(ended.err.split())[-200:]
        tally.breaches.append(f"{tally.what}: {when}: code {ended.code}: {tail}")


# Full disks --------------------------------------------------------------------------------------


def full_disks(world: World, random: Random, count: int, until: float) -> list[Tally]:
    """Files that may not grow, changes that find no room, and small file systems of their own."""
    grown, refused = Tally("file size limited"), Tally("no space left (injected)")
    small = Tally("small file system (tmpfs)")
    while refused.tried < count and time.monotonic() < until:
        job = random.choice(("run", "audit", "sweep", "apply"))
        with world.place(job) as place:
            limits = {resource.RLIMIT_FSIZE: random.randint(100, 20_000)}
            _recovers(world, job, place, grown, world.do(job, place, limits=limits))
        with world.place(job) as place:
            trap = Trap(place, random.randint(1, world.changes[job]), errno.ENOSPC)
            _recovers(world, job, place, refused, world.do(job, place, trap=trap))
        with world.place(job) as place:
            _on_tmpfs(world, random, place, small)
    return [grown, refused, small] if small.tried else [grown, refused]


def _recovers(world: World, job: str, place: Path, tally: Tally, ended: Ended) -> None:
    check(tally, ended, "on a full disk")
    for text in half_written(place):
        tally.breaches.append(f"{tally.what}: {text}")
    finish(world, job, place, tally, 1)
    tally.outcomes[f"code {ended.code} then"] += 1


def _on_tmpfs(world: World, random: Random, place: Path, tally: Tally) -> None:
    """A run on a file system of few bytes or few inodes, which then grows."""
    mount = place / "disk"
    mount.mkdir()
    few = f"size={random.randint(16, 400)}k,nr_inodes={random.choice((20, 60, 5000))}"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", few, "tmpfs", mount], capture_output=True
    ).returncode:
        return
    try:
        check(tally, world.do("run", mount), f"on a file system of {few}")
        subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=9000", mount], check=True)
        finish(world, "run", mount, tally, 1)
    finally:
        subprocess.run(["umount", mount], check=True)
        shutil.rmtree(mount, ignore_errors=True)

"""Runs side by side on one store, and workers whose parent dies."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from random import Random

from tools.faults.child import Trap, command
from tools.faults.tally import Tally
from tools.faults.world import World, contents


def side_by_side(world: World, random: Random, count: int, until: float) -> Tally:
    """Two or three runs that start together: each stage is worked on once."""
    tally = Tally("runs side by side")
    needed = {Path(name).parts[1] for name in world.answers["run"] if name.startswith("stages")}
    while tally.tried < count and time.monotonic() < until:
        with world.place("run") as place:
            log = place.with_suffix(".log")
            children = []
            for _ in range(min(random.choice((2, 2, 3)), max(2, count - tally.tried))):
                children.append(world.start("run", place, trap=Trap(place, log=log)))
                time.sleep(random.choice((0.0, random.uniform(0, 1.0))))
            ends = [child.wait() for child in children]
            worked = Counter(log.read_text().split())
            twice = sorted(name for name, times in worked.items() if times > 1)
            breach = ""
            if any(end.code for end in ends):
                breach = " / ".join(end.err[-150:] for end in ends)
            elif twice or set(worked) != needed:
                breach = f"worked on twice: {twice}" if twice else "not every stage was worked on"
            elif contents(place) != world.answers["run"]:
                breach = "other bits"
            for number in range(len(ends)):
                tally.note(
                    "breach" if breach else "same bits, each stage once", breach * (not number)
                )
            log.unlink()
    return tally


def orphans(world: World, random: Random, count: int, until: float) -> Tally:
    """Kills a run with two workers soon after they appeared."""
    tally = Tally("orphans of a killed run")
    while tally.tried < count and time.monotonic() < until:
        with world.place("run") as place:
            arguments = [*world.arguments("run", place)[:-1], "processes", "--workers", 2]
            child = command(place / "log", *arguments)
            while len(workers := _children(child.pid)) < 2:
                time.sleep(0.01)
            time.sleep(random.uniform(0, 2))
            child.kill()
            child.wait()
            limit = time.monotonic() + 60
            while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
                if time.monotonic() > limit:
                    break
                time.sleep(0.05)
            tally.note("orphans" if alive else "none", f"{len(alive)} live on" if alive else "")
            for pid in alive:
                os.kill(pid, 9)
    return tally


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(part) for part in text.split()]

"""``python -m tools.faults``: the whole campaign, seeded and bounded."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.common.base.files import write_text
from tools.faults.damages import damages
from tools.faults.hostile import attacks, fuzzed
from tools.faults.kills import full_disks, kills
from tools.faults.power import power_cuts
from tools.faults.tally import Tally, sections
from tools.faults.together import orphans, side_by_side
from tools.faults.world import World

Part = tuple[int, float, Callable[[World, Random, int, float], "Tally | list[Tally]"]]
PARTS: dict[str, Part] = {
    "run": (80, 0.18, lambda w, r, n, t: kills(w, r, "run", n, t)),
    "audit": (30, 0.07, lambda w, r, n, t: kills(w, r, "audit", n, t)),
    "sweep": (30, 0.07, lambda w, r, n, t: kills(w, r, "sweep", n, t)),
    "apply": (40, 0.06, lambda w, r, n, t: kills(w, r, "apply", n, t)),
    "report": (20, 0.03, lambda w, r, n, t: kills(w, r, "report", n, t)),
    "power": (40, 0.10, power_cuts),
    "disk": (12, 0.12, full_disks),
    "damage": (200, 0.25, damages),
    "together": (20, 0.10, side_by_side),
    "orphans": (6, 0.05, orphans),
    "fuzz": (300, 0.06, fuzzed),
    "hostile": (1, 0.01, lambda w, r, n, t: attacks(w, t + 600)),
}
"""Name -> trials at full size, share of the time, and what does them."""


def campaign(
    root: Path, seed: int, minutes: float, scale: float = 1.0, only: Sequence[str] = ()
) -> list[Tally]:
    """Every fault, on a world below ``root``.

    Args:
        root: A folder that is not there yet.
        seed: Of every choice.
        minutes: Wall time of the trials; what a part does not use, the next ones may.
        scale: Share of the full number of trials.
        only: Parts to do; all of them when empty.
    """
    world = World(root)
    world.prepare()
    tallies: list[Tally] = []
    parts = {name: part for name, part in PARTS.items() if not only or name in only}
    shares, end = sum(share for _, share, _ in parts.values()), time.monotonic() + minutes * 60
    for name, (count, share, work) in parts.items():
        now = time.monotonic()
        until = now + max(0.0, end - now) * share / max(shares, share)
        result = work(world, Random(f"{seed} {name}"), max(1, round(count * scale)), until)
        tallies += result if isinstance(result, list) else [result]
        shares -= share
    return tallies


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes the table; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults",
        description="Kills, full disks, damaged bytes, side-by-side runs, hostile files.",
        epilog="Example:  python -m tools.faults --seed 7 --minutes 10 --out runs/faults",
    )
    parser.add_argument("--seed", type=int, default=0, help="of every choice (0)")
    parser.add_argument("--minutes", type=float, default=10, help="wall time of the trials (10)")
    parser.add_argument("--scale", type=float, default=1, help="share of the trials (1)")
    parser.add_argument("--only", default="", help=f"parts, with commas: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for FAULTS.md")
    options = parser.parse_args(argv)
    only = [part for part in options.only.split(",") if part]
    if not hasattr(os, "fork") or not set(only) <= set(PARTS):
        parser.error(f"needs Linux, and parts among {', '.join(PARTS)}")
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.monotonic()
    try:
        tallies = campaign(root / "world", options.seed, options.minutes, options.scale, only)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages) / 60
    wall = (time.monotonic() - began) / 60
    line = f"Seed {options.seed}; {wall:.1f} minutes, {cpu:.1f} of them on a processor."
    text = markdown.write(sections(tallies, "Faults on purpose", [line]))
    write_text(options.out / "FAULTS.md", text)
    sys.stdout.write(text)
    return int(any(tally.breaches for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())

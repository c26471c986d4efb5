"""``python -m tools.faults``: the whole campaign, seeded and bounded."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.files import write_text
from tools.faults.hostile import attack, fuzz
from tools.faults.power import power_cut
from tools.faults.trials import (
    Campaign,
    Tally,
    damage,
    full_disk,
    kills,
    repeated,
    side_by_side,
)
from tools.faults.world import World

FAULTS: dict[str, tuple[int, float, Campaign]] = {
    "run": (80, 0.18, kills("run")),
    "attack": (30, 0.07, kills("attack")),
    "sweep": (30, 0.07, kills("sweep")),
    "apply": (40, 0.06, kills("apply")),
    "report": (20, 0.03, kills("report")),
    "power": (40, 0.10, repeated("power cut (simulated)", power_cut)),
    "disk": (36, 0.12, repeated("full disk", full_disk)),
    "damage": (200, 0.25, repeated("damaged file", damage)),
    "together": (20, 0.10, repeated("runs side by side", side_by_side)),
    "fuzz": (300, 0.06, repeated("fuzzed suite (planned)", fuzz)),
    "hostile": (1, 0.01, repeated("hostile file", attack)),
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
    world, tallies = World(root), []
    faults = {name: fault for name, fault in FAULTS.items() if not only or name in only}
    shares, end = sum(share for _, share, _ in faults.values()), time.monotonic() + minutes * 60
    for name, (count, share, work) in faults.items():
        now = time.monotonic()
        until = now + max(0.0, end - now) * share / max(shares, share)
        count = max(1, round(count * scale))
        tallies.append(work(world, Random(f"{seed} {name}"), count, max(until, now + 1)))
        shares -= share
    return tallies


def sections(tallies: Sequence[Tally], line: str) -> list[Section]:
    """The table of a campaign, and its breaches."""
    rows = []
    for tally in tallies:
        outcomes = ", ".join(f"{name} {count}" for name, count in tally.outcomes.most_common())
        rows.append([tally.what, str(tally.tried), outcomes, str(len(tally.breaches))])
    breaches = tuple(text for tally in tallies for text in tally.breaches)
    content = table(["fault", "tried", "outcomes", "breaches"], rows, words=True)
    verdict = f"{len(breaches)} breaches." if breaches else "No promise was broken."
    return [
        Section("Faults on purpose", (line,), content, depth=1),
        Section("", (verdict,), None, breaches),
    ]


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
    parser.add_argument("--only", default="", help=f"parts, with commas: {', '.join(FAULTS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for FAULTS.md")
    options = parser.parse_args(argv)
    only = [part for part in options.only.split(",") if part]
    if not hasattr(os, "fork") or not set(only) <= set(FAULTS):
        parser.error(f"needs Linux, and parts among {', '.join(FAULTS)}")
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
    text = markdown.write(sections(tallies, line))
    write_text(options.out / "FAULTS.md", text)
    sys.stdout.write(text)
    return int(any(tally.breaches for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())

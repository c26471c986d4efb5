"""``python -m tools.perf [--quick] [--only NAME] [--out DIR]``: measure, show, write.

Minutes on one core; ``--quick`` takes seconds and shows only that all works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, Table, table
from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.base.files import write_json, write_text
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.store.records import environment
from tools.perf import attacks, muse, peer, tofu, wide
from tools.perf.timing import Case, measure

SCHEMA = 2
BENCHMARKS: dict[str, Callable[[bool], Iterable[Case]]] = {
    "adapter_wide": wide.adapter_wide,
    "svc_mia": attacks.attacks,
    "tofu_decoding": tofu.decoding,
}
PEERS: dict[str, Callable[[bool, Path], Iterable[Case]]] = {
    peer.NAME: peer.evaluation,
    muse.NAME: muse.evaluation,
}
"""Other people's code, from a checkout that --peer names."""
READING = (
    "Times: milliseconds on the processor, one thread, medians over rounds in turns.  Ratios: of"
    " medians, with the quartiles of the ratios round by round; below 1 ours is faster.",
    "Counts are the same on every machine.  MFLOP: products, convolutions, attention.",
    "Goals are limits of the ratio at full sizes, set before measuring; a missed one stays.  The"
    " floor of an exact bounded layer is three products to LoRA's two: 1.5, or 1 + f/2 where f of a"
    " step's products are adapted.",
)


def pair_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The ratio of every pair of every case."""
    rows = [
        [
            result["name"],
            f"{pair['ours']} / {pair['peer']}",
            f"{pair['median']:.2f} ({pair['low']:.2f}-{pair['high']:.2f})",
            _goal(pair),
        ]
        for result in results
        for pair in result["pairs"]
    ]
    return table(["benchmark", "ours / peer", "ratio (quartiles)", "goal"], rows, words=True)


def _goal(pair: Mapping[str, Any]) -> str:
    if pair["goal"] is None:
        return ""
    over = pair["median"] - pair["goal"]
    return f"≤ {pair['goal']:g} " + ("met" if over <= 0 else f"MISSED +{over:.2f}")


def case_section(result: Mapping[str, Any]) -> Section:
    """Times and counts of one case's variants, and its checks."""
    variants = result["variants"]
    counts = list(dict.fromkeys(key for row in variants.values() for key in row["counts"]))
    rows = [
        [name, f"{row['ms']:,.3g}", *(f"{row['counts'].get(key, 0):,.6g}" for key in counts)]
        for name, row in variants.items()
    ]
    checks = [
        f"{'ok' if check['ok'] else 'FAILED'}: {check['name']}: "
        + ("not finite" if check["value"] is None else f"{check['value']:.2g}")
        + f" (at most {check['limit']:g})"
        for check in result["checks"]
    ]
    content = table(["variant", f"ms/{result['unit']}", *counts], rows)
    return Section(result["name"], (f"{result['title']}.",), content, tuple(checks))


def sections(results: Mapping[str, Any]) -> list[Section]:
    """The report: ratios of all pairs, then times and counts case by case."""
    packages = results["environment"]["packages"]
    versions = ", ".join(f"{n} {packages[n]}" for n in ("torch", "timm") if n in packages)
    about = f"{versions}; {'quick sizes, of no meaning' if results['quick'] else 'full sizes'}."
    head = Section("Performance", (about, *READING), pair_table(results["cases"]), depth=1)
    return [head, *map(case_section, results["cases"])]


def experiment(
    names: Sequence[str], quick: bool, seconds: float, folder: Path | None = None
) -> dict[str, Any]:
    """Everything that goes into ``perf.json``."""
    make_deterministic()  # as stages are
    torch.set_num_threads(1)
    results = []
    for name in names:
        if name in BENCHMARKS:
            made = BENCHMARKS[name](quick)
        else:
            assert folder is not None, "main asks for it"
            made = PEERS[name](quick, folder)
        for case in made:
            results.append(measure(case, seconds, 2 if quick else case.rounds))
            sys.stdout.write(markdown.write([case_section(results[-1])]) + "\n")
    about = {"schema": SCHEMA, "quick": quick, "environment": environment()}
    return about | {"cases": results}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes ``perf.json`` and ``perf.md``; 1 where two variants did not do the same job."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.perf",
        description="Ours against naive versions and peers, in turns, on one thread.",
        epilog="Example:  python -m tools.perf --only svc_mia --out runs/perf",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few rounds")
    names = [*BENCHMARKS, *PEERS]
    parser.add_argument("--only", action="append", choices=names, help="repeatable")
    parser.add_argument("--peer", type=Path, help="checkout of the code that *_peer runs")
    parser.add_argument("--seconds", type=float, help="per case (8.5; quick: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/perf"), help="folder (runs/perf)")
    given = parser.parse_args(argv)
    seconds = (0.0 if given.quick else 8.5) if given.seconds is None else given.seconds
    folder, asked = given.peer, sorted(PEERS.keys() & set(given.only or ()))
    if len(asked) != (folder is not None):
        parser.error(f"--only {' or '.join(PEERS)} and --peer FOLDER go together, one at a time")
    try:
        results = experiment(given.only or [*BENCHMARKS], given.quick, seconds, folder)
    except UserError as error:
        parser.error(str(error))
    write_json(given.out / "perf.json", results)
    write_text(given.out / "perf.md", markdown.write(sections(results)))
    broken = [
        f"{result['name']}: {check['name']}"
        for result in results["cases"]
        for check in result["checks"]
        if not check["ok"]
    ]
    if broken:
        sys.stderr.write(f"error: not the same job: {'; '.join(broken)}\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

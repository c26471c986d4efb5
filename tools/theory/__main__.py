"""``python -m tools.theory --out DIR [--quick]``: measure, write, say what was seen.

The default grid is 29 ascents for each of 3 seeds and takes under a minute on one core; ``--quick``
takes seconds and shows only that everything works.  The sentences are computed: they say what the
measured numbers say, also where that does not support the paper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.common.base.files import write_text
from tools.theory import vit
from tools.theory.mlp import SIDES, Setting, Variant, ascend, fit, load_data

FORGOTTEN, KEPT = 0.05, 0.90
"""A step is *usable* when at most 5 % of the forget set and at least 90 % of the rest is right."""
CONTROL = "LoRA-w100"
VARIANTS = (
    Variant("full", None),
    Variant("LoRA", "identity"),
    Variant(CONTROL, "identity", 100.0),
    Variant("tanh-w100", "tanh", 100.0),
    Variant("sine-w100", "sine", 100.0),
)
"""All weights; LoRA; LoRA with the omega inside (the control); the two bounded adapters."""
SETTINGS = (
    Setting("adamw", "moderate", "all", "relu", 3e-3, 1e-3),
    Setting("sgd", "moderate", "all", "relu", 3e-2, 1e-2),
    Setting("adamw", "large", "all", "relu", 1e-1, 3e-2),
    Setting("sgd", "large", "all", "relu", 1.0, 1e-1),
    Setting("adamw", "moderate", "hidden", "relu", 3e-3, 1e-3),
    Setting("adamw", "moderate", "all", "tanh", 3e-3, 1e-3),
)
"""The rates were set so that "moderate" forgets within the run."""


class Run(NamedTuple):
    """One ascent: :func:`tools.theory.mlp.measure` by step; where it met a non-finite number."""

    setting: Setting
    variant: Variant
    seed: int
    rows: list[dict[str, float]]
    stopped: int | None

    def most(self, name: str) -> float | None:
        """The largest value over all steps; None for a variant that has none."""
        return max((row[name] for row in self.rows if name in row), default=None)

    def usable(self) -> list[tuple[int, dict[str, float]]]:
        """The steps that forgot and kept the rest."""
        return [
            (step, row)
            for step, row in enumerate(self.rows)
            if row["forget_accuracy"] <= FORGOTTEN and row["retain_accuracy"] >= KEPT
        ]


def experiment(seeds: int, steps: int, *, quick: bool = False) -> tuple[list[Run], list[vit.Row]]:
    """All runs, and the rows of :mod:`tools.theory.vit`; what is fitted is shared."""
    runs = []
    for seed in range(seeds):
        everything, *data = load_data(seed)
        fitted = {kind: fit(everything, kind, seed) for kind in ("relu", "tanh")}
        for setting in SETTINGS[: 4 if quick else None]:
            for variant in VARIANTS:
                if variant.phi is None and setting.scope == "hidden":
                    continue
                start = fitted[setting.activation]
                parts = (data[0], data[1])
                found = ascend(start, parts, setting, variant, seed=seed, steps=steps)
                runs.append(Run(setting, variant, seed, *found))
    return runs, [*vit.ceiling_rows(seeds, steps)]


# What they say -----------------------------------------------------------------------------------


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """``median [least, most]`` over seeds; ``-`` where nothing is defined."""
    numbers = [v for v in values if v is not None]
    if not numbers:
        return "-"
    mid, low, high = (f"{v:.{digits}g}" for v in (median(numbers), min(numbers), max(numbers)))
    return mid if low == high else f"{mid} [{low}, {high}]"


COLUMNS: dict[str, Callable[[Run], float | None]] = {
    "loss, end": lambda run: run.rows[-1]["loss"],
    "logit norm, end": lambda run: run.rows[-1]["logit_norm"],
    "W_L norm, x start": lambda run: run.rows[-1]["last_weight"] / run.rows[0]["last_weight"],
    "max grad trained": lambda run: run.most("gradient"),
    "certificate ratio, max": lambda run: run.most("certificate_ratio"),
    "max omega AB^T": lambda run: run.most("max_argument"),
    "share > .5, end": lambda run: run.rows[-1].get("active_share"),
    "usable steps": lambda run: len(run.usable()),
    "max omega AB^T, usable": lambda run: max(
        (row["max_argument"] for _, row in run.usable() if "max_argument" in row), default=None
    ),
    "FA, end": lambda run: run.rows[-1]["forget_accuracy"],
    "RA, end": lambda run: run.rows[-1]["retain_accuracy"],
}


def stops(runs: Sequence[Run]) -> str:
    """How many of the runs met a number that is not finite, and at which steps."""
    steps = [run.stopped for run in runs if run.stopped is not None]
    return f"{len(steps)}/{len(runs)}" + (f" (step {spread(steps)})" if steps else "")


def tables(runs: Sequence[Run]) -> Iterator[Section]:
    """One table per setting: a row per variant, ``median [least, most]`` over seeds."""
    for setting in dict.fromkeys(run.setting for run in runs):
        rows = []
        for variant in dict.fromkeys(run.variant for run in runs if run.setting == setting):
            group = [run for run in runs if (run.setting, run.variant) == (setting, variant)]
            cells = [spread(map(get, group)) for get in COLUMNS.values()]
            rows.append([variant.name, f"{setting.step_size(variant):.3g}", *cells, stops(group)])
        heads = ["variant", "step size", *COLUMNS, "non-finite"]
        yield Section(str(setting), content=table(heads, rows), depth=3)


def reading(runs: Sequence[Run]) -> list[str]:
    """What the runs say about each claim, in a sentence or two."""
    rows = [row for run in runs for row in run.rows]
    broken = sum(any(row[f"slack_{s}"] < -row["slack_rounding"] for s in SIDES) for row in rows)
    least = {side: min(row[f"slack_{side}"] for row in rows) for side in SIDES}
    bounded = [run for run in runs if run.variant.bounded]
    ratios = [run.most("certificate_ratio") or 0.0 for run in bounded]
    free = [run for run in runs if run.variant.phi == "identity"]
    over = sum((run.most("certificate_ratio") or 0.0) > 1 for run in free)
    held = sum(ratio <= 1 + 1e-9 for ratio in ratios)
    return [
        f"Inequality: {len(rows)} steps, {broken} of them beyond float64 rounding on any sample. "
        f"Least slack: L - m = {least['gap']:.2g}, L - log(1 + e^m) = {least['gap_soft']:.2g}, "
        f"log(1 + (C-1) e^m) - L = {least['tight']:.2g}, log(1 + C e^m) - L = "
        f"{least['paper']:.2g}, |z| - m/sqrt 2 = {least['norm']:.2g}.",
        f"Certificate: held at every finite step in {held} of {len(bounded)} bounded runs (largest "
        f"ratio {max(ratios):.3g}); {over} of {len(free)} LoRA runs went past the same value.",
        *_usable(runs, bounded),
        *_finite(runs, bounded),
    ]


def _usable(runs: Sequence[Run], bounded: Sequence[Run]) -> list[str]:
    used = [[row for _, row in run.usable()] for run in bounded if run.usable()]
    if not used:
        return ["Usable steps: no bounded run had one, so this grid cannot tell."]
    acting = sum(any(row["active_share"] > 0 for row in steps) for steps in used)
    most = max(row["max_argument"] for steps in used for row in steps)
    control = {(run.setting, run.seed): run for run in runs if run.variant.name == CONTROL}
    pairs = [
        [[step for step, _ in each.usable()] for each in (run, control[run.setting, run.seed])]
        for run in bounded
    ]
    pairs = [pair for pair in pairs if any(pair)]
    same = sum(len(a) == len(b) and a[:1] == b[:1] for a, b in pairs)
    return [
        f"Does the bound act where the run is usable? {'Yes' if acting else 'No'}: in {acting} of "
        f"{len(used)} bounded runs with usable steps any |omega AB^T| passed .5 on one of them; "
        f"the largest was {most:.3g}.",
        f"Control: of {len(pairs)} bounded runs where it or {CONTROL} (phi = identity, same omega "
        f"and rate) had usable steps, {same} have as many of them, from the same step.",
    ]


def _finite(runs: Sequence[Run], bounded: Sequence[Run]) -> list[str]:
    lines = []
    for optimizer in dict.fromkeys(run.setting.optimizer for run in runs):
        mine = [run for run in runs if run.setting.optimizer == optimizer]
        groups = {v.name: [run for run in mine if run.variant == v] for v in VARIANTS}
        counts = "; ".join(f"{name} {stops(group)}" for name, group in groups.items())
        lines.append(f"Non-finite numbers under {optimizer}: {counts}.")
    stopped = [run for run in bounded if run.stopped is not None]
    if stopped:
        most = spread((run.most("max_argument") for run in stopped), 2)
        lines.append(
            "Bounded runs that stopped had dW within its certificate but |omega AB^T| at "
            f"{most} one step earlier: the bound covers dW, not A and B."
        )
    return lines


def sections(runs: Sequence[Run], ceilings: list[vit.Row], seeds: int) -> list[Section]:
    """The page."""
    about = (
        f"Cells are the median [least, most] over {seeds} seeds.  FA, RA: accuracy on the forget"
        " set and on the rest; a step is usable at FA <= .05 and RA >= .90.  Adapters of one"
        " setting make the same first step.  Runs that met a non-finite number are read at their"
        " last finite step."
    )
    frozen, free = ([row for row in ceilings if row["end"] == end] for end in vit.ENDS)
    ceiling = (
        "Ceiling (ViT): with the last LayerNorm and the head frozen the largest loss of a sample"
        f" came to {spread(row['share'] for row in frozen)} % of a ceiling of"
        f" {spread(row['ceiling'] for row in frozen)} nats, above the proven bound on"
        f" {sum(row['above'] for row in frozen)} steps; with both trained it came to"
        f" {spread(row['share'] for row in free)} %."
    )
    columns = {
        "ceiling, nats": "ceiling",
        "proven bound": "bound",
        "loss, start": "loss_first",
        "loss, end": "loss_last",
        "largest of a sample": "largest",
        "% of ceiling": "share",
        "steps above the bound": "above",
    }
    lines = [
        [
            end,
            *(
                spread(row[key] for row in ceilings if row["end"] == end)
                for key in columns.values()
            ),
        ]
        for end in vit.ENDS
    ]
    heads = ["last LayerNorm and head", *columns]
    return [
        Section("Gradient ascent on an MLP, measured", (about,), depth=1),
        Section("Reading", lines=(*reading(runs), ceiling)),
        Section("Ascent on a ViT, and its ceiling", content=table(heads, lines)),
        Section("Numbers"),
        *tables(runs),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Gradient ascent on a small MLP: the loss bounds, the growth, the adapters' certificate."""
    parser = argparse.ArgumentParser(prog="python -m tools.theory", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for theory.md")
    parser.add_argument("--quick", action="store_true", help="few steps, a smaller grid")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (3)")
    parser.add_argument("--steps", type=int, default=100, help="ascent steps (100)")
    given = parser.parse_args(argv)
    if given.seeds < 1 or given.steps < 2:
        parser.error("give --seeds >= 1 and --steps >= 2")
    torch.set_num_threads(1)
    runs, ceilings = experiment(given.seeds, given.steps, quick=given.quick)
    page = sections(runs, ceilings, given.seeds)
    write_text(given.out / "theory.md", markdown.write(page))
    sys.stdout.write("\n".join(page[1].lines) + "\n")


if __name__ == "__main__":
    main()

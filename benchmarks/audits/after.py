"""Who forgets and who hides: what rows show of the forgotten before and after the worst attack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.cells import MISSING
from stable_forgetting.benchmarks.report.section import Column, Mark, Picture, Section, table
from stable_forgetting.benchmarks.suite.suite import FLOOR, REFERENCES
from stable_forgetting.common.audits.base import ModelAudit
from stable_forgetting.common.data.parts import utility_parts
from stable_forgetting.common.measure.gaps import Summary, summarise

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.audits.derive import AuditReport, AuditTable
    from stable_forgetting.benchmarks.pipeline.stage import Placed

EQUAL = 2.0
"""Points of accuracy on what is to be kept that a row of equal utility may have below Retrain."""
NONE = "none"
"""Name of no attack at all."""
FILE = "after_attack.svg"
CUT = "*"
"""Behind an attack in which a training was cut off."""


@dataclass(frozen=True)
class Shown:
    """How much more of the forgotten than Retrain a row shows, in points.

    Attributes:
        before: Without an attack: accuracy on forget minus Retrain's.
        attack: The one that shows most, by the mean over seeds; :data:`NONE` where none shows more.
        after: What it shows, over the seeds.
        utility: Accuracy on what is to be kept minus Retrain's, before any attack, mean over seeds:
            on retain or on held-out data, whichever is the lower.
        reference: Whether the row is no method.
        attacks: How many were tried on the row.
        cut: Whether a relearning of the row or of Retrain was cut off in this attack.
    """

    label: str
    before: float
    attack: str
    after: Summary
    utility: float | None
    reference: bool
    attacks: int
    cut: bool = False

    @property
    def equal(self) -> bool:
        """Whether its utility is Retrain's, but for :data:`EQUAL` points."""
        return self.utility is not None and self.utility >= -EQUAL

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        return {**asdict(self), "equal_utility": self.equal}


def after_attack(report: AuditReport, tables: Sequence[AuditTable]) -> list[Shown]:
    """What every row shows of the forgotten, before and after the attack that shows most."""
    attacks = [
        each
        for each in tables
        if isinstance(each.audit, ModelAudit) and report.retrain in each.rows
    ]
    found = []
    for label, results in report.rows.items():
        above = {
            seed: _above(report, result.stage, report.retrains[seed].stage)
            for seed, result in results.items()
            if seed in report.retrains
        }
        shown = {NONE: {seed: own["forget"] for seed, own in above.items()}}
        for attack in attacks:
            values = {s: _advantage(attack, label, report.retrain, s) for s in above}
            known = {s: value for s, value in values.items() if value is not None}
            shown |= {attack.name: known} if known and len(known) == len(values) else {}
        if not above or len(shown) < 2:
            continue
        over = {name: summarise([*by_seed.values()]) for name, by_seed in shown.items()}
        worst, after = max(over.items(), key=lambda item: item[1].mean)
        accuracies = [*above.values()]
        kept = [fmean(own[p] for own in accuracies) for p in accuracies[0] if p != "forget"]
        row = Shown(
            label,
            over[NONE].mean,
            worst,
            after,
            min(kept, default=None),
            reference=label == FLOOR or report.suite.row(label).method in REFERENCES,
            attacks=len(over) - 1,
            cut=any(_cut_off(a, label, report.retrain) for a in attacks if a.name == worst),
        )
        found.append(row)
    return found


def _cut_off(attack: AuditTable, *labels: str) -> bool:
    """Whether a training of the rows ended at its limit, which counts as its result then."""
    cells = [cell for label in labels for cell in attack.rows.get(label, {}).values()]
    measures = [measure for cell in cells if isinstance(cell, dict) for measure in cell.values()]
    return any("cut off" in measure.note for measure in measures)


def _advantage(attack: AuditTable, label: str, retrain: str, seed: int) -> float | None:
    """Of one row and seed; None where the attack measured nothing of it or of Retrain."""
    assert isinstance(attack.audit, ModelAudit)
    ours, theirs = (attack.rows.get(row, {}).get(seed) for row in (label, retrain))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return None
    return attack.audit.advantage(ours, theirs)


def _above(report: AuditReport, stage: Placed, retrain: Placed) -> dict[str, float]:
    """The accuracies of one model less those of another, by what they are of."""
    ours, theirs = (_accuracies(report, each) for each in (stage, retrain))
    return {part: ours[part] - value for part, value in theirs.items()}


def _accuracies(report: AuditReport, stage: Placed) -> dict[str, float]:
    """Accuracy on forget, on retain where it is scored, and on what is held out, averaged."""
    scores = report.scores(stage)
    found = {part: scores[part].accuracy for part in ("forget", "retain") if part in scores}
    held = [scores[part].accuracy for part in utility_parts(scores, report.benchmark.part_table)]
    return found | ({"held out": fmean(held)} if held else {})


def ordered(rows: Sequence[Shown]) -> list[Shown]:
    """References first, then the methods of equal utility by what they show, then the others."""
    return sorted(rows, key=lambda row: (not row.reference, not row.equal, row.after.mean))


def places(rows: Sequence[Shown]) -> dict[str, int]:
    """Label -> place of a method of equal utility, from 1; ties, as shown, share the best."""
    shown = {r.label: round(r.after.mean, 1) for r in rows if r.equal and not r.reference}
    return {label: 1 + sum(v < own for v in shown.values()) for label, own in shown.items()}


def floor_of(rows: Sequence[Shown]) -> float | None:
    """What the second Retrain shows after the attack that shows most of it."""
    return next((row.after.mean for row in rows if row.label == FLOOR), None)


def sections(name: str, rows: Sequence[Shown]) -> list[Section]:
    """The table and the picture; nothing where no attack was measured."""
    if not rows:
        return []
    floor, place = floor_of(rows), places(rows)
    text = (
        "Points by which a row shows more of the forgotten than Retrain under the same attack: of "
        "accuracy on forget (of AUC for membership, percent of Retrain's steps that are saved for "
        "relearning). Each row has the attack that shows most, mean over seeds. It is the largest "
        "of many, so it is biased upwards, for the second Retrain too; the interval takes the "
        "attack as given. Taking an adapter off is no part of it: the models are merged. rank: by "
        "the worst "
        f"attack among the methods of equal utility, which lose at most {EQUAL:g} points of "
        "accuracy on what is to be kept, on retain and on held-out data."
    )
    if floor is not None:
        text += f" The noise floor is the second Retrain: {floor:.1f}."
    most = max(row.attacks for row in rows)
    fewer = [f"{r.label} ({r.attacks} of {most})" for r in ordered(rows) if r.attacks < most]
    if fewer:
        text += f" An attack without a value on some seed is left out: {', '.join(fewer)}."
    if any(row.cut for row in rows):
        text += f" {CUT} A relearning of the row or of Retrain ended at its limit and counts as it."
    heads: list[str | Column] = [
        "method",
        Column("rank"),
        Column("before", doc="is what the row shows without an attack"),
        Column("after", doc="is what the worst attack shows"),
        Column("95 % CI", doc="is over seeds (t)"),
        Column("worst attack", doc="is the attack that shows most"),
        Column(
            "utility", doc="is accuracy on retain or on held-out data minus Retrain's: the lower"
        ),
        Column("", "mark"),
    ]
    lines = []
    for row in ordered(rows):
        low, high = row.after.low, row.after.high
        interval = MISSING if low is None or high is None else f"[{low:.1f}, {high:.1f}]"
        utility = MISSING if row.utility is None else f"{row.utility:+.1f}"
        within = floor is not None and not row.reference and row.after.mean <= floor
        lines.append(
            [
                row.label,
                str(place.get(row.label, MISSING)),
                f"{row.before:.1f}",
                f"{row.after.mean:.1f}",
                interval,
                f"{row.attack}{CUT if row.cut else ''}",
                utility,
                "≤ floor" if within else "",
            ]
        )
    marks: Mapping[str, Mark] = {row.label: "reference" for row in rows if row.reference}
    shown = picture(name, rows)
    return [
        Section("Who forgets, who hides", (text,), table(heads, lines, marks=marks), depth=3),
        Section(content=shown, level="full"),
    ]


TICKS = 4
"""At least so many on the axis."""


def picture(name: str, rows: Sequence[Shown]) -> Picture:
    """An arrow per row from what it shows before an attack to what it shows after the worst one."""
    ends = [value for row in rows for value in (row.before, row.after.mean)]
    low, high = min(0.0, *ends), max(1.0, *ends)

    def x(value: float) -> float:
        return svg.LEFT + svg.WIDTH * (value - low) / (high - low)

    floor, title = floor_of(rows), f"{name}: who forgets, who hides"
    ticks = _round_ticks(low, high)
    axis = "points above Retrain: dot before, arrow to after the worst attack"
    drawn = svg.rows_picture(
        [partial(_arrow, row, x(row.before), x(row.after.mean)) for row in ordered(rows)],
        [(f"{tick:g}", x(tick)) for tick in ticks],
        None if floor is None else (x(0.0), x(max(floor, 0.0)), f"noise floor: {floor:.1f}"),
        axis=axis,
        title=title,
        subtitle="blue: equal utility; grey: reference or less utility; green: noise floor",
    )
    return Picture(drawn, f"{title} ({axis})", FILE)


def _round_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between the ends."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(s for s in (power, power / 2, power / 5) if (high - low) / s >= TICKS)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(step * number, 6) for number in range(first, last + 1)]


def _arrow(row: Shown, start: float, end: float, y: float) -> str:
    colour = "#1f4e9c" if row.equal and not row.reference else svg.GREY
    tip = svg.tip(f"{row.label}: {row.before:.1f} before, {row.after.mean:.1f} after {row.attack}")
    parts = [
        tip,
        svg.text(svg.LEFT - 10, y + 4, row.label, text_anchor="end"),
        svg.line((start, y), (end, y), stroke=colour, stroke_width=2),
        svg.element("circle", cx=start, cy=y, r=3.5, fill=colour),
    ]
    if abs(end - start) > 1:
        back = end - 6 if end > start else end + 6
        tips = f"{end:.1f},{y:.1f} {back:.1f},{y - 4:.1f} {back:.1f},{y + 4:.1f}"
        parts.append(svg.element("polygon", points=tips, fill=colour))
    return svg.element("g", *parts, class_="row")

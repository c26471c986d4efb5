"""From runs to what can be read: a summary per run, a Markdown table, and sentences.

The sentences are computed.  They say what the measured numbers say, also where that does not
support the paper; nothing here knows the outcome in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from stable_forgetting.benchmarks.report.section import Section, table
from tools.theory.ascent import WIDTHS, Setting, Variant

FORGOTTEN, KEPT = 0.05, 0.90
"""A step is *usable* when at most 5 % of the forget set and at least 90 % of the rest is right."""
CONTROL = "LoRA-w100"
SIDES = ("gap", "gap_soft", "tight", "paper", "norm")
Run = dict[str, Any]


def rank_correlation(a: list[float], b: list[float]) -> float | None:
    """Spearman's correlation of two paths (no ties expected); None if it is undefined."""
    if len(a) < 3 or any(len(set(v)) < 2 for v in (a, b)):
        return None
    ranks = [np.argsort(np.argsort(np.asarray(v))) for v in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def usable_steps(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The steps that forgot and kept the rest, and the most that the bound did on any of them."""
    usable = [
        (step, row)
        for step, row in enumerate(rows)
        if row["forget_accuracy"] <= FORGOTTEN and row["retain_accuracy"] >= KEPT
    ]
    names = ("active_share", "max_argument", "certificate_ratio")
    most = {n: max((row[n] for _, row in usable if n in row), default=None) for n in names}
    return {"count": len(usable), "first": usable[0][0] if usable else None, **most}


def summarise(run: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """One run of :func:`tools.theory.ascent.ascend` in numbers (undefined = None)."""
    rows = run["rows"]
    column = {name: [row[name] for row in rows] for name in rows[0]}
    first, last, depth = rows[0], rows[-1], len(WIDTHS) - 1
    broken = sum(row[f"slack_{s}"] < -row["slack_rounding"] for row in rows for s in SIDES)
    summary = {
        "steps": len(rows) - 1,
        "nonfinite": run["nonfinite"],
        "samples_checked": sum(len(cloud) for cloud in run["clouds"]),
        **{f"min_slack_{s}": min(column[f"slack_{s}"]) for s in SIDES},
        "bound_violations": broken,
        "loss_first": first["loss"],
        "loss_last": last["loss"],
        "logit_norm_first": first["logit_norm"],
        "logit_norm_last": last["logit_norm"],
        "last_weight_growth": last[f"weight_{depth}"] / first[f"weight_{depth}"],
        "activation_growth": last["activation_norm"] / first["activation_norm"],
        "loss_logit_rank_correlation": rank_correlation(column["loss"], column["logit_norm"]),
        "gradient_by_layer_first": [first[f"gradient_{i + 1}"] for i in range(depth)],
        "gradient_by_layer_max": [max(column[f"gradient_{i + 1}"]) for i in range(depth)],
        "max_gradient_trained": max(column["gradient_trained"]),
        "min_logit_gradient_last": last["min_logit_gradient"],
        "forget_accuracy_least": min(column["forget_accuracy"]),
        "forget_accuracy_last": last["forget_accuracy"],
        "retain_accuracy_last": last["retain_accuracy"],
        "usable": usable_steps(rows),
    }
    return summary | _adapter_summary(column, variant)


def _adapter_summary(column: dict[str, list[float]], variant: Variant) -> dict[str, Any]:
    if "certificate_ratio" not in column:
        return {}
    ratio, moved = max(column["certificate_ratio"]), column["delta_norm"]
    return {
        "first_step_delta": moved[1] if len(moved) > 1 else None,
        "max_certificate_ratio": ratio,
        "certificate_holds": ratio <= 1 + 1e-9 if variant.bounded else None,
        "active_share_last": column["active_share"][-1],
        "max_argument": max(column["max_argument"]),
    }


def describe(setting: Setting, variant: Variant, seed: int) -> dict[str, Any]:
    """The identity of a run, as it stands in the results."""
    named = {"variant": variant.name, "phi": variant.phi, "omega": variant.omega, "seed": seed}
    return named | asdict(setting) | {"step_size": setting.step_size(variant)}


def setting_name(run: Run) -> str:
    """Such as ``adamw, moderate, all layers, relu``; runs that share it are comparable."""
    scope = {"all": "all layers", "hidden": "hidden layers"}[run["scope"]]
    return f"{run['optimizer']}, {run['rate']}, {scope}, {run['activation']}"


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """``median [least, most]`` over seeds; ``-`` where nothing is defined."""
    numbers = [v for v in values if v is not None]
    if not numbers:
        return "-"
    mid, low, high = (f"{v:.{digits}g}" for v in (median(numbers), min(numbers), max(numbers)))
    return mid if low == high else f"{mid} [{low}, {high}]"


def _worst_layer(summary: dict[str, Any]) -> float:
    return max(summary["gradient_by_layer_max"])


COLUMNS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "loss, end": lambda s: s["loss_last"],
    "logit norm, end": lambda s: s["logit_norm_last"],
    "W_L norm, x start": lambda s: s["last_weight_growth"],
    "max grad W": _worst_layer,
    "max grad trained": lambda s: s["max_gradient_trained"],
    "certificate ratio, max": lambda s: s.get("max_certificate_ratio"),
    "max omega AB^T": lambda s: s.get("max_argument"),
    "share > .5, end": lambda s: s.get("active_share_last"),
    "usable steps": lambda s: s["usable"]["count"],
    "max omega AB^T, usable": lambda s: s["usable"]["max_argument"],
    "FA, end": lambda s: s["forget_accuracy_last"],
    "RA, end": lambda s: s["retain_accuracy_last"],
}


def grouped(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by (setting, variant), in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((setting_name(run), run["variant"]), []).append(run)
    return groups


def stops(runs: list[Run]) -> str:
    """How many of the runs met a number that is not finite, and at which steps."""
    steps = [r["summary"]["nonfinite"]["step"] for r in runs if r["summary"]["nonfinite"]]
    return f"{len(steps)}/{len(runs)}" + (f" (step {spread(steps)})" if steps else "")


def tables(runs: list[Run]) -> list[Section]:
    """One table per setting: a row per variant, ``median [least, most]`` over seeds."""
    rows: dict[str, list[list[str]]] = {}
    for (setting, variant), group in grouped(runs).items():
        cells = [spread(get(r["summary"]) for r in group) for get in COLUMNS.values()]
        size = f"{group[0]['step_size']:.3g}"
        rows.setdefault(setting, []).append([variant, size, *cells, stops(group)])
    heads = ["variant", "step size", *COLUMNS, "non-finite"]
    return [Section(name, content=table(heads, own), depth=3) for name, own in rows.items()]


def reading(runs: list[Run]) -> list[str]:
    """What the runs say about each claim, one sentence or two each."""
    parts = (
        *(_inequality, _growth, _same_start, _certificate, _usable, _control),
        *(_windows, _finite, _capped, _wrapped),
    )
    return [line for part in parts for line in part(runs)]


def _inequality(runs: list[Run]) -> list[str]:
    summaries = [r["summary"] for r in runs]
    least = {side: min(s[f"min_slack_{side}"] for s in summaries) for side in SIDES}
    return [
        f"Inequality: {sum(s['samples_checked'] for s in summaries)} (sample, step) pairs, "
        f"{sum(s['bound_violations'] for s in summaries)} steps beyond float64 rounding. "
        f"Least slack: L - m = {least['gap']:.2g}, L - log(1 + e^m) = {least['gap_soft']:.2g}, "
        f"log(1 + (C-1) e^m) - L = {least['tight']:.2g}, log(1 + C e^m) - L = "
        f"{least['paper']:.2g}, |z| - m/sqrt 2 = {least['norm']:.2g}."
    ]


def _growth(runs: list[Run]) -> list[str]:
    lines = []
    for (setting, variant), group in grouped(runs).items():
        if group[0]["phi"] is not None or group[0]["rate"] != "moderate":
            continue
        s = [r["summary"] for r in group]
        ratio = [x["logit_norm_last"] / x["logit_norm_first"] for x in s]
        head = [x["gradient_by_layer_max"][-1] / x["gradient_by_layer_first"][-1] for x in s]
        rank = [x["loss_logit_rank_correlation"] for x in s]
        lines.append(
            f"Growth ({variant}; {setting}): loss {spread(x['loss_last'] for x in s)}, logit norm "
            f"x {spread(ratio)} (rank correlation with the loss {spread(rank)}), |W_L| x "
            f"{spread(x['last_weight_growth'] for x in s)}, |a_(L-1)| x "
            f"{spread(x['activation_growth'] for x in s)}, |dL/dW_L| x {spread(head)} at its peak."
        )
    return lines


def _bounded(runs: list[Run]) -> list[Run]:
    return [r for r in runs if r["summary"].get("certificate_holds") is not None]


def _twins(runs: list[Run], variant: str) -> Iterator[tuple[Run, Run]]:
    """(run, the run of ``variant`` with the same setting and seed), for bounded runs."""
    other = {(setting_name(r), r["seed"]): r for r in runs if r["variant"] == variant}
    for run in _bounded(runs):
        if (setting_name(run), run["seed"]) in other:
            yield run, other[setting_name(run), run["seed"]]


def _same_start(runs: list[Run]) -> list[str]:
    moved = [
        run["summary"]["first_step_delta"] / lora["summary"]["first_step_delta"]
        for run, lora in _twins(runs, "LoRA")
    ]
    return [f"First step of the bounded adapters relative to LoRA's, |dW|: x {spread(moved, 6)}."]


def _certificate(runs: list[Run]) -> list[str]:
    held = [r["summary"]["certificate_holds"] for r in _bounded(runs)]
    most = max(r["summary"]["max_certificate_ratio"] for r in _bounded(runs))
    free = [r for r in runs if r["phi"] == "identity"]
    over = sum(r["summary"]["max_certificate_ratio"] > 1 for r in free)
    return [
        f"Certificate: held at every finite step in {sum(held)} of {len(held)} bounded runs "
        f"(largest ratio {most:.3g}); {over} of {len(free)} LoRA runs went past the same value."
    ]


def _usable(runs: list[Run]) -> list[str]:
    used = [r["summary"]["usable"] for r in _bounded(runs) if r["summary"]["usable"]["count"]]
    if not used:
        return ["Usable steps: no bounded run had one, so this grid cannot tell."]
    acting = sum(u["active_share"] > 0 for u in used)
    most = max(u["max_argument"] for u in used)
    ratio = max(u["certificate_ratio"] for u in used)
    return [
        f"Does the bound act where the run is usable? {'Yes' if acting else 'No'}: in {acting} of "
        f"{len(used)} bounded runs with usable steps any |omega AB^T| passed .5 on one of them; "
        f"the largest was {most:.3g}, the certificate ratio at most {ratio:.3g}."
    ]


def _control(runs: list[Run]) -> list[str]:
    pairs = [(run["summary"]["usable"], c["summary"]["usable"]) for run, c in _twins(runs, CONTROL)]
    pairs = [(run, control) for run, control in pairs if run["count"] or control["count"]]
    same = sum(run["count"] == c["count"] and run["first"] == c["first"] for run, c in pairs)
    return [
        f"Control: of {len(pairs)} bounded runs where it or {CONTROL} (phi = identity, same omega "
        f"and rate) had usable steps, {same} have as many of them as {CONTROL}, from the same step."
    ]


def _windows(runs: list[Run]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for (setting, variant), group in grouped(runs).items():
        count = spread(r["summary"]["usable"]["count"] for r in group)
        lines.setdefault(setting, []).append(f"{variant} {count}")
    return [f"Usable steps ({setting}): " + "; ".join(v) + "." for setting, v in lines.items()]


def _finite(runs: list[Run]) -> list[str]:
    lines = []
    for optimizer in dict.fromkeys(r["optimizer"] for r in runs):
        mine = [r for r in runs if r["optimizer"] == optimizer]
        names = dict.fromkeys(r["variant"] for r in mine)
        counts = [f"{n} {stops([r for r in mine if r['variant'] == n])}" for n in names]
        lines.append(f"Non-finite numbers under {optimizer}: " + "; ".join(counts) + ".")
    broken = [r["summary"] for r in _bounded(runs) if r["summary"]["nonfinite"]]
    if broken:
        most = [s["max_argument"] for s in broken]
        lines.append(
            f"Bounded runs that stopped had dW within its certificate but |omega AB^T| at "
            f"{spread(most, 2)} one step earlier: the bound covers dW, not A and B."
        )
    return lines


def _capped(runs: list[Run]) -> list[str]:
    lines = []
    for (setting, variant), group in grouped(runs).items():
        if group[0]["rate"] != "large" or group[0]["phi"] is None:
            continue
        s = [r["summary"] for r in group]
        loss = spread(x["loss_last"] for x in s)
        share = spread(x["active_share_last"] for x in s)
        accuracy = spread(x["retain_accuracy_last"] for x in s)
        lines.append(
            f"Where the bound can act ({setting}), {variant}: loss {loss}, share > .5 {share}, "
            f"retain accuracy {accuracy} at the last finite step."
        )
    return lines


def _wrapped(runs: list[Run]) -> list[str]:
    def returned(summary: dict[str, Any]) -> bool:
        low, end = summary["forget_accuracy_least"], summary["forget_accuracy_last"]
        return low <= FORGOTTEN and end >= 1 - FORGOTTEN

    back = [r["variant"] for r in runs if returned(r["summary"])]
    counts = "; ".join(f"{name} {back.count(name)}" for name in dict.fromkeys(back)) or "none"
    return [f"Runs that forgot, and at the end recognised all of the forget set again: {counts}."]

"""Three pictures of the runs; the only file here that needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from tools.theory.ascent import ACTIVE, WIDTHS
from tools.theory.report import FORGOTTEN, KEPT, Run

STYLE = {
    "full": ("#444444", "-"),
    "LoRA": ("#d1495b", "-"),
    "LoRA-w100": ("#edae49", "-"),
    "tanh-w100": ("#30638e", "--"),
    "sine-w100": ("#00a087", ":"),
}
MAIN = ("adamw", "sgd")
NOTE = "All layers, ReLU.  Bold: seed 0; thin: other seeds; cross: next step is not finite."
FLOOR = 1e-8  # a run that fell into a minimum has gradients of 1e-40, which would hide the rest
DOT = {"LoRA": 40, "LoRA-w100": 110, "tanh-w100": 55, "sine-w100": 14}


def draw(runs: list[Run], out: Path) -> None:
    """Writes ``loss_bounds.png``, ``norms.png`` and ``certificate.png`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = {"loss_bounds": loss_bounds, "norms": norms, "certificate": certificates}
    for name, make in drawn.items():
        figure = make(runs)
        figure.savefig(out / f"{name}.png", dpi=100)
        plt.close(figure)


def _select(runs: list[Run], optimizer: str, rate: str) -> list[Run]:
    wanted = {"optimizer": optimizer, "rate": rate, "scope": "all", "activation": "relu"}
    return [r for r in runs if all(r[k] == v for k, v in wanted.items())]


def _path(run: Run, name: str) -> np.ndarray:
    """A number by step."""
    return np.array([row[name] for row in run["rows"]])


def _lines(axes: Axes, runs: list[Run], name: str) -> None:
    """One line per run (thin: the other seeds), a cross where a number stopped being finite."""
    for run in runs:
        if name not in run["rows"][0]:
            continue
        color, dash = STYLE[run["variant"]]
        first = run["seed"] == 0
        value = np.where(_path(run, name) > FLOOR, _path(run, name), np.nan)
        look: dict[str, Any] = {"color": color, "linestyle": dash, "alpha": 1.0 if first else 0.35}
        label = run["variant"] if first else None
        axes.plot(value, linewidth=2.2 if first else 1.0, label=label, **look)
        if run["nonfinite"] and np.isfinite(value[-1]):
            axes.plot(len(value) - 1, value[-1], "x", color=color, markersize=7, markeredgewidth=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.grid(alpha=0.25)


def loss_bounds(runs: list[Run]) -> Figure:
    """Loss against logit gap and logit norm, every sample, with the bounds."""
    clouds = [cloud[:12] for run in runs if run["seed"] == 0 for cloud in run["clouds"][::3]]
    gap, loss, norm = torch.cat(clouds).numpy().T
    classes = WIDTHS[-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    inside = (gap > -15) & (gap < 15)
    left.scatter(gap[inside], loss[inside], s=7, alpha=0.3, color="#30638e", label="samples")
    m = np.linspace(-15, 15, 400)
    left.plot(m, np.where(m > 0, m, np.nan), color="#d1495b", label="m")
    left.plot(m, np.logaddexp(0, m), "--", color="#d1495b", label="log(1 + e$^m$)")
    left.plot(m, np.logaddexp(0, m + math.log(classes - 1)), "k", label="log(1 + (C-1) e$^m$)")
    left.plot(m, np.logaddexp(0, m + math.log(classes)), "k:", label="log(1 + C e$^m$)")
    left.set(xlabel="logit gap  $m = \\max_{j \\neq y} z_j - z_y$", ylabel="cross-entropy L")
    left.set(yscale="log", ylim=(1e-7, 40), title="Every loss lies between its bounds")
    left.legend(loc="lower right")
    window = (loss > 1e-2) & (loss < 1e7)
    right.scatter(norm[window], loss[window], s=7, alpha=0.3, color="#30638e", label="samples")
    n = np.geomspace(norm[window].min() / 2, norm[window].max() * 2, 400)
    cap = np.logaddexp(0, math.sqrt(2) * n + math.log(classes - 1))
    right.plot(n, cap, "k", label="log(1 + (C-1) e$^{√2‖z‖}$)")
    right.set(xscale="log", yscale="log", xlabel="logit norm ‖z‖", ylabel="cross-entropy L")
    right.set_title("No large loss without large logits (upper bound only)")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    return figure


PANELS = {
    "loss": "cross-entropy, forget set",
    "logit_norm": "mean logit norm",
    "weight_3": "last layer ‖W$_L$‖$_F$",
    "gradient_3": "‖dL/dW$_L$‖$_F$",
    "gradient_trained": "gradient of what is trained (A, B)",
}


SETTINGS = [(optimizer, rate) for rate in ("moderate", "large") for optimizer in MAIN]


def _framed(rows: int, columns: int, size: tuple[float, float], share: Any) -> tuple[Figure, Any]:
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", sharey=share)
    figure.supxlabel(NOTE, fontsize=12)
    return figure, grid


def _legend(figure: Figure, axes: Axes) -> None:
    """The variants of one panel, for all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=12)


def norms(runs: list[Run]) -> Figure:
    """Loss, logits, last weight and gradients over steps: one row per optimiser and rate."""
    figure, grid = _framed(len(SETTINGS), len(PANELS), (17, 11.5), False)
    for line, (optimizer, rate) in zip(grid, SETTINGS, strict=True):
        for axes, name in zip(line, PANELS, strict=True):
            _lines(axes, _select(runs, optimizer, rate), name)
        line[0].set_ylabel(f"{optimizer}, {rate} rate", fontsize=12, fontweight="bold")
    for top, bottom, title in zip(grid[0], grid[-1], PANELS.values(), strict=True):
        top.set_title(title)
        bottom.set_xlabel("ascent step")
    _legend(figure, grid[0][0])
    return figure


def certificates(runs: list[Run]) -> Figure:
    """Certificate ratio over steps, with the usable steps marked."""
    figure, grid = _framed(2, len(SETTINGS), (17, 7.6), "row")
    for (top, low), (optimizer, rate) in zip(grid.T, SETTINGS, strict=True):
        chosen = _select(runs, optimizer, rate)
        lines = ((top, "certificate_ratio", 1.0), (low, "max_argument", ACTIVE))
        for axes, name, limit in lines:
            _lines(axes, chosen, name)
            axes.axhline(limit, color="k", linewidth=1)
            _mark_usable(axes, chosen, name)
        top.set(title=f"{optimizer}, {rate} rate", ylim=(1e-4, 1e2))
        low.set(xlabel="ascent step", ylim=(1e-3, 1e3))
    grid[0][0].set_ylabel(
        "$\\|\\Delta W\\|_F \\;/\\; (\\alpha/r)\\sqrt{dk}$\n(certified to be at most 1)"
    )
    grid[1][0].set_ylabel("$\\max |\\omega A B^T|$\n($\\phi$ bends above .5)")
    _legend(figure, grid[0][0])
    return figure


def _mark_usable(axes: Axes, runs: list[Run], name: str) -> None:
    """Dots on the steps that forgot and kept the rest; the legend gets one of them."""
    for run in runs:
        if name not in run["rows"][0]:
            continue
        good = _path(run, "forget_accuracy") <= FORGOTTEN
        good &= _path(run, "retain_accuracy") >= KEPT
        color, size = STYLE[run["variant"]][0], DOT[run["variant"]]
        (step,) = good.nonzero()
        value = _path(run, name)[good]
        axes.scatter(step, value, s=size, facecolors="none", edgecolors=color, zorder=3)
    label = "usable step (forgot, kept the rest)"
    axes.scatter([], [], s=50, facecolors="none", edgecolors="#666666", label=label)

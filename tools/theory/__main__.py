"""``python -m tools.theory --out DIR [--quick]``: measure, write, say what was seen.

The default grid is 29 ascents for each of 3 seeds and takes under a minute on one core; ``--quick``
takes seconds, draws nothing unless asked (``--plots``), and shows only that everything works.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.common.base.errors import UserError
from tools.theory import ascent, report, vit
from tools.theory.ascent import Setting, Variant, ascend, fit, load_data
from tools.theory.report import describe, setting_name, summarise, tables

SCHEMA = 1
POINTS = 41
CLOUD_SAMPLES = 12


def variants() -> list[Variant]:
    """All weights; LoRA; LoRA with the omega inside (the control); the two bounded adapters."""
    return [
        Variant("full", None),
        Variant("LoRA", "identity"),
        Variant("LoRA-w100", "identity", 100.0),
        Variant("tanh-w100", "tanh", 100.0),
        Variant("sine-w100", "sine", 100.0),
    ]


def settings(quick: bool) -> list[Setting]:
    """The grid; ``lr`` and ``full_lr`` were set so that "moderate" forgets within the run."""
    grid = [
        Setting("adamw", "moderate", "all", "relu", 3e-3, 1e-3),
        Setting("sgd", "moderate", "all", "relu", 3e-2, 1e-2),
        Setting("adamw", "large", "all", "relu", 1e-1, 3e-2),
        Setting("sgd", "large", "all", "relu", 1.0, 1e-1),
        Setting("adamw", "moderate", "hidden", "relu", 3e-3, 1e-3),
        Setting("adamw", "moderate", "all", "tanh", 3e-3, 1e-3),
    ]
    return grid[:4] if quick else grid


def thinned(length: int, points: int = POINTS) -> list[int]:
    """At most ``points`` indices of ``range(length)``, evenly, with the first and the last."""
    count = min(points, length)
    return sorted({round(i * (length - 1) / max(count - 1, 1)) for i in range(count)})


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def record(
    run: dict[str, Any], identity: dict[str, Any], summary: dict[str, Any]
) -> dict[str, Any]:
    """One run as it is stored: identity, summary, and the thinned path."""
    first = summary["usable"]["first"]
    keep = sorted({*thinned(len(run["rows"])), *([] if first is None else [first])})
    names = [name for name in run["rows"][0] if not name.startswith("slack_")]
    trace = {name: [_short(run["rows"][i][name]) for i in keep] for name in names}
    stored = identity | {"summary": summary, "trace": {"step": keep, **trace}}
    if identity["seed"] == 0:
        cloud = [
            [_short(v) for v in s] for i in keep for s in run["clouds"][i][:CLOUD_SAMPLES].tolist()
        ]
        stored["cloud"] = cloud
    return stored


def run_grid(
    seeds: int, steps: int, quick: bool, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """All records; one fitted model per seed and activation is shared by the runs on it."""
    for seed in range(seeds):
        everything, data = load_data(seed)
        fitted: dict[str, Any] = {}
        for setting in settings(quick):
            if setting.activation not in fitted:
                fitted[setting.activation] = fit(everything, setting.activation, seed)
            for variant in variants():
                if variant.phi is None and setting.scope == "hidden":
                    continue
                state = fitted[setting.activation]
                run = ascend(state, data, setting, variant, seed=seed, steps=steps)
                identity = describe(setting, variant, seed)
                yield record(run, identity, summarise(run, variant))
            progress(f"seed {seed}: {setting_name(identity)}")


def experiment(
    seeds: int, steps: int, *, quick: bool = False, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Everything that goes into ``theory.json``."""
    if seeds < 1 or steps < 2:
        raise UserError(f"seeds = {seeds}, steps = {steps}: give --seeds >= 1 and --steps >= 2")
    runs = list(run_grid(seeds, steps, quick, progress))
    config = {
        "seeds": seeds,
        "steps": steps,
        "widths": list(ascent.WIDTHS),
        "rank": ascent.RANK,
        "alpha": ascent.ALPHA,
        "active_above": ascent.ACTIVE,
        "usable": {"max_forget_accuracy": report.FORGOTTEN, "min_retain_accuracy": report.KEPT},
    }
    made_with = {"python": platform.python_version(), "torch": str(torch.__version__)}
    ceilings = list(vit.ceiling_rows(seeds, steps))
    return {
        "schema": SCHEMA,
        "config": config,
        "env": made_with,
        "reading": [*report.reading(runs), vit.ceiling_reading(ceilings)],
        "runs": runs,
        "ceilings": ceilings,
    }


def write(results: dict[str, Any], out: Path) -> list[Path]:
    """Writes ``theory.json`` (strict JSON: no NaN, no infinity) and ``theory.md``."""
    about = (
        f"Cells are the median [least, most] over {results['config']['seeds']} seeds.  FA, RA:"
        " accuracy on the forget set and on the rest; a step is usable at FA <= .05 and RA >= .90."
        "  Adapters of one setting make the same first step.  Runs that met a non-finite number are"
        " read at their last finite step."
    )
    sections = [
        Section("Gradient ascent on an MLP, measured", (about,), depth=1),
        Section("Reading", lines=tuple(results["reading"])),
        vit.ceiling_table(results["ceilings"]),
        Section("Numbers"),
        *tables(results["runs"]),
    ]
    stored = json.dumps(results, allow_nan=False, sort_keys=True) + "\n"
    write_files(out, {"theory.json": stored, "theory.md": markdown.write(sections)})
    return [out / "theory.json", out / "theory.md"]


def main(
    out: Annotated[Path, typer.Option(help="Folder for theory.json, theory.md and the plots.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, few steps, a smaller grid.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds (default 3).")] = None,
    steps: Annotated[int | None, typer.Option(help="Ascent steps (default 100).")] = None,
    plots: Annotated[
        bool | None,
        typer.Option(help="Draw the PNGs (needs matplotlib); by default not with --quick."),
    ] = None,
) -> None:
    """Gradient ascent on a small MLP: the loss bounds, the growth, the adapters' certificate."""
    torch.set_num_threads(1)
    seeds = seeds if seeds is not None else (1 if quick else 3)
    steps = steps if steps is not None else (30 if quick else 100)
    try:
        results = experiment(seeds, steps, quick=quick, progress=lambda s: typer.echo(s, err=True))
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    paths = write(results, out)
    if plots or (plots is None and not quick):
        try:
            from tools.theory.plots import draw
        except ModuleNotFoundError as error:
            typer.echo(f"no plots: {error.name} is missing (pip install '.[plots]')", err=True)
        else:
            paths += draw(results, out)
    typer.echo("\n".join([*results["reading"], "", *(f"wrote {path}" for path in paths)]))


if __name__ == "__main__":
    typer.run(main)

"""``python -m tools.theory --out DIR [--quick]``: measure, write, say what was seen.

The default grid is 29 ascents for each of 3 seeds and takes under a minute on one core; ``--quick``
takes seconds, draws nothing unless asked (``--plots``), and shows only that everything works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from stable_forgetting.benchmarks.report import markdown
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.common.base.errors import UserError
from tools.theory import report, vit
from tools.theory.ascent import Setting, Variant, ascend, fit, load_data
from tools.theory.report import describe, setting_name, summarise, tables


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


def run_grid(
    seeds: int, steps: int, quick: bool, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """All runs; one fitted model per seed and activation is shared by those on it."""
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
                yield {**run, **identity, "summary": summarise(run, variant)}
            progress(f"seed {seed}: {setting_name(identity)}")


def experiment(
    seeds: int, steps: int, *, quick: bool = False, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """``runs``, ``ceilings``, and the sentences of ``reading``."""
    if seeds < 1 or steps < 2:
        raise UserError(f"seeds = {seeds}, steps = {steps}: give --seeds >= 1 and --steps >= 2")
    runs = list(run_grid(seeds, steps, quick, progress))
    ceilings = list(vit.ceiling_rows(seeds, steps))
    sentences = [*report.reading(runs), vit.ceiling_reading(ceilings)]
    return {"reading": sentences, "runs": runs, "ceilings": ceilings}


def write(results: dict[str, Any], seeds: int, out: Path) -> None:
    """Writes ``theory.md``."""
    about = (
        f"Cells are the median [least, most] over {seeds} seeds.  FA, RA: accuracy on the forget"
        " set and on the rest; a step is usable at FA <= .05 and RA >= .90.  Adapters of one"
        " setting make the same first step.  Runs that met a non-finite number are read at their"
        " last finite step."
    )
    sections = [
        Section("Gradient ascent on an MLP, measured", (about,), depth=1),
        Section("Reading", lines=tuple(results["reading"])),
        vit.ceiling_table(results["ceilings"]),
        Section("Numbers"),
        *tables(results["runs"]),
    ]
    write_files(out, {"theory.md": markdown.write(sections)})


def main(
    out: Annotated[Path, typer.Option(help="Folder for theory.md and the plots.")],
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
    write(results, seeds, out)
    if plots or (plots is None and not quick):
        try:
            from tools.theory.plots import draw
        except ModuleNotFoundError as error:
            typer.echo(f"no plots: {error.name} is missing (pip install '.[plots]')", err=True)
        else:
            draw(results["runs"], out)
    typer.echo("\n".join(results["reading"]))


if __name__ == "__main__":
    typer.run(main)

"""``python -m tools.perf [--quick] [--only NAME] [--out DIR]``: measure, show, write.

Some ten minutes on one core; ``--quick`` takes one and shows only that all works.  A new benchmark
is a file beside this one and a line in :data:`BENCHMARKS`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stable_forgetting.benchmarks.report import markdown, terminal
from stable_forgetting.benchmarks.report.section import Column, Section, Table, Tone, table
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError, UserError
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.store.records import environment
from tools.perf import (
    adapters,
    augmentation,
    bounded_layer,
    evaluation,
    extraction,
    measure,
    svc_mia,
    tofu_eval,
    vision_engine,
)
from tools.perf.measure import Case, Effort, Size, one_thread

SCHEMA = 1
BENCHMARKS: dict[str, Callable[..., Iterable[Case]]] = {
    "adapter_layer": adapters.layer,
    "adapter_wide": adapters.wide,
    "adapter_step": adapters.step,
    "difference": vision_engine.difference_steps,
    "engine_loop": vision_engine.loop,
    "augmentation": augmentation.augmentation,
    "evaluation": evaluation.one_pass,
    "svc_mia": svc_mia.attacks,
    "tofu_evaluation": tofu_eval.evaluation,
    "extraction": extraction.extraction,
    "bounded_layer": bounded_layer.cases,  # last: its layers change the allocator for good
}
GIVEN = ("tofu_evaluation",)
"""Benchmarks that compare with what lies in folders of the user's."""
SECONDS: Mapping[Size, float] = {"full": 8.5, "quick": 0.25, "tiny": 0.0}
MIN_ROUNDS: Mapping[Size, int] = {"full": 4, "quick": 2, "tiny": 2}
READING = (
    "Times: milliseconds on one thread, medians over interleaved rounds; cpu is process time.",
    "Ratios: of medians (quartiles of the ratios round by round), of minima; below 1 ours is"
    " faster.  Trust cpu over wall where others share the machine.",
    "Counts are the same on every machine (what PIL does is not counted).  saved MB: what autograd"
    " keeps for backward beside inputs and weights.  MFLOP: products, convolutions, attention.  new"
    " MB: allocated for results.  calls: operators that reached a backend.  peak MB: most held at"
    " once beyond what was there.",
    "Goals are limits of the ratio of CPU medians at full sizes, set before measuring; a missed one"
    " stays.  The floor of an exact bounded layer is three products to LoRA's two: 1.5, or 1 + f/2"
    " where f of a step's products are adapted.",
    "Not measured: the goal of at most 1.15 of PEFT LoRA in bfloat16 on an H100.  Nothing here runs"
    " on a GPU; `unlearn show bounded --plan MODEL` derives what to expect.",
    "Allocator: glibc maps large buffers anew in some calls and not in others, which moves a"
    " layer's time by up to a third; cases marked steady keep them, as a GPU's allocator does.",
)


def cases(
    names: Sequence[str], size: Size, given: Mapping[str, Path | None] | None = None
) -> Iterator[Case]:
    """The cases of the named benchmarks.

    Args:
        names: Of :data:`BENCHMARKS`.
        size: Of the data.
        given: Folders for those that compare with them, by name.

    Raises:
        ConfigError: There is no such benchmark.
    """
    for name in names:
        if name not in BENCHMARKS:
            raise ConfigError(
                f"--only {name}: no such benchmark{did_you_mean(name, [*BENCHMARKS])}"
            )
    for name in names:
        yield from BENCHMARKS[name](size, **(given or {} if name in GIVEN else {}))


def experiment(
    names: Sequence[str],
    size: Size,
    effort: Effort,
    *,
    steady: bool = False,
    given: Mapping[str, Path | None] | None = None,
    show: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Everything that goes into ``perf.json``; ``show`` gets each case when it is measured.

    ``steady`` asks for :func:`tools.perf.measure.steady_allocator` in the whole process,
    ``given`` is for :func:`cases`.
    """
    make_deterministic()  # as stages are
    steady = steady and measure.steady_allocator()
    machine: dict[str, Any] = {"cpu": _cpu(), "steady_allocator": steady}
    machine |= {"threads": 1, "load_before": os.getloadavg()[0]}
    results = []
    with one_thread():
        for case in cases(names, size, given):
            if case.steady and size != "tiny":
                steady = measure.steady_allocator()  # for the rest of the process
            results.append(measure.measure(case, effort) | {"steady_allocator": steady})
            show(results[-1])
    machine["load_after"] = os.getloadavg()[0]
    about = {"schema": SCHEMA, "size": size, "machine": machine, "environment": environment()}
    return about | {"cases": results}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


# Tables ------------------------------------------------------------------------------------------


def variant_table(result: Mapping[str, Any]) -> Table:
    """Times and counts of one case's variants."""
    counts = list(dict.fromkeys(key for row in result["variants"] for key in row["counts"]))
    heads = ["variant", *(f"{clock} ms/{result['unit']}" for clock in ("cpu", "wall")), *counts]
    rows = [
        [
            row["name"],
            *(_number(row[clock]["median"]) for clock in ("cpu", "wall")),
            *(_number(row["counts"][key]) if key in row["counts"] else "" for key in counts),
        ]
        for row in result["variants"]
    ]
    return table(heads, rows)


def pair_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The ratio of every pair of every case."""
    pairs = Column("ours / peer", "label")
    rows = []
    for result in results:
        for pair in result["pairs"]:
            cpu = pair["cpu"]
            rows.append(
                [
                    result["name"],
                    f"{pair['ours']} / {pair['peer']}",
                    f"{cpu['median']:.2f} ({cpu['low']:.2f}-{cpu['high']:.2f})",
                    f"{cpu['min']:.2f}",
                    f"{pair['wall']['median']:.2f}",
                    _goal(pair),
                ]
            )
    return table(["benchmark", pairs, "cpu (quartiles)", "cpu minima", "wall", "goal"], rows)


def _goal(pair: Mapping[str, Any]) -> str:
    """The limit, and whether it holds."""
    if pair["goal"] is None:
        return ""
    over = pair["cpu"]["median"] - pair["goal"]
    return f"≤ {pair['goal']:g} " + ("met" if over <= 0 else f"MISSED +{over:.2f}")


def check_lines(result: Mapping[str, Any]) -> list[str]:
    """One line per check of a case."""
    return [
        f"{'ok' if check['ok'] else 'FAILED'}: {check['name']}: "
        f"{'not finite' if check['value'] is None else format(check['value'], '.2g')}"
        f" (at most {check['limit']:g})"
        for check in result["checks"]
    ]


def failed(results: Mapping[str, Any]) -> list[str]:
    """``case: check`` of every check that does not hold."""
    return [
        f"{result['name']}: {check['name']}"
        for result in results["cases"]
        for check in result["checks"]
        if not check["ok"]
    ]


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sections(results: Mapping[str, Any]) -> list[Section]:
    """The report: ratios of all pairs, then times and counts case by case."""
    machine, packages = results["machine"], results["environment"]["packages"]
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "timm") if name in packages
    )
    allocator = "steady" if machine["steady_allocator"] else "the system's"
    about = (
        f"Machine: {machine['cpu']}, {machine['threads']} thread, load average"
        f" {machine['load_before']:.1f} before and {machine['load_after']:.1f} after; allocator:"
        f" {allocator}; {versions}; sizes: {results['size']}."
    )
    pairs = pair_table(results["cases"])
    return [
        Section("Performance", (about, *READING), pairs, depth=1),
        *map(_case, results["cases"]),
    ]


def _case(result: Mapping[str, Any]) -> Section:
    steady = "; steady allocator" if result["steady_allocator"] else ""
    text = f"{result['title']}; {result['rounds']} rounds{steady}."
    tone: Tone = "plain" if all(check["ok"] for check in result["checks"]) else "warning"
    lines = tuple(check_lines(result))
    return Section(result["name"], (text,), variant_table(result), lines, tone=tone)


def write(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Writes ``perf.json`` (strict JSON, with all samples) and ``perf.md``."""
    paths = [out / "perf.json", out / "perf.md"]
    write_json(paths[0], results)
    paths[1].write_text(markdown.write(sections(results)), encoding="utf-8")
    return paths


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, few rounds.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(BENCHMARKS)}; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for perf.json and perf.md.")] = Path(
        "runs/perf"
    ),
    seconds: Annotated[float | None, typer.Option(help="Seconds per case.", min=0.0)] = None,
    peer: Annotated[
        Path | None, typer.Option(help="Checkout of open-unlearning, to time its own code.")
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with tofu_eval_logs/, to count published answers.")
    ] = None,
    steady_malloc: Annotated[
        bool, typer.Option("--steady-malloc", help="Keep large blocks instead of unmapping them.")
    ] = False,
) -> None:
    """Ours against naive versions and peers, interleaved in one process, on one thread."""
    console = Console()
    size: Size = "quick" if quick else "full"
    effort = Effort(SECONDS[size] if seconds is None else seconds, MIN_ROUNDS[size])
    try:
        results = experiment(
            only or [*BENCHMARKS],
            size,
            effort,
            steady=steady_malloc,
            given={"peer": peer, "data_root": data_root},
            show=lambda result: terminal.show(console, [_case(result)]),
        )
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    terminal.show(console, sections(results)[:1])
    typer.echo("\n".join(f"wrote {path}" for path in write(results, out)))
    if broken := failed(results):
        typer.echo(f"error: not the same job: {'; '.join(broken)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

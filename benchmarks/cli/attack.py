"""The command ``attack``: what brings the forgotten back, and what differs from Retrain."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from stable_forgetting.benchmarks.apply.attacked import attack_given
from stable_forgetting.benchmarks.audits.after import after_attack, ordered
from stable_forgetting.benchmarks.audits.after import sections as after_sections
from stable_forgetting.benchmarks.audits.cost import costs, time_line
from stable_forgetting.benchmarks.audits.derive import AuditReport
from stable_forgetting.benchmarks.audits.plan import AuditPlanner, Shadows, suite_of_record
from stable_forgetting.benchmarks.audits.report import sections, to_json
from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Machine,
    Selection,
    Workers,
    console,
    split_names,
)
from stable_forgetting.benchmarks.cli.report import show_shipped
from stable_forgetting.benchmarks.cli.session import finish, working
from stable_forgetting.benchmarks.pipeline.schedule import run_suite
from stable_forgetting.benchmarks.pipeline.stage import Plan
from stable_forgetting.benchmarks.report.cells import duration
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite
from stable_forgetting.common.audits import AUDITS, make_audit
from stable_forgetting.common.audits.base import TIERS, Audit, ModelAudit, PopulationAudit
from stable_forgetting.common.audits.sequential import Sequential
from stable_forgetting.common.audits.twins import Twins
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import apply_overrides
from stable_forgetting.common.base.errors import ConfigError, DataError
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.records import RunRecord
from stable_forgetting.common.store.stages import StageStore


@dataclass(frozen=True)
class ShadowOptions:
    """Which models attacks over many models need."""

    shadows: Annotated[
        int,
        typer.Option(help="Train N further models per row and seed; prints the cost first.", min=0),
    ] = 0
    design: Annotated[
        str, typer.Option(help="Shadows: fixed (one forget set) or halves (random halves).")
    ] = "fixed"
    originals: Annotated[
        int, typer.Option(help="Different Originals under fixed shadows; 0: one each.", min=0)
    ] = 0
    yes: Annotated[bool, typer.Option("--yes", help="Train them, after the cost was printed.")] = (
        False
    )

    def population(self) -> Shadows | None:
        """The shadows to train; None without any."""
        if self.design not in ("fixed", "halves"):
            raise ConfigError(f"--design {self.design}: choose fixed or halves")
        if self.shadows == 0:
            return None
        if self.shadows < 2:
            raise ConfigError("--shadows 1: a distribution needs two models or more")
        if self.originals and self.design == "halves":
            raise ConfigError("--originals: halves need an Original each; leave it out")
        return Shadows(self.shadows, self.design, self.originals or None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Given:
    """A model of the user's, with the models and samples that it is attacked beside and with."""

    model: Annotated[
        Path | None,
        typer.Option(help="Attack this model instead: folder, or hub id of a text one."),
    ] = None
    original: Annotated[
        Path | None, typer.Option(help="With --model: the model before unlearning.")
    ] = None
    retrained: Annotated[
        list[Path] | None,
        typer.Option(help="With --model: one or two models that never saw the forgotten."),
    ] = None
    forget: Annotated[Path | None, typer.Option(help="With --model: what was forgotten.")] = None
    retain: Annotated[Path | None, typer.Option(help="With --model: what was kept.")] = None
    test: Annotated[Path | None, typer.Option(help="With --model: what no model saw.")] = None

    def suspects(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Label -> model, and role -> samples."""
        needed = {name: getattr(self, name) for name in ("model", "original", "forget", "retain")}
        missing = ", ".join(f"--{name}" for name, value in needed.items() if value is None)
        if missing:
            raise ConfigError(f"attack --model: give {missing}")
        retrained = self.retrained or []
        if len(retrained) > 2:
            raise ConfigError("--retrained: give one or two")
        models = {"model": self.model, "original": self.original}
        models |= dict(zip(("retrain", "retrain-2"), retrained, strict=False))
        samples = {"forget": self.forget, "retain": self.retain, "test": self.test}
        return (
            {label: path for label, path in models.items() if path},
            {role: path for role, path in samples.items() if path},
        )


@dataclass(frozen=True)
class Budget:
    """How strong the attacker is."""

    samples: Annotated[
        int | None, typer.Option(help="Samples, draws or shots that the attacker has.", min=1)
    ] = None
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps that the attacker takes at most.", min=1)
    ] = None


@command(
    "unlearn attack --list",
    "unlearn attack digits-class",
    "unlearn attack digits-class --minutes --only gd_sine",
    "unlearn attack digits-class --attacks relearn_few,prune --samples 8 --steps 50",
    "unlearn attack digits-class --attacks relearn --with relearn.share=0.9",
    "unlearn attack digits-class --shadows 16",
    "unlearn attack runs/stages/measure-0123/record.json",
    "unlearn attack --model forgotten/ --original my_vit/ --forget forget/ --retain retain/",
)
def attack(
    machine: Machine,
    selection: Selection,
    population: ShadowOptions,
    given: Given,
    budget: Budget,
    suite: Annotated[
        str | None, typer.Argument(help="Suite name, YAML file, or the record.json of one run.")
    ] = None,
    workers: Workers = 0,
    list_: Annotated[bool, typer.Option("--list", help="Formulas, sources and costs.")] = False,
    attacks: Annotated[str | None, typer.Option(help="Only these, comma-separated.")] = None,
    minutes: Annotated[
        bool, typer.Option("--minutes", help="Also attacks that run or train the stored models.")
    ] = False,
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="Setting: attack.key=value (repeatable).")
    ] = None,
) -> None:
    """Attack the models of a suite, or one of your own, beside Original and two Retrains.

    Free attacks read the stored scores. --minutes adds attacks that run or train the stored
    models. Their results are kept. Attacks over many models (KLoM, epsilon, U-LiRA) need further
    models, called shadows: --shadows N prints their cost, and --yes trains them. --attacks
    sequential, rounding and unlearning_seed print their cost too, and need --yes. Give suite,
    --set, --seeds and --only as for run. --samples and --steps say how strong the attacker is. The
    tables are also in suites/SUITE/audits.json in the store.
    """
    if list_:
        _list(attacks)
        return
    if given.model is not None:
        if suite or population.shadows or selection != Selection(plugin=selection.plugin):
            raise ConfigError(
                "attack: give a suite, or --model without --set, --seeds, --only and --shadows"
            )
        _attack_given(given, machine, choose(attacks, True, with_ or (), budget))
        return
    if suite is None or given != Given():
        raise ConfigError("attack: give a suite alone, --model and its samples, or --list")

    resolved, store = _target(suite, machine.store, selection)
    chosen = choose(attacks, minutes, with_ or (), budget)
    shadows = population.population()
    _check(resolved, shadows, chosen)
    runtime = machine.runtime(store)
    planner = AuditPlanner(resolved, StageStore(runtime.store))
    if not planner.finals():
        show_shipped(resolved.name, store, selection.command(suite, store), under="Attacks")
        return
    missing, probes = _missing(planner, chosen, shadows), planner.probe_plan(chosen)
    if missing and not population.yes:
        console.print("Nothing was trained. Add --yes to train this.")
    plans = [*(missing if population.yes else ()), *([probes] if probes.results else ())]
    failed = _run(plans, runtime, workers)
    if not failed and processes.is_main():
        _report(planner, chosen, shadows)
    finish(failed)


def _attack_given(given: Given, machine: Machine, chosen: Mapping[str, Audit]) -> None:
    """Attacks the user's model and prints the tables."""
    attacks = {name: each for name, each in chosen.items() if isinstance(each, ModelAudit)}
    if not attacks:
        raise ConfigError(f"--attacks {', '.join(chosen)}: compare models of a suite; give one")
    tables = attack_given(
        *given.suspects(), attacks, device=machine.device, threads=machine.threads
    )
    show(console, sections(tables))


def _list(only: str | None) -> None:
    """Every attack with its tier, formula and source."""
    for name in split_names(only, "--attacks") or AUDITS.names():
        cls = AUDITS[name]
        info = cls.info
        console.print(
            f"[bold]{name}[/bold]  {info.tier}  in {escape(info.unit)}, ideal: {info.ideal}"
            + ("  [dim]class forgetting only[/dim]" if info.scenario == "class" else ""),
        )
        console.print(escape(inspect.getdoc(cls) or ""), style="dim")
        defaults = ", ".join(f"{k}={v}" for k, v in cls.Config().model_dump().items())
        console.print(f"settings: {escape(defaults) or 'none'}\n")
    for tier, text in TIERS.items():
        console.print(f"{tier}: {text}")


def choose(
    audits: str | None, minutes: bool, settings: Sequence[str], budget: Budget
) -> dict[str, Audit]:
    """The attacks of a command line, with their configs."""
    classes = {name: AUDITS[name] for name in split_names(audits, "--attacks") or AUDITS.names()}
    if audits is None:
        unasked = (Sequential, Twins) if minutes else (Sequential, Twins, ModelAudit)
        classes = {n: cls for n, cls in classes.items() if not issubclass(cls, unasked)}
    strength = {option: value for option, value in vars(budget).items() if value}
    for option in strength:
        takers = [name for name in AUDITS.names() if option in AUDITS[name].budget]
        if not classes.keys() & takers:
            names = ",".join(takers)
            raise ConfigError(f"--{option}: no chosen attack takes it; add --attacks {names}")
    given: dict[str, Any] = apply_overrides({}, settings, "--with")
    for name, values in given.items():
        AUDITS.entry(name)
        if name not in classes or not isinstance(values, Mapping):
            raise ConfigError(f"--with {name}: write {name}.key=value, and choose the attack")
    chosen = {}
    for name, cls in classes.items():
        taken = {cls.budget[option]: strength[option] for option in cls.budget.keys() & strength}
        chosen[name] = make_audit(name, {**taken, **given.get(name, {})}, f"--with {name}")
    return chosen


def _check(suite: ResolvedSuite, shadows: Shadows | None, audits: Mapping[str, Audit]) -> None:
    """Refuses a suite without a Retrain, and trainings that no chosen attack would read."""
    _ = suite.retrain  # raises where there is none
    if shadows is None:
        return
    seeds = len(suite.spec.seeds)  # they may share one population
    count, design = shadows.count * (seeds if shadows.design == "fixed" else 1), shadows.design
    least = {
        name: audit.least[design]
        for name, audit in audits.items()
        if isinstance(audit, PopulationAudit) and design in audit.least
    }
    if not least:
        readers = "ulira" if design == "halves" else "klom, epsilon and ulira"
        raise ConfigError(f"--shadows with --design {design}: only {readers} read them; choose one")
    if count < min(least.values()):
        name = min(least, key=lambda name: least[name])
        raise ConfigError(f"--shadows {shadows.count}: {name} needs {least[name]} or more")


def _target(suite: str, store: Path, selection: Selection) -> tuple[ResolvedSuite, Path]:
    """A suite, or the one-row suite of a record with the store that it lies in."""
    path = Path(suite)
    if path.suffix != ".json":
        return selection.suite(suite, store), store

    if selection.set_ or selection.seeds or selection.only:
        raise ConfigError("--set, --seeds and --only go with a suite, not with a record")
    try:
        record = RunRecord.load(path)
    except DataError as error:
        if path.name == "record.json":
            raise
        raise ConfigError(f"{error.args[0].partition(';')[0]}; give a run's record.json") from None
    resolved = suite_of_record(record)
    where = path.resolve().parents
    inside = len(where) > 2 and where[1].name == "stages"
    return resolved, where[2] if inside and store == STORE else store


def _missing(
    planner: AuditPlanner, audits: Mapping[str, Audit], shadows: Shadows | None
) -> list[Plan]:
    """The trainings that attacks need and the store lacks, after their cost was printed."""
    streams = [a.config.requests for a in audits.values() if isinstance(a, Sequential)]
    plans = [planner.stream_plan(count) for count in streams]
    plans += [planner.twin_plan(moved=a.moved) for a in audits.values() if isinstance(a, Twins)]
    plans += [] if shadows is None else [planner.shadow_plan(shadows)]
    missing = [plan for plan in plans if not all(map(planner.lineage.done, plan.stages()))]
    for plan in missing:
        planner.check_trainable()
        _print_cost(planner, plan)
    return missing


def _run(plans: Sequence[Plan], runtime: Runtime, workers: int) -> dict[str, str]:
    """Runs plans one after the other, up to the first in which something failed; what failed."""
    failed: dict[str, str] = {}
    with working(runtime, workers) as (executor, watching):
        for plan in plans:
            if failed:
                break
            with watching(f"{plan.suite.name} attacks") as display:
                made = run_suite(
                    *(plan.suite, runtime, executor),
                    watcher=display,
                    planner=lambda *_, plan=plan: plan,
                    live_events=False,
                )
            failed |= made.failed
    return failed


def _print_cost(planner: AuditPlanner, plan: Plan) -> None:
    priced = costs(plan, planner.store, list(planner.base.stages()))
    open_ = [f"{x}: its tuning is not finished: left out" for x in dict.fromkeys(plan.waiting)]
    rows = []
    for cost in priced:
        disk = "?" if cost.megabytes is None else f"{cost.megabytes:.3g} MB"
        about = "?" if cost.seconds is None else duration(cost.seconds)
        rows.append([cost.kind, str(cost.planned), str(cost.missing), cost.length, about, disk])
    heads = ["stages", "planned", "missing", "length of one", "about", "disk"]
    content = table(heads, rows, words=True)
    show(console, [Section("To be trained", (time_line(priced), *open_), content)])


def _report(planner: AuditPlanner, audits: Mapping[str, Audit], shadows: Shadows | None) -> None:
    """Prints the tables and writes the JSON."""
    plan = planner.report_plan(audits, shadows)
    report, name = AuditReport(planner.suite, planner.store, audits, plan), planner.suite.name
    tables = report.tables()
    shown = after_attack(report, tables)
    show(console, [*sections(tables), *after_sections(name, shown)])
    path = planner.store.root / "suites" / name / "audits.json"
    after = {"after_attack": [row.to_json() for row in ordered(shown)]} if shown else {}
    write_json(path, {"schema": "audit-1", "suite": name, "audits": to_json(tables), **after})
    console.print(f"written to {path}", markup=False, soft_wrap=True)

"""The command ``demo``: two small leaderboards, and what the models say to forgotten samples."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    STORE,
    Machine,
    Selection,
    Store,
    Threads,
    Workers,
    console,
)
from stable_forgetting.benchmarks.cli.run import short_path, show_board
from stable_forgetting.benchmarks.cli.session import finish, working
from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.leaderboard.run import execute
from stable_forgetting.benchmarks.leaderboard.samples import PAGE, write_samples
from stable_forgetting.benchmarks.leaderboard.tables import narrow_table
from stable_forgetting.benchmarks.report.section import Sample, Section, table
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.registry import BENCHMARKS
from stable_forgetting.common.protocol.benchmark import Runtime

IMAGES, PAGE_IMAGES = 6, 100
TEXTS, PAGE_TEXTS = 3, 12
"""Samples on the screen, and on the page of samples."""
FEWER = "finetune,gd,gd_lora,gd_lora_omega,gd_sine"
SHORTER = ["protocol.train.epochs=30", "protocol.minimum_train_accuracy=95"]
Choice = tuple[list[str] | None, str | None, str | None]
"""Settings, seeds and rows."""
WHOLE: dict[str, Choice] = {
    "digits-class": (None, "1,2,3", f"ascent,gd_tanh,gd_ul,{FEWER}"),
    "digits-random": (None, "1,2,3", FEWER),
    "authors": (None, "1,2,3", None),
    "tdec-notes": (None, None, None),
}
BRIEF: dict[str, Choice] = {
    "digits-class": (SHORTER, "1,2", "finetune,ascent,gd,gd_sine"),
    "authors": (None, "1", "gd,npo_gdr,gd_lora,gd_sine"),
}
"""Suites of the long and of the short demo."""


@command("unlearn demo", "unlearn demo --full")
def demo(
    store: Store = STORE,
    full: Annotated[
        bool, typer.Option("--full", help="Four suites, more rows and seeds, whole trainings.")
    ] = False,
    workers: Workers = 0,
    threads: Threads = 1,
) -> None:
    """Real digits and invented authors: two leaderboards, and what each model still knows."""
    started = time.monotonic()
    runtime = Machine(store, device="cpu", threads=threads).runtime()
    chosen = WHOLE if full else BRIEF
    suites = [Selection(*choice).suite(name, store) for name, choice in chosen.items()]
    failed: dict[str, str] = {}
    shown = ("finetune", "gd_sine"), ("npo_gdr", "gd_sine")
    with working(runtime, workers) as (executor, watching):
        for number, suite in enumerate(suites):
            watched = partial(watching, suite.name)
            board, failed_here = execute(suite, runtime, executor, watched)
            failed |= failed_here
            if full:
                show_board(board, runtime)
            else:
                _show_brief(board, runtime, shown[number], whole=not failed_here)
    minutes = (time.monotonic() - started) / 60
    console.print(f"\nDone in {minutes:.1f} minutes. Look on:")
    for line in look_lines(suites[0].name, runtime.store, store):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    finish(failed)


def _show_brief(
    board: Leaderboard, runtime: Runtime, methods: tuple[str, str], *, whole: bool
) -> None:
    """Prints the table of a suite, and samples of some rows where all of it worked."""
    suite = board.suite
    show(console, [brief_section(board)])
    if board.complete and whole:
        text = BENCHMARKS[suite.spec.benchmark].modality != "vision"
        chosen = write_samples(board, runtime, PAGE_TEXTS if text else PAGE_IMAGES)
        told = chosen[0].answers  # what diverged has none
        rows = [row for row in (*REFERENCES, *methods) if row in told]
        few = [replace(one, answers={row: one.answers[row] for row in rows}) for one in chosen]
        show(console, [text_section(few[:TEXTS]) if text else image_section(few[:IMAGES])])


def brief_section(board: Leaderboard) -> Section:
    """The narrow table of a leaderboard; marks that these seeds cannot show are said once."""
    spec, content = board.suite.spec, narrow_table(board)
    methods = [row for row in board.rows if row.method not in REFERENCES]
    words = {row.verdict.word for row in methods if row.verdict}
    lines = [f"+ and -: the difference to Retrain. {board.rule.title}: the mean difference."]
    if words <= {"undecided", "untested"}:
        unmarked = ((cell.removesuffix("?").rstrip() for cell in row) for row in content.rows)
        content = replace(content, rows=tuple(map(tuple, unmarked)))
        few = f"{len(spec.seeds)} seed{'s' * (len(spec.seeds) > 1)}"
        lines.append(
            f"{few}: too few to test whether a row is different from a retrained model, so no "
            "row is marked."
        )
    return Section(spec.title, tuple(lines), content)


def image_section(chosen: Sequence[Sample]) -> Section:
    """A line per image: its class, and each model's class and confidence."""
    labels = [*chosen[0].answers]
    rows = [
        [f"#{sample.index}", sample.truth]
        + [f"{a.text} {100 * a.probability:3.0f} %" for a in sample.answers.values()]
        for sample in chosen
    ]
    text = "Forgotten images: the class that each model answers, and how sure it is."
    return Section("Samples", (text,), table(["image", "true", *labels], rows))


def text_section(chosen: Sequence[Sample]) -> Section:
    """A few lines per text: the question, the true answer, and each model's."""
    width = max(len(label) for label in chosen[0].answers) + 2
    lines: list[str] = []
    for sample in chosen:
        lines += ["", clipped(sample.question), f"{'true':{width + 6}}{clipped(sample.truth, 56)}"]
        for label, answer in sample.answers.items():
            share = f"{100 * answer.probability:3.0f} %"
            lines.append(f"{label:{width}}{share} {clipped(answer.text, 56)}")
    text = (
        "Forgotten questions: what each model answers; in % the true answer's probability, a mean "
        "over its tokens."
    )
    return Section("Samples", (text,), lines=tuple(lines))


def clipped(text: str, width: int = 76) -> str:
    """At most so many characters of one line."""
    return textwrap.shorten(text, width, placeholder=" …") or "(nothing)"


def look_lines(name: str, store: Path, given: Path) -> Iterator[str]:
    """Where a suite's pictures lie in ``store``, and commands that work as printed.

    ``given`` is the store's folder as the user wrote it.
    """
    kept = f" --store {shlex.quote(str(given))}" if given != STORE else ""
    events = shlex.quote(short_path(store / "tensorboard" / name / "summary"))
    yield f"page with pictures  {short_path(store / 'suites' / name / 'leaderboard.html')}"
    yield f"page of samples     {short_path(store / 'suites' / name / PAGE)}"
    yield f"training curves     {program('tensorboard')} --logdir {events}"
    yield "Next:"
    for arguments, text in (
        (f"report {name}{kept}", "every table of this run"),
        ("show gd_sine", "what a method is, and its defaults"),
        (f"run digits-class --only gd,gd_sine --seeds 1{kept}", "the whole protocol, some minutes"),
    ):
        yield f"{program('unlearn')} {arguments}".ljust(46) + f"  {text}"
    yield "CONTRIBUTING.md".ljust(46) + "  how to add a method in 20 lines"


def program(name: str) -> str:
    """A program as it can be typed: with its path where it is not on PATH."""
    path = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not path.exists() else shlex.quote(short_path(path))

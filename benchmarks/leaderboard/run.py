"""``run``: the Python door to suites, and what the commands that run suites call."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stable_forgetting.benchmarks.audits.plan import probe_plan
from stable_forgetting.benchmarks.costs.estimate import mends
from stable_forgetting.benchmarks.leaderboard import board as boards
from stable_forgetting.benchmarks.leaderboard.data import row_lines, run_lines
from stable_forgetting.benchmarks.leaderboard.derive import make_leaderboard
from stable_forgetting.benchmarks.leaderboard.report import sections
from stable_forgetting.benchmarks.leaderboard.write import picture_of, write_report
from stable_forgetting.benchmarks.pipeline.executors import executing
from stable_forgetting.benchmarks.pipeline.models import make_benchmarks_anew
from stable_forgetting.benchmarks.pipeline.schedule import Watcher, run_suite
from stable_forgetting.benchmarks.pipeline.stage import Plan, Stage
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.files import write_files
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.suite.remembered import remembered, suite_files
from stable_forgetting.benchmarks.suite.resolve import ResolvedSuite, load_suite
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import listed
from stable_forgetting.common.base.errors import Damaged, UserError
from stable_forgetting.common.base.files import write_text
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS, load_plugins
from stable_forgetting.common.base.seeding import torch_as_it_was
from stable_forgetting.common.protocol.benchmark import Runtime, check_device
from stable_forgetting.common.store.stages import StageStore, check_writable

if TYPE_CHECKING:
    import pandas


logger = logging.getLogger(__name__)
LISTING = "listing.sha256"
Watching = Callable[[], AbstractContextManager[Watcher]]
"""What makes the watcher around a run."""


class Leaderboard(boards.Leaderboard):
    """The table of a suite, which shows itself in a notebook.

    Attributes:
        failed: Stage -> why it failed.
        folder: Where the reports were written.
    """

    failed: Mapping[str, str]
    folder: Path

    @classmethod
    def of(cls, board: boards.Leaderboard, failed: Mapping[str, str], folder: Path) -> Leaderboard:
        """The same board with what failed, and where its reports lie."""
        shown = cls(**vars(board))
        shown.failed, shown.folder = failed, folder
        return shown

    def to_frame(self, *, full: bool = False, runs: bool = False) -> pandas.DataFrame:
        """The table as numbers.

        Args:
            full: Every metric and its signed gap to Retrain, each with ``_std`` and the ends of its
                95 % interval; else the means of the suite's own columns.
            runs: A line per run, with its config, in the place of a line per row.

        Returns:
            By label of the row; ``distance`` is the mean over seeds, in the rule's unit.
        """
        import pandas

        found = run_lines(self) if runs else row_lines(self)
        lines = pandas.DataFrame(found, columns=None if found else ["row"]).set_index("row")
        if full or runs:
            return lines
        shown = ["method", "seeds", *self.suite.spec.columns, "distance", "distance_std", "verdict"]
        return lines[[name for name in shown if name in lines]].dropna(axis="columns", how="all")

    def plot(self) -> Picture:
        """How far every row is from a retrained model, or the cells of a grid, as ``.svg``."""
        return picture_of(self)

    def __str__(self) -> str:
        """The compact tables in Markdown."""
        return markdown.write([part for part in sections(self) if part.level == "compact"])

    def _repr_html_(self) -> str:
        """The compact tables as a notebook shows them."""
        return html.fragment([part for part in sections(self) if part.level == "compact"])


def run(
    suite: str | Path,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    *,
    settings: Sequence[str] = (),
    store: str | Path = "runs",
    data_root: str | Path | None = None,
    device: str = "auto",
    threads: int = 1,
    workers: int = 1,
    plugins: Sequence[str] = (),
    progress: bool = True,
) -> Leaderboard:
    """Runs what a store lacks of a suite, and makes its leaderboard.

    Args:
        suite: A built-in name (``unlearn show suites``) or the path of a YAML file.
        methods: Rows of the suite, or any methods, which run with their defaults; Original and
            Retrain are always there.  Empty for all rows.
        seeds: In the place of the suite's own.
        settings: Overrides such as ``"defaults.steps=30"``.
        store: Folder for everything that is written; what lies there is not computed again.
        data_root: Folder with local data sets.
        device: Of torch; ``auto`` takes the first accelerator.
        threads: Torch threads of each process.
        workers: Processes; 1 works in this one.
        plugins: Python files that register methods or benchmarks.
        progress: Write a line to stderr when a stage is complete.

    Returns:
        The leaderboard; ``failed`` says which stages failed.

    Raises:
        UserError: Something that is given can be mended.

    Example:
        >>> board = run(suite, methods=["gd"], seeds=[1], progress=False)
        >>> sorted(board.to_frame().index)
        ['gd', 'original', 'retrain']
    """
    methods, plugins = listed(methods), listed(plugins)
    load_plugins(plugins)
    check_writable(store := Path(store).absolute(), "store")
    further = {name: None for name in methods if name in METHODS}
    resolved = load_suite(
        remembered(str(suite), store), listed(settings), seeds=seeds, only=methods, further=further
    )
    runtime = Runtime(
        store=store,
        data_root=None if data_root is None else Path(data_root).absolute(),
        device=device,
        threads=threads,
        plugins=tuple(str(Path(path).absolute()) for path in plugins),
    )
    kept = torch_as_it_was() if workers <= 1 else nullcontext()
    lines = Lines(shown=progress)
    with kept, executing(workers, threads, runtime.plugins) as executor:
        board, failed = execute(resolved, runtime, executor, lambda: nullcontext(lines))
    return Leaderboard.of(board, failed, store / "suites" / resolved.name)


class Lines:
    """Watches a run: a line on stderr when a stage is complete, if it is ``shown``."""

    def __init__(self, *, shown: bool):
        self.shown, self.total, self.done = shown, 0, 0

    def planned(self, plan: Plan, missing: Collection[str]) -> None:
        """A (re)plan."""
        self.total = len(list(plan.stages()))
        self.done = self.total - len(missing)

    def started(self, stage: Stage) -> None:
        """Nothing is said."""

    def finished(self, stage: Stage, status: str) -> None:
        """A stage is complete, or failed."""
        self.done += 1
        if self.shown:
            sys.stderr.write(f"{self.done}/{self.total} {stage.name}: {status}\n")


def execute(
    suite: ResolvedSuite, runtime: Runtime, executor: Executor, watching: Watching
) -> tuple[boards.Leaderboard, dict[str, str]]:
    """Runs a suite and writes its report: its board, and what failed."""
    store = StageStore(runtime.store)
    make_benchmarks_anew()
    with _running(suite, runtime, watching) as watcher:
        work = [run_suite(suite, runtime, executor, watcher=watcher)]
        if suite.audits:
            done = run_suite(
                suite, runtime, executor, watcher=watcher, planner=probe_plan, live_events=False
            )
            work.append(done)
    try:
        board = make_leaderboard(suite, store)
        exported = (runtime.store / "tensorboard" / suite.name / "summary").is_dir()
        if processes.is_main():
            events = any(done.executed for done in work) or not exported
            write_report(board, runtime.store, events=events)
    except Damaged as error:
        if not error.set_aside:
            raise
        logger.warning("%s", error)
        return execute(suite, runtime, executor, watching)
    failed = {key: text for done in work for key, text in done.failed.items()}
    if processes.is_main():
        _compare_listing(suite, runtime)
    return board, {key: with_mends(suite, text) for key, text in failed.items()}


def _compare_listing(suite: ResolvedSuite, runtime: Runtime) -> None:
    """Warns where files of data, probes or weights are not as at the first run of the suite."""
    listing = BENCHMARKS[suite.spec.benchmark].listing(suite.protocol, runtime)
    listing += "".join(e.probe.listing(runtime.data_root) for e in suite.probes.values())
    path = runtime.store / "suites" / suite.name / LISTING
    if listing and not path.is_file():
        write_text(path, listing)
    elif listing and path.read_text(encoding="utf-8") != listing:
        logger.warning(
            "%s: names, sizes or times of its images, texts or given weights changed since its "
            "first run; if what they hold did, take another --store, and if not, remove %s",
            suite.name,
            path,
        )


@contextmanager
def _running(suite: ResolvedSuite, runtime: Runtime, watching: Watching) -> Iterator[Watcher]:
    """The watcher around a suite's run, which leaves nothing where it was refused."""
    if runtime.device not in ("auto", "cpu"):
        check_device(runtime.device)
    folder = runtime.store / "suites" / suite.name
    first, watcher = processes.is_main() and not folder.exists(), None
    try:
        with watching() as watcher:
            if processes.is_main():  # by its name the run can be reported, even if it is cut short
                write_files(folder, suite_files(suite))
            yield watcher
    except UserError:
        if first and not (watcher and watcher.done):
            _remove(folder, runtime.store)
        raise


def with_mends(suite: ResolvedSuite, text: str) -> str:
    """What failed; where memory of a card ran out, with what would lower it, as a plan counts."""
    if "OutOfMemoryError" not in text:
        return text
    if len(re.findall(r"Process \d+ has", text)) > 1:  # torch names the others on the card
        text += "; run again with fewer --workers, which share the card: what is stored stays"
    known = mends(suite, text.partition("/")[0])
    if not known:
        ways = "accumulation, protocol.model.gradient_checkpointing, an adapter, or FSDP"
        return f"{text}; less memory: {ways} (docs/scale.md)"
    held = known.pop("")
    ways = "; ".join(f"{size / 1e9:.0f} GB with {way}" for way, size in known.items())
    return f"{text}; it holds {held / 1e9:.0f} GB by unlearn plan; less: {ways}"


def _remove(folder: Path, store: Path) -> None:
    """Removes what a refused run wrote, and the folders that are empty then, the store too."""
    shutil.rmtree(folder, ignore_errors=True)
    StageStore(store).sweep()
    for empty in (store / "leases", *folder.parents[: len(folder.relative_to(store).parts)]):
        with suppress(OSError):
            empty.rmdir()

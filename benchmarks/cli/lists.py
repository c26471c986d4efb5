"""Lists of suites, sweeps, methods and benchmarks, for ``unlearn show``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stable_forgetting.benchmarks.cli.options import console
from stable_forgetting.benchmarks.report.cells import MISSING, duration
from stable_forgetting.benchmarks.report.section import Section, table
from stable_forgetting.benchmarks.report.shipped import recorded_seconds
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.benchmarks.suite.needs import needs
from stable_forgetting.benchmarks.suite.reading import read_suite
from stable_forgetting.benchmarks.suite.suite import suite_groups, suite_names, sweeps
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS
from stable_forgetting.common.bounded.config import PRESETS

TIMES = (
    "time: of the trainings one after the other, from this store's report or from the one that "
    "comes with the project; – where there is none (of large models: show suites --paper)."
)
START = "Start here: nothing to download, two CPU cores"
OTHERS = "Other benchmarks"
GROUPS = {
    "image_classification": "Images",
    "tofu": "TOFU",
    "tdec": "TDEC",
    "muse": "MUSE",
    "wmdp": "WMDP and RWKU",
    "rwku": "WMDP and RWKU",
}
"""Benchmark -> title of its suites."""
WIDEST = 120
"""Characters of a line of a family."""
LISTS = ("methods", "suites", "sweeps", "benchmarks")
Family = tuple[str, list[str], bool]
"""The words that the names of some suites begin with, the names, and whether they need a GPU."""


def show_lists(what: str | None, words: str | None, store: Path) -> None:
    """Prints one list; without a name, the suites by family, or what a filter finds in all lists.

    Args:
        what: One of :data:`LISTS`, or None.
        words: Only lines with all these words.
        store: Whose reports say how long suites took.
    """
    if what in (None, "suites") and not words:
        _show_families(store)
        return
    heads = ["name", "what it is"]
    if what in (None, "suites"):
        _show_found("Suites", ["suite", "needs", "time", "what it measures"], _suites(store), words)
        console.print(TIMES, style="dim")
    if what in (None, "sweeps"):
        _show_found("Sweeps", ["suite", "what it asks"], sweeps().items(), words)
    if what in (None, "methods"):
        _show_found("Methods", heads, ((e.name, e.summary) for e in METHODS), words)
    if what in (None, "benchmarks"):
        _show_found("Benchmarks", heads, ((e.name, e.summary) for e in BENCHMARKS), words)
    if what in (None, "methods"):
        crossed = ((f"METHOD_{name}", preset.through) for name, preset in PRESETS.items())
        title = "Any method with an adapter, through"
        _show_found(title, ["name", "what is trained"], crossed, words)


def _suites(store: Path) -> Iterator[Sequence[str]]:
    for name in suite_names():
        data = read_suite(name)[1]
        needed = ", ".join(needs(data)) or "nothing"
        yield name, needed, _time([name], store), str(data.get("title", ""))
    for name, of in suite_groups().items():
        yield name, "as its suites", _time(of, store), ", ".join(of)


def _show_found(
    title: str, heads: list[str], rows: Iterable[Sequence[str]], words: str | None
) -> None:
    """The rows with all words; where there are none, a line that says so."""
    wanted = (words or "").lower().split()
    found = [[*row] for row in rows if all(word in " ".join(row).lower() for word in wanted)]
    if found or not words:
        show_words(title, heads, found)
    else:
        console.print(f"{title}: nothing matches '{words}'", markup=False)


def _show_families(store: Path) -> None:
    """Every family of suites in a line, what runs here first; then the sweeps."""
    for title, families in families_of(suite_names()).items():
        console.print(f"[bold]{title}[/bold]")
        for stem, members, gpu in families:
            time = "needs a GPU" if gpu else _times(members, store)
            line = f"  {stem:28} {time:>13}  {_about(stem, members)}"
            console.print(_cut(line), markup=False)
    for head, names in (
        ("Several at once:", suite_groups()),
        ("Sweeps (unlearn show sweeps):", sweeps()),
    ):
        console.print(_cut(f"{head} {', '.join(names)}"), markup=False)
    for text in (
        "All suites of a family, with needs and time: unlearn show suites --filter WORDS",
        "More: unlearn show methods, sweeps, benchmarks, metrics, or one name",
    ):
        console.print(text, style="dim")


def _cut(line: str) -> str:
    width = min(console.width, WIDEST)
    return line if len(line) <= width else line[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _times(names: Sequence[str], store: Path) -> str:
    """``~2 to 51 min`` of the suites that were measured."""
    seconds = [recorded_seconds(name, store) for name in names]
    known = sorted(value for value in seconds if value is not None)
    if not known:
        return MISSING
    least, most = duration(known[0]), duration(known[-1])
    if least == most:
        return f"~{most}"
    number, _, unit = least.partition(" ")
    return f"{number if most.endswith(unit) else least} to {most}"


def _about(stem: str, members: Sequence[str]) -> str:
    """The title of a suite that is alone; what the names of several add to their stem."""
    if len(members) == 1:
        return str(read_suite(members[0])[1].get("title", ""))
    added = [name.removeprefix(stem) for name in members]
    own = "itself, " if "" in added else ""
    return f"{len(added)}: {own}{', '.join(filter(None, added))}"


def families_of(names: Sequence[str]) -> dict[str, list[Family]]:
    """Title of a group -> its families, those that run here first.

    A family has the first word of its names (the first two, of long lists of text suites) and
    its needs in common.
    """
    groups: dict[str, dict[tuple[bool, str], list[str]]] = {}
    for name in names:
        data = read_suite(name)[1]
        needed, words = needs(data), name.split("-")
        benchmark = str(data.get("benchmark", ""))
        title = GROUPS.get(benchmark, OTHERS) if needed else START
        short = words[0] in names or title in (START, GROUPS["image_classification"])
        family = words[0] if short else "-".join(words[:2])
        groups.setdefault(title, {}).setdefault(("a GPU" in needed, family), []).append(name)
    order = [title for title in dict.fromkeys((START, *GROUPS.values(), OTHERS)) if title in groups]
    return {
        title: [(_stem(own), own, gpu) for (gpu, _), own in sorted(groups[title].items())]
        for title in order
    }


def _stem(names: Sequence[str]) -> str:
    """The words that all names begin with."""
    columns = zip(*(name.split("-") for name in names), strict=False)
    return "-".join(c[0] for c in itertools.takewhile(lambda words: len({*words}) == 1, columns))


def _time(names: Sequence[str], store: Path) -> str:
    """``~12 min`` of all suites together; a dash where one of them was never measured."""
    seconds = [recorded_seconds(name, store) for name in names]
    if None in seconds:
        return MISSING
    return f"~{duration(math.fsum(value for value in seconds if value is not None))}"


def show_words(title: str, heads: list[str], rows: list[list[str]]) -> None:
    """Prints a table of words."""
    show(console, [Section(title, content=table(heads, rows, words=True))])

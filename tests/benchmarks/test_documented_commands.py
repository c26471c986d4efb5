"""Every command that a document or a help text shows is executed.

Commands that only read run as they are, on shipped records.  Commands that compute run as a plan,
or on tiny data that the fixture ``desk`` makes once.  ``HOW`` says which, and why.
"""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from stable_forgetting import benchmarks
from stable_forgetting.benchmarks.cli import main as cli_module
from stable_forgetting.benchmarks.cli import options
from stable_forgetting.benchmarks.suite.suite import suite_groups
from tests.benchmarks.desk import lay

ROOT = Path(benchmarks.__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(path for path in (ROOT / "examples").iterdir() if path.is_file()),
]
GROUP = typer.main.get_command(cli_module.app)
CODE = re.compile(r"```.*?```|(?<!`)`([^`]+)`(?!`)", re.DOTALL)
LINE = re.compile(
    r"^[ >$]*(?:[\w=$\"{}.-]+ )*?(?:srun )?(?:\.venv/bin/)?"
    r"((?:unlearn|make|torchrun|accelerate launch|python -m (?:tools|stable_forgetting))\b.*)$"
)
LAUNCHED = re.compile(
    r"^(?:torchrun|accelerate launch|python)\b.*? -m stable_forgetting\.benchmarks "
)


# What the documents show ------------------------------------------------------------------------


def lines_of(text: str) -> Iterator[str]:
    """Commands on lines of their own (in a block of code) and in backticks in the prose."""
    for line in text.splitlines():
        if found := LINE.match(line):
            yield found[1]
    for found in CODE.finditer(text):
        span = " ".join((found[1] or "").split())
        if (inner := LINE.match(span)) and " " in span:
            yield inner[1]


def tidy(line: str) -> str:
    """Without comment, redirection and launcher: what the program itself is given."""
    line = re.split(r"\s+#|\s+>\s|\s&&\s|;", LAUNCHED.sub("unlearn ", line))[0]
    return " ".join(line.split())


def epilogues() -> Iterator[tuple[str, str]]:
    """(command, example) of every help text."""
    for name, entry in {"unlearn": GROUP, **GROUP.commands}.items():
        for example in (entry.epilog or "").strip().splitlines()[1:]:
            yield f"unlearn {name} --help", example.strip()


def documented() -> dict[str, str]:
    """Command -> the first place that shows it."""
    shown = [(p.name, line) for p in DOCUMENTS for line in lines_of(p.read_text(encoding="utf-8"))]
    found: dict[str, str] = {}
    for place, line in [*shown, *epilogues()]:
        found.setdefault(tidy(line), place)
    return found


def outputs() -> list[list[str]]:
    """Of the README: each command with the lines that it is shown to print."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n\$ (.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in blocks]


SHOWN = outputs()
FOUND = documented()
OURS = sorted(line for line in FOUND if line.startswith("unlearn "))
TOOLS = sorted(line for line in FOUND if line.startswith("python -m tools"))
TARGETS = sorted(line for line in FOUND if re.match(r"make [a-z][a-z-]*( ARGS=\S+)?$", line))


# How each is executed ---------------------------------------------------------------------------

Change = Callable[[list[str]], list[str]]


def without(words: list[str], *options: str) -> list[str]:
    """The words less these options and their values."""
    spots = {i for i, word in enumerate(words) if word in options}
    return [w for i, w in enumerate(words) if i not in spots and i - 1 not in spots]


def planned(words: list[str]) -> list[str]:
    """``plan`` of the same selection of rows, seeds and settings; of a group its first suite.

    A single stage is run: that of the desk.
    """
    if "--stage" in words:
        return small(words)
    words = [word for word in words if word not in ("--samples", "--rehearse", "--free-weights")]
    rest = without(words[1:], "--fresh", "--workers", "--data-root", "--record", "--track")
    names = {"full": "tofu-llama2-7b-forget10", "photos.yaml": "small.yaml"}
    names |= {name: suites[0] for name, suites in suite_groups().items() if name in rest}
    return ["plan", *(names.get(word, word) for word in rest)]


def small(words: list[str]) -> list[str]:
    """On the tiny suite whose records the desk holds, in the place of the suite that is named."""
    suites = r"digits-class(\+\w+)?|lethevit-cifar10$|mine\.yaml"
    return [re.sub(suites, "small.yaml", word) for word in words]


def briefly(words: list[str]) -> list[str]:
    """A few samples and steps on the desk's models, which stand for those of a hub."""
    if "--convert" in words:
        return words
    models = {"meta-llama/Llama-3.1-8B-Instruct": "my_llm"}
    kept = without(words, "--template")
    brief = ["--set", "batch_size=4"]
    brief += [] if "scrub" in " ".join(words) else ["--set", "steps=2"]
    brief += [] if any(word.endswith(".jsonl") for word in words) else ["--goal", "50"]
    brief += ["--anyway"] if "--arch" in words else []
    return [*(models.get(word, word) for word in kept), *brief]


def one_row(words: list[str]) -> list[str]:
    """Attacks of one row alone, with few steps of relearning."""
    if "--list" in words or words[-1].endswith(".json"):
        return words
    if "--model" in words:
        there = {"forgotten/": "my_vit", "FORGOTTEN": "my_vit"}
        return [*(there.get(word, word) for word in words), "--attacks", "relearn_few,nf4"]
    words = [*small(words), "--workers", "1"]
    words += ["--with", "relearn.max_steps=4"] if "--with" in words else []
    return words if "--only" in words else [*words, "--only", "gd_sine"]


@dataclass(frozen=True)
class Way:
    """How a command is executed, and why not as it stands."""

    why: str
    change: Change = list
    parse_only: bool = False
    codes: frozenset[int] = field(default=frozenset({0}))


HOW = {
    "run": Way("takes minutes or needs a GPU; test_run and test_rehearse run tiny ones", planned),
    "attack": Way("reads stored models: those of the desk, one row", one_row),
    "submit": Way("reads stored scores: those of the desk", small),
    "compare": Way("reads two stores: those of the desk", small),
    "apply": Way("trains: on tiny models, two steps", briefly),
    "demo": Way("takes minutes; make demo is part of .ci/run", parse_only=True),
    "doctor": Way(
        "as it stands; code 1 where this machine lacks something", codes=frozenset({0, 1})
    ),
}
HUB = "asks a hub: its words are parsed alone"
EXCEPT = {
    "EleutherAI/gpt-neo-125m": HUB,
    "--watch": "serves until it is ended: its words are parsed alone; test_live asks it",
    "--board": "serves until it is ended: its words are parsed alone; test_live asks it",
}
SLOW = re.compile(r"check --all|attack .*--minutes|--tasks|unlearn site --out|show suites --paper")
"""Twenty processor seconds or more; their own tests are test_checks, test_audit, test_probes,
test_sharing and test_coverage."""
PLACEHOLDERS = {"DATA": "data", "F": "forget", "R": "retain", "T": "test", "CKPT": "my_vit"}
PLACEHOLDERS |= {"HF_FOLDER": "my_llm", "SUITE": "digits-class", "NAME": "digits-class"}
PLACEHOLDERS |= {"COMMAND": "run", "ROW": "gd_sine"}
ALONE = ("doctor", "show", "compare", "demo")
"""Commands that need no more words; another one that stands alone is named, not shown."""


def filled_in(words: list[str], desk: SimpleNamespace, out: Path) -> list[str]:
    """The words with every placeholder replaced by something that is there."""
    words = [PLACEHOLDERS.get(word, word) for word in words]
    for option in ("--out", "--record"):
        if option in words:
            place = words.index(option) + 1
            words[place] = str(out / Path(words[place]).name)
    words = [
        {"KEY": desk.key, "IMAGES": before.strip("-")}.get(word, word)
        for before, word in itertools.pairwise(["", *words])
    ]
    words = [re.sub(r"^(\$SCRATCH/|/shared/)", "", word).replace("$DATA", "data") for word in words]
    return [word.replace("/path/", f"{desk.root}/") for word in words]


def named(words: list[str]) -> bool:
    """Whether prose only names a command, as in "``unlearn report SUITE`` prints"."""
    rest = words[1:]
    return all(word == word.upper() for word in rest) if rest else words[0] not in ALONE


def parsed(words: list[str]) -> None:
    """Raises where a command or option does not exist."""
    if "--help" not in words:
        GROUP.commands[words[0]].make_context(words[0], words[1:])


# The tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tiny_suite, cli, tmp_path_factory):
    """A folder with everything that documents name."""
    return lay(tmp_path_factory.mktemp("desk"), tiny_suite, cli)


def test_the_documents_show_every_command_and_use_every_exception():
    assert len(OURS) > 60 and min(len(TOOLS), len(TARGETS), len(SHOWN)) > 3
    assert {line.split()[1] for line in OURS} >= {*GROUP.commands, *HOW}
    assert all(any(word in line for line in OURS) for word in EXCEPT)


@pytest.mark.parametrize(
    "line",
    [pytest.param(each, marks=pytest.mark.slow if SLOW.search(each) else ()) for each in OURS],
)
def test_a_documented_command_works(line, desk, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(desk.root)
    monkeypatch.setenv("COLUMNS", "120")
    words = shlex.split(line)[1:]
    words = [words[0], "--help"] if named(words) else filled_in(words, desk, tmp_path)
    parsed(words)
    way = HOW.get(words[0], Way("as it stands"))
    if way.parse_only or any(word in line for word in EXCEPT):
        return
    done = cli(*(words if words[-1] == "--help" else way.change(words)))
    assert done.code in way.codes, f"{FOUND[line]}: {line}\n{done.err or done.out[-2000:]}"


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block[0])
def test_the_output_in_the_readme_is_what_is_printed(block, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(options.console, "width", 120)
    done = cli(*shlex.split(block[0])[1:])
    printed = iter([line.strip() for line in done.out.splitlines()])
    assert [line for line in block[1:] if line.strip() not in printed] == []


@pytest.mark.parametrize("line", TOOLS)
def test_a_documented_tool_answers(line, monkeypatch, capsys):
    module, *words = shlex.split(line)[2:]
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    text = capsys.readouterr().out
    assert stop.value.code in (0, None)
    assert [word for word in words if word.startswith("--") and word not in text] == []


@pytest.mark.parametrize("line", TARGETS)
def test_a_documented_target_exists(line):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), FOUND[line]

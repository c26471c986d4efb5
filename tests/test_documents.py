"""The documents are true: links lead somewhere, and every file, module and arrow exists."""

from __future__ import annotations

import ast
import configparser
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.variants import ROWS
from tests.test_architecture import FILES, PACKAGES

ROOT = Path(__file__).resolve().parents[1]
NAME = "stable_forgetting"
MODULES = {
    ".".join((NAME, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in FILES
}
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
REPORTS = ("LEADERBOARD.md", "MAP.md")
FOLDERS = (*PACKAGES, "tools", "tests", "docs", "examples")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`+([^`]+)`+")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*")
PLACE = re.compile(r"([\w./-]+\.py)::?(\w+(?:\.\w+)*)")
DOTTED = re.compile(rf"(?:{NAME}\.)?(?:{'|'.join(PACKAGES)})(?:\.\w+)+")


def prose(document: Path) -> str:
    """The text of a document without its code blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def spans(document: Path) -> Iterator[str]:
    """What stands in backticks in the prose."""
    yield from (match.group(1).strip() for match in CODE.finditer(prose(document)))


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    heads = re.findall(r"^#+ +(.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def expanded(path: str) -> list[str]:
    """``a/{b,c}.py`` as two paths."""
    match = re.search(r"\{([^}]*)\}", path)
    if match is None:
        return [path]
    before, after = path[: match.start()], path[match.end() :]
    return [p for word in match.group(1).split(",") for p in expanded(before + word + after)]


def exists(path: str) -> bool:
    """Whether a path of the repository, possibly with wildcards, is there."""
    return all(any(ROOT.glob(each.rstrip("/"))) for each in expanded(path))


@cache
def names_in(path: str) -> frozenset[str]:
    """Functions, classes, members and constants that a file defines, with dots."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))

    return frozenset(walk(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, ""))


def is_there(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name that a module defines."""
    parts = f"{NAME}.{dotted.removeprefix(NAME + '.')}".split(".")
    for length in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:length]), ".".join(parts[length:])
        if module in MODULES:
            return not rest or rest in names_in(str(MODULES[module].relative_to(ROOT)))
    return False


def faults(text: str) -> list[str]:
    """What a span of code names that is not there."""
    if place := PLACE.fullmatch(text):
        path, name = place.groups()
        return [] if (ROOT / path).is_file() and name in names_in(path) else [text]
    if PATH.fullmatch(text):
        return [] if exists(text) else [text]
    if DOTTED.fullmatch(text):
        return [] if is_there(text) else [text]
    return []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for target in LINK.findall(prose(document)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_module_exists(document):
    assert [fault for text in spans(document) for fault in faults(text)] == []


@pytest.mark.parametrize("name", ["architecture.md", "glossary.md"])
def test_every_class_and_table_is_in_the_code(name):
    words = {text for text in spans(ROOT / "docs" / name) if re.fullmatch(r"[A-Z][A-Za-z_]+", text)}
    files = (str(path.relative_to(ROOT)) for path in MODULES.values())
    defined = {name.rpartition(".")[2] for file in files for name in names_in(file)}
    assert words - defined <= {"METHOD_PRESET"}


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("common/engine.py", False),
        ("stable_forgetting.common.engine", False),
        ("stable_forgetting.common.train.fit.fitted", False),
        ("common/train/fit.py:fitted", False),
        ("common/train/", True),
        ("common/train/fit.py:fit", True),
        ("stable_forgetting.common.train.fit.fit", True),
        ("tests/test_documents.py::test_a_name_that_is_gone_is_seen", True),
        ("benchmarks/report/{html,markdown}.py", True),
    ],
)
def test_a_name_that_is_gone_is_seen(text, there):
    assert faults(text) == [] if there else [text]


# The wheel ----------------------------------------------------------------------------------------

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_file_that_the_code_reads(package):
    patterns = SETUP["options.package_data"].get(f"{NAME}.{package}", "").split()
    packed = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    read = {p for s in ("toml", "yaml", "csv") for p in (ROOT / package).rglob(f"*.{s}")}
    reports = (ROOT / "benchmarks" / "results").rglob("*.md")
    read |= {p for p in reports if package == "benchmarks" and p.name in REPORTS}
    assert read, package
    others = ROOT / "benchmarks" / "results"
    assert {p for p in read - packed if p.suffix == ".md" or others not in p.parents} == set()


def test_the_metadata_say_what_a_reader_of_an_index_needs():
    metadata, options = SETUP["metadata"], SETUP["options"]
    for key in ("name", "version", "description", "author", "license", "keywords"):
        assert metadata[key].strip()
    assert metadata["long_description"] == "file: README.md"
    claimed = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert claimed == job["jobs"]["test"]["strategy"]["matrix"]["python"], "what CI tests"
    assert options["python_requires"] == ">=3.11"
    assert "Python** 3.11 or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (metadata["version"], metadata["license"])
    paper = citation["references"][0]["url"]
    assert f"Paper = {paper}" in metadata["project_urls"]
    assert paper in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_changelog_counts_the_methods():
    origins = {name: METHODS.entry(name).origin for name in METHODS.names()}
    methods = {name for name in origins if "/tests/" not in origins[name]} - {"original", "retrain"}
    said = f"{len(methods)} unlearning methods for images and text, of which {len(ROWS)} are "
    assert said in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# The README ---------------------------------------------------------------------


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_suite_of_ones_own_photos_can_be_loaded(tmp_path):
    text = (ROOT / "docs/use.md").read_text(encoding="utf-8")
    shown = re.search(r"A folder of images of your own.*?```yaml\n(.*?)```", text, re.S)
    (tmp_path / "photos.yaml").write_text(shown[1])
    suite = load_suite(str(tmp_path / "photos.yaml"))
    assert suite.protocol.data.folder == "photos" and suite.protocol.model.image_size == 32
    assert len([row for row in suite.rows if row.method not in ("original", "retrain")]) == 5


@pytest.mark.parametrize(
    "term",
    ["forget accuracy", "retain accuracy", "test accuracy", "membership inference attack", "AG4"],
)
def test_the_first_table_spells_its_columns_out(term):
    _, _, after = README.partition("$ unlearn report digits-class")
    assert term in after.partition("```")[2].partition("**2.")[0]


def test_documents_are_short():
    """The README is read to its end, and all documents in an hour."""
    assert len(README.splitlines()) <= 132 and 1100 <= len(README.split()) <= 1550
    pages = (ROOT / "docs").glob("*.md")
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages) <= 1400


# The picture ------------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ARMS = ("vision", "language")
BOXES = {("benchmarks", "arms"), ("benchmarks", "common"), ("arms", "common")}


def arrows() -> list[tuple[str, str]]:
    """(from, to) of the picture; a node is a room with ``_`` for a dot, or a whole box."""
    (picture,) = re.findall(r"^```mermaid$(.*?)^```$", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    pairs = []
    for line in picture.splitlines():
        groups = [group.split("&") for group in line.split("-->")]
        for sources, targets in itertools.pairwise(groups):
            pairs += [(name_of(a), name_of(b)) for a in sources for b in targets]
    return pairs


def name_of(node: str) -> str:
    """``common_base[base]`` -> ``common_base``."""
    return node.partition("[")[0].strip()


def places(node: str) -> list[str]:
    """What a node of the picture stands for: of either arm, a folder or a module."""
    first, _, rest = node.partition("_")
    packages = ARMS if first == "arm" else (first,)
    return [f"{NAME}.{package}.{rest.replace('_', '.')}" for package in packages]


@cache
def imports() -> frozenset[tuple[str, str]]:
    """(module, module) of every import of one of our modules by another."""
    found = set()
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found |= {(name, f"{node.module}.{alias.name}") for alias in node.names}
    return frozenset(found)


@pytest.mark.parametrize(("source", "target"), arrows())
def test_an_arrow_of_the_picture_is_an_import(source, target):
    if (source, target) not in BOXES:
        starts, ends = (tuple(f"{place}." for place in places(node)) for node in (source, target))
        assert any(
            f"{one}.".startswith(starts) and f"{other}.".startswith(ends)
            for one, other in imports()
        )


def test_every_folder_has_its_line():
    folders = {path.parent.relative_to(ROOT).as_posix() for path in MODULES.values()}
    lines = re.findall(r"^\| (`.*?) \|", ARCHITECTURE, re.MULTILINE)
    named = {name.rstrip("/") for line in lines for name in CODE.findall(line)}
    named = {each for name in named for each in expanded(name)}
    assert {folder for folder in folders if "/" in folder} <= named

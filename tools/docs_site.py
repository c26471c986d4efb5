"""A hook of MkDocs: the site is the repository's own pages, where they lie.

A page keeps its path, so that its links hold; files that pages link to come along.  The pages on
the Python interface are made from the stubs that list the public names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
STUB = re.compile(r"^from \.(\S+) import \S+ as (\S+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Puts the repository's pages in the place of those of a folder; theme files stay."""
    from mkdocs.structure.files import File

    for file in list(files.documentation_pages()):
        files.remove(file)
    for path in sorted(linked()):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, True))
    for name, folder in (("stable_forgetting", "src/stable_forgetting"), ("common", "common")):
        text = reference(ROOT / folder / "__init__.pyi", name)
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def linked() -> set[Path]:
    """README, the documents, and what they and the pages behind their links link to."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    seen = set(pages)
    while pages:
        found = _targets(pages.pop()) - seen
        seen |= found
        pages += [path for path in found if path.suffix == ".md"]
    return seen


def _targets(page: Path) -> set[Path]:
    """Files of the repository that a page links to."""
    linked = (page.parent / link for link in LINK.findall(page.read_text(encoding="utf-8")))
    inside = (path.resolve() for path in linked)
    return {path for path in inside if path.is_file() and path.is_relative_to(ROOT)}


def reference(stub: Path, name: str) -> str:
    """The page of a package: a heading, and each public name for mkdocstrings to describe."""
    package = "stable_forgetting" if name == "stable_forgetting" else f"stable_forgetting.{name}"
    lines = [f"# `{package}`", ""]
    for module, public in STUB.findall(stub.read_text(encoding="utf-8")):
        lines += [f"::: {package}.{module}.{public}", ""]
    return "\n".join(lines)

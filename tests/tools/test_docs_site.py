"""The documentation site holds every page and every public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tools.docs_site import ROOT, linked, reference

NAV = re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_every_document_stands_in_the_menu():
    written = {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")}
    assert written <= set(NAV)
    assert all((ROOT / page).is_file() for page in NAV if not page.startswith("api/"))


def test_files_that_pages_link_to_come_along():
    assert ROOT / "benchmarks/results/digits-class/LEADERBOARD.md" in linked()


@pytest.mark.parametrize(
    ("name", "stub"),
    [
        ("stable_forgetting", "src/stable_forgetting/__init__.pyi"),
        ("common", "common/__init__.pyi"),
    ],
)
def test_every_public_name_has_a_description(name, stub):
    page = reference(Path(ROOT / stub), name)
    package = import_module("stable_forgetting" if name != "common" else "stable_forgetting.common")
    described = re.findall(r"^::: (\S+)\.(\w+)$", page, re.MULTILINE)
    assert {public for _, public in described} == set(package.__all__)
    for module, public in described:
        assert hasattr(import_module(module), public)


def test_the_site_is_built(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build")
    config = import_module("mkdocs.config").load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True
    )
    build.build(config)
    assert "gradient_difference" in (tmp_path / "api/common/index.html").read_text()
    assert (tmp_path / "benchmarks/results/digits-class/LEADERBOARD/index.html").is_file()

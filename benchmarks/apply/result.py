"""What became of an application: a model, what was measured, and the folder to write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.apply.place import STATEMENT, check_out, workplace
from stable_forgetting.benchmarks.apply.report import front_matter, sections
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.section import Section
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.files import write_json, write_text
from stable_forgetting.common.base.hub import check_push, is_repository, parsed, push
from stable_forgetting.common.protocol.given import GivenBenchmark
from stable_forgetting.common.store.adapters import ADAPTER_CONFIG

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.bounded.files import AdapterState

ADAPTER = "adapter"

SCHEMA = 2
"""Of ``statement.json``."""


@dataclass(frozen=True)
class Result:
    """What became of an application.

    Attributes:
        status: ``ok``; or ``diverged``: then there is no model.
        statement: What was done and measured, as in ``statement.json``; ``output`` once it is
            written.
        model: With adapters merged, in eval mode; None where the training diverged.
        adapter: Of the method, if it trained one.
        out: The folder that was written, if one was asked for.
    """

    status: str
    statement: Mapping[str, Any]
    benchmark: GivenBenchmark
    model: nn.Module | None = None
    adapter: AdapterState | None = None
    out: Path | None = None

    @property
    def before(self) -> Mapping[str, Any]:
        """Part (``forget``, ``retain``, ``test``) -> measure -> value, of the given model."""
        return self.statement["before"]

    @property
    def after(self) -> Mapping[str, Any] | None:
        """The same of :attr:`model`; None where the training diverged."""
        return self.statement["after"]

    @property
    def message(self) -> str:
        """One line for people: what was written, or why there is no model."""
        if self.status == "ok":
            return f"wrote {self.out}: the merged model, {STATEMENT}, README.md and report.html"
        written = "" if self.out is None else f", only {self.out / STATEMENT}"
        another = "" if self.out is None else " and choose another folder"
        name, detail = self.statement["method"]["name"], self.statement["status_detail"]
        return f"{name} {detail}; no model was written{written}; lower lr or steps{another}"

    @property
    def page(self) -> Sequence[Section]:
        """The report; empty where there is no model."""
        name = "in memory" if self.out is None else self.out.name
        return () if self.model is None else sections(self.statement, self.benchmark, name)

    def __str__(self) -> str:
        """The report as text."""
        return markdown.write(self.page) if self.page else self.message

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""
        return html.fragment(self.page) if self.page else self.message

    def save(self, out: str | Path) -> Path:
        """Writes model, adapter, statement, model card and report into a new folder, or nothing.

        Args:
            out: The folder; it must not exist or be empty.

        Returns:
            The folder.

        Raises:
            ConfigError: There is no model, or the folder is not free.
        """
        out = Path(out)
        if self.model is None:
            raise ConfigError("the training diverged, so there is no model to save; lower lr")
        check_out(out)
        with workplace(out, {}) as place, place.writing() as folder:
            self.write(folder, out.name)
        return out

    def push(self, repository: str, out: str | Path | None = None) -> str:
        """Uploads what :meth:`save` writes to the hub; a new repository there is private.

        Args:
            repository: OWNER/NAME.
            out: A new folder to write into; None takes the one that is written, or a temporary one.

        Returns:
            The address.

        Raises:
            UserError: There is no model, the folder is not free, nobody is logged in, or the hub
                cannot be reached.
        """
        if out is None and self.out is not None:
            return push(self.out, repository, instead=_no_local_base(self.out))
        check_push(repository)
        with TemporaryDirectory() as temporary:
            name = parsed(repository)[0].rpartition("/")[2]
            folder = self.save(out or Path(temporary) / name)
            return push(folder, repository, instead=_no_local_base(folder))

    def write(self, folder: Path, name: str) -> Result:
        """Writes everything into an empty folder; without a model the statement alone.

        The report calls the folder ``name``; the result has the digests of what was written.
        """
        statement = dict(self.statement)
        if self.model is not None:
            reading, output = statement.pop("reading"), self.benchmark.given.write
            statement |= {"output": output(self.model, folder), "reading": reading}
            if self.adapter is not None:
                self.adapter.write(folder / ADAPTER)
                statement["output"] |= _write_peft(self.adapter, folder / ADAPTER, self.benchmark)
            page = sections(statement, self.benchmark, name)
            card = front_matter(statement, self.benchmark, name) + markdown.write(page)
            write_text(folder / "README.md", card)
            write_text(folder / "report.html", html.write(page))
        write_json(folder / STATEMENT, statement)
        return replace(self, statement=statement)


def _no_local_base(folder: Path) -> dict[str, bytes]:
    """The adapter's config for others, to whom a path of this machine says nothing."""
    name = f"{ADAPTER}/{ADAPTER_CONFIG}"
    if not (folder / name).is_file():
        return {}
    config = json.loads((folder / name).read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path") or ""
    if not base or is_repository(base):
        return {}
    return {name: (json.dumps({**config, "base_model_name_or_path": ""}, indent=1) + "\n").encode()}


def _write_peft(adapter: AdapterState, folder: Path, benchmark: GivenBenchmark) -> dict[str, Any]:
    """Writes the adapter for PEFT too, where one of PEFT does the same."""
    from stable_forgetting.common.bounded.as_peft import write_peft

    model = benchmark.config.model
    base = str(model) if isinstance(model, Path) else getattr(model, "name_or_path", "")
    base, revision = parsed(base) if is_repository(base) else (base, None)
    task = "CAUSAL_LM" if benchmark.modality == "language" else None
    return write_peft(adapter, folder, base=base, revision=revision, task=task)

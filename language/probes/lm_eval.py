"""Tasks of lm-eval as a probe: reasoning, dialogue, perplexity, or tasks of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.protocol.probe import ProbeTable
from stable_forgetting.language.probes.base import ProbedModel, TextProbe

ACCURACIES = ("acc", "exact_match", "acc_norm")
"""Columns that are a share of right answers; the first one that a task has is its accuracy."""


class LMEvalConfig(Strict):
    """Which tasks, and how much of them.

    Attributes:
        tasks: Names of tasks or groups.
        include: A folder with YAMLs of further tasks, absolute or below the data root.
        shots: Examples in each prompt; what each task says when None.
        limit: Rows per task, from the start; all when None.
    """

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    include: str | None = None
    shots: Annotated[int, Field(ge=0)] | None = None
    limit: Count | None = None


class LMEvalProbe(TextProbe):
    """Accuracy on tasks of lm-eval, each in its own words, metrics and version."""

    version = 1
    Config: ClassVar[type[Strict]] = LMEvalConfig
    config: LMEvalConfig

    def table(self, asked: ProbedModel) -> ProbeTable:
        """One row per task.

        Columns are lm-eval's: ``acc``, ``acc_norm``, ``exact_match``, ``perplexity``, ..., each
        with its standard error (``acc_stderr``), in lm-eval's units (shares, not percent), and
        ``n``, the number of rows.

        Raises:
            ConfigError: The folder ``include`` is missing, or a task is a mere tag of several.
            DataError: A task cannot be loaded, or asks for what this model cannot answer.
            Diverged: A scored logit is NaN or infinite.
        """
        from stable_forgetting.language.measure.harness import TextLM, run_tasks

        with self.including(asked) as further:
            results = run_tasks(
                TextLM(asked.model, asked.source, asked.sizes),
                self.config.tasks,
                limit=self.config.limit,
                **further,
            )
        rows = {task: _columns(results, task) for task in results["results"]}
        for task in self.config.tasks:
            if task not in rows:
                raise ConfigError(
                    f"{self.name}: tasks: '{task}' stands for several tasks and has no value of"
                    f" its own; name them: {', '.join(rows)}"
                )
        return ProbeTable(rows, self.notes(results))

    @contextmanager
    def including(self, asked: ProbedModel) -> Iterator[Mapping[str, Any]]:
        """Further arguments of :func:`language.measure.harness.run_tasks`, while it runs."""
        folder = None
        if self.config.include is not None:
            folder = (asked.data_root or Path()) / self.config.include
            if not folder.is_dir():
                raise ConfigError(f"{self.name}: include: there is no folder {folder}")
        yield {"include": folder, "shots": self.config.shots}

    @property
    def rows(self) -> Sequence[str]:
        """The tasks."""
        return self.config.tasks

    def value(self, columns: Mapping[str, float | None]) -> float | None:
        """Percent of right answers."""
        for name in ACCURACIES:
            for column, value in columns.items():
                if column.partition(",")[0] == name:
                    return None if value is None else 100 * value
        return None

    def notes(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Versions, shots, and lm-eval's hash of each task's texts and targets."""
        from stable_forgetting.language.measure.harness import task_hash

        return {
            "lm_eval": version("lm-eval"),
            "versions": {task: results["versions"][task] for task in sorted(results["versions"])},
            "shots": dict(results["n-shot"]),
            "hashes": {task: task_hash(rows) for task, rows in results["samples"].items()},
        }


def _columns(results: Mapping[str, Any], task: str) -> dict[str, float | None]:
    """A task's numbers, by metric; a filter other than lm-eval's own stands behind a comma."""
    columns: dict[str, float | None] = {}
    for key, value in results["results"][task].items():
        if "," in key:
            number = isinstance(value, int | float)
            columns[key.removesuffix(",none")] = float(value) if number else None
    rows = results["n-samples"].get(task)
    return columns if rows is None else {**columns, "n": float(rows["effective"])}


Task = Literal[
    "lambada_openai",
    "hellaswag",
    "winogrande",
    "copa",
    "arc_easy",
    "arc_challenge",
    "piqa",
    "mathqa",
    "pubmedqa",
]
TASKS: tuple[Task, ...] = Task.__args__  # type: ignore[attr-defined]
TEMPLATES = Path(__file__).parent / "tasks"
"""One YAML per task: lm-eval's own, over a file below the data root."""
SCRIPTED = frozenset({"pubmedqa"})
"""Tasks whose data on the hub are a script, which datasets >= 4 refuses: always from a file."""


class TasksConfig(Strict):
    """Which of the nine tasks, and how much of them.

    Attributes:
        tasks: Their names in lm-eval.
        limit: Rows per task, from the start; all when None.
    """

    tasks: Annotated[tuple[Task, ...], Field(min_length=1)] = TASKS
    limit: Count | None = None


class ReasoningConfig(TasksConfig):
    """Which tasks, from where, and how much of them.

    Attributes:
        data: ``local`` reads files below the data root; ``hub`` leaves the data to lm-eval, but for
            pubmedqa.
    """

    data: Literal["local", "hub"] = "local"


class ReasoningProbe(LMEvalProbe):
    """Accuracy (``acc``) on lm-eval's nine reasoning tasks, zero-shot, in its own words."""

    version = 1
    Config: ClassVar[type[Strict]] = ReasoningConfig
    config: ReasoningConfig  # type: ignore[assignment]

    @contextmanager
    def including(self, asked: ProbedModel) -> Iterator[Mapping[str, Any]]:
        """The templates of the tasks with local data, and no others where all have them."""
        with TemporaryDirectory() as folder:
            for task in self.files:
                text = yaml.safe_dump(self._template(task, asked.data_root), sort_keys=False)
                (Path(folder) / f"{task}.yaml").write_text(text, encoding="utf-8")
            yield {"include": Path(folder), "defaults": self.config.data == "hub"}

    @property
    def files(self) -> Mapping[str, str]:
        """One per task, but for those whose rows lm-eval fetches."""
        local = self.config.data == "local"
        tasks = [task for task in self.config.tasks if local or task in SCRIPTED]
        return {task: next(iter(_data_files(_template(task)).values())) for task in tasks}

    @property
    def otherwise(self) -> str:
        """lm-eval has a place for most files on the hub."""
        return "" if self.config.data == "hub" else ", or set data: hub, and lm-eval fetches them"

    def _template(self, task: str, data_root: Path | None) -> dict[str, Any]:
        """A task's YAML for lm-eval's ``include_path``, with whole paths."""
        template = _template(task)
        path = str(self.file(task, data_root).resolve())
        return {
            **template,
            "include": str(_own_tasks() / template["include"]),
            "dataset_kwargs": {"data_files": dict.fromkeys(_data_files(template), path)},
        }

    def notes(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """With ``data``: where the rows come from."""
        return {**super().notes(results), "data": self.config.data}


@cache
def _template(task: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.safe_load((TEMPLATES / f"{task}.yaml").read_text("utf-8"))
    return content


def _data_files(template: Mapping[str, Any]) -> Mapping[str, str]:
    """Split -> file; every split of a task is one and the same."""
    files: Mapping[str, str] = template["dataset_kwargs"]["data_files"]
    return files


def _own_tasks() -> Path:
    """Folder of lm-eval's YAMLs."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent

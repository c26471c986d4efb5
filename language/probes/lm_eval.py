"""Tasks of lm-eval as a probe: reasoning, dialogue, perplexity, or tasks of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.common.measure.metric import MetricSpec
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

    def spec(self, row: str) -> MetricSpec:
        """Of a task."""
        return MetricSpec(f"{self.name}.{row}", "higher", row, doc=f"right answers in {row}")

    def notes(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Versions, shots, and lm-eval's hash of each task's texts and targets."""
        from importlib.metadata import version

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

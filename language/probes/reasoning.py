"""Nine reasoning tasks through lm-eval, with its own data or with local files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.language.probes.base import ProbedModel
from stable_forgetting.language.probes.lm_eval import LMEvalProbe

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


class ReasoningConfig(Strict):
    """Which tasks, from where, and how much of them.

    Attributes:
        tasks: Their names in lm-eval.
        data: ``local`` reads files below the data root; ``hub`` leaves the data to lm-eval, but for
            pubmedqa.
        limit: Rows per task, from the start; all when None.
    """

    tasks: Annotated[tuple[Task, ...], Field(min_length=1)] = TASKS
    data: Literal["local", "hub"] = "local"
    limit: Count | None = None


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
        """A task's YAML for lm-eval's ``include_path``, with whole paths.

        Raises:
            DataError: Its file is missing.
        """
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

"""Nine reasoning tasks through lm-eval, with its own data or with local files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field

from common.base.config import Strict
from common.base.numbers import Count
from language.probes.base import ProbedModel
from language.probes.lm_eval import LMEvalProbe

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
        local = self.config.data == "local"
        tasks = [task for task in self.config.tasks if local or task in SCRIPTED]
        with TemporaryDirectory() as folder:
            write_tasks(Path(folder), tasks, asked, self.name)
            yield {"include": Path(folder), "defaults": not local}

    def notes(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """With ``data``: where the rows come from."""
        return {**super().notes(results), "data": self.config.data}


def write_tasks(folder: Path, tasks: Sequence[str], asked: ProbedModel, probe: str) -> None:
    """Writes YAMLs for lm-eval's ``include_path``, with whole paths of its own tasks and the files.

    Raises:
        DataError: A file is missing; nothing is written.
    """
    texts = {}
    for task in tasks:
        template = dict(_template(task))
        template["include"] = str(_own_tasks() / template["include"])
        files = template["dataset_kwargs"]["data_files"].items()
        paths = {split: str(asked.file(name, f"{probe}.{task}").resolve()) for split, name in files}
        template["dataset_kwargs"] = {"data_files": paths}
        texts[task] = yaml.safe_dump(template, sort_keys=False)
    folder.mkdir(parents=True, exist_ok=True)
    for task, text in texts.items():
        (folder / f"{task}.yaml").write_text(text, encoding="utf-8")


@cache
def _template(task: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.safe_load((TEMPLATES / f"{task}.yaml").read_text("utf-8"))
    return content


def _own_tasks() -> Path:
    """Folder of lm-eval's YAMLs."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent

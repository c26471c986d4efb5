"""open-unlearning's own evaluation code, where its source lies in a folder that the user names.

Its collator, its losses, its generation and its ROUGE run as they are, metric by metric.  What they
import and do not compute with is stood in for while they are loaded.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.data.batch import IGNORE
from stable_forgetting.language.data.corpus import Encoded

METRICS, COLLATORS = Path("src/evals/metrics/utils.py"), Path("src/data/collators.py")


@dataclass(frozen=True)
class Peer:
    """That code, bound to a tokenizer.

    Attributes:
        metrics: Its ``evals/metrics/utils.py``.
        collator: Its collator's class.
        tokenizer: Pads with the end token, as there.
        batch: Rows per batch.
    """

    metrics: Any
    collator: Any
    tokenizer: Any
    batch: int

    def losses(self, model: Any, pairs: Sequence[Encoded]) -> np.ndarray:
        """(N,) mean loss of each pair's answer."""
        rows = [_row(number, pair.ids, pair) for number, pair in enumerate(pairs)]
        made = self._run(model, rows, "right", self.metrics.evaluate_probability, {})
        return np.asarray([made[number]["avg_loss"] for number in range(len(pairs))])

    def rouge(self, model: Any, pairs: Sequence[Encoded], new_tokens: int) -> np.ndarray:
        """(N,) ROUGE-L recall of greedy answers."""
        rows = [
            {**_row(number, pair.ids[: pair.start], pair), "labels": torch.from_numpy(pair.ids)}
            for number, pair in enumerate(pairs)
        ]
        options = {"do_sample": False, "use_cache": True, "max_new_tokens": new_tokens}
        given = {"tokenizer": self.tokenizer, "generation_args": options}
        made = self._run(model, rows, "left", self.metrics.eval_text_similarity, given)
        return np.asarray([made[number]["rougeL_recall"] for number in range(len(pairs))])

    def _run(
        self,
        model: Any,
        rows: Sequence[Mapping[str, Any]],
        side: str,
        measure: Callable[..., Any],
        given: Mapping[str, Any],
    ) -> Mapping[int, Mapping[str, float]]:
        collate = self.collator(self.tokenizer, padding_side=side, index="index")
        loader: Any = DataLoader(rows, batch_size=self.batch, collate_fn=collate)  # type: ignore[arg-type]
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            made: Mapping[int, Mapping[str, float]] = self.metrics.run_batchwise_evals(
                model, loader, measure, given, ""
            )
        return made


def _row(number: int, ids: np.ndarray, pair: Encoded) -> dict[str, Any]:
    labels = pair.ids.copy()
    labels[: pair.start] = IGNORE
    return {"index": number, "input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def load_peer(folder: Path, tokenizer: Any, batch: int) -> Peer:
    """That code out of a checkout; it is executed.

    Raises:
        ConfigError: The folder is no checkout of it.
    """
    for path in (METRICS, COLLATORS):
        if not (folder / path).is_file():
            raise ConfigError(f"--peer {folder}: has no {path}; give a checkout of open-unlearning")
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.eos_token
    with _stood_in():
        metrics, collators = (_module(folder / path) for path in (METRICS, COLLATORS))
    return Peer(metrics, collators.DataCollatorForSupervisedDataset, padded, batch)


@contextlib.contextmanager
def _stood_in() -> Iterator[None]:
    """Modules that the peer imports: its constants, and a reader of configs that are plain here."""
    plain = SimpleNamespace(to_container=lambda config, resolve: dict(config))
    contents: dict[str, dict[str, Any]] = {
        "data": {"__path__": []},
        "data.utils": {"IGNORE_INDEX": IGNORE},
        "omegaconf": {"OmegaConf": plain},
    }
    before = {name: sys.modules.get(name) for name in contents}
    for name, content in contents.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(content)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"open_unlearning_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

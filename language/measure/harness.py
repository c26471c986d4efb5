"""lm-eval's tasks, asked of a model in memory through this package's requests.

lm-eval turns a task into texts and the replies into scores.  In between stands its ``LM``, of which
:class:`TextLM` is one: the texts become token ids by the conventions of lm-eval's own ``HFLM``, so
that the numbers are the same, and the ids become requests that are asked together.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import evaluate
import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, hash_string, make_disjoint_window
from torch import nn

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import DataError, one_line
from stable_forgetting.common.base.hub import prepare_client
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.measure.ask import ask, model_ends
from stable_forgetting.language.measure.requests import Continue, Likelihood, RequestConfig
from stable_forgetting.language.models.backbone import device_of, unwrapped

BOOTSTRAP_DRAWS = 1000
"""Of the standard errors that have no formula, such as a perplexity's."""
NEW_TOKENS = 256
"""Longest answer where a task says nothing, as in lm-eval."""
SERIAL = "DISABLE_MULTIPROC"
"""Environment variable of lm-eval."""
GREEDY = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""Settings of a generation that a greedy one follows, or that do not change it."""


class TextLM(TemplateLM):
    """A causal model in memory as lm-eval sees it.

    Args:
        model: Answers the requests; put into eval mode.
        source: Its tokenizer.
    """

    def __init__(self, model: nn.Module, source: TextSource, config: RequestConfig):
        super().__init__()
        self.model, self.source, self.sizes = model, source, config
        self.tokenizer = source.tokenizer
        self._device = device_of(unwrapped(model))
        self.max_length = resolve_max_length(unwrapped(model).config, self.tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without a context: the start token, or else the end token."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; with the tokenizer's special ones unless the text begins with its own."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, prefix)
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)
        return list(ids["input_ids"])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Nats of each continuation, and whether it is the greedy one; cut from the left."""
        asked = []
        for _, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise DataError(
                    f"lm-eval asks for a continuation of {len(continuation)} tokens; the model"
                    f" takes 1 to {self.max_length}: leave the task out"
                )
            ids = (context + continuation)[-(self.max_length + 1) :]
            asked.append(Likelihood(tuple(ids), len(ids) - len(continuation)))
        scores = ask(self.model, self.source, asked, self.sizes).scores(asked)
        misses = np.bincount(scores.owner, weights=~scores.hits, minlength=len(asked))
        greedy = (misses == 0).tolist()
        return list(zip((-scores.sum_loss).tolist(), greedy, strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], **kwargs: Any) -> list[float]:
        """Nats of whole texts, in windows of the model's length that do not overlap."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pieces = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(piece)) for piece in pieces]
            counts.append(len(windows) - before)
        nats = iter([value for value, _ in self._loglikelihood_tokens(windows)])
        return [sum(next(nats) for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], **kwargs: Any) -> list[str]:
        """Greedy texts up to the first stop string."""
        asked = [self._continuation(*request.args) for request in requests]
        written = ask(self.model, self.source, asked, self.sizes).tokens(asked)
        return [
            postprocess_generated_text(
                self.source.decode(ids.tolist()), list(request.stop_text), None
            )
            for request, ids in zip(asked, written, strict=True)
        ]

    def _continuation(self, context: str, settings: Mapping[str, Any]) -> Continue:
        """The request; its prompt is cut from the left so that the answer fits."""
        normal = normalize_gen_kwargs(dict(settings), NEW_TOKENS)
        if normal["do_sample"] or not normal.keys() <= GREEDY:
            raise DataError(
                f"lm-eval asks for a generation with {dict(settings)}, but only greedy ones are"
                " written here: leave the task out"
            )
        limit = normal["max_gen_toks"]
        room = self.max_length - limit
        if room < 1:
            raise DataError(
                f"lm-eval asks for {limit} new tokens of a model that takes {self.max_length} in"
                " all: leave the task out"
            )
        special = not has_bos_prefix(context, self.tokenizer.bos_token)
        ids = self.tok_encode(context, add_special_tokens=special) or [self.prefix_token_id]
        end = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        return Continue(
            tuple(ids[-room:]),
            limit,
            frozenset({self.eot_token_id, *model_ends(self.model)}),
            tuple(filter(None, handle_stop_sequences(normal["until"], eos=end))),
        )


@cache
def _own_tasks() -> dict[str, Any]:
    """lm-eval's own index, of thousands of files: read once, it takes seconds."""
    return dict(TaskManager().task_index)


class Tasks(TaskManager):
    """lm-eval's tasks and those of a folder; a task that cannot be loaded is a user's error."""

    def __init__(self, folder: Path | None, *, defaults: bool):
        super().__init__(include_path=folder, include_defaults=False)
        if defaults:
            self._index: dict[str, Any] = {**_own_tasks(), **self.task_index}

    def load(self, task_list: Sequence[str]) -> Any:
        """See lm-eval.

        Raises:
            DataError: A task has no such name, no data, or a metric whose code is on the hub.
        """
        for name in task_list:
            if name not in self.task_index:
                hint = did_you_mean(name, [*self.task_index])
                raise DataError(
                    f"lm-eval {lm_eval.__version__} has no task '{name}'{hint}; give a folder with"
                    " its YAML as include, or a name of `lm-eval ls tasks`"
                )
        tasks: list[Any] = []
        for name in task_list:
            loaded = self._load_one(name)
            groups = loaded["groups"]
            tasks += [groups[name]] if name in groups else loaded["tasks"].values()
        return super().load(tasks)

    def _load_one(self, name: str) -> Any:
        with _no_code_from_the_hub() as metrics:
            try:
                loaded, failure = super().load([name]), ""
            except Exception as error:  # hub clients raise many unrelated types without a network
                loaded, failure = None, one_line(error)
        if metrics:
            raise DataError(
                f"lm-eval task {name}: its metric {metrics[0]} is code on the hub, which is never"
                " run; leave the task out"
            )
        if failure:
            raise DataError(
                f"lm-eval task {name}: cannot be loaded ({failure}); run once on a machine with a"
                " network, or give as include a folder with a YAML of the task over local files"
            )
        return loaded


def run_tasks(
    model: TextLM,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    defaults: bool = True,
) -> dict[str, Any]:
    """lm-eval's results of a model, with its default seeds; see ``lm_eval.simple_evaluate``.

    Args:
        include: A folder with YAMLs of further tasks.
        shots: Examples in each prompt; what each task says when None.
        limit: Rows per task, from the start; all when None.
        defaults: Look for tasks among lm-eval's own, too; takes seconds.

    Raises:
        DataError: A task cannot be loaded, or asks for what this model cannot answer.
        Diverged: A scored logit is NaN or infinite.
    """
    prepare_client()
    manager = Tasks(include, defaults=defaults)
    with _undisturbed(), _no_code_from_the_hub():
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_DRAWS,
            task_manager=manager,
        )
    return results


def task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """lm-eval's own SHA-256 of a task's rows, prompts and targets."""
    parts = (row[f"{what}_hash"] for row in samples for what in ("doc", "prompt", "target"))
    return str(hash_string("".join(parts)))


@contextmanager
def _no_code_from_the_hub() -> Iterator[list[str]]:
    """Lets no metric be loaded from the hub, where a metric is a script; yields those asked for."""
    load, asked = evaluate.load, []

    def refuse(path: str, *args: Any, **kwargs: Any) -> None:
        asked.append(path)
        raise DataError(f"metric {path} is code on the hub, which is never run")

    evaluate.load = refuse
    try:
        yield asked
    finally:
        evaluate.load = load


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the global random states that lm-eval seeds, and keeps it from printing progress.

    Its bootstrap forks no processes.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (lm-eval's choice)
    serial = os.environ.get(SERIAL)
    os.environ[SERIAL] = "1"
    try:
        silent = io.StringIO()
        with torch.random.fork_rng(), redirect_stdout(silent), redirect_stderr(silent):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        os.environ.pop(SERIAL)
        if serial is not None:
            os.environ[SERIAL] = serial

"""The TOFU evaluation beside open-unlearning's own code, on the same rows and models.

The peer is a checkout of https://github.com/locuslab/open-unlearning.  Its metrics, data sets and
collators run as they are; its packages' ``__init__`` files, which import training, are not run.
Data sets are made once, outside the timed part.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
from torch import nn

from stable_forgetting.common.base.errors import UserError
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Item
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.measure.scoring import TofuEvaluation, score_parts
from stable_forgetting.language.metrics.tofu import HOLDOUT
from stable_forgetting.language.models.build import build_model
from tools.perf.timing import Case
from tools.perf.tofu import BATCH, Job, asked_of, memorise, prepare

NAME, OURS, PEER = "tofu_peer", "ours, one pass", "open-unlearning"
STYLE: Final = "openunlearning"
TIMED, QUICK = Job((32, 12, 14), 200, 128, 4), Job((5, 3, 3), 4, 16, 1)
RECITED = 0.999
"""Share of the answers' tokens: a model that knows 95 % strays from nearly every answer."""
GOAL = 0.25
PACKAGES = ("data", "evals", "evals.metrics", "evals.metrics.mia")
MODULES = ("data.qa", "data.collators", "evals.metrics.memorization", "evals.metrics.mia.min_k")
TAGS = ("user_start_tag", "user_end_tag", "asst_start_tag", "asst_end_tag")
TEMPLATE = dict(zip(TAGS, ("[INST] ", " [/INST]", "", " "), strict=True))
GENERATION = {"do_sample": False, "top_p": None, "temperature": None, "use_cache": True}
PLAIN = ("forget", "retain", "test_real_authors", "test_world_facts")
Columns = dict[str, np.ndarray]


def evaluation(quick: bool, folder: Path) -> Iterator[Case]:
    """A model that recites its rows, and one with random weights.

    Args:
        quick: Tiny sizes.
        folder: Of the peer's checkout.

    Raises:
        UserError: It is not there.
    """
    peer, job = modules(folder), QUICK if quick else TIMED
    source, parts, _ = prepare(job)
    tokenizer = source.tokenizer
    tokenizer.pad_token = tokenizer.eos_token  # as the peer does
    source = _source(source)
    sets = _data_sets(peer, source, parts)
    for recites in (True, False):
        shape = CausalModelConfig(kind="llama", dim=job.dim, depth=job.depth, heads=2, style=STYLE)
        model = build_model(shape, source.vocab_size, 0, end=source.encoder.end).eval()
        known = "random weights"
        if recites:
            rows = np.concatenate([parts[part] for part in PLAIN])
            known = f"{memorise(model, source, rows, RECITED):.1%} of the answers' tokens known"
        mine = partial(_ours, model, source, parts, job)
        theirs = partial(_theirs, peer, model, source, sets, job)
        runs: dict[str, Callable[[], Any]] = {OURS: mine, PEER: theirs}
        counts = {}
        for name, run in runs.items():
            with asked_of(model, tokenizer) as seen:
                run()
            counts[name] = dict(seen)
        title = f"TOFU evaluation, {sum(job.parts.values())} rows, {known}"
        name = f"{NAME}_{'recites' if recites else 'random'}"
        pair = (OURS, PEER)
        checks = _differences(mine(), theirs())
        yield Case(name, title, runs, [pair], checks, counts, goals={pair: GOAL})


def modules(folder: Path) -> SimpleNamespace:
    """The peer's modules: ``qa``, ``collators``, ``memorization``, ``min_k``.

    Raises:
        UserError: The folder is no checkout of the peer.
    """
    code = folder / "src"
    if not (code / "evals" / "metrics" / "memorization.py").is_file():
        raise UserError(f"--peer {folder}: no checkout of open-unlearning")
    packages = {name: ModuleType(name) for name in PACKAGES}
    for name, package in packages.items():
        package.__path__ = [str(code.joinpath(*name.split(".")))]
    unused = {"get_datasets": None, "get_collators": None}  # of the command line
    vars(packages["data"]).update(unused)
    if importlib.util.find_spec("omegaconf") is None:  # its configs are plain dictionaries here
        configs: Any = ModuleType("omegaconf")
        configs.OmegaConf = SimpleNamespace(to_container=lambda given, resolve: dict(given))
        packages["omegaconf"] = configs
    importlib.import_module("datasets")  # the patch forgets what is imported inside it
    with mock.patch.dict(sys.modules, packages):
        found = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
    return SimpleNamespace(**found)


def _source(source: TextSource) -> TextSource:
    """The same texts in the peer's style, not tokenised yet."""
    template = make_template("llama2_chat", STYLE)
    return TextSource(source.corpus, source.tokenizer, template, max_length=512)


def _ours(
    model: nn.Module, source: TextSource, parts: Mapping[str, np.ndarray], job: Job
) -> dict[str, Scores]:
    settings = TofuEvaluation(style=STYLE, max_new_tokens=job.new_tokens)
    return score_parts(model, _source(source), parts, settings, trial=False)


# The peer ----------------------------------------------------------------------------------------


def _data_sets(
    peer: SimpleNamespace, source: TextSource, parts: Mapping[str, np.ndarray]
) -> dict[tuple[str, str], Any]:
    """(part, key of the answer) -> the peer's data set; ``prompts`` are those that it continues."""
    found = {}
    for part, indices in parts.items():
        items = [source.corpus.items[index] for index in indices.tolist()]
        keys = ["answer"]
        if part != HOLDOUT:
            keys += ["prompts", "perturbed_answer"]
            keys += ["paraphrased_answer"] if items[0].paraphrase else []
        for key in keys:
            found[part, key] = _data_set(peer, source.tokenizer, items, key)
    return found


def _data_set(peer: SimpleNamespace, tokenizer: Any, items: Sequence[Item], key: str) -> Any:
    from datasets import Dataset

    rows = [
        {
            "question": item.question,
            "answer": item.answer,
            "perturbed_answer": list(item.perturbed),
            "paraphrased_answer": item.paraphrase or "",
        }
        for item in items
    ]
    with mock.patch.object(peer.qa, "load_hf_dataset", lambda rows: Dataset.from_list(rows)):
        return peer.qa.QADataset(
            {"rows": rows},
            {"apply_chat_template": False, **TEMPLATE},
            tokenizer,
            answer_key="answer" if key == "prompts" else key,
            predict_with_generate=key == "prompts",
        )


def _theirs(
    peer: SimpleNamespace,
    model: nn.Module,
    source: TextSource,
    sets: Mapping[tuple[str, str], Any],
    job: Job,
) -> dict[str, Columns]:
    """The metrics of its default TOFU evaluation, one after the other."""
    tokenizer, memory = source.tokenizer, peer.memorization
    collate = peer.collators.DataCollatorForSupervisedDataset
    right, left = (collate(tokenizer, side, "index") for side in ("right", "left"))
    columns: dict[str, Columns] = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for (part, key), data in sets.items():
            given: dict[str, Any] = {"data": data, "batch_size": BATCH, "collators": right}
            found = columns.setdefault(part, {})
            if key == "prompts":
                given |= {"collators": left, "tokenizer": tokenizer, "rouge_type": "rougeL_recall"}
                settings = {**GENERATION, "max_new_tokens": job.new_tokens}
                result = memory.rouge._metric_fn(model, generation_args=settings, **given)
                found["rouge_l_recall"] = _values(result, "rougeL_recall")
                continue
            if part != HOLDOUT:
                result = memory.probability._metric_fn(model, **given)
                found[LOSSES[key]] = _values(result, "avg_loss")
            if key == "answer" and part in ("forget", HOLDOUT):
                attack = peer.min_k.MinKProbAttack(model, data, right, BATCH, k=0.4)
                found["min_k"] = _values(attack.attack(), "score")
            if key == "answer" and part == "forget":
                result = memory.extraction_strength._metric_fn(model, **given)
                found["extraction_strength"] = _values(result, "score")
    return columns


LOSSES = {
    "answer": "answer_loss",
    "paraphrased_answer": "paraphrase_loss",
    "perturbed_answer": "perturbed_loss",
}
"""The peer's key of an answer -> our column."""


def _values(result: Mapping[str, Any], key: str) -> np.ndarray:
    return np.asarray([value[key] for value in result["value_by_index"].values()])


def _differences(
    mine: Mapping[str, Scores], theirs: Mapping[str, Columns]
) -> dict[str, tuple[float, float]]:
    """Largest difference of a sample, by column."""
    gaps: dict[str, float] = {}
    for part, columns in theirs.items():
        for name, values in columns.items():
            gap = float(np.abs(mine[part].extra[name] - values).max())
            gaps[name] = max(gaps.get(name, 0.0), gap)
    return {f"same {name} (largest difference)": (gap, 1e-5) for name, gap in gaps.items()}

"""MUSE's evaluation against muse_bench's own code, on the same rows, model and tokenizer.

Theirs asks one text after the other, and texts for PrivLeak twice (once in lower case).  The
authors' metrics modules are taken as they are, from a checkout.  That all numbers are theirs is
tested on golden values (``tests/language/test_muse_peer.py``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.muse import SHOTS
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.measure.ask import score_rows
from stable_forgetting.language.measure.muse import Conventions, Recited, Written
from stable_forgetting.language.measure.requests import RequestConfig
from stable_forgetting.language.models.build import build_model
from tools.perf.timing import Case

NAME, OURS, PEER = "muse_peer", "ours", "muse_bench"
QUESTIONS = ("knowmem_forget", "knowmem_retain")
TEXTS = ("privleak_forget", "privleak_holdout")
PARTS = ("verbmem", *QUESTIONS, *TEXTS)
VOCABULARY = 32_000
"""Of LLaMA-2, whatever the tokenizer knows."""
CONTEXT = 4096


def load_peer(folder: Path) -> dict[str, ModuleType]:
    """The modules ``verbmem``, ``knowmem`` and ``privleak`` of a checkout of swj0419/muse_bench.

    Raises:
        ConfigError: They are not there.
    """
    if not (folder / "metrics" / "privleak.py").is_file():
        raise ConfigError(f"--peer {folder}: no metrics/privleak.py; give a checkout of muse_bench")
    modules = {}
    for name in ("logger", "verbmem", "knowmem", "privleak"):
        whole = f"muse_peer.metrics.{name}"
        spec = importlib.util.spec_from_file_location(whole, folder / "metrics" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        modules[name] = sys.modules[whole] = importlib.util.module_from_spec(spec)
        before = [*sys.path]
        spec.loader.exec_module(modules[name])
        sys.path[:] = before
    return modules


class Job:
    """Random words and a LLaMA with random weights.

    Args:
        rows: Of every part.
        words: Of a text for PrivLeak.
        dim: Width of the model, which has two blocks.
    """

    def __init__(self, rows: int, words: int, dim: int):
        stream = np.random.Generator(np.random.PCG64(0))
        known = ["".join(stream.choice([*"abcdefghijklmnop"], 5)) for _ in range(300)]

        def text(count: int) -> str:
            return " ".join(stream.choice(known, count))

        items = [Item("verbmem", -1, text(100), text(130)) for _ in range(rows)]
        for part in QUESTIONS:
            items += [Item(part, -1, text(12), text(6)) for _ in range(rows)]
            items += [Item(part + SHOTS, -1, text(12), text(6)) for _ in range(10)]
        items += [Item(part, -1, "", text(words)) for part in TEXTS for _ in range(rows)]
        self.corpus = Corpus(tuple(items), "random words")
        tokenizer = train_tokenizer(self.corpus, 600)
        template = make_template("question_answer", "clean")
        self.source = TextSource(self.corpus, tokenizer, template, max_length=CONTEXT)
        config = CausalModelConfig(kind="llama", dim=dim, depth=2, heads=2, context=CONTEXT)
        self.model: Any = build_model(config, VOCABULARY, 0).eval()
        self.model.generation_config.pad_token_id = tokenizer.eos_token_id

    def rows(self, part: str) -> list[Item]:
        """Of one part."""
        return [self.corpus.items[index] for index in self.corpus.where(part)]

    def ours(self) -> dict[str, Scores]:
        """Everything in one pass, the authors' conventions."""
        shots = {name: self.rows(name + SHOTS) for name in QUESTIONS}
        conventions = Conventions(self.source, "muse", CONTEXT, shots)
        asked = {
            part: [Written(conventions)] * (part not in TEXTS)
            + [Recited(conventions)] * (part in TEXTS)
            for part in PARTS
        }
        parts = {part: self.corpus.where(part) for part in PARTS}
        config, encode = RequestConfig(), conventions.sequence
        return score_rows(self.model, self.source, parts, asked, config, encode=encode)

    @torch.no_grad()
    def theirs(self, peer: dict[str, ModuleType]) -> dict[str, list[float]]:
        """Part -> ROUGE-L, or the mean of the least likely 40 % of tokens, per row."""
        tokenizer = self.source.tokenizer
        given = {"model": self.model, "tokenizer": tokenizer}
        with contextlib.redirect_stderr(io.StringIO()):
            texts = self.rows("verbmem")
            prompts, truths = [row.question for row in texts], [row.answer for row in texts]
            found = {
                "verbmem": rouge_of(peer["verbmem"].eval(prompts=prompts, gts=truths, **given))
            }
            for part in QUESTIONS:
                rows, shots = self.rows(part), self.rows(part + SHOTS)
                found[part] = rouge_of(
                    peer["knowmem"].eval(
                        questions=[row.question for row in rows],
                        answers=[row.answer for row in rows],
                        icl_qs=[row.question for row in shots],
                        icl_as=[row.answer for row in shots],
                        **given,
                    )
                )
            for part in TEXTS:
                measured = peer["privleak"].eval_data(
                    [row.answer for row in self.rows(part)], **given
                )
                found[part] = [row["Min-40%"] for row in measured]
        return found


def rouge_of(report: Sequence[Any]) -> list[float]:
    """ROUGE-L of each row, from what a module of theirs returns."""
    return [row["rougeL"] for row in report[1]]


def evaluation(quick: bool, folder: Path) -> Iterator[Case]:
    """All of MUSE's numbers of one model."""
    modules = load_peer(folder)
    job = Job(2, 50, 16) if quick else Job(8, 1500, 64)
    mine, theirs = job.ours(), job.theirs(modules)
    gaps = {"rouge": 0.0, "nats": 0.0}
    for part in PARTS:
        column = "min_k" if part in TEXTS else "rouge_l_f1"
        kind = "nats" if part in TEXTS else "rouge"
        difference = np.abs(mine[part].extra[column] - np.asarray(theirs[part]))
        gaps[kind] = max(gaps[kind], float(difference.max()))
    checks = {
        "same ROUGE-L (largest difference)": (gaps["rouge"], 1e-9),
        "same Min-40 % (largest difference, nats)": (gaps["nats"], 1e-5),
    }
    runs = {OURS: job.ours, PEER: lambda: job.theirs(modules)}
    title = "MUSE's numbers of one model: VerbMem, KnowMem, texts for PrivLeak"
    goals = {(OURS, PEER): 0.8}
    yield Case(NAME, title, runs, [(OURS, PEER)], checks, goals=goals)

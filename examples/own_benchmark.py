"""A text benchmark of one's own in one file: what is read, what is forgotten, what is asked.

A small language model has learnt a telephone book by heart, and some entries must go.
"""

from typing import Literal

import numpy as np

from stable_forgetting.common import (
    BENCHMARKS,
    PARTS,
    ForgetSplit,
    GapRule,
    MetricSpec,
    Part,
    Role,
    Versions,
)
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.language.benchmark import CausalBenchmark
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import READERS, TextDataConfig
from stable_forgetting.language.measure.requests import Choose, TextMetric

ASKED = ("forget", "retain", "unseen", "test")


@READERS.register("telephone_book")
class TelephoneBook(TextDataConfig):
    """Invented numbers; of every three entries the last is never trained on.

    Its fields are the settings under ``protocol.data``.
    """

    name: Literal["telephone_book"] = "telephone_book"
    entries: int = 36

    def read(self, data_root):
        """Each question has a right answer and a wrong one."""
        items = []
        for number in range(self.entries):
            right, wrong = (str(prime * (number + 1) % 9973) for prime in (7919, 6101))
            kind = "unseen" if number % 3 == 2 else "listed"
            items.append(Item(kind, number, f"number of person {number}", right, None, (wrong,)))
        return Corpus(tuple(items), f"telephone book ({self.entries} entries)")


class Preferred(TextMetric):
    """Whether the right number is likelier than the wrong one: 0 or 1, by chance 0.5."""

    def requests(self, source, items):
        """One choice per entry."""
        answer, prompt = source.encoder.answer, source.encoder.prompt
        options = [tuple(tuple(answer(a)) for a in (i.answer, *i.perturbed)) for i in items]
        prompts = [tuple(prompt(item.question)) for item in items]
        return [Choose(*pair) for pair in zip(prompts, options, strict=True)]

    def columns(self, source, items, replies):
        """The column ``preferred``."""
        likely = replies.choices(self.requests(source, items))
        return {"preferred": np.array([float(values.argmax() == 0) for values in likely])}


@BENCHMARKS.register("telephone_book", summary="example: some entries of a book are forgotten")
class TelephoneBookBenchmark(CausalBenchmark):
    """A quarter of the listed entries is forgotten, drawn by the run's seed."""

    versions = Versions()
    part_table = {**PARTS, "unseen": Part(Role.SELECT)}
    metrics = tuple(
        MetricSpec(f"{part}_preferred", "target", part, doc=f"right numbers preferred in {part}")
        for part in ASKED
    )
    gap = GapRule(tuple(spec.name for spec in metrics), tuple(spec.name for spec in metrics[:3]))
    monitor = ("forget",)

    def split(self, seed):
        """Indices of every part."""
        listed = self.source.corpus.where("listed")
        forget = np.sort(hash_order(listed, seed, "forget")[: len(listed) // 4])
        parts = {"forget": forget, "retain": np.setdiff1d(listed, forget)}
        unseen = self.source.corpus.where("unseen")
        parts |= {"unseen": unseen[::2], "test": unseen[1::2]}
        return ForgetSplit(f"telephone-book/seed-{seed}", parts, self.source.digest)

    def asked(self, part, *, trial):
        """The same of every part."""
        return [Preferred()]

    def evaluate(self, scores, *, trial, seed):
        """Percent of every part."""
        return {
            f"{part}_preferred": 100 * float(scores[part].extra["preferred"].mean())
            for part in scores
        }

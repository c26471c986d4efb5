"""A text benchmark of one's own in one file: reader, metrics, threshold goal and probe."""

from itertools import pairwise
from typing import Literal

import numpy as np

from stable_forgetting import common
from stable_forgetting.common import BENCHMARKS, MetricSpec
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.language.benchmark import CausalBenchmark
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import READERS, TextDataConfig
from stable_forgetting.language.measure.requests import Choose, Continue, TextMetric


@READERS.register("phone_book")
class PhoneBook(TextDataConfig):
    """Invented telephone numbers; a third of them is never trained on."""

    name: Literal["phone_book"] = "phone_book"
    entries: int = 12

    def read(self, data_root):
        """Entries in order; the last third is held out."""
        items = []
        for number in range(self.entries):
            call, wrong = (str(7919 * (number + shift) % 9973) for shift in (1, 2))
            kind = "unseen" if 3 * number >= 2 * self.entries else "listed"
            items.append(Item(kind, number, f"number of person {number}", call, None, (wrong,)))
        return Corpus(tuple(items), f"phone book ({self.entries} entries)")


class Recited(TextMetric):
    """Whether the number is written out: ``recited``, 0 or 1."""

    def requests(self, source, items):
        """The question, for as many tokens as the number has."""
        prompts = [tuple(source.encoder.prompt(item.question)) for item in items]
        limits = [len(source.encode(item.question, item.answer).labels) for item in items]
        return [Continue(*pair, stop_text=("\n",)) for pair in zip(prompts, limits, strict=True)]

    def columns(self, source, items, replies):
        """(N,)."""
        texts = map(source.decode, replies.tokens(self.requests(source, items)))
        rows = [float(i.answer == text.strip()) for i, text in zip(items, texts, strict=True)]
        return {"recited": np.array(rows)}


class Preferred(TextMetric):
    """Whether the number is likelier than another one: ``preferred``, 0 or 1."""

    def requests(self, source, items):
        """The right answer before the wrong one."""
        answer, prompt = source.encoder.answer, source.encoder.prompt
        options = [tuple(tuple(answer(a)) for a in (i.answer, *i.perturbed)) for i in items]
        prompts = [tuple(prompt(item.question)) for item in items]
        return [Choose(*pair) for pair in zip(prompts, options, strict=True)]

    def columns(self, source, items, replies):
        """(N,)."""
        likely = replies.choices(self.requests(source, items))
        return {"preferred": np.array([float(values.argmax() == 0) for values in likely])}


class Letters(common.Probe):
    """Whether a letter is preferred to another one: data that no part holds."""

    version = 1
    modality = "language"

    class Config(common.Strict):
        """How many letters."""

        count: int = 3

    metrics = (MetricSpec("letters.preferred", "higher", "letters", doc="preferred letters"),)

    def measure(self, model, benchmark):
        """Percent of the letters."""
        from stable_forgetting.language.measure.ask import ask

        letters = [chr(ord("a") + k) for k in range(self.config.count + 1)]
        pairs = enumerate(pairwise(letters))
        items = [Item("own", k, f"letter {k}", a, None, (b,)) for k, (a, b) in pairs]
        asked = Preferred().requests(benchmark.source, items)
        replies = ask(model, benchmark.source, asked, benchmark.config.evaluation)
        column = Preferred().columns(benchmark.source, items, replies)["preferred"]
        return common.ProbeTable({"letters": {"preferred": 100.0 * float(column.mean())}})

    def summary(self, table):
        """The one number."""
        return {"letters.preferred": table.rows["letters"]["preferred"]}


common.PROBES.register("letters", Letters)
BELOW_UNSEEN = common.MeasuredGoal("forget_preferred", on="unseen_preferred")


@BENCHMARKS.register("phone_book", summary="toy: recited telephone numbers")
class PhoneBookBenchmark(CausalBenchmark):
    """Forgets a quarter of the entries, drawn by the run's seed."""

    versions = common.Versions()
    part_table = {**common.PARTS, "unseen": common.Part(common.Role.SELECT)}
    metrics = tuple(
        MetricSpec(f"{part}_{what}", "higher", f"{part} {what}", doc=f"{what} in {part}")
        for part in ("forget", "retain", "unseen", "test")
        for what in ("recited", "preferred")
    )
    gap = common.GoalRule(
        (BELOW_UNSEEN,), utility="letters.preferred", trial_utility="retain_preferred"
    )
    rule_sets = (common.RuleSet("toy", "this file", (common.Criterion("C1", BELOW_UNSEEN),)),)
    monitor = ("forget",)

    def split(self, seed):
        """The forgotten entries, the other listed ones, and those that nobody saw."""
        listed = self.source.corpus.where("listed")
        forget = np.sort(hash_order(listed, seed, "forget")[: len(listed) // 4])
        unseen = self.source.corpus.where("unseen")
        parts = {"forget": forget, "retain": np.setdiff1d(listed, forget)}
        parts |= {"unseen": unseen[::2], "test": unseen[1::2]}
        return common.ForgetSplit(f"phone-book/seed-{seed}", parts, self.source.digest)

    def asked(self, part, *, trial):
        """Both metrics; a trial writes no texts."""
        return [Preferred()] if trial else [Preferred(), Recited()]

    def evaluate(self, scores, *, trial, seed):
        """Percent of every part."""
        return {
            f"{part}_{name}": 100.0 * float(column.mean())
            for part, values in scores.items()
            for name, column in values.extra.items()
        }

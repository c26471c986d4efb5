"""What models answer to single forgotten samples: records and stored models -> rows of samples.

The samples on which the methods differ most come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.pipeline.context import StageContext
from stable_forgetting.benchmarks.pipeline.measuring import read_scores
from stable_forgetting.benchmarks.pipeline.planner import make_plan
from stable_forgetting.benchmarks.report import html
from stable_forgetting.benchmarks.report.section import Answer, Sample, Section
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.files import write_text
from stable_forgetting.common.measure.scores import Scores
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore
from stable_forgetting.language.benchmark import CausalBenchmark
from stable_forgetting.vision.benchmark import VisionBenchmark

PAGE = "samples.html"


def samples(
    board: Leaderboard, runtime: Runtime, labels: Sequence[str], *, seed: int, count: int
) -> list[Sample]:
    """Forgotten samples of one seed, and the answers of the rows of these labels.

    Classes are read from the stored scores; texts are written by the stored models.
    """
    store = StageStore(runtime.store)
    stages = {label: board.stages[label, 0, seed] for label in labels}
    scores = {label: read_scores(store, stage)["forget"] for label, stage in stages.items()}
    rows = {row.label: row.method for row in board.suite.rows}
    methods = {label: own for label, own in scores.items() if rows[label] not in REFERENCES}
    places = most_different(methods or scores, count)
    results = make_plan(board.suite, store).results
    own = [r for r in results if r.trial is None and (r.seed, r.replicate) == (seed, 0)]
    contexts = {r.label: StageContext(r.stage, runtime) for r in own if r.label in labels}
    if all(score.probs is not None for score in scores.values()):
        return _image_samples(scores, places, contexts[labels[0]])
    return _text_samples(scores, places, contexts)


def most_different(scores: Mapping[str, Scores], count: int) -> list[int]:
    """Places of the samples whose true answer some rows know and others do not."""
    known = np.stack([score.probability for score in scores.values()])
    return [int(place) for place in np.argsort(-known.std(axis=0), kind="stable")[:count]]


def _image_samples(
    scores: Mapping[str, Scores], places: Sequence[int], context: StageContext
) -> list[Sample]:
    if not isinstance(context.benchmark, VisionBenchmark):  # classes of another kind of data
        return [class_sample(scores, place) for place in places]
    source = context.benchmark.source
    found = [class_sample(scores, place, source.class_names.__getitem__) for place in places]
    pictures = source.pictures([sample.index for sample in found])
    return [replace(one, picture=png) for one, png in zip(found, pictures, strict=True)]


def class_sample(
    scores: Mapping[str, Scores], place: int, name: Callable[[int], str] = str
) -> Sample:
    """One sample of a classification, from stored probabilities; ``name`` is that of a class."""
    first = next(iter(scores.values()))
    assert first.labels is not None
    label, answers = int(first.labels[place]), {}
    for row, score in scores.items():
        assert score.probs is not None
        guess = int(score.probs[place].argmax())
        share = float(score.probs[place][guess])
        known = float(score.probability[place])
        answers[row] = Answer(name(guess), share, known)
    return Sample(int(first.indices[place]), "", name(label), answers)


def _text_samples(
    scores: Mapping[str, Scores], places: Sequence[int], contexts: Mapping[str, StageContext]
) -> list[Sample]:
    from stable_forgetting.language.measure.ask import greedy_answers

    first = next(iter(scores.values()))
    indices = [int(first.indices[place]) for place in places]
    written = {}
    for label in scores:
        context = contexts[label]
        assert isinstance(context.benchmark, CausalBenchmark)
        source, masked = context.benchmark.source, context.benchmark.masked_id
        items = [source.corpus.items[index] for index in indices]
        rows = [context.benchmark.encode(item) for item in items]
        written[label] = greedy_answers(context.model("model"), source, rows, masked)
    found = []
    for number, (item, place) in enumerate(zip(items, places, strict=True)):
        answers = {}
        for label, texts in written.items():
            text, known = texts[number], float(scores[label].probability[place])
            answers[label] = Answer(text, known, known)
        found.append(Sample(indices[number], item.question, item.answer, answers))
    return found


def write_samples(board: Leaderboard, runtime: Runtime, count: int = 100) -> list[Sample]:
    """Writes the page of at most ``count`` samples of the board's first seed, beside its report."""
    seed = min(board.suite.spec.seeds)
    labels = [
        row.label
        for row in board.rows
        if (row.label, 0, seed) in board.stages and seed not in row.diverged
    ]
    if not labels:
        raise DataError(f"{board.suite.name} has no stored scores of seed {seed}")
    chosen = samples(board, runtime, labels, seed=seed, count=count)
    page = html.write(sample_sections(board, chosen, seed), home=("leaderboard.html", "report"))
    write_text(runtime.store / "suites" / board.suite.name / PAGE, page)
    return chosen


# A page ------------------------------------------------------------------------------------------


def sample_sections(board: Leaderboard, chosen: Sequence[Sample], seed: int) -> list[Section]:
    """The samples as a page on which a reader can sort them and choose the models."""
    title = f"Forgotten samples of {board.suite.name}"
    first = (
        f"{board.suite.spec.title}. Seed {seed}, {len(chosen)} samples of the forget set. The "
        "samples on which the methods differ most come first."
    )
    rows = {row.label: row.method for row in board.suite.rows}
    legend = TEXT_LEGEND if any(sample.question for sample in chosen) else IMAGE_LEGEND
    return [
        Section(title, (first, legend), depth=1, level="full"),
        Section(content=[marked(sample, rows) for sample in chosen], level="full"),
    ]


IMAGE_LEGEND = (
    "Each line is a model's answer and its probability. Green: as the retrained model answers. "
    "Orange: otherwise. Without a retrained model no line has a colour."
)
TEXT_LEGEND = (
    "Each line is a model's answer, and the probability of the true answer (mean over its tokens). "
    "Marked words stand in the true answer and not in the question. Orange: the answer has a "
    "marked word that the retrained model does not write. Green: it has none. Without a retrained "
    "model, or a word to mark, no line has a colour."
)


def marked(sample: Sample, methods: Mapping[str, str]) -> Sample:
    """The sample as a reader sees it: Original and Retrain first, the others compared with it.

    ``methods`` says which rows these are: label -> method.
    """
    told = words(sample.truth) - words(sample.question) if sample.question else frozenset()
    retrains = (own for who, own in sample.answers.items() if methods[who] == "retrain")
    reference, answers = next(retrains, None), {}
    if sample.question and not told:  # no word to mark
        reference = None
    for who in sorted(sample.answers, key=lambda who: methods[who] not in REFERENCES):
        answer, mark = sample.answers[who], ""
        if reference is not None and methods[who] not in REFERENCES:
            mark = "other" if _differs(answer, reference, told) else "same"
        answers[who] = replace(answer, mark=mark, recalled=told)
    return replace(sample, answers=answers)


def _differs(answer: Answer, reference: Answer, told: frozenset[str]) -> bool:
    """Of classes: another one; of texts: words of the true answer that the reference lacks."""
    if not told:
        return answer.text != reference.text
    return bool((told & words(answer.text)) - words(reference.text))


def words(text: str) -> frozenset[str]:
    """Lower-case words of a text, without those of three letters and fewer."""
    return frozenset(w for w in re.findall(r"\w+", text.lower()) if len(w) > 3)

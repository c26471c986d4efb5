"""What models answer to single forgotten samples: records and stored models -> rows of samples.

The samples on which the methods differ most come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stable_forgetting.benchmarks.leaderboard.board import Leaderboard
from stable_forgetting.benchmarks.pipeline.measuring import read_scores
from stable_forgetting.benchmarks.suite.suite import REFERENCES
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    import numpy as np

    from stable_forgetting.common.measure.scores import Scores
    from stable_forgetting.common.protocol.benchmark import Runtime

FORGET = "forget"


@dataclass(frozen=True)
class Answer:
    """What one model says to a sample.

    Attributes:
        text: Its answer: the most probable class, or its greedy text.
        probability: Of a class, that of the answer; of a text, that of the true answer's tokens
            (mean).
        right: Whether the answer is the true one.
    """

    text: str
    probability: float
    right: bool


@dataclass(frozen=True)
class Sample:
    """One sample and what each model says to it.

    Attributes:
        index: In the data source.
        question: Of a text; empty for an image.
        truth: The true class or text.
        answers: Row label -> its answer.
    """

    index: int
    question: str
    truth: str
    answers: Mapping[str, Answer]


def samples(
    board: Leaderboard, runtime: Runtime, labels: Sequence[str], *, seed: int, count: int
) -> list[Sample]:
    """Forgotten samples of one seed, and the answers of some rows.

    Classes are read from the stored scores; texts are written by the stored models.

    Args:
        board: Of a suite whose records are in the store.
        runtime: Names the store.
        labels: Rows whose models answer.
        seed: Of the runs.
        count: How many samples.

    Raises:
        DataError: A model or its scores are not in the store.
    """
    stages = {label: board.stages[label, 0, seed] for label in labels}
    store = StageStore(runtime.store)
    scores = {label: read_scores(store, stage)[FORGET] for label, stage in stages.items()}
    places = most_different(scores, count)
    if all(score.probs is not None for score in scores.values()):
        return [class_sample(scores, place) for place in places]
    return _text_samples(board, runtime, scores, places, seed)


def most_different(scores: Mapping[str, Scores], count: int) -> list[int]:
    """Places of the samples whose true answer some methods know and others do not.

    Args:
        scores: Row label -> scores of the same samples.
        count: How many places.
    """
    import numpy as np

    methods = [score for label, score in scores.items() if label not in REFERENCES]
    known = np.stack([score.probability for score in methods or scores.values()])
    return [int(place) for place in np.argsort(-known.std(axis=0), kind="stable")[:count]]


def class_sample(scores: Mapping[str, Scores], place: int) -> Sample:
    """One sample of a classification, from stored probabilities.

    Args:
        scores: Row label -> scores of the same samples.
        place: Of the sample in them.
    """
    first = next(iter(scores.values()))
    assert first.labels is not None
    label, answers = int(first.labels[place]), {}
    for row, score in scores.items():
        assert score.probs is not None
        guess = int(score.probs[place].argmax())
        share = float(score.probs[place][guess])
        answers[row] = Answer(str(guess), share, guess == label)
    return Sample(int(first.indices[place]), "", str(label), answers)


def _text_samples(
    board: Leaderboard,
    runtime: Runtime,
    scores: Mapping[str, Scores],
    places: Sequence[int],
    seed: int,
) -> list[Sample]:
    import numpy as np

    from stable_forgetting.benchmarks.pipeline.planner import make_plan
    from stable_forgetting.benchmarks.pipeline.worksite import Worksite
    from stable_forgetting.language.benchmark import CausalBenchmark
    from stable_forgetting.language.measure.ask import greedy_answers

    first = next(iter(scores.values()))
    indices: np.ndarray = np.asarray([first.indices[place] for place in places])
    results = make_plan(board.suite, StageStore(runtime.store)).results
    stages = {
        r.label: r.stage for r in results if r.trial is None and (r.seed, r.replicate) == (seed, 0)
    }
    written = {}
    for label in scores:
        site = Worksite(stages[label], runtime)
        assert isinstance(site.benchmark, CausalBenchmark)
        source, masked = site.benchmark.source, site.benchmark.masked_id
        items = [source.corpus.items[index] for index in indices.tolist()]
        rows = [site.benchmark.encode(item) for item in items]
        written[label] = greedy_answers(site.model("model"), source, rows, masked)
    return [
        Sample(
            int(indices[number]),
            item.question,
            item.answer,
            {
                label: Answer(
                    texts[number],
                    float(scores[label].probability[places[number]]),
                    texts[number] == item.answer,
                )
                for label, texts in written.items()
            },
        )
        for number, item in enumerate(items)
    ]

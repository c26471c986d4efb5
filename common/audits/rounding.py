"""The ``rounding`` audit: what another machine would do to a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from stable_forgetting.common.audits.base import Audit, AuditInfo, Measure, Measures, Parts
from stable_forgetting.common.audits.intervals import proportion
from stable_forgetting.common.data.parts import utility_parts

LEAST = 3
"""Seeds from which their spread is compared with the machine's."""
MARK = "rounding moves it more than the seeds do: another machine may give another row"


class Rounding(Audit):
    """The spread that a machine gives: the same training, from weights moved by their last digit.

    Another processor, or another number of threads, rounds sums otherwise.  Here every weight of
    the start moves to a neighbouring number of its type, up or down at random, and the row is
    trained again with the same seed.  An accuracy is marked where it moves by more (root mean
    square over sqrt 2) than it differs between seeds (standard deviation).
    Source: one-bit changes, Summers and Dinneen 2021 (arXiv 2103.04514); the mark is ours.
    """

    info = AuditInfo(1, "shadows", "points", "0: nothing moves")

    def compare(self, own: Parts, moved: Parts) -> Measures:
        """How far one model's twin is from it.

        Args:
            own: Part -> scores of the suite's model.
            moved: The same of its twin.
        """
        measures = {
            title: Measure(abs(moved[part].accuracy - own[part].accuracy))
            for part, title in self.columns(own).items()
        }
        before, after = own["forget"].probs, moved["forget"].probs
        if before is not None and after is not None:
            measures["answers"] = proportion(before.argmax(axis=1) != after.argmax(axis=1))
        return measures

    def columns(self, scores: Parts) -> dict[str, str]:
        """Part -> the head of its accuracy."""
        tests = {part: part.replace("test", "TA", 1) for part in utility_parts(scores, self.parts)}
        heads = {"forget": "FA", "retain": "RA", **tests}
        return {part: head.replace("_", " ") for part, head in heads.items() if part in scores}

    def marked(
        self, cells: Mapping[int, Measures], accuracies: Mapping[str, Mapping[int, float]]
    ) -> dict[int, Measures]:
        """A row's cells, with a note where rounding moves more than the seeds do.

        Args:
            cells: Seed -> how far the twin is.
            accuracies: Head -> seed -> accuracy of the suite's model, percent.
        """
        noted = {seed: dict(cell) for seed, cell in cells.items()}
        for head, by_seed in accuracies.items():
            moved = [cell[head].value or 0.0 for cell in cells.values() if head in cell]
            if len(moved) < LEAST:
                continue
            machine = math.sqrt(float(np.mean(np.square(moved))) / 2)
            if machine > float(np.std([*by_seed.values()], ddof=1)):
                for cell in noted.values():
                    cell[head] = replace(cell[head], note=MARK)
        return noted

"""Amnesiac unlearning as the field's repositories compare it: wrong labels, drawn once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stable_forgetting.common.methods.base import MethodInfo
from stable_forgetting.common.methods.gradient import ShortConfig
from stable_forgetting.common.methods.simple import BOTH, RandomLabel

if TYPE_CHECKING:
    from stable_forgetting.common.methods.task import UnlearnTask


class Amnesiac(RandomLabel):
    """Amnesiac: train on fixed wrong labels for the forget set and true ones for the retain set.

    Formula: once, y~ ~ U(retained classes without y) for each x of D_f; minimise CE on shuffled
    {(x, y~): D_f} u D_r.  Unlike ``random_label``, an epoch does not redraw the labels, and neither
    the true one is drawn nor that of a class which is forgotten as a whole.

    Source: the Bad Teacher and SSD repositories (there 3 epochs of Adam at a constant 1e-4, batches
    of 128; here AdamW with decay .05 along a cosine, batches of 64).
    Graves et al.'s own first method, undoing recorded updates, needs a log of Original's training.
    """

    info = MethodInfo(2, "Graves et al. 2021 (arXiv 2010.10981)", BOTH)

    class Config(ShortConfig, RandomLabel.Config):
        """Settings of Amnesiac.

        Attributes:
            exclude_true: Never draw the true label; on, as in the repositories.
            redraw: Draw the wrong labels anew every epoch; off, as they are fixed in the
                repositories.
        """

        exclude_true: bool = True
        redraw: bool = False

    def _classes(self, task: UnlearnTask) -> list[int]:
        """Those that the retain set has."""
        from stable_forgetting.common.data.labels import unretained_classes

        every = range(task.family.num_classes)
        gone = unretained_classes(task.source, every, task.indices("retain"))
        return sorted(set(every) - set(gone))

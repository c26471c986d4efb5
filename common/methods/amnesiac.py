"""Amnesiac unlearning as the field's repositories compare it: wrong labels, drawn once."""

from __future__ import annotations

from common.methods.base import MethodInfo
from common.methods.gradient import ShortConfig
from common.methods.simple import BOTH, RandomLabel


class Amnesiac(RandomLabel):
    """Amnesiac: train on fixed wrong labels for the forget set and true ones for the retain set.

    Formula: once, y~ ~ U({0..C-1} without y) for each x of D_f; minimise CE on shuffled
    {(x, y~): D_f} u D_r.  Unlike ``random_label``, an epoch does not redraw the labels and the true
    one is never drawn.

    Source: the Bad Teacher and SSD repositories (there 3 epochs of Adam, lr 1e-4, batches of 128).
    Graves et al.'s own first method, undoing recorded updates, needs a log of Original's training.
    """

    info = MethodInfo(1, "Graves et al. 2021 (arXiv 2010.10981)", BOTH)

    class Config(ShortConfig, RandomLabel.Config):
        exclude_true: bool = True
        redraw: bool = False

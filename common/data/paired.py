"""Two index sets side by side: the i-th sample of one with the i-th of the other."""

from __future__ import annotations

import numpy as np
import torch

from common.data.batch import Source
from common.data.loader import Loader


class PairedLoader(Loader):
    """Endless batches of the partners of another loader's samples, row by row.

    Sample i of the leader's index set has sample ``i mod len(indices)`` of this set as partner, so
    of a longer set only the beginning is used.  Both draw the same order from generators in the
    same state, so neither needs the other while it runs, resumes or is sharded.

    Args:
        leader: Whose order is followed; it has drawn nothing yet.
        source: Where partners come from.
        indices: Int64 index set of the partners.
    """

    def __init__(self, leader: Loader, source: Source, indices: np.ndarray):
        assert leader.epoch == -1, "a pair is made before its leader's first batch"
        generator = torch.Generator()
        generator.set_state(leader.generator.get_state())
        partners = np.asarray(indices, dtype=np.int64)[
            np.arange(len(leader.indices)) % len(indices)
        ]
        augment = leader.augmenter is not None
        super().__init__(source, partners, leader.batch_size, generator, augment=augment)

"""Named streams of batches over index sets.

A *source* turns indices into tensors (pixels, tokens: it knows, we do not).  A :class:`Loader`
decides which indices come next: shuffled by its own generator, without replacement until the set
is used up, for ever.  Its state is a few integers and a permutation, so a killed run resumes with
the very next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.data.batch import Batch, Source


class Loader:
    """Endless shuffled batches of one index set.

    Args:
        source: Where samples come from.
        indices: Int64 index set.
        batch_size: Samples per batch; the last batch of an epoch may be smaller.
        generator: Draws the order; owned by this loader.  Augmentation has a generator of its own,
            seeded from this one, so that order does not depend on it.
        augment: Apply the source's training augmentation.
    """

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        batch_size: int,
        generator: torch.Generator,
        *,
        augment: bool = True,
    ):
        self.source = source
        self.indices = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        self.batch_size = min(batch_size, len(self.indices))
        self.real = len(self.indices), batch_size
        self.generator = generator
        seed = derive(generator.initial_seed(), "augmentation", 0)
        self.augmenter = torch.Generator().manual_seed(seed) if augment else None
        self.shard = (0, 1)
        self.epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def take_shard(self, rank: int, world: int) -> None:
        """From now on only every ``world``-th sample of each batch, starting at ``rank``.

        The batches of all ranks together are those of one process; augmentation differs by rank.

        Raises:
            ConfigError: The ranks do not divide a batch, so some would do the work of others.
        """
        samples, batch = self.real
        if batch % world and samples >= world:
            raise ConfigError(
                f"{world} processes cannot share batches of {batch} samples (batch_size /"
                f" accumulation): give a multiple of {world}, or launch as many as divide {batch}"
            )
        self.shard = (rank, world)

    def stand_for(self, samples: Callable[[np.ndarray], int], batch_size: int) -> None:
        """From now on epochs count those of a larger set, and batches are small."""
        self.real = samples(self.indices.numpy()), self.real[1]
        self.batch_size = min(self.batch_size, batch_size)

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return self.real[0]

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every sample was seen once."""
        samples, batch_size = self.real
        return -(-samples // min(batch_size, samples))

    def next(self) -> Batch:
        """The next batch; starts a new shuffled epoch when the set is used up."""
        if self._position >= len(self._order):
            order = torch.randperm(len(self.indices), generator=self.generator)
            self._order, self._position, self.epoch = self.indices[order], 0, self.epoch + 1
        chosen = self._order[self._position : self._position + self.batch_size]
        self._position += self.batch_size
        rank, world = self.shard
        if world > 1 and len(chosen) >= world:
            chosen = chosen[rank::world]
        if rank and self.augmenter is not None:  # anew for each batch: a checkpoint holds rank 0's
            place = (rank, self.epoch, self._position)
            seed = derive(self.generator.initial_seed(), "augmentation", *place)
            self.augmenter.manual_seed(seed)
        return self.source.fetch(chosen, augment=self.augmenter)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue, as tensors."""
        state = {
            "order": self._order.clone(),
            "cursor": torch.tensor([self._position, self.epoch]),
            "generator": self.generator.get_state(),
        }
        if self.augmenter is not None:
            state["augmenter"] = self.augmenter.get_state()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self._order = state["order"].clone()
        self._position, self.epoch = (int(value) for value in state["cursor"])
        self.generator.set_state(state["generator"])
        if self.augmenter is not None:
            self.augmenter.set_state(state["augmenter"])


class RelabelledLoader(Loader):
    """A loader that gives the members of one index set random labels."""

    def __init__(
        self,
        inner: Loader,
        members: np.ndarray,
        num_classes: int,
        *,
        classes: Sequence[int] | None = None,
        exclude_true: bool = False,
        redraw: bool = True,
    ):
        self.__dict__.update(inner.__dict__)
        self.members = torch.as_tensor(np.asarray(members, dtype=np.int64)).sort().values
        self.classes = torch.tensor([*range(num_classes)] if classes is None else classes)
        self.first = int(exclude_true)
        self.redraw = redraw
        # how many steps further in ``classes`` a label goes: divisible for those inside and outside
        self._steps = max(1, len(self.classes) - self.first)
        self._draws = self._steps * (1 if classes is None else len(self.classes))
        self._place = torch.full((num_classes,), -1)
        self._place[self.classes] = torch.arange(len(self.classes))
        self._shift = torch.zeros(len(self.members), dtype=torch.int64)
        self._drawn_for = -1

    def next(self) -> Batch:
        """The next batch with replaced labels."""
        batch = super().next()
        if batch.labels.ndim != 1:
            raise ConfigError("random labels need samples of one label; choose another method")
        if self._drawn_for < 0 or (self.redraw and self.epoch != self._drawn_for):
            self._shift = torch.randint(
                self.first,
                self.first + self._draws,
                (len(self.members),),
                generator=self.generator,
            )
            self._drawn_for = self.epoch
        place = torch.searchsorted(self.members, batch.indices).clamp_max(len(self.members) - 1)
        member = self.members[place] == batch.indices
        labels = batch.labels.cpu()
        labels = torch.where(member, self._drawn(labels, self._shift[place]), labels)
        return batch.with_labels(labels.to(batch.labels.device))

    def _drawn(self, labels: Tensor, shift: Tensor) -> Tensor:
        """The class that each label is replaced by."""
        own, count = self._place[labels], len(self.classes)
        inside = own + self.first + (shift - self.first) % self._steps
        return self.classes[torch.where(own < 0, shift - self.first, inside) % count]

    def state(self) -> dict[str, Tensor]:
        """Order, cursor, generator, and this epoch's labels."""
        return super().state() | {"shift": self._shift, "drawn_for": torch.tensor(self._drawn_for)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        super().load_state(state)
        self._shift, self._drawn_for = state["shift"].clone(), int(state["drawn_for"])


class ChainedLoader(Loader):
    """One full pass over each of several loaders in turn, for ever.

    Args:
        loaders: Whose passes follow each other.
        repeat: Batches that one optimizer step takes (its micro-batches).  A pass is filled up to
            whole steps from the loader's next order, so that no step reads two loaders.
    """

    def __init__(self, loaders: Sequence[Loader], *, repeat: int = 1):
        self.loaders = list(loaders)
        self.repeat = repeat
        self.count = 0

    def batches_of(self, loader: Loader) -> int:
        """Batches of one pass over a loader."""
        return -(-loader.batches_per_epoch // self.repeat) * self.repeat

    @property
    def samples(self) -> int:
        """Samples of one pass over all."""
        return sum(loader.samples for loader in self.loaders)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one pass over all."""
        return sum(self.batches_of(loader) for loader in self.loaders)

    def next(self) -> Batch:
        """The next batch of the loader whose turn it is."""
        place = self.count % self.batches_per_epoch
        self.count += 1
        for loader in self.loaders:
            if place < self.batches_of(loader):
                return loader.next()
            place -= self.batches_of(loader)
        raise AssertionError("unreachable")

    def stand_for(self, samples: Callable[[np.ndarray], int], batch_size: int) -> None:
        """Every loader stands for a larger one."""
        for loader in {id(loader): loader for loader in self.loaders}.values():
            loader.stand_for(samples, batch_size)

    def take_shard(self, rank: int, world: int) -> None:
        """Every loader takes its shard."""
        for loader in self.loaders:
            loader.take_shard(rank, world)

    def state(self) -> dict[str, Tensor]:
        """States of all, and whose turn it is."""
        merged = {"count": torch.tensor(self.count)}
        for index, loader in enumerate(self.loaders):
            merged |= {f"{index}-{key}": value for key, value in loader.state().items()}
        return merged

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a :meth:`state`."""
        self.count = int(state["count"])
        for index, loader in enumerate(self.loaders):
            mine = f"{index}-"
            loader.load_state({k[len(mine) :]: v for k, v in state.items() if k.startswith(mine)})


class PairedLoader(Loader):
    """Endless batches of the partners of another loader's samples, row by row.

    Sample i of the leader's index set has sample ``i mod len(indices)`` of this set as partner, so
    of a longer set only the beginning is used.  Both draw the same order from generators in the
    same state, so neither needs the other while it runs, resumes or is sharded.
    """

    def __init__(self, leader: Loader, source: Source, indices: np.ndarray):
        assert leader.epoch == -1, "a pair is made before its leader's first batch"
        generator = torch.Generator()
        generator.set_state(leader.generator.get_state())
        partners = np.asarray(indices, dtype=np.int64)[
            np.arange(len(leader.indices)) % len(indices)
        ]
        augment = leader.augmenter is not None
        super().__init__(source, partners, leader.real[1], generator, augment=augment)

"""A toy unlearning problem that knows no modality: vectors, four classes, a small network.

The contract checks run methods on it: no download, no pixels, no tokens, milliseconds per run.  Its
layers are named as in a transformer, and its network has dropout, so that a method that leans on
the global random streams of torch shows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from stable_forgetting.common.base.registry import PROBLEMS
from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import Batch, Source
from stable_forgetting.common.data.splits import ForgetSplit, class_forget, random_forget
from stable_forgetting.common.methods.base import train_reference
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.protocol.family import ModelFamily
from stable_forgetting.common.store.weights import tensors_digest
from stable_forgetting.common.train.config import FitConfig


@dataclass(frozen=True)
class CheckResult:
    """One promise: kept or not, and what was seen."""

    name: str
    ok: bool
    detail: str = ""


@contextlib.contextmanager
def seeded_streams(salt: int) -> Iterator[Callable[[], list[str]]]:
    """Seeds the global random streams for a block; gives a function that names those that moved."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        random.seed(salt)
        np.random.seed(salt)  # noqa: NPY002
        torch.default_generator.manual_seed(salt)
        before = _global_streams()
        try:
            yield lambda: [name for name, now in _global_streams().items() if now != before[name]]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def _global_streams() -> dict[str, Any]:
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    return {
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
        "NumPy's global generator": (np.asarray(keys).tobytes(), position),
        "Python's random": random.getstate(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
    }


CLASSES, WIDTH, TOKENS, PER_CLASS = 4, 16, 3, 36
TARGETS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
    "attention": ("blocks.*.attn.qkv", "blocks.*.attn.proj"),
    "all": ("blocks.*.mlp.fc*", "blocks.*.attn.*"),
}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.proj((query @ key.mT / WIDTH**0.5).softmax(-1) @ value)
        return out


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return out


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = _Attention(), _Mlp()
        self.drop = nn.Dropout(0.1)  # a method that depends on torch's global stream shows

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return out


class TinyNet(nn.Module):
    """(N, TOKENS * WIDTH) vectors -> (N, CLASSES) logits; two residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Cuts each vector into tokens, mixes them, classifies their mean."""
        tokens = self.embed(x.view(len(x), TOKENS, WIDTH))
        for block in self.blocks:
            tokens = block(tokens)
        out: Tensor = self.head(self.norm(tokens.mean(dim=1)))
        return out


RECIPE = FitConfig(epochs=6, batch_size=16, lr=3e-3)


class VectorSource:
    """Labelled vectors in memory."""

    def __init__(self) -> None:
        stream = generator(0, "checks", "data")
        centres = torch.randn(CLASSES, TOKENS * WIDTH, generator=stream)
        self._labels = torch.arange(CLASSES * PER_CLASS) % CLASSES
        spread = torch.randn(len(self._labels), TOKENS * WIDTH, generator=stream)
        self._values = centres[self._labels] + spread

    @property
    def digest(self) -> str:
        """SHA-256 of vectors and labels."""
        return tensors_digest({"values": self._values, "labels": self._labels})

    @property
    def refusals(self) -> tuple[int, ...]:
        """Classes that may stand in for an answer that refuses."""
        return (0, 2)

    def answers_of(self, indices: np.ndarray) -> list[int]:
        """Labels."""
        labels: list[int] = self._labels[torch.as_tensor(indices)].tolist()
        return labels

    def with_answers(self, answers: Mapping[int, int]) -> VectorSource:
        """The same vectors with other labels at some indices."""
        other = copy.copy(self)
        other._labels = self._labels.clone()
        for index, label in answers.items():
            other._labels[index] = label
        return other

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        """The vectors at ``indices``; with a generator, a little noise from it is added."""
        values = self._values[indices]
        if augment is not None:
            values = values + 0.05 * torch.randn(values.shape, generator=augment)
        return Batch({"x": values}, self._labels[indices], indices)


@dataclass
class WatchedTask(UnlearnTask):
    """Notes what is trained and where adapters start.

    Attributes:
        fitted: ``id`` of every parameter that was trained through :meth:`fit`.
        start: Largest |dW| when adapters were first given to :meth:`fit`; None without adapters.
    """

    fitted: set[int] = field(default_factory=set)
    start: float | None = None

    def fit(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Looks at the model, then trains it."""
        with torch.no_grad():
            moved = [float(layer.delta().abs().max()) for _, layer in adapted_layers(model)]
        if moved and self.start is None:
            self.start = max(moved)
        self.fitted |= {id(p) for p in model.parameters() if p.requires_grad}
        return super().fit(model, *args, **kwargs)


class TinyProblem(ModelFamily):
    """What the checks run methods on: four classes, a source, a network, a recipe.

    A modality whose methods need more than tensors (pixels, an attention map) registers a problem
    of its own in ``common.base.registry.PROBLEMS`` under its name, and its methods name it in
    ``MethodInfo.modality``.
    """

    recipe: ClassVar[FitConfig] = RECIPE
    num_classes: ClassVar[int] = CLASSES

    @abstractmethod
    def source(self) -> Source:
        """The samples."""

    @abstractmethod
    def net(self) -> nn.Module:
        """An untrained network of fixed bits; torch's global stream is left alone."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """(N, CLASSES) logits."""
        logits: Tensor = model(batch.inputs["x"])
        return logits

    def split(self, scenario: str) -> ForgetSplit:
        """Forgets one class (``class``) or a quarter of the training samples (anything else)."""
        labels = np.arange(CLASSES * PER_CLASS) % CLASSES
        everything = np.arange(len(labels))
        train = everything[: 2 * len(labels) // 3]
        held_out = everything[len(train) :]
        if scenario == "class":
            forget = class_forget(train, labels, [1])
        else:
            forget = random_forget(train.tolist(), 0.25, 0)
        parts = {
            "forget": forget,
            "retain": np.setdiff1d(train, forget),
            "validation": held_out[: len(held_out) // 2],
            "test": held_out[len(held_out) // 2 :],
        }
        return ForgetSplit(f"checks/{scenario}", parts, self.source().digest)

    def task(
        self, model: nn.Module, scenario: str, seed: int, access: frozenset[str]
    ) -> WatchedTask:
        """A task around ``model``."""
        return WatchedTask(
            model=model,
            data=DataAccess(self.source(), self.split(scenario), access),
            family=self,
            recipe=self.recipe,
            build=self.net,
            seed=seed,
        )

    @functools.cached_property
    def original(self) -> nn.Module:
        """The network trained on forget and retain; shared, so copy it before use."""
        access = frozenset({"forget", "retain", "initial"})
        task = self.task(nn.Identity(), "random", 0, access)
        return train_reference(task, ["forget", "retain"]).eval()

    def outputs(self, model: nn.Module) -> Tensor:
        """Logits on every sample, in eval mode."""
        model.eval()
        with torch.no_grad():
            return self.forward(model, self.source().fetch(torch.arange(CLASSES * PER_CLASS)))


class TinyLayers:
    """What the layers of :class:`TinyNet` are called."""

    targets = TARGETS
    head = ("head.*",)

    def component_of(self, parameter: str) -> str:
        """mlp, attention, head or other."""
        components = {"mlp": "mlp", "attn": "attention", "head": "head"}
        parts = parameter.split(".")
        return next((components[part] for part in parts if part in components), "other")


class TinyVectors(TinyProblem):
    """The problem of methods that know no modality: vectors and a small residual network."""

    family = TinyLayers()

    def source(self) -> VectorSource:
        """Labelled vectors."""
        return VectorSource()

    def net(self) -> TinyNet:
        """A network with dropout, whose layers are named as in a transformer."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return TinyNet()


@functools.cache
def problem_of(modality: str) -> TinyProblem:
    """The problem of a modality (empty: none), with its trained Original, once per process."""
    return PROBLEMS[modality]() if modality else TinyVectors()

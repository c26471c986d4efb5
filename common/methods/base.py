"""What an unlearning method is.

Modules of methods import torch only inside functions: listing and planning read classes and
configs, and must answer at once.  The packages ``data``, ``objectives`` and ``methods.tools`` are
imported at the top: each of their names is loaded when it is first used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.config import Strict, did_you_mean, merge, validate
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import nn

ALIASES = {"ga": "ascent", "ft": "finetune", "rl": "random_label"}
"""The literature's short names -> registered methods."""
FORGET, RETAIN = frozenset({"forget"}), frozenset({"retain"})
BOTH = FORGET | RETAIN
"""The parts that methods read: one of them, or as most do both."""
Length = Literal["steps", "epochs"]
"""What lengths of trainings are given in."""


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method that the harness enforces or prints.

    Attributes:
        version: Raised whenever the same config would give other numbers.
        paper: Where the method comes from.
        access: Parts that it may read (``forget``, ``retain``; rarely ``validation`` and the
            ``validation_forget`` of class forgetting); ``initial`` allows a fresh model.
            Asking for anything else raises.
        scenarios: Scenarios it applies to; empty means all.
        changes_model: False for Original.
        modality: The benchmarks that it understands, such as ``vision``; empty means all.
        models: How many models answer at inference.  More than one is a generation-time method: no
            single checkpoint holds its result, and no later request can start from it.
        resumes: A later request can start from it all the same.
        reading: Tables call the row our reading: the source leaves too much open to be the method.
        extra: The extra of this project whose package it needs, of the same name; empty: none.
    """

    version: int
    paper: str
    access: frozenset[str]
    scenarios: frozenset[str] = frozenset()
    changes_model: bool = True
    modality: str = ""
    models: int = 1
    resumes: bool = False
    reading: bool = False
    extra: str = ""

    def require(self, name: str) -> None:
        """Checks that the method's package is there, before anything is trained.

        Raises:
            ConfigError: It is not.
        """
        if self.extra and find_spec(self.extra) is None:
            raise ConfigError(
                f"method '{name}' needs {self.extra}: pip install 'stable-forgetting[{self.extra}]'"
                ", or leave the method out"
            )

    def inapplicable(self, *, scenario: str, modality: str, in_turn: bool = False) -> str | None:
        """Why the method says nothing about a benchmark, in words; None where it applies.

        Args:
            scenario: Of the benchmark; one that is not known (empty) rules nothing out.
            modality: Of the benchmark; likewise.
            in_turn: Whether it starts from what it left at an earlier request.
        """
        if self.modality and modality and self.modality != modality:
            return f"for {self.modality} benchmarks only"
        if self.scenarios and scenario and scenario not in self.scenarios:
            return f"for {', '.join(sorted(self.scenarios))} forgetting only"
        if in_turn and self.models > 1 and not self.resumes:
            return f"{self.models} models at inference, of which no later request can start"
        return None


class UnlearningMethod(ABC):
    """A baseline: one class, one file or less.

    Its ``Config`` is the only place for defaults; ``presets`` are named sets of overrides;
    ``quick`` overrides make the checks' runs short where ``steps`` or ``epochs`` alone do not;
    ``unread`` are fields that the config inherits and the method has no use for.
    """

    info: ClassVar[MethodInfo]
    Config: ClassVar[type[Strict]] = Strict
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    quick: ClassVar[Mapping[str, Any]] = {}
    unread: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Strict):
        self.config: Any = config

    @classmethod
    def empty_model(cls, config: Strict, build: Callable[[], nn.Module]) -> nn.Module:
        """What a result's weights are loaded into: one model, unless a subclass joins several."""
        return build()

    @classmethod
    def access_of(cls, config: Any) -> frozenset[str]:
        """Parts that a run with this config may read; a subclass narrows the declared ones."""
        return cls.info.access

    @classmethod
    def within(cls, config: Any, unit: Length, amount: int) -> dict[str, Any]:
        """Params that give a method which reads retain data a length; none where it has none.

        A subclass that reads retain data in several phases overrides it, so that they add up.

        Args:
            config: Of the method, without the length.
            unit: ``epochs`` are passes over the retain set, ``steps`` optimizer steps.
            amount: How many.
        """
        if "retain" not in cls.info.access or not hasattr(config, "epochs"):
            return {}
        anchored = unit == "epochs" and getattr(config, "epochs_of", None) is not None
        return {unit: amount, **({"epochs_of": "retain"} if anchored else {})}

    @abstractmethod
    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Returns the unlearned model: ``task.model`` changed in place, or another one.

        A model returned with adapters attached is stored as an adapter and merged for evaluation.
        """


def train_reference(
    task: UnlearnTask, parts: Sequence[str], model: nn.Module | None = None
) -> nn.Module:
    """Trains a model on the union of parts with the task's recipe (Original, Retrain).

    It is a fresh one unless the caller gives its own.
    """
    model = task.fresh_model() if model is None else model
    indices = task.indices(*parts)
    loader = data.Loader(task.source, indices, task.recipe.micro_batch, task.generator("train"))
    objective = objectives.CrossEntropy("train", task.recipe.average)
    task.fit(model, objective, {"train": loader}, task.recipe)
    return model


def resolve_config(
    name: str, preset: str | None, params: Mapping[str, Any], *, origin: str
) -> Strict:
    """A method's full config: its defaults, then a preset, then ``params``.

    Of ``steps`` and ``epochs`` the later one holds (see :func:`over`).
    """
    cls = METHODS[name]
    overrides: Mapping[str, Any] = {}
    if preset is not None:
        if preset not in cls.presets:
            hint = did_you_mean(preset, list(cls.presets)) or "; it has none"
            raise ConfigError(f"{origin}: method '{name}' has no preset '{preset}'{hint}")
        overrides = cls.presets[preset]
    config = over(cls.Config().model_dump(), overrides)
    config = over(config, cls.Config.by_field(params))
    whole: Strict = validate(cls.Config, config, origin)
    return whole


def check_read(name: str, params: Iterable[str], *, origin: str) -> None:
    """Refuses params of a user that a method's config has and the method does not read.

    A suite's defaults are for all rows, so they are not looked at.
    """
    cls = METHODS[name]
    for key in params:
        if cls.Config.field_of(key) in cls.unread:
            raise ConfigError(f"{origin}: method '{name}' does not read {key}; leave it out")


def over(config: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """A config under a later layer; of ``steps`` and ``epochs`` the later one holds."""
    merged = merge(config, layer)
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if layer.get(given) is not None and other not in layer and other in merged:
            merged[other] = None
    return merged

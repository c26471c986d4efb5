"""Methods that fine-tune on what is to be forgotten, and go the other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from stable_forgetting.common import data, objectives
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, NonNegative, Positive
from stable_forgetting.common.methods.base import FORGET, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


Strengths = NonNegative | Annotated[tuple[NonNegative, ...], Field(min_length=1)]
"""One strength, or several, of which the first at which ``stop_below`` holds is taken."""


class ReinforcedConfig(FitConfig):
    """How the model is fine-tuned on forget data; muse_bench: lr 1e-5, cosine, AdamW.

    Attributes:
        a: How strongly the method acts.
    """

    epochs: Count | None = 10
    batch_size: Count = 16
    lr: Positive = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    a: Strengths = 1.0

    @property
    def evaluates(self) -> bool:
        """Whether the model is measured: after each of several strengths."""
        return not isinstance(self.a, float) or super().evaluates


PUBLISHED: Mapping[str, Mapping[str, Any]] = {"muse_bench": {"lr": 1e-5, "batch_size": 4}}
"""The effective batch of four follows from 102 steps an epoch on 408 chunks of News."""


def reinforce(task: UnlearnTask, config: ReinforcedConfig) -> None:
    """Fine-tunes ``task.model`` on the forget set in place, for all of its epochs."""
    engine = FitConfig.of(config, stop_below={})
    task.train(objectives.CrossEntropy("forget", engine.average), engine)


def take_strength(
    task: UnlearnTask, model: nn.Module, config: Any, apply: Callable[[float], None]
) -> None:
    """Applies ``config.a``; of several the first at which ``stop_below`` holds, else the last.

    MUSE's authors choose so (jaechan-repo/muse_bench, get_best_forget_quality.py).

    Raises:
        ConfigError: There are several strengths, and nothing measures the model.
    """
    from stable_forgetting.common.train.loop import reached
    from stable_forgetting.common.train.telemetry import looking

    if isinstance(config.a, float):
        return apply(config.a)
    telemetry = task.telemetry
    if not config.stop_below or telemetry is None or telemetry.evaluate_during is None:
        raise ConfigError("a: several strengths need stop_below, and a suite; give one strength")
    device = next(model.parameters()).device
    for index, strength in enumerate(config.a, 1):
        apply(strength)
        with looking(model, device):
            metrics = telemetry.evaluate_during(model, index)
        if reached(metrics, config.stop_below) is not None:
            break
    return None


class TaskVector(UnlearningMethod):
    """Task vector: fine-tune on forget, then go as far the other way, times a factor.

    Formula: theta <- theta - a (theta_ft - theta), theta_ft = argmin CE(B_f) from theta, of all
    parameters; running statistics of batches stay Original's, since extrapolation takes variances
    below 0.  Never reads retain data.
    Source: Ilharco et al. 2023, arXiv 2212.04089; MUSE, arXiv 2407.06460 (a = 5, 10 epochs);
    swj0419/muse_bench (task_vector.py).
    """

    info = MethodInfo(2, "Ilharco et al. 2023 (arXiv 2212.04089); MUSE (arXiv 2407.06460)", FORGET)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PUBLISHED

    class Config(ReinforcedConfig):
        """Settings of Task vector.

        Attributes:
            a: How far to go back, in lengths of the fine-tuning; 5, as in muse_bench's script
                (MUSE's authors evaluate 16 on News and 1 on Books).  A list: see ``Strengths``.
        """

        a: Strengths = 5.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes, then extrapolates."""
        import torch

        start = {key: value.clone() for key, value in _tensors(task.model).items()}
        reinforce(task, self.config)
        tuned = _tensors(task.model)
        if not isinstance(self.config.a, float):
            tuned = {key: value.clone() for key, value in tuned.items()}
        weights = dict(task.model.named_parameters())

        @torch.no_grad()
        def go_back(a: float) -> None:
            for key, tensor in _tensors(task.model).items():
                step = a if key in weights else 0.0
                tensor.copy_(start[key] - step * (tuned[key] - start[key]))

        take_strength(task, task.model, self.config, go_back)
        return task.model


class NegMerge(UnlearningMethod):
    """NegMerge: several task vectors, of which only what they agree on is taken off.

    Formula: fine-tune Original on forget ``models`` times with rates lr f^k, f = ``factor``, and
    other orders; tau_k = theta_k - theta; keep the entries whose sign all tau_k share; theta <-
    theta - a mean_k tau_k there, theta elsewhere; of all parameters, as for ``task_vector``.  Never
    reads retain data.
    Source: Kim et al. 2025 (arXiv 2410.05583, ICML); Harry24k/machine-unlearning-pytorch
    (negmerge.py).  There the candidates come of a search, here of a ladder of rates.
    """

    info = MethodInfo(3, "NegMerge, Kim et al. 2025 (arXiv 2410.05583)", FORGET)
    quick: ClassVar[Mapping[str, Any]] = {"models": 2}

    class Config(ReinforcedConfig):
        """Settings of NegMerge.

        Attributes:
            models: Fine-tuned candidates; 3, torchunlearn's.
            factor: Between the rates of two candidates; 2 is ours.
            a: How far to go back, in mean lengths of the fine-tunings; 1, as in the source.
        """

        models: Count = 3
        factor: Positive = 2.0
        a: NonNegative = 1.0

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Fine-tunes the candidates one after the other, then merges."""
        import torch

        config = self.config
        start = {key: value.clone() for key, value in _tensors(task.model).items()}
        vectors: list[dict[str, Tensor]] = []
        for number in range(config.models):
            engine = FitConfig.of(config, lr=config.lr * config.factor**number)
            generator = task.generator("negmerge", number)
            loader = data.Loader(task.source, task.indices("forget"), engine.micro_batch, generator)
            objective = objectives.CrossEntropy("forget", engine.average)
            last = number == config.models - 1
            task.fit(task.model, objective, {"forget": loader}, engine, more=not last)
            vectors.append({k: v - start[k] for k, v in _tensors(task.model).items()})
            with torch.no_grad():
                for key, tensor in _tensors(task.model).items():
                    tensor.copy_(start[key])
        with torch.no_grad():
            for key, parameter in task.model.named_parameters():
                parameter.sub_(config.a * agreed([vector[key] for vector in vectors]))
        return task.model


def agreed(vectors: Sequence[Tensor]) -> Tensor:
    """The mean where all have one sign, else 0."""
    import torch

    stacked = torch.stack(list(vectors))
    signs = stacked.sign()
    same = (signs == signs[0]).all(0) & (signs[0] != 0)
    return torch.where(same, stacked.mean(0), 0.0)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name -> each floating-point tensor of the state once, tied ones under their first name."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stored = model.state_dict().keys()
    return {
        name: value.detach()
        for name, value in state.items()
        if name in stored and value.is_floating_point()
    }

"""What the training loop is given beside model, objective and data, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from stable_forgetting.common.data.batch import Batch

ModelForward = Callable[[nn.Module, Batch], Tensor]
AfterStep = Callable[[nn.Module], Mapping[str, float] | None]
Progress = Callable[[int, int, float], None]
"""(steps done, steps in all, loss of the last logged step; NaN before it) -> nothing."""
EvaluateDuring = Callable[[nn.Module, int], Mapping[str, float | None]]
"""(model in eval mode, steps done) -> metrics."""
StopWhen = Callable[[nn.Module, int], str | None]
"""(model in eval mode, steps done) -> why the run stops here, or None."""


class ScalarSink(Protocol):
    """Where scalars go; see :class:`common.train.tracking.Tracker`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named values at a step."""

    def rewind(self, step: int) -> None:
        """Drops what was recorded after a step."""


class Stateful(Protocol):
    """Something whose tensors belong into a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state."""


@dataclass(frozen=True)
class Hooks:
    """What a method adds to a run; it changes the weights that come out.

    Attributes:
        after_step: Called with the model after each optimizer step (projections); may return
            scalars to log.
        penalty: Added to the objective, a function of the model's parameters.
        stateful: Further states to keep in checkpoints, by name.
        stop_when: Asked after every step; ends the run where it gives a reason.
    """

    after_step: Sequence[AfterStep] = ()
    penalty: Callable[[nn.Module], Tensor] | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    stop_when: StopWhen | None = None


@dataclass(frozen=True)
class Telemetry:
    """Who looks at a run; it changes no weight.

    Attributes:
        tracker: Receives losses, norms and adapter statistics.
        evaluate_during: Evaluates the model every ``config.evaluate_every`` steps and at the last
            one; what it returns is logged as ``evaluation/<metric>``.
        component_of: Parameter name -> component, for norms.
    """

    tracker: ScalarSink | None = None
    progress: Progress | None = None
    evaluate_during: EvaluateDuring | None = None
    component_of: Callable[[str], str] = field(default=lambda name: "all")


@dataclass
class FitResult:
    """What a finished run cost and how it ended.

    Attributes:
        seconds: Wall time, of earlier sittings too.
        last: Name -> last value of everything logged.
        peak: Name -> largest finite value of everything logged.
        stopped: Why it ended before its time; None where it did not.
        earlier: Seconds of these in sittings that ended before this one.
    """

    steps: int
    seconds: float
    last: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    stopped: str | None = None
    earlier: float = 0.0

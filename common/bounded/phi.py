"""The entrywise functions phi of the bounded layer, one record each, and the form of an update.

A new phi is one :class:`Phi` given to ``PHIS.register``: configs accept its name, and the eager
path runs it.  Torch is imported inside functions only, as configs are read without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.registry import OURS, TABLES, is_foreign, source_digest

if TYPE_CHECKING:
    from torch import Tensor

CLIP = 1.5
"""The paper's threshold of phi = clip."""

CURVED = 0.5
"""|argument| from which sine and tanh are told from a line: they are 4 and 8 % below it."""


@dataclass(frozen=True)
class Phi:
    """One entrywise function with phi(0) = 0 (or with a start that is subtracted) and its slope.

    Every function takes ``arguments``' values last.  Exactly one of the two slopes is given, unless
    phi is linear.

    Attributes:
        value: z -> phi(z), of any shape, differentiable.
        value_: z -> phi(z) in place of z, without a graph; by default a copy of ``value``'s.
        slope_of_argument: (z, out) -> None, fills ``out`` with phi'(z).  At a kink the slope is
            torch's own: 0 for relu at 0, 1 for clip at its threshold.
        slope_of_value: (p, out) -> None, fills ``out`` with phi'(z) from p = phi(z).
        slope0: phi'(0), the first step of a training in units of LoRA's.
        bound: sup |phi|: a number, or the name of the argument that is the bound.
        arguments: Fields of :class:`Bound` that the functions take beside z.
        start: ``zero``: A starts at 0.  ``random``: A starts at small random values, whose dW is
            subtracted (for a phi without slope at 0).
        linear: phi(z) = z: two skinny products take the place of a k x d matrix.
    """

    name: str
    value: Callable[..., Tensor]
    value_: Callable[..., Tensor] | None = None
    slope_of_argument: Callable[..., object] | None = None
    slope_of_value: Callable[..., object] | None = None
    slope0: float = 1.0
    bound: float | str = float("inf")
    arguments: tuple[str, ...] = ()
    start: Literal["zero", "random"] = "zero"
    linear: bool = False

    def __post_init__(self) -> None:
        slopes = [self.slope_of_argument, self.slope_of_value]
        if not self.linear and slopes.count(None) != 1:
            raise ConfigError(f"phi '{self.name}': give slope_of_argument or slope_of_value")

    @property
    def bounded(self) -> bool:
        """Whether |phi| has a finite bound."""
        return isinstance(self.bound, str) or self.bound < float("inf")

    @property
    def relative(self) -> bool:
        """Whether ``bound: relative`` takes it: bounded by 1, with slope 1 at 0."""
        return self.bound == 1.0 and self.slope0 == 1.0


class PhiTable(dict[str, Phi]):
    """Name -> record."""

    def foreign(self) -> bool:
        """Whether any record was registered by a plugin."""
        return any(is_foreign(phi.value.__module__) for phi in self.values())

    def code(self, name: str) -> set[str]:
        """Digest of the plugin's source that a record comes from."""
        module = self[name].value.__module__ if name in self else OURS
        return {source_digest(module)} if is_foreign(module) else set()

    def register(self, phi: Phi) -> None:
        """Adds a record.

        Raises:
            ConfigError: The name is taken.
        """
        if phi.name in self:
            raise ConfigError(f"phi '{phi.name}' is registered twice; choose another name")
        self[phi.name] = phi

    def __missing__(self, name: str) -> Phi:
        raise ConfigError(f"unknown phi '{name}'{did_you_mean(name, list(self))}")


def _cosine(z: Tensor, out: Tensor) -> None:
    import torch

    torch.cos(z, out=out)


def _inside(z: Tensor, out: Tensor, clip: float) -> None:
    import torch

    torch.le(torch.abs(z, out=out), clip, out=out)


def _rest_of_square(ceiling: float) -> Callable[[Tensor, Tensor], None]:
    """(p, out) -> None, fills ``out`` with ceiling - p^2."""

    def fill(p: Tensor, out: Tensor) -> None:
        import torch

        torch.mul(p, p, out=out).neg_().add_(ceiling)

    return fill


def _positive(p: Tensor, out: Tensor) -> None:
    import torch

    torch.gt(p, 0.0, out=out)


PHIS = PhiTable()
"""The registered activations."""
TABLES.append(PHIS)

for _phi in (
    Phi(
        "sine",
        value=lambda z: z.sin(),
        value_=lambda z: z.sin_(),
        slope_of_argument=_cosine,
        bound=1.0,
    ),
    Phi(
        "tanh",
        value=lambda z: z.tanh(),
        value_=lambda z: z.tanh_(),
        slope_of_value=_rest_of_square(1.0),
        bound=1.0,
    ),
    Phi(
        "sigmoid",
        # sigmoid(z) - 1/2, written so that it does not cancel near zero
        value=lambda z: 0.5 * (0.5 * z).tanh(),
        value_=lambda z: z.mul_(0.5).tanh_().mul_(0.5),
        slope_of_value=_rest_of_square(0.25),
        slope0=0.25,
        bound=0.5,
    ),
    Phi(
        "relu",
        value=lambda z: z.relu(),
        value_=lambda z: z.relu_(),
        slope_of_value=_positive,
        start="random",
    ),
    Phi(
        "clip",
        value=lambda z, clip: z.clamp(-clip, clip),
        value_=lambda z, clip: z.clamp_(-clip, clip),
        slope_of_argument=_inside,
        bound="clip",
        arguments=("clip",),
    ),
    Phi("identity", value=lambda z: z, linear=True),
):
    PHIS.register(_phi)


class Bound(NamedTuple):
    """The form of an update: ``dW = amplitude * phi(frequency * A Bt)``."""

    phi: str
    amplitude: float
    frequency: float
    clip: float = CLIP

    @property
    def record(self) -> Phi:
        """The function's record."""
        return PHIS[self.phi]

    @property
    def arguments(self) -> tuple[float, ...]:
        """Values of the arguments that phi takes beside z."""
        return tuple(getattr(self, name) for name in self.record.arguments)

    @property
    def limit(self) -> float:
        """sup |phi|; infinite for an unbounded one."""
        bound = self.record.bound
        return getattr(self, bound) if isinstance(bound, str) else bound

    @property
    def curved_from(self) -> float:
        """|argument| from which the bound acts: :data:`CURVED`, or the threshold of a clip."""
        return self.limit if isinstance(self.record.bound, str) else CURVED

    def value(self, z: Tensor) -> Tensor:
        """phi(z), of any shape, differentiable."""
        return self.record.value(z, *self.arguments)

    def replace_(self, z: Tensor) -> Tensor:
        """phi(z) in place of z, without a graph."""
        phi = self.record
        return phi.value_(z, *self.arguments) if phi.value_ else z.copy_(self.value(z))

    def value_and_slope_(self, z: Tensor, slope: Tensor) -> None:
        """Turns ``z`` into phi(z) and fills ``slope`` with phi'(z), both of ``z``'s shape."""
        phi = self.record
        if phi.slope_of_argument is not None:
            phi.slope_of_argument(z, slope, *self.arguments)
            self.replace_(z)
        else:
            assert phi.slope_of_value is not None, "a linear phi has no weight-sized slope"
            phi.slope_of_value(self.replace_(z), slope, *self.arguments)

    def slope_(self, z: Tensor, slope: Tensor) -> None:
        """Fills ``slope`` with phi'(z); ``z`` is scratch afterwards."""
        if self.record.slope_of_argument is not None:
            self.record.slope_of_argument(z, slope, *self.arguments)
        else:
            self.value_and_slope_(z, slope)

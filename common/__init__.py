"""The engine: tensors, parameters and index sets.  It knows no pixels and no tokens.

What a plugin needs is imported from here alone; each name is loaded when it is first used.

* Registries: ``METHODS``, ``BENCHMARKS``, ``AUDITS``, ``PROBLEMS`` (tiny problems of the contract
  check), ``PHIS`` (activations), ``PRESETS`` (adapters by name).
* A method: ``UnlearningMethod`` with ``MethodInfo`` and a ``Strict`` config; it gets an
  ``UnlearnTask``.  Ready bodies: ``AdaptedMethod`` with ``AdaptedConfig`` (may train an adapter),
  ``GradientMethod`` with ``GradientConfig`` (one objective), ``ForgetRetainMethod`` with
  ``ForgetConfig`` or ``RetainConfig`` (one term on forget, one on retain), ``Finetune``.
  ``resolve_config`` completes a config, ``check_method`` holds a method against the contract.
* Objectives: ``Objective``, ``ObjectiveValue``, ``CrossEntropy``, ``ForgetRetain``,
  ``gradient_difference``; ``Term`` and ``Mean`` of ``cross_entropy`` or ``unlikelihood``.
* Data and training: ``Batch``, ``Source``, ``DatasetSource``, ``Loader``, ``ForgetSplit``, ``fit``,
  ``FitConfig``.
* Adapters: ``AdapterConfig``, ``Phi``, ``attach``, ``detach``, ``adapted_layers``,
  ``save_adapter``, ``load_adapter``.
* Benchmarks: ``Benchmark`` with ``Versions``, ``PARTS`` (each a ``Part`` with a ``Role``),
  ``Scores``, ``MetricSpec``; rules ``GapRule`` (of each ``Axis``) or ``GoalRule`` of
  ``RetrainGoal``, ``MeasuredGoal``, ``ConstantGoal``; a ``RuleSet`` of ``Criterion``.
* Probes and audits: ``PROBES``, ``Probe``, ``ProbeTable``; ``Audit``, ``AuditInfo``.
* Errors: ``UserError`` and its kinds ``ConfigError``, ``DataError``, ``AccessError``; ``Diverged``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from common.base.public import PUBLIC
from common.methods import catalogue as _catalogue  # noqa: F401 - registers the methods

if TYPE_CHECKING:
    from common.audits import AUDITS as AUDITS
    from common.audits.base import Audit as Audit
    from common.audits.base import AuditInfo as AuditInfo
    from common.base.config import Strict as Strict
    from common.base.errors import AccessError as AccessError
    from common.base.errors import ConfigError as ConfigError
    from common.base.errors import DataError as DataError
    from common.base.errors import Diverged as Diverged
    from common.base.errors import UserError as UserError
    from common.base.registry import BENCHMARKS as BENCHMARKS
    from common.base.registry import METHODS as METHODS
    from common.base.registry import PROBLEMS as PROBLEMS
    from common.bounded.attach import attach as attach
    from common.bounded.attach import detach as detach
    from common.bounded.config import AdapterConfig as AdapterConfig
    from common.bounded.files import load_adapter as load_adapter
    from common.bounded.files import save_adapter as save_adapter
    from common.bounded.layer import adapted_layers as adapted_layers
    from common.bounded.phi import PHIS as PHIS
    from common.bounded.phi import Phi as Phi
    from common.bounded.presets import PRESETS as PRESETS
    from common.checks import check_method as check_method
    from common.data.batch import Batch as Batch
    from common.data.batch import Source as Source
    from common.data.dataset import DatasetSource as DatasetSource
    from common.data.loader import Loader as Loader
    from common.data.parts import PARTS as PARTS
    from common.data.parts import Part as Part
    from common.data.parts import Role as Role
    from common.data.splits import ForgetSplit as ForgetSplit
    from common.measure.goal import ConstantGoal as ConstantGoal
    from common.measure.goal import MeasuredGoal as MeasuredGoal
    from common.measure.goal import RetrainGoal as RetrainGoal
    from common.measure.metric import MetricSpec as MetricSpec
    from common.measure.rules import Axis as Axis
    from common.measure.rules import Criterion as Criterion
    from common.measure.rules import GapRule as GapRule
    from common.measure.rules import GoalRule as GoalRule
    from common.measure.rules import RuleSet as RuleSet
    from common.measure.scores import Scores as Scores
    from common.methods.base import MethodInfo as MethodInfo
    from common.methods.base import UnlearningMethod as UnlearningMethod
    from common.methods.base import resolve_config as resolve_config
    from common.methods.forget_retain import ForgetConfig as ForgetConfig
    from common.methods.forget_retain import ForgetRetainMethod as ForgetRetainMethod
    from common.methods.forget_retain import RetainConfig as RetainConfig
    from common.methods.gradient import AdaptedConfig as AdaptedConfig
    from common.methods.gradient import AdaptedMethod as AdaptedMethod
    from common.methods.gradient import GradientConfig as GradientConfig
    from common.methods.gradient import GradientMethod as GradientMethod
    from common.methods.simple import Finetune as Finetune
    from common.methods.task import UnlearnTask as UnlearnTask
    from common.objectives.objectives import CrossEntropy as CrossEntropy
    from common.objectives.objectives import ForgetRetain as ForgetRetain
    from common.objectives.objectives import Objective as Objective
    from common.objectives.objectives import ObjectiveValue as ObjectiveValue
    from common.objectives.objectives import gradient_difference as gradient_difference
    from common.objectives.positions import cross_entropy as cross_entropy
    from common.objectives.positions import unlikelihood as unlikelihood
    from common.objectives.terms import Mean as Mean
    from common.objectives.terms import Term as Term
    from common.protocol.benchmark import Benchmark as Benchmark
    from common.protocol.benchmark import Versions as Versions
    from common.protocol.probe import PROBES as PROBES
    from common.protocol.probe import Probe as Probe
    from common.protocol.probe import ProbeTable as ProbeTable
    from common.train.config import FitConfig as FitConfig
    from common.train.fit import fit as fit
else:

    def __getattr__(name: str) -> object:
        if name not in PUBLIC:
            raise AttributeError(f"module 'common' has no attribute '{name}'")
        return getattr(import_module(PUBLIC[name]), name)


__all__ = sorted(PUBLIC)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})

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
  ``RetrainGoal``, ``MeasuredGoal``, ``ConstantGoal``; a ``TargetRule`` of trials; a ``RuleSet`` of
  ``Criterion``.
* Probes: ``PROBES``, ``Probe``, ``ProbeTable``.
* Audits, which are attacks too: ``Audit`` with ``AuditInfo``; a ``PairAudit`` compares stored
  scores, a ``ModelAudit`` gets an ``AuditTask``.  Both return ``Measure``s, or raise
  ``NotApplicable``.
* Errors: ``UserError`` and its kinds ``ConfigError``, ``DataError``, ``AccessError``; ``Diverged``.
"""

import lazy_loader

from stable_forgetting.common.methods import catalogue as _catalogue  # noqa: F401 - registers

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

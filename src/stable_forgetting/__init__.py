"""Stable Forgetting: a benchmark harness for machine unlearning.

``forget`` makes a model forget, ``run`` runs a suite, ``evaluate`` measures a model; each is loaded
when it is first used.  ``common`` is the engine, ``vision`` and ``language`` are its arms,
``benchmarks`` runs and reports.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

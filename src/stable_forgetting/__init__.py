"""Stable Forgetting: a benchmark harness for machine unlearning.

``common`` is the engine, ``vision`` and ``language`` are its arms, ``benchmarks`` runs and reports.
"""

"""The language arm: text, causal models, TOFU.

The registrations below are lazy: nothing is imported until it is used.
"""

from common.registry import BENCHMARKS

BENCHMARKS.register(
    "language",
    "language.protocols:LanguageBenchmark",
    summary="question answering about authors, some of whom are to be forgotten (TOFU)",
)

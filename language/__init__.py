"""The language arm: text, causal models, TOFU.

The registrations below are lazy: nothing is imported until it is used.
"""

from common.base.registry import BENCHMARKS, METHODS, PROBLEMS, SUBJECTS
from common.protocol.probe import PROBES

BENCHMARKS.register(
    "language",
    "language.benchmarks.tofu:TofuBenchmark",
    summary="question answering about authors, some of whom are to be forgotten (TOFU)",
)
SUBJECTS.register(
    "text",
    "language.apply.subject:TextSubject",
    summary="a causal language model and rows of a .jsonl file",
)
PROBLEMS.register("language", "common.checks.tiny_task:TinyVectors")
PROBES.register(
    "lm_eval",
    "language.probes.lm_eval:LMEvalProbe",
    summary="tasks of lm-eval: accuracy, perplexity and what else each task measures",
)
METHODS.register(
    "idk",
    "language.methods.refusals:IDK",
    summary="fine-tunes on refusals for forget and on retain",
)
METHODS.register(
    "dpo",
    "language.methods.refusals:DPO",
    summary="prefers a refusal to the true answer, no retain data",
)
METHODS.register(
    "dpo_gdr",
    "language.methods.refusals:DPOGdr",
    summary="DPO and cross-entropy on retain",
)
METHODS.register(
    "rmu",
    "language.methods.rmu:RMU",
    summary="steers hidden states of forget to a random direction",
)

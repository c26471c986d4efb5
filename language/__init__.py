"""The language arm: text, causal models, TOFU, TDEC, MUSE.

The registrations below are lazy: nothing is imported until it is used.
"""

from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.base.registry import BENCHMARKS, METHODS, PROBLEMS
from stable_forgetting.common.protocol.probe import PROBES

BENCHMARKS.register(
    "tofu",
    "stable_forgetting.language.benchmarks.tofu:TofuBenchmark",
    summary="question answering about authors, some of whom are to be forgotten (TOFU)",
    stored="language",
)
BENCHMARKS.register(
    "tdec",
    "stable_forgetting.language.benchmarks.tdec:TdecBenchmark",
    summary="texts that a model recites, to be forgotten down to what it says of unseen text",
)
BENCHMARKS.register(
    "muse",
    "stable_forgetting.language.benchmarks.muse:MuseBenchmark",
    summary="news or books as text, as knowledge and as training members (MUSE)",
)
BENCHMARKS.register(
    "wmdp",
    "stable_forgetting.language.benchmarks.wmdp:WmdpBenchmark",
    summary="hazardous knowledge, asked in multiple choice (WMDP)",
)
BENCHMARKS.register(
    "rwku",
    "stable_forgetting.language.benchmarks.rwku:RwkuBenchmark",
    summary="what is known of single people, probed in several ways (RWKU)",
)
PROBLEMS.register("language", "stable_forgetting.language.tiny:TinyTexts")
for _name, _target, _summary in (
    ("few_shot", "FewShot", "retained questions and answers before the forgotten one"),
    ("paraphrase", "Paraphrase", "the forgotten question in other words, by rule"),
    ("zlib", "Zlib", "forgotten or never seen, by likelihood over compressed length"),
):
    AUDITS.register(_name, f"stable_forgetting.language.attacks:{_target}", summary=_summary)
for _name, _target, _summary in (
    (
        "lm_eval",
        "lm_eval:LMEvalProbe",
        "tasks of lm-eval: accuracy, perplexity and what else each task measures",
    ),
    (
        "reasoning",
        "lm_eval:ReasoningProbe",
        "accuracy on nine reasoning tasks, as lm-eval asks them",
    ),
    (
        "reasoning_original",
        "original:OriginalReasoning",
        "accuracy on the same tasks, scored as in the paper on knowledge unlearning",
    ),
    (
        "dialogue",
        "dialogue:DialogueProbe",
        "words that greedy answers share with the last turns of dialogues (token F1)",
    ),
    ("perplexity", "perplexity:PerplexityProbe", "perplexity of texts, weighted by tokens"),
):
    PROBES.register(_name, f"stable_forgetting.language.probes.{_target}", summary=_summary)
for _name, _target, _summary in (
    ("idk", "refusals:IDK", "fine-tunes on refusals for forget and on retain"),
    ("mismatch", "refusals:Mismatch", "fine-tunes on answers to other questions, and on retain"),
    ("flat", "refusals:FLAT", "prefers a template answer by an f-divergence, no retain data"),
    ("o3", "inference:O3", "refusals through orthogonal adapters behind a gate, requests in turn"),
    (
        "whp",
        "inference:WHP",
        "two models at inference: what fine-tuning on forget raised is taken off",
    ),
    ("dpo", "refusals:DPO", "prefers a refusal to the true answer, no retain data"),
    ("dpo_gdr", "refusals:DPOGdr", "DPO and cross-entropy on retain"),
    ("altpo", "alternates:AltPO", "prefers another plausible answer, and cross-entropy on retain"),
    ("simdpo", "alternates:SimDPO", "DPO without a reference, length-normalised, and retain"),
    (
        "jensun",
        "alternates:JensUn",
        "Jensen-Shannon to a refusal's tokens, and to Original on retain",
    ),
    ("rmu", "rmu:RMU", "steers hidden states of forget to a random direction"),
    ("llmu", "alternates:LLMU", "ascent, answers to other questions, KL to Original on retain"),
    ("rmu_adaptive", "rmu:AdaptiveRMU", "RMU with a vector as long as Original's hidden states"),
    (
        "circuit_breakers",
        "latent:CircuitBreakers",
        "hidden states of forget turn away from Original's, those of retain stay",
    ),
    (
        "latent_adversarial",
        "latent:LatentAdversarial",
        "gradient difference under an attack on hidden states",
    ),
    ("uld", "inference:ULD", "two models at inference: a small one that knows forget is taken off"),
    ("kto", "alternates:KTO", "forget answers below the refusals' mean, cross-entropy on retain"),
):
    METHODS.register(_name, f"stable_forgetting.language.methods.{_target}", summary=_summary)

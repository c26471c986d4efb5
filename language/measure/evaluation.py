"""What an evaluation on questions and answers is made of; no torch here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.numbers import Count
from stable_forgetting.language.config import Style
from stable_forgetting.language.metrics.tofu import FQReference
from stable_forgetting.language.metrics.truth import Truth


class RequestConfig(Strict):
    """How requests to a model are batched.

    Attributes:
        token_budget: Token slots per forward.
        generation_batch: Rows per batch of greedy answers.
        share_prompts: Put a question's answers behind one copy of its prompt, where the model can.
    """

    token_budget: Count = 8192
    generation_batch: Count = 128
    share_prompts: bool = True


class TofuEvaluation(RequestConfig):
    """How TOFU's measurements are taken.

    Attributes:
        style: Conventions of the metrics (the model's template has its own ``style``; a comparison
            with published numbers wants the same in both).  ``tofu`` limits prompt and answer
            together to ``max_new_tokens``; ``openunlearning`` takes the targets of ROUGE from
            decoded tokens, leaves the last label out of what counts tokens, and hides from
            attention whatever has the padding token's id.
        truth: What the truth-ratio metrics average: ``ratio``, or the ``mass`` of the right answer.
        fq_reference: Rows that forget quality compares with; see
            :func:`language.metrics.tofu.tofu_compare`.
        min_k: Share of the least likely tokens that the membership score looks at.
        max_new_tokens: Longest greedy answer.
        reference_cap: Stop an answer at this many times the tokens of its reference; None lets it
            run.  Below 1 recall suffers; well above it only babble is lost.
        rouge_workers: Processes for ROUGE when there is enough of it; 0 for none.
    """

    style: Style = "clean"
    truth: Truth = "ratio"
    fq_reference: FQReference = "tofu"
    min_k: Annotated[float, Field(gt=0, le=1)] = 0.4
    max_new_tokens: Count = 200
    reference_cap: Annotated[float, Field(gt=0)] | None = None
    rouge_workers: Annotated[int, Field(ge=0)] = 0

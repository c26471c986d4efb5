"""The language arm.  The registrations below are lazy."""

from common.registry import METHODS

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

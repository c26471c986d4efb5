"""Plain evidence for the paper's theory: gradient ascent on a small MLP, measured at every step.

The claims are about an L-layer MLP, so they are tried on one, away from any benchmark: is the loss
trapped between functions of the logit gap, do logits and weights grow with it, does a bounded
adapter keep its certificate, and does that bound ever act?  One claim is about a ViT: where its
last LayerNorm and head are frozen, the loss has a ceiling.  ``python -m tools.theory``.
"""

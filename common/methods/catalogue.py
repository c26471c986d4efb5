"""The methods that know no modality, as one table; importing it registers them.

Targets are strings: nothing is imported until a method is used.
"""

from __future__ import annotations

from common.base.registry import METHODS

CATALOGUE = (
    ("original", "references:Original", "the model before unlearning"),
    ("retrain", "references:Retrain", "the target: trained on the retain set alone"),
    ("finetune", "simple:Finetune", "FT: keep training on retain"),
    ("ascent", "simple:Ascent", "GA: gradient ascent on forget"),
    ("random_label", "simple:RandomLabel", "RL: random labels for forget, true ones for retain"),
    ("gd", "difference:GradientDifference", "GD on all parameters"),
    ("gd_lora", "variants:gd_lora", "GD through plain LoRA (unbounded)"),
    ("gd_lora_omega", "variants:gd_lora_omega", "control: LoRA with sine's omega and initial step"),
    ("gd_tanh", "variants:gd_tanh", "GD through (alpha/r) tanh(omega A B^T)"),
    ("gd_sine", "variants:gd_sine", "GD through (alpha/r) sin(omega A B^T): the paper's method"),
    ("gd_sigmoid", "variants:gd_sigmoid", "GD through a centred sigmoid"),
    ("gd_relu", "variants:gd_relu", "GD through ReLU (unbounded)"),
    ("gd_clip", "variants:gd_clip", "GD through a hard clamp"),
    ("gd_weight_clip", "variants:gd_weight_clip", "LoRA with A, B projected to [-c, c]"),
    ("gd_sine_weight_clip", "variants:gd_sine_weight_clip", "sine with A, B projected to [-c, c]"),
    ("gd_penalty", "variants:gd_penalty", "LoRA with mu ||A B^T||_F^2"),
    ("gd_sine_relative", "variants:gd_sine_relative", "sine, bound scaled to the layer (ours)"),
    ("gd_tanh_relative", "variants:gd_tanh_relative", "tanh, bound scaled to the layer (ours)"),
    ("gd_ul", "variants:gd_ul", "LoRA, saturating forget loss"),
    ("gd_lora_ball", "variants:gd_lora_ball", "LoRA in a ball ||dW|| <= c ||W0|| (ours)"),
    ("gd_ball", "variants:gd_ball", "saturating forget loss and ball (ours)"),
    ("ihl", "hinge:IHL", "inverted hinge on forget, cross-entropy on retain"),
    ("ihl_lora", "variants:ihl_lora", "inverted hinge through plain LoRA"),
    ("ihl_lora_omega", "variants:ihl_lora_omega", "control: LoRA with sine's omega"),
    ("ihl_tanh", "variants:ihl_tanh", "inverted hinge through tanh"),
    ("ihl_sine", "variants:ihl_sine", "inverted hinge through sine"),
    ("loku", "variants:loku", "LoKU: inverted hinge through LoRA started by FILA"),
    ("ga_fila", "fila:GAFila", "GA through LoRA started by FILA"),
    ("gd_fila", "fila:GDFila", "GD through LoRA started by FILA"),
    ("kl", "divergence:KL", "ascent on forget, KL to Original on retain"),
    ("npo", "preference:NPO", "negative preference optimisation, no retain data"),
    ("npo_gdr", "preference:NPOGdr", "NPO and cross-entropy on retain"),
    ("npo_klr", "preference:NPOKlr", "NPO and KL to Original on retain"),
    ("simnpo", "preference:SimNPO", "NPO without a reference, length-normalised"),
    ("me_gd", "entropy:MEGD", "maximal entropy on forget, cross-entropy on retain"),
    ("undial", "reweighted:Undial", "self-distillation with the label lowered"),
    ("wga", "reweighted:WGA", "ascent weighted by confidence"),
    ("satimp", "reweighted:SatImp", "ascent weighted by saturation and importance"),
    ("ceu", "reweighted:CEU", "towards the model's own answer without the label"),
    ("salun", "salun:SalUn", "SalUn: random labels on the weights most salient for forget"),
    ("neg_grad_plus", "neg_grad_plus:NegGradPlus", "NegGrad+: a CE(retain) - (1 - a) CE(forget)"),
    ("scrub", "scrub:Scrub", "SCRUB: away from Original on forget, close to it on retain"),
    ("scrub_r", "scrub:ScrubRewind", "SCRUB+R: SCRUB rewound to where forget looks unseen"),
    (
        "bad_teacher",
        "bad_teacher:BadTeacher",
        "Bad Teacher: an untrained teacher on forget, Original on retain",
    ),
    ("l1_sparse", "l1_sparse:L1Sparse", "l1-sparse: fine-tuning under a fading l1 penalty"),
    (
        "ssd",
        "ssd:SelectiveSynapticDampening",
        "SSD: dampen weights that matter more to forget; no training",
    ),
    ("unsir", "unsir:Unsir", "UNSIR: impair with error-maximising noise, repair (classes only)"),
    ("cf_k", "cf_k:CFk", "CF-k: fine-tune the last k blocks on retain"),
    ("eu_k", "eu_k:EUk", "EU-k: retrain the last k blocks on retain"),
    (
        "amnesiac",
        "amnesiac:Amnesiac",
        "amnesiac: fixed wrong labels for forget, true ones for retain",
    ),
    (
        "boundary_shrink",
        "boundary_shrink:BoundaryShrink",
        "Boundary Shrink: forget data go to the nearest other class",
    ),
    (
        "boundary_expand",
        "boundary_expand:BoundaryExpand",
        "Boundary Expand: forget data go to an extra class, then dropped",
    ),
    ("sfron", "sfron:SFRon", "SFR-on: masked, self-weighted ascent between retain steps"),
    ("influence", "influence:Influence", "IU: one influence-function step (WoodFisher)"),
    (
        "fisher",
        "fisher:FisherForgetting",
        "noise where the retain set's Fisher information is small",
    ),
    ("fast_ntk", "fast_ntk:FastNTK", "closed-form unlearning of the linearised model"),
)
"""(name, module of this package and attribute, summary)."""

for _name, _target, _summary in CATALOGUE:
    METHODS.register(_name, f"common.methods.{_target}", summary=_summary)

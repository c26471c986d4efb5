"""The engine: tensors, parameters and index sets.  It knows no pixels and no tokens.

The registrations below are lazy: nothing is imported until a method is used.
"""

from common.base.registry import METHODS

METHODS.register(
    "original", "common.methods.references:Original", summary="the model before unlearning"
)
METHODS.register(
    "retrain",
    "common.methods.references:Retrain",
    summary="the target: trained on the retain set alone",
)
METHODS.register(
    "finetune", "common.methods.simple:Finetune", summary="FT: keep training on retain"
)
METHODS.register("ascent", "common.methods.simple:Ascent", summary="GA: gradient ascent on forget")
METHODS.register(
    "random_label",
    "common.methods.simple:RandomLabel",
    summary="RL: random labels for forget, true ones for retain",
)
METHODS.register(
    "gd", "common.methods.difference:GradientDifference", summary="GD on all parameters"
)
METHODS.register(
    "gd_lora", "common.methods.difference:GDLora", summary="GD through plain LoRA (unbounded)"
)
METHODS.register(
    "gd_lora_omega",
    "common.methods.difference:GDLoraOmega",
    summary="control: LoRA with sine's omega and initial step",
)
METHODS.register(
    "gd_tanh",
    "common.methods.difference:GDTanh",
    summary="GD through (alpha/r) tanh(omega A B^T)",
)
METHODS.register(
    "gd_sine",
    "common.methods.difference:GDSine",
    summary="GD through (alpha/r) sin(omega A B^T): the paper's method",
)
METHODS.register(
    "gd_sigmoid", "common.methods.difference:GDSigmoid", summary="GD through a centred sigmoid"
)
METHODS.register(
    "gd_relu", "common.methods.difference:GDRelu", summary="GD through ReLU (unbounded)"
)
METHODS.register("gd_clip", "common.methods.difference:GDClip", summary="GD through a hard clamp")
METHODS.register(
    "gd_weight_clip",
    "common.methods.difference:GDWeightClip",
    summary="LoRA with A, B projected to [-c, c]",
)
METHODS.register(
    "gd_sine_weight_clip",
    "common.methods.difference:GDSineWeightClip",
    summary="sine with A, B projected to [-c, c]",
)
METHODS.register(
    "gd_penalty", "common.methods.difference:GDPenalty", summary="LoRA with mu ||A B^T||_F^2"
)
METHODS.register(
    "gd_sine_relative",
    "common.methods.difference:GDSineRelative",
    summary="sine, bound scaled to the layer (ours)",
)
METHODS.register(
    "gd_tanh_relative",
    "common.methods.difference:GDTanhRelative",
    summary="tanh, bound scaled to the layer (ours)",
)
METHODS.register("gd_ul", "common.methods.difference:GDUl", summary="LoRA, saturating forget loss")
METHODS.register(
    "gd_lora_ball",
    "common.methods.difference:GDLoraBall",
    summary="LoRA in a ball ||dW|| <= c ||W0|| (ours)",
)
METHODS.register(
    "gd_ball",
    "common.methods.difference:GDBall",
    summary="saturating forget loss and ball (ours)",
)
METHODS.register(
    "ihl",
    "common.methods.hinge:IHL",
    summary="inverted hinge on forget, cross-entropy on retain",
)
METHODS.register(
    "ihl_lora", "common.methods.hinge:IHLLora", summary="inverted hinge through plain LoRA"
)
METHODS.register(
    "ihl_lora_omega",
    "common.methods.hinge:IHLLoraOmega",
    summary="control: LoRA with sine's omega",
)
METHODS.register("ihl_tanh", "common.methods.hinge:IHLTanh", summary="inverted hinge through tanh")
METHODS.register("ihl_sine", "common.methods.hinge:IHLSine", summary="inverted hinge through sine")
METHODS.register(
    "loku",
    "common.methods.hinge:LoKU",
    summary="LoKU: inverted hinge through LoRA started by FILA",
)
METHODS.register("ga_fila", "common.methods.fila:GAFila", summary="GA through LoRA started by FILA")
METHODS.register("gd_fila", "common.methods.fila:GDFila", summary="GD through LoRA started by FILA")
METHODS.register(
    "kl", "common.methods.divergence:KL", summary="ascent on forget, KL to Original on retain"
)
METHODS.register(
    "npo",
    "common.methods.preference:NPO",
    summary="negative preference optimisation, no retain data",
)
METHODS.register(
    "npo_gdr", "common.methods.preference:NPOGdr", summary="NPO and cross-entropy on retain"
)
METHODS.register(
    "npo_klr", "common.methods.preference:NPOKlr", summary="NPO and KL to Original on retain"
)
METHODS.register(
    "simnpo",
    "common.methods.preference:SimNPO",
    summary="NPO without a reference, length-normalised",
)
METHODS.register(
    "me_gd",
    "common.methods.entropy:MEGD",
    summary="maximal entropy on forget, cross-entropy on retain",
)
METHODS.register(
    "undial",
    "common.methods.reweighted:Undial",
    summary="self-distillation with the label lowered",
)
METHODS.register("wga", "common.methods.reweighted:WGA", summary="ascent weighted by confidence")
METHODS.register(
    "satimp",
    "common.methods.reweighted:SatImp",
    summary="ascent weighted by saturation and importance",
)
METHODS.register(
    "ceu",
    "common.methods.reweighted:CEU",
    summary="towards the model's own answer without the label",
)
METHODS.register(
    "salun",
    "common.methods.salun:SalUn",
    summary="SalUn: random labels on the weights most salient for forget",
)
METHODS.register(
    "neg_grad_plus",
    "common.methods.neg_grad_plus:NegGradPlus",
    summary="NegGrad+: a CE(retain) - (1 - a) CE(forget)",
)
METHODS.register(
    "scrub",
    "common.methods.scrub:Scrub",
    summary="SCRUB: away from Original on forget, close to it on retain",
)
METHODS.register(
    "scrub_r",
    "common.methods.scrub:ScrubRewind",
    summary="SCRUB+R: SCRUB rewound to where forget looks unseen",
)
METHODS.register(
    "bad_teacher",
    "common.methods.bad_teacher:BadTeacher",
    summary="Bad Teacher: an untrained teacher on forget, Original on retain",
)
METHODS.register(
    "l1_sparse",
    "common.methods.l1_sparse:L1Sparse",
    summary="l1-sparse: fine-tuning under a fading l1 penalty",
)
METHODS.register(
    "ssd",
    "common.methods.ssd:SelectiveSynapticDampening",
    summary="SSD: dampen weights that matter more to forget; no training",
)
METHODS.register(
    "unsir",
    "common.methods.unsir:Unsir",
    summary="UNSIR: impair with error-maximising noise, repair (classes only)",
)
METHODS.register(
    "cf_k",
    "common.methods.cf_k:CFk",
    summary="CF-k: fine-tune the last k blocks on retain",
)
METHODS.register(
    "eu_k",
    "common.methods.eu_k:EUk",
    summary="EU-k: retrain the last k blocks on retain",
)
METHODS.register(
    "amnesiac",
    "common.methods.amnesiac:Amnesiac",
    summary="amnesiac: fixed wrong labels for forget, true ones for retain",
)
METHODS.register(
    "boundary_shrink",
    "common.methods.boundary_shrink:BoundaryShrink",
    summary="Boundary Shrink: forget data go to the nearest other class",
)
METHODS.register(
    "boundary_expand",
    "common.methods.boundary_expand:BoundaryExpand",
    summary="Boundary Expand: forget data go to an extra class, then dropped",
)
METHODS.register(
    "sfron",
    "common.methods.sfron:SFRon",
    summary="SFR-on: masked, self-weighted ascent between retain steps",
)
METHODS.register(
    "influence",
    "common.methods.influence:Influence",
    summary="IU: one influence-function step (WoodFisher)",
)
METHODS.register(
    "fisher",
    "common.methods.fisher:FisherForgetting",
    summary="noise where the retain set's Fisher information is small",
)
METHODS.register(
    "fast_ntk",
    "common.methods.fast_ntk:FastNTK",
    summary="closed-form unlearning of the linearised model",
)

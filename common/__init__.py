"""The engine: tensors, parameters and index sets.  It knows no pixels and no tokens.

The registrations below are lazy: nothing is imported until a method is used.
"""

from common.registry import METHODS

METHODS.register("original", "common.baselines:Original", summary="the model before unlearning")
METHODS.register(
    "retrain",
    "common.baselines:Retrain",
    summary="the target: trained on the retain set alone",
)
METHODS.register("finetune", "common.baselines:Finetune", summary="FT: keep training on retain")
METHODS.register("ascent", "common.baselines:Ascent", summary="GA: gradient ascent on forget")
METHODS.register(
    "random_label",
    "common.baselines:RandomLabel",
    summary="RL: random labels for forget, true ones for retain",
)
METHODS.register("gd", "common.baselines:GradientDifference", summary="GD on all parameters")
METHODS.register("gd_lora", "common.baselines:GDLora", summary="GD through plain LoRA (unbounded)")
METHODS.register(
    "gd_lora_omega",
    "common.baselines:GDLoraOmega",
    summary="control: LoRA with sine's omega and initial step",
)
METHODS.register(
    "gd_tanh",
    "common.baselines:GDTanh",
    summary="GD through (alpha/r) tanh(omega A B^T)",
)
METHODS.register(
    "gd_sine",
    "common.baselines:GDSine",
    summary="GD through (alpha/r) sin(omega A B^T): the paper's method",
)
METHODS.register("gd_sigmoid", "common.baselines:GDSigmoid", summary="GD through a centred sigmoid")
METHODS.register("gd_relu", "common.baselines:GDRelu", summary="GD through ReLU (unbounded)")
METHODS.register("gd_clip", "common.baselines:GDClip", summary="GD through a hard clamp")
METHODS.register(
    "gd_weight_clip",
    "common.baselines:GDWeightClip",
    summary="LoRA with A, B projected to [-c, c]",
)
METHODS.register(
    "gd_sine_weight_clip",
    "common.baselines:GDSineWeightClip",
    summary="sine with A, B projected to [-c, c]",
)
METHODS.register("gd_penalty", "common.baselines:GDPenalty", summary="LoRA with mu ||A B^T||_F^2")
METHODS.register(
    "gd_sine_relative",
    "common.baselines:GDSineRelative",
    summary="sine, bound scaled to the layer (ours)",
)
METHODS.register(
    "gd_tanh_relative",
    "common.baselines:GDTanhRelative",
    summary="tanh, bound scaled to the layer (ours)",
)
METHODS.register("gd_ul", "common.baselines:GDUl", summary="LoRA, saturating forget loss")
METHODS.register(
    "gd_lora_ball",
    "common.baselines:GDLoraBall",
    summary="LoRA in a ball ||dW|| <= c ||W0|| (ours)",
)
METHODS.register(
    "gd_ball",
    "common.baselines:GDBall",
    summary="saturating forget loss and ball (ours)",
)
METHODS.register(
    "ihl",
    "common.unlearners.hinge:IHL",
    summary="inverted hinge on forget, cross-entropy on retain",
)
METHODS.register(
    "ihl_lora", "common.unlearners.hinge:IHLLora", summary="inverted hinge through plain LoRA"
)
METHODS.register(
    "ihl_lora_omega",
    "common.unlearners.hinge:IHLLoraOmega",
    summary="control: LoRA with sine's omega",
)
METHODS.register(
    "ihl_tanh", "common.unlearners.hinge:IHLTanh", summary="inverted hinge through tanh"
)
METHODS.register(
    "ihl_sine", "common.unlearners.hinge:IHLSine", summary="inverted hinge through sine"
)
METHODS.register(
    "loku",
    "common.unlearners.hinge:LoKU",
    summary="LoKU: inverted hinge through LoRA started by FILA",
)
METHODS.register(
    "ga_fila", "common.unlearners.fila:GAFila", summary="GA through LoRA started by FILA"
)
METHODS.register(
    "gd_fila", "common.unlearners.fila:GDFila", summary="GD through LoRA started by FILA"
)
METHODS.register(
    "kl", "common.unlearners.divergence:KL", summary="ascent on forget, KL to Original on retain"
)
METHODS.register(
    "npo",
    "common.unlearners.preference:NPO",
    summary="negative preference optimisation, no retain data",
)
METHODS.register(
    "npo_gdr", "common.unlearners.preference:NPOGdr", summary="NPO and cross-entropy on retain"
)
METHODS.register(
    "npo_klr", "common.unlearners.preference:NPOKlr", summary="NPO and KL to Original on retain"
)
METHODS.register(
    "simnpo",
    "common.unlearners.preference:SimNPO",
    summary="NPO without a reference, length-normalised",
)
METHODS.register(
    "me_gd",
    "common.unlearners.entropy:MEGD",
    summary="maximal entropy on forget, cross-entropy on retain",
)
METHODS.register(
    "undial",
    "common.unlearners.reweighted:Undial",
    summary="self-distillation with the label lowered",
)
METHODS.register("wga", "common.unlearners.reweighted:WGA", summary="ascent weighted by confidence")
METHODS.register(
    "satimp",
    "common.unlearners.reweighted:SatImp",
    summary="ascent weighted by saturation and importance",
)
METHODS.register(
    "ceu",
    "common.unlearners.reweighted:CEU",
    summary="towards the model's own answer without the label",
)
METHODS.register(
    "salun",
    "common.unlearners.salun:SalUn",
    summary="SalUn: random labels on the weights most salient for forget",
)
METHODS.register(
    "neg_grad_plus",
    "common.unlearners.neg_grad_plus:NegGradPlus",
    summary="NegGrad+: a CE(retain) - (1 - a) CE(forget)",
)
METHODS.register(
    "scrub",
    "common.unlearners.scrub:Scrub",
    summary="SCRUB: away from Original on forget, close to it on retain",
)
METHODS.register(
    "scrub_r",
    "common.unlearners.scrub:ScrubRewind",
    summary="SCRUB+R: SCRUB rewound to where forget looks unseen",
)
METHODS.register(
    "bad_teacher",
    "common.unlearners.bad_teacher:BadTeacher",
    summary="Bad Teacher: an untrained teacher on forget, Original on retain",
)
METHODS.register(
    "l1_sparse",
    "common.unlearners.l1_sparse:L1Sparse",
    summary="l1-sparse: fine-tuning under a fading l1 penalty",
)
METHODS.register(
    "ssd",
    "common.unlearners.ssd:SelectiveSynapticDampening",
    summary="SSD: dampen weights that matter more to forget; no training",
)
METHODS.register(
    "unsir",
    "common.unlearners.unsir:Unsir",
    summary="UNSIR: impair with error-maximising noise, repair (classes only)",
)
METHODS.register(
    "cf_k",
    "common.unlearners.cf_k:CFk",
    summary="CF-k: fine-tune the last k blocks on retain",
)
METHODS.register(
    "eu_k",
    "common.unlearners.eu_k:EUk",
    summary="EU-k: retrain the last k blocks on retain",
)
METHODS.register(
    "amnesiac",
    "common.unlearners.amnesiac:Amnesiac",
    summary="amnesiac: fixed wrong labels for forget, true ones for retain",
)
METHODS.register(
    "boundary_shrink",
    "common.unlearners.boundary_shrink:BoundaryShrink",
    summary="Boundary Shrink: forget data go to the nearest other class",
)
METHODS.register(
    "boundary_expand",
    "common.unlearners.boundary_expand:BoundaryExpand",
    summary="Boundary Expand: forget data go to an extra class, then dropped",
)
METHODS.register(
    "sfron",
    "common.unlearners.sfron:SFRon",
    summary="SFR-on: masked, self-weighted ascent between retain steps",
)
METHODS.register(
    "influence",
    "common.unlearners.influence:Influence",
    summary="IU: one influence-function step (WoodFisher)",
)
METHODS.register(
    "fisher",
    "common.unlearners.fisher:FisherForgetting",
    summary="noise where the retain set's Fisher information is small",
)
METHODS.register(
    "fast_ntk",
    "common.unlearners.fast_ntk:FastNTK",
    summary="closed-form unlearning of the linearised model",
)

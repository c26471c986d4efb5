"""The vision arm: image data, timm models, class and random forgetting.

The registrations below are lazy: nothing is imported until it is used.
"""

from stable_forgetting.common.base.registry import BENCHMARKS, METHODS, PROBLEMS

BENCHMARKS.register(
    "image_classification",
    "stable_forgetting.vision.benchmark:VisionBenchmark",
    summary="images of classes: random, class, confusing or memorised forgetting",
    stored="vision",
)
PROBLEMS.register("vision", "stable_forgetting.vision.tiny:TinyImages")
METHODS.register(
    "lethevit",
    "stable_forgetting.vision.methods.vits:LetheViT",
    summary="contrast with attention-masked forget images, then FT",
)
METHODS.register(
    "coun",
    "stable_forgetting.vision.methods.coun:CoUn",
    summary="CE and NT-Xent on retain images; never reads forget",
)
METHODS.register(
    "with_contrast",
    "stable_forgetting.vision.methods.coun:WithContrast",
    summary="+CL: another method with CoUn's contrastive term",
)
METHODS.register(
    "novo",
    "stable_forgetting.vision.methods.vits:Novo",
    summary="own model with class keys; deletes a class's key",
)
METHODS.register(
    "amun",
    "stable_forgetting.vision.methods.inputs:AMUN",
    summary="trains on nearest adversarial examples with the labels that they get",
)
METHODS.register(
    "mumis",
    "stable_forgetting.vision.methods.inputs:MUMis",
    summary="MU-Mis: true logits as insensitive to the input as other ones",
)
METHODS.register(
    "jit",
    "stable_forgetting.vision.methods.inputs:JiT",
    summary="JiT: flat outputs under noise around each forgotten image; no retain data",
)
METHODS.register(
    "natmu",
    "stable_forgetting.vision.methods.inputs:NatMU",
    summary="NatMU: trains on forget images blended with those of other classes",
)
METHODS.register(
    "duck",
    "stable_forgetting.vision.methods.duck:DUCK",
    summary="DUCK: forget features go to the nearest centre of another class",
)

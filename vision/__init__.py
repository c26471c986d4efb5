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
for _name, _target, _summary in (
    ("lethevit", "vits:LetheViT", "contrast with attention-masked forget images, then FT"),
    ("coun", "coun:CoUn", "CE and NT-Xent on retain images; never reads forget"),
    ("with_contrast", "coun:WithContrast", "+CL: another method with CoUn's contrastive term"),
    ("novo", "vits:Novo", "own model with class keys; deletes a class's key"),
    (
        "amun",
        "inputs:AMUN",
        "trains on nearest adversarial examples with the labels that they get",
    ),
    ("mumis", "inputs:MUMis", "MU-Mis: true logits as insensitive to the input as other ones"),
    (
        "jit",
        "inputs:JiT",
        "JiT: flat outputs under noise around each forgotten image; no retain data",
    ),
    (
        "natmu",
        "inputs:NatMU",
        "NatMU: trains on forget images blended with those of other classes",
    ),
    ("duck", "duck:DUCK", "DUCK: forget features go to the nearest centre of another class"),
):
    METHODS.register(_name, f"stable_forgetting.vision.methods.{_target}", summary=_summary)

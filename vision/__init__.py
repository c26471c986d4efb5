"""The vision arm: image data, timm models, class and random forgetting.

The registrations below are lazy: nothing is imported until it is used.
"""

from common.base.registry import BENCHMARKS, METHODS, PROBLEMS, SUBJECTS

BENCHMARKS.register(
    "vision",
    "vision.benchmark:VisionBenchmark",
    summary="image classification: random, class, confusing or memorised forgetting",
)
PROBLEMS.register("vision", "vision.tiny:TinyImages")
SUBJECTS.register(
    "images",
    "vision.apply.subject:ImageSubject",
    summary="a timm classifier and folders of images",
)
METHODS.register(
    "lethevit",
    "vision.methods.lethevit:LetheViT",
    summary="contrast with attention-masked forget images, then FT",
)
METHODS.register(
    "coun",
    "vision.methods.coun:CoUn",
    summary="CE and NT-Xent on retain images; never reads forget",
)
METHODS.register(
    "with_contrast",
    "vision.methods.coun:WithContrast",
    summary="+CL: another method with CoUn's contrastive term",
)
METHODS.register(
    "novo",
    "vision.methods.novo:Novo",
    summary="own model with class keys; deletes a class's key",
)

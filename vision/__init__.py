"""The vision arm: image data, timm models, class and random forgetting.

The registrations below are lazy: nothing is imported until it is used.
"""

from common.registry import BENCHMARKS

BENCHMARKS.register(
    "vision",
    "vision.protocols:VisionBenchmark",
    summary="image classification: random, class, confusing or memorised forgetting",
)

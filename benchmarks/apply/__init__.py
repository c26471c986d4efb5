"""``unlearn apply``: a user's own timm model, a user's own folders of images.

There is no Retrain here to compare with, so the outcome is a model and an *audit*: what was
measured before and after, and what that does and does not show.
"""

from benchmarks.apply.run import AppliedResult, ApplyRequest, apply

__all__ = ["AppliedResult", "ApplyRequest", "apply"]

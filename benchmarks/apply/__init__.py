"""``unlearn apply``: a user's own model, a user's own images or texts to forget.

There is no Retrain here to compare with, so the outcome is a model and a *statement*: what was
measured before and after, and what that does and does not show.
"""

from stable_forgetting.benchmarks.apply.convert import convert
from stable_forgetting.benchmarks.apply.forget import forget
from stable_forgetting.benchmarks.apply.result import Result
from stable_forgetting.benchmarks.apply.work import apply
from stable_forgetting.common.protocol.given import Application

__all__ = ["Application", "Result", "apply", "convert", "forget"]

"""Contract checks: what every method and every benchmark must keep, tried on something tiny.

``unlearn check NAME`` prints them and the tests assert them.  A method runs on vectors in a
four-class toy problem with a small residual network whose layers are named as in a transformer, so
the checks need no modality, no download and about a second.  Passing them shows that a method keeps
the harness's promises; it says nothing about how well the method forgets.
"""

from stable_forgetting.common.checks.benchmarks import check_benchmark
from stable_forgetting.common.checks.methods import check_method
from stable_forgetting.common.checks.tiny_task import CheckResult

__all__ = ["CheckResult", "check_benchmark", "check_method"]

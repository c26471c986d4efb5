"""What ``from stable_forgetting import ...`` offers, loaded when it is first used."""

from .benchmarks.apply.evaluate import Evaluation as Evaluation
from .benchmarks.apply.evaluate import evaluate as evaluate
from .benchmarks.apply.forget import forget as forget
from .benchmarks.apply.result import Result as Result
from .benchmarks.leaderboard.run import Leaderboard as Leaderboard
from .benchmarks.leaderboard.run import run as run

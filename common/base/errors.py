"""The errors that a user can cause and mend.

Everything here ends as one clear line and exit code 2 on the command line.  Invariants of our own
code are ``assert``s instead: they are bugs, and deserve a traceback.
"""

from __future__ import annotations

import os
import re


def one_line(error: BaseException) -> str:
    """An error's message on one line of at most 160 characters, or its type's name."""
    return shortened(str(error), 160) or type(error).__name__


def named_line(error: BaseException) -> str:
    """An error's type and message on one line of at most 400 characters."""
    return shortened(f"{type(error).__name__}: {error}", 400)


def system_line(error: BaseException) -> str | None:
    """What the operating system refused, on one line; None for any other error.

    The writer of safetensors gives its own error type, with the system's number in the text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'the store'}: {error.strerror}"
    number = re.search(r"\(os error (\d+)\)", str(error))
    return f"cannot be written: {os.strerror(int(number[1]))}" if number else None


def shortened(text: str, limit: int) -> str:
    """A text on one line of at most so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


class UserError(ValueError):
    """Something the user can mend; the message says what is wrong and how."""


class ConfigError(UserError):
    """A suite, a parameter or a command-line value is not valid."""


class DataError(UserError):
    """A data set is missing, malformed, or not the one that was used before."""


class Damaged(DataError):
    """A stored file is not what was written.

    Attributes:
        set_aside: Whether its stage was moved away, so that it can be made again.
    """

    set_aside = False


class CheckpointError(UserError):
    """A checkpoint or adapter is missing, damaged, or belongs to another model."""


class AccessError(UserError):
    """A method asked for data that it did not declare."""


class GateError(UserError):
    """The Original model is too weak for its forgetting to mean anything."""


class Diverged(RuntimeError):
    """A number was not finite or a loss passed its cap.  A status of a run, never a crash.

    Args:
        step: First step (counted from 1) with a non-finite or excessive loss.
        reason: What was seen, in words.
    """

    def __init__(self, step: int, reason: str):
        super().__init__(f"diverged at step {step}: {reason}")
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[Diverged], tuple[int, str]]:
        return Diverged, (self.step, self.reason)

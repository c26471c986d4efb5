"""The ``unlearn`` command.  Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import typer

from stable_forgetting.benchmarks.cli import (  # noqa: F401
    apply,
    attack,
    demo,
    machine,
    probe,
    report,
    run,
    share,
    show,
)
from stable_forgetting.benchmarks.cli.command import app
from stable_forgetting.benchmarks.cli.options import console, print_error
from stable_forgetting.common.base import processes, stopping
from stable_forgetting.common.base.errors import UserError, system_line

logger = logging.getLogger(__name__)
_INTERRUPTED = 130
"""What Typer makes of an interruption."""
_USAGE: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""Base of the command line's own errors; where its module lies depends on Typer's version."""


def main() -> None:
    """Entry point: what the user can mend is one line and exit code 2."""
    logging.basicConfig(level=_log_level(), format="%(message)s")
    logging.captureWarnings(True)
    try:
        processes.forget_cluster()
        console.quiet = not processes.is_main()
        with stopping.listening():
            code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        processes.disconnect()
    except UserError as error:
        print_error(f"error: {error}")
        code = 2
    except _USAGE as error:
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        print_error(f"error: {error.format_message()}{hint}")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        line = system_line(error)
        if line is None:
            raise
        logger.debug("", exc_info=error)
        print_error(f"error: {line}; mend it and run again")
        code = 2
    if code == _INTERRUPTED:
        print_error("interrupted; what is complete is kept, run again to continue")
        code = stopping.exit_code()
    sys.exit(code)


def _log_level() -> str:
    level = os.environ.get("SF_LOG", "WARNING").upper()
    return level if level in logging.getLevelNamesMapping() else "WARNING"


if __name__ == "__main__":
    main()
